"""The commands of README.md and the tutorials, and the Python code of docs/, run unchanged.

Environment variables set folders, ports and pace. Placeholders such as `ADDRESS` are filled in.
"""

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import swarmd
from p2p.identity import nickname
from swarmd.cli.app import app
from swarmd.state.folder import LOG_FILE
from swarmd.tasks.held_out import checked_receipt
from testbed.environments import default_environment, holds
from testbed.local_swarm import checkpoints, free_ports
from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT
from tests.processes import killed_after, wait_until
from tests.swarm.waiting import until

TUTORIALS = ROOT / "docs" / "tutorials"
EXPERIMENT, TRL = TUTORIALS / "experiment.md", TUTORIALS / "trl.md"
# Minimum seconds of a round, so that nodes that wait for a command use little CPU.
PACE = "3"
# A code span with this beginning is a command.
PROGRAMS = r"(?:swarmd|swarmd-judge|uv|git) |packaging/|scripts/|\.venv/"
INVITED = "swarmd join 'swarm:main,…'"
JUDGED = "swarmd join --model tiny --judge http://127.0.0.1:8400"
LAB = "swarmd lab run share.toml --seeds 1 --rounds 10 --out trial"
TRAINERS = [f".venv/bin/python docs/examples/trl_swarm.py {words}" for words in ("first", "second ADDRESS")]
# Commands in the order in which a test below runs them, by that test.
RUN = {
    "swarm": [
        "swarmd join --model tiny",
        "swarmd invite",
        "swarmd-judge init --invitation 'swarm:main,…'",
        "swarmd-judge serve --config judge.toml",
        INVITED,
        "swarmd peers",
        "swarmd stop",
        JUDGED,
        "swarmd verify ID",
        "swarmd leave --everything",
    ],
    "experiment": [LAB],
    "trl": TRAINERS,
}
NOT_RUN = {
    "git pull": "needs a remote repository",
    "packaging/install.sh": "tests/packaging/test_wheel.py runs it",
    "SWARMD_EXTRAS=judge packaging/install.sh": "tests/packaging/test_wheel.py runs it",
    "scripts/demo": "tests/swarm/test_demo.py runs it",
    "scripts/test": "tests/packaging/test_scripts.py runs it",
    "scripts/setup": "tests/packaging/test_scripts.py runs it",
    "scripts/terminal-picture": "tests/swarm/test_terminal_picture.py runs it",
    "swarmd join": "names the command of a step before it",
    'swarmd chat "What is 12 + 30?"': "tests/swarmd/cli/test_machine.py runs it",
    "swarmd models": "tests/swarmd/policy/test_listing.py runs it",
    "swarmd bootstrap": "tests/swarm/test_meeting.py runs it",
    "swarmd join --model smollm2-135m 'swarm:main,…'": "downloads a model",
    "swarmd lab run share.toml --seeds 5 --jobs 2": "is the experiment's other command, for two minutes",
    "uv tool uninstall swarmd": "removes an installation of this user",
    "uv pip install --override overrides.txt --constraints constraints.txt '.[trl]'": "needs a network",
}


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced code blocks of a language, without the indentation inside lists."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def commands(text: str) -> set[str]:
    lines = [line.split(" # ")[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]
    spans = re.findall(rf"`((?:SWARMD_\w+=\S+ )?(?:{PROGRAMS})[^`\n]*)`", text)
    return {line for line in (*lines, *spans) if line}


def test_each_command_is_run_or_has_a_reason_why_not() -> None:
    documents = [ROOT / "README.md", *TUTORIALS.glob("*.md")]
    found = set().union(*(commands(document.read_text(encoding="utf-8")) for document in documents))
    run = {command for scenario in RUN.values() for command in scenario}
    assert sorted(found - run - NOT_RUN.keys()) == [], "neither run nor given a reason"
    assert sorted((run | NOT_RUN.keys()) - found) == [], "listed here, but in no document"
    for reason in NOT_RUN.values():
        assert all((ROOT / path).exists() for path in re.findall(r"\S+\.py", reason)), reason


def python_of(path: str) -> str:
    """Return the Python of a document or notebook."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return "\n".join(blocks(text, "python"))
    return "\n".join(
        "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"
    )


def test_the_python_of_own_tasks_behaves_like_the_example(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(python_of("docs/own-tasks.md"), encoding="utf-8")
    said = runpy.run_path(str(tmp_path / "own.py"))
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "sums.py"))
    assert said["specialties"] == example["specialties"]
    for specialty in said["specialties"]:
        question, right = said["generate"](specialty, 7)
        assert (question, right) == example["generate"](specialty, 7)
        assert [said["score"](right, answer) for answer in (f" {right} ", f"{right}1")] == [1, 0]
    assert said["reward"](None, "short", 1.0) == 1 and said["reward"](None, "long" * 9, 0.0) == 0


def test_the_environment_of_own_tasks_can_be_played(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "own-tasks.md").read_text(encoding="utf-8")
    (tmp_path / "guess.py").write_text("\n".join(blocks(text, "py")), encoding="utf-8")
    said = runpy.run_path(str(tmp_path / "guess.py"))
    _, state = said["reset"]("guess", 1)
    played = [said["step"](state, str(guess)) for guess in range(1, state["hidden"] + 1)]
    assert played == [*[("larger", 0.0, False)] * (len(played) - 1), ("smaller", 1.0, True)]


@pytest.mark.parametrize(
    "path",
    ["docs/library.md", "docs/tutorials/trl.md", "docs/examples/trl_swarm.ipynb"],
    ids=os.path.basename,
)
def test_python_names_only_existing_files_and_commands(path: str) -> None:
    """This code is not run: the notebook takes minutes, and the other examples lack the model."""
    trl = ast.parse((ROOT / "swarmd" / "trl.py").read_text()).body
    join = get_command(app).commands["join"]  # type: ignore[attr-defined]
    options = {option for parameter in join.params for option in parameter.opts}
    source = inspect.getsource(swarmd.JoinedSwarm)
    swarm, used = 0, set()
    for node in ast.walk(ast.parse(python_of(path))):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("swarmd"):
                there = {getattr(item, "name", "") for item in trl}
                there = there if module == "swarmd.trl" else set(dir(import_module(module)))
                assert {alias.name for alias in names} <= there
            case ast.Attribute(value=ast.Name(id="swarm"), attr=name):
                assert hasattr(swarmd.JoinedSwarm, name) or f"self.{name} = " in source, name
                swarm += 1
            case ast.Attribute(value=ast.Name(id="group"), attr=name):
                assert name in swarmd.ScoredGroup.__annotations__, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="swarmd"), attr="join"), keywords=keywords):
                inspect.signature(swarmd.join).bind(**{str(word.arg): None for word in keywords})
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if defined := arguments(trl, name):
                assert {str(word.arg) for word in keywords} <= defined, name
            case ast.Constant(value=str(word)) if word.startswith("--"):
                used.add(word)
    assert used <= options and ((swarm >= 3 and "--pace" in used) or not path.endswith(".ipynb"))


def arguments(body: Sequence[ast.stmt], name: str) -> set[str]:
    """Return the parameters of a function or of a class's `__init__`; none for other names."""
    for item in body:
        if isinstance(item, ast.ClassDef) and item.name == name:
            return arguments(item.body, "__init__")
        if isinstance(item, ast.FunctionDef) and item.name == name:
            return {each.arg for each in (*item.args.args, *item.args.kwonlyargs)}
    return set()


class Person:
    """A person with a state folder who types a document's commands at a terminal."""

    def __init__(self, stack: ExitStack, folder: Path, **variables: str) -> None:
        self.stack, self.folder, self.state = stack, folder, folder / "state"
        folder.mkdir()
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "SWARMD_STATE_DIR": str(self.state),
            "SWARMD_SWARM_LISTEN": "/ip4/127.0.0.1/tcp/0",
            "SWARMD_SWARM_MDNS": "off",
            "SWARMD_ROUND_PACE": PACE,
            **checkpoints(every=0),
            **variables,
        }

    def types(self, command: str, more: str = "", expect: int = 0) -> str:
        """Run a command to its end, and return its output. more: arguments that the test adds."""
        done = subprocess.run(
            ["sh", "-c", command + more],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=3 * TIMEOUT_S,
        )
        assert done.returncode == expect, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def starts(self, command: str) -> "subprocess.Popen[str]":
        """Start a command that keeps running; with `exec`, so that the process is the program itself."""
        log = self.stack.enter_context((self.folder / LOG_FILE).open("a"))
        process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=log,
            stderr=log,
            text=True,
        )
        return self.stack.enter_context(killed_after(process))


@pytest.mark.slow
@pytest.mark.net
def test_the_tutorials_of_two_friends_and_a_judge_work(tmp_path: Path) -> None:
    """README.md, friends.md and judge.md: a node, a friend's node, and a judge of their swarm."""
    (port,) = free_ports(1)
    run = iter(RUN["swarm"])
    with ExitStack() as stack:
        you = Person(stack, tmp_path / "you", SWARMD_JUDGE_PORT=str(port))
        friend = Person(stack, tmp_path / "friend")
        node = you.starts(next(run))
        until(you.state, lambda status: bool(status["addresses"]), node)
        invitation = you.types(invite := next(run)).split()[0]
        you.types(next(run).replace("swarm:main,…", invitation))
        you.starts(next(run))
        joined = friend.starts(next(run).replace("swarm:main,…", invitation))
        ids = [
            until(person.state, lambda status: status["peers"] == 1 and status["round"] >= 1, process)[
                "peer_id"
            ]
            for person, process in ((you, node), (friend, joined))
        ]
        assert nickname(ids[1]) in you.types(next(run))
        you.types(stop := next(run))
        assert node.wait(TIMEOUT_S) == 0
        node = you.starts(next(run).replace("8400", str(port)))
        receipts = you.state / "receipts.jsonl"
        wait_until(lambda: receipts.exists() and receipts.read_text().count("\n"), every=0.2)
        receipt = checked_receipt(json.loads(receipts.read_text().splitlines()[0]))
        assert receipt is not None
        # Exit code 4, because the window is still open, as the tutorial says.
        you.types(next(run).replace("ID", receipt["evaluation"]), expect=4)
        assert f",judge=http://127.0.0.1:{port}" in you.types(invite)
        for person, process in ((you, node), (friend, joined)):
            person.types(stop)
            assert process.wait(TIMEOUT_S) == 0
        friend.types(next(run), more=" --yes")
        assert not friend.state.exists() and not list(run)


@pytest.mark.slow
def test_the_tutorial_of_an_experiment_works(tmp_path: Path) -> None:
    (experiment,) = blocks(EXPERIMENT.read_text(encoding="utf-8"), "toml")
    assert len(experiment.splitlines()) == 10
    with ExitStack() as stack:
        person = Person(stack, tmp_path / "person")
        (person.folder / "share.toml").write_text(experiment, encoding="utf-8")
        (command,) = RUN["experiment"]
        table = person.types(command, more=" --rounds 2")
        assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| 8/0", "| 4/4"]
        assert (person.folder / "trial" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.net
def test_the_tutorial_of_two_trl_trainers_works(tmp_path: Path) -> None:
    """The trainers make two steps each instead of 100."""
    environment = default_environment("trl")
    if not holds(environment, "trl"):
        pytest.skip("TRL is not here: `python -m testbed.environments trl`")
    (theirs,) = environment.glob("lib/python3*/site-packages")
    first, second = RUN["trl"]
    with ExitStack() as stack:
        person = Person(
            stack,
            tmp_path / "person",
            PYTHONPATH=os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"], str(theirs)]),
            PYTHONUNBUFFERED="1",
        )
        examples = person.folder / "docs" / "examples"
        examples.mkdir(parents=True)
        text = (ROOT / "docs" / "examples" / "trl_swarm.py").read_text(encoding="utf-8")
        assert "STEPS = 100" in text
        (examples / "trl_swarm.py").write_text(text.replace("STEPS = 100", "STEPS = 2"), encoding="utf-8")
        (person.folder / ".venv" / "bin").mkdir(parents=True)
        (person.folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
        trainer, log = person.starts(first), person.folder / LOG_FILE
        address = wait_until(lambda: re.search(r"\['(/ip4/[^']+)'", log.read_text()), every=0.2)[1]
        said = person.types(second.replace("ADDRESS", address))
        assert trainer.wait(TIMEOUT_S) == 0
        assert "external groups trained on" in said and "external groups trained on" in log.read_text()
