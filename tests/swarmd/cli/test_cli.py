"""The command line for people and scripts: texts, the streams they go to, and exit codes."""

import contextlib
import errno
import inspect
import io
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import typer
from msgspec import to_builtins

from p2p.errors import OperatorError
from swarmd.cli.app import app
from swarmd.daemon.local_api.control import call, serve
from swarmd.state.folder import StateFolder
from swarmd.state.logs import installed_version
from swarmd.state.status import KnownPeer, PeerList
from swarmd.tasks.answers import MAX_COMPLETION_CHARACTERS
from swarmd.terminal import explained, run_program
from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT
from tests.processes import killed_after, wait_until
from tests.swarmd.cli.test_view import status_of
from tests.swarmd.conftest import Run, Said

PEERS = to_builtins(PeerList([KnownPeer("12D3KooW", "brave-otter", None, "inbound", None, frames=3)]))


ANSWERS = {
    "status": to_builtins(status_of()),
    "peers": PEERS,
    "pause": {"schema": 1, "paused": True, "warning": "pause.json cannot be written"},
    "resume": {"schema": 1, "paused": False, "ended": ["user"], "warning": ""},
}


@contextlib.contextmanager
def node(state_dir: Path, *, obeys: bool = True) -> Iterator[list[str]]:
    """Serve a node's control API over a real socket, in a thread; yield the recorded arguments.

    obeys: the node ends when it is told to stop.
    """
    told: list[str] = []
    ready, halt = threading.Event(), trio.Event()

    async def answer(name: str, _: Mapping[str, Any]) -> Mapping[str, Any]:
        told.append(name)
        if name == "stop" and obeys:
            halt.set()
        return ANSWERS.get(name, {"schema": 1, "stopping": True})

    async def live() -> None:
        with StateFolder.open(state_dir) as state:
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    partial(serve, state.path, {name: partial(answer, name) for name in [*ANSWERS, "stop"]})
                )
                tokens.append(trio.lowlevel.current_trio_token())
                ready.set()
                await halt.wait()
                await trio.testing.wait_all_tasks_blocked(0.01)  # so that the answer to `stop` is sent
                nursery.cancel_scope.cancel()

    tokens: list[trio.lowlevel.TrioToken] = []
    thread = threading.Thread(target=trio.run, args=(live,))
    thread.start()
    assert ready.wait(TIMEOUT_S)
    try:
        yield told
    finally:
        with contextlib.suppress(trio.RunFinishedError):
            trio.from_thread.run_sync(halt.set, trio_token=tokens[0])
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("command", ["status", "peers", "pause", "resume", "stop"])
def test_without_a_node_the_exit_code_is_6(run: Run, tmp_path: Path, command: str) -> None:
    said = run(command, "--state-dir", tmp_path / "none")
    assert (said.code, said.out) == (6, "")
    assert (
        said.err
        == f"swarmd: No node is running in {tmp_path / 'none'}. Start one with `swarmd join`, or name another"
        " folder with --state-dir.\n"
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.net
def test_commands_query_control_and_stop_a_running_node(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as told:
        assert json.loads(run("status", "--json", "--state-dir", tmp_path).out) == ANSWERS["status"]
        monkeypatch.setenv("SWARMD_STATE_DIR", str(tmp_path))
        assert "state    training\nround    120 of 300\n" in run("status").out
        assert "brave-otter" in run("peers").out
        assert json.loads(run("peers", "--json").out) == PEERS
        told_of_pause = "pausing; `swarmd resume` continues\npause.json cannot be written\n"
        assert run("pause") == Said(0, "", told_of_pause)
        code, out, far = run("pause", "--for", "9999d")
        assert (code, out) == (0, "") and re.match(
            r"pausing; until 20\d\d-\d\d-\d\d \d\d:\d\d; `swarmd resume` ends it earlier\n", far
        )
        assert json.loads(run("resume", "--json").out) == ANSWERS["resume"]
        assert run("resume").err == "resumed\n"
        monkeypatch.setitem(ANSWERS, "resume", ANSWERS["resume"] | {"ended": []})
        assert run("resume").err == "nothing was paused\n"
        second = run("join", "--model", "tiny")
        assert second.code == 5 and f"pid {os.getpid()}" in second.err
        assert run("stop", "--json") == Said(0, '{"schema": 1, "stopped": true}\n', "")
        assert run("status").code == 6
        assert told == ["status", "status", "peers", "peers", "pause", "pause", *["resume"] * 3, "stop"]


@pytest.mark.net
def test_stop_says_if_the_node_does_not_end(run: Run, tmp_path: Path) -> None:
    with node(tmp_path, obeys=False):
        said = run("stop", "--state-dir", tmp_path, "--timeout", "0")
    assert said.code == 4 and "--timeout" in said.err


@pytest.mark.net
def test_watching_ends_with_the_node(run: Run, tmp_path: Path) -> None:
    def stop() -> None:
        wait_until(lambda: told)
        call(tmp_path, "stop", dict)

    with node(tmp_path) as told:
        threading.Thread(target=stop).start()
        said = run("status", "--watch", "--json", "--state-dir", tmp_path)
    assert said.code in (4, 6)  # ending, or ended
    assert [json.loads(line)["schema"] for line in said.out.splitlines()] == [1]


WRONG = """join --local -1|join --local many|join --device gpu|join --bootstrap localhost:4001
    |join --judge judge.example|join --config absent.toml|join --nonsense|dance|task show bf|task show bff 1
    |task show bf -1|task show bf 2147483648|task list --curriculum x
    |plan replay --alpha 0.5"""


@pytest.mark.parametrize("arguments", [line.split() for line in WRONG.split("|")], ids=" ".join)
def test_wrong_usage_is_exit_code_2_without_a_traceback(
    run: Run, tmp_path: Path, arguments: list[str]
) -> None:
    said = run(*arguments)
    assert (said.code, said.out) == (2, "") and said.err.strip()


@pytest.mark.parametrize("command", [["leave", "--state-dir"], ["lab", "run"]])
def test_an_unusable_path_is_reported_without_a_traceback(run: Run, command: list[str]) -> None:
    said = run(*command, "x" * 300)
    assert (
        said.code == 2
        and re.search("xxx(/lock)?: File name too long. ", said.err)
        and "Traceback" not in said.err
    )


def test_unreadable_settings_give_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmd.cli.settings.default_config_file", lambda: Path("x" * 300))
    said = run("config", "show")
    assert said.code == 2 and said.err.endswith(
        "xxx: File name too long. Correct its permissions, or name another path.\n"
    )


@pytest.mark.parametrize("arguments", [["config", "check"], ["status", "--state-dir"], ["lab", "run"]])
def test_an_unknown_users_home_folder_is_reported_without_a_traceback(run: Run, arguments: list[str]) -> None:
    said = run(*arguments, "~no-such-user/x")
    assert (said.code, said.out) == (2, "") and "write all paths in full" in said.err


def test_a_user_without_a_home_folder_has_to_name_the_folders(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `docker run --user 4242`: there is no HOME and no entry in /etc/passwd."""

    def nobody(_: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "SWARMD_STATE_DIR", "SWARMD_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for arguments in (["status"], ["config", "path"], ["service", "install"], ["bug-report"]):
        said = run(*arguments)
        assert (said.code, said.out) == (2, "") and "Set HOME, or write all paths in full" in said.err
    assert run("status", "--state-dir", tmp_path / "none").code == 6, "a home folder was required"
    assert run("config", "show", "--state-dir", tmp_path / "none").code == 0


def test_all_mistakes_of_a_configuration_are_reported_and_no_folder_is_created(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[round]\nlocl = 3\nexternal = -1\n")
    said = run("join", "--config", file, "--rounds", "-2", "--state-dir", tmp_path / "state")
    assert said.code == 2 and said.err.splitlines() == [
        f"{file}:2: round.locl: unknown key; did you mean round.local?",
        f"{file}:3: round.external: expected a whole number, at least 0 and at most 1,024, found -1",
        "--rounds: round.rounds: expected a whole number, at least 0, found -2",
    ]
    assert not (tmp_path / "state").exists()


def test_a_flag_with_two_words_sets_its_setting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "none")  # so that no network is started
    said = run("join", "--no-train", "--local", "0")
    assert said.code == 2 and 'round.train is "off"' in said.err


def test_config_commands_check_show_and_print_the_path(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Path(run("config", "path").out.strip())
    assert json.loads(run("config", "path", "--json").out)["exists"] is False
    assert run("config", "check").code == 0
    usual.parent.mkdir(parents=True)
    usual.write_text("[round]\nlocal = 8\n")
    monkeypatch.setenv("SWARMD_EXTERNAL", "2")
    assert run("config", "check").out == f"{usual}: no mistakes\n"
    shown = json.loads(run("config", "show", "--json").out)
    expected = {
        "round.local": {"value": 8, "origin": f"{usual}:2"},
        "round.external": {"value": 2, "origin": "SWARMD_EXTERNAL"},
        "seed": {"value": None, "origin": "default"},
    }
    assert shown["schema"] == 1 and shown["keys"] | expected == shown["keys"]
    plain = [line.split("  #")[0].strip() for line in run("config", "show").out.splitlines()]
    assert "round.local = 8" in plain and len(plain) == len(shown["keys"])
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("x = 1")
    monkeypatch.setenv("SWARMD_CONFIG", str(wrong))
    assert run("config", "check").code == 2
    told = run("config", "check", wrong, "--json")
    mistakes = [f"{wrong}:1: x: unknown key"]
    assert (told.code, json.loads(told.out)) == (2, {"schema": 1, "file": str(wrong), "mistakes": mistakes})
    assert run("config", "check", usual).code == 0  # the argument has precedence over the variable


def test_a_question_from_a_file_cannot_control_the_terminal(run: Run, tmp_path: Path) -> None:
    rows = [{"question": f"{n}\x1b[2J\nline", "answer": "1"} for n in range(2)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = run("task", "show", "questions", "0", "--curriculum", tmp_path / "own.jsonl")
    assert re.fullmatch(r"[01]\\x1b\[2J\nline\n\nA right answer: <answer>1</answer>\n", said.out), said


def test_commands_list_and_show_tasks(run: Run) -> None:
    listed = json.loads(run("task", "list", "--json").out)
    assert [one["name"] for one in listed["curricula"]] == [
        "ladder-9",
        "ladder-9-strict",
        "sapo-9",
        "sapo-9-strict",
        "tiny-9",
        "tiny-9-strict",
        "tools-6",
    ]
    assert len(run("task", "list", "--curriculum", "tiny-9").out.splitlines()) == 9
    shown = json.loads(run("task", "show", "binary_matrix", "7", "--curriculum", "tiny-9", "--json").out)
    assert shown["question"] in run("task", "show", "binary_matrix", "7", "--curriculum", "tiny-9").out
    assert "did you mean bf" in run("task", "show", "bff", "1").err
    played = run("task", "show", "facts.2", "3", "--curriculum", "tools-6").out
    assert "A right answer:\n<tool>" in played and "\n  → " in played and played.endswith("</answer>\n")


@pytest.mark.net
@pytest.mark.parametrize(
    ("text", "reason"),
    [("1", "correct"), ("2", "wrong"), ("so <answer>1.</answer>", "correct"), ("", "wrong")],
)
def test_one_answer_is_scored_with_or_without_tags(run: Run, tmp_path: Path, text: str, reason: str) -> None:
    rows = [{"question": f"{n}", "answer": "1"} for n in range(2)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = run("task", "score", "questions", "0", "--curriculum", tmp_path / "own.jsonl", "--text", text)
    assert json.loads(said.out)["reason"] == reason


def test_a_folder_or_a_file_of_another_kind_is_rejected_as_a_curriculum(run: Run, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "a.csv").touch()
    said = run("task", "list", "--curriculum", tmp_path)
    assert said.code == 2 and f"it is a folder: name a file in it, {tmp_path / 'b.jsonl'}" in said.err
    assert "a file of another kind" in run("task", "list", "--curriculum", tmp_path / "a.csv").err


@pytest.mark.net
def test_completions_are_scored_line_by_line(run: Run) -> None:
    answer = json.loads(run("task", "show", "bf", "3", "--curriculum", "tiny-9", "--json").out)["answer"]
    right = f"<answer>{answer}</answer>"
    # A line of 1.5 MiB, since each character takes twelve.
    longest = "\U0001f9ab" * (MAX_COMPLETION_CHARACTERS - len(right)) + right
    texts = {
        "correct": [right, longest],
        "wrong": ["<answer>x</answer>"],
        "no answer": ["none"],
        "too long": ["x" + longest, "x" * 2**22],
        "correct again": [right],
    }
    lines = [json.dumps({"text": text, "ended": False}) for some in texts.values() for text in some]
    said = run("task", "score", "bf", "3", "--curriculum", "tiny-9", stdin="\n\n".join(lines) + "\n")
    wanted = [reason.removesuffix(" again") for reason, some in texts.items() for _ in some]
    assert said.code == 0 and [json.loads(line) for line in said.out.splitlines()] == [
        {"reward": float(why == "correct"), "reason": why} for why in wanted
    ]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"text": 3}', "{}", '{"text": "x", "ended": "yes"}', "[" * 50_000]
)
def test_a_malformed_completion_is_rejected_with_its_line_number(run: Run, line: str) -> None:
    said = run("task", "score", "bf", "3", stdin="\n" + line)
    assert (said.code, said.out) == (2, "") and "standard input, line 2:" in said.err


def test_help_and_version_import_no_large_packages() -> None:
    script = (
        "import sys, swarmd.cli.app; swarmd.cli.app.main(sys.argv[1:]); print(*{m.split('.')[0]for m in"
        " sys.modules}, file=sys.stderr)"
    )
    heavy = {
        "torch",
        "trio",
        "libp2p",
        "reasoning_gym",
        "transformers",
        "numpy",
        "structlog",
        "cryptography",
        "fastapi",
        "httpx",
        "sqlalchemy",
        "asyncio",
    }
    for arguments in (["--help"], ["join", "--help"], ["doctor", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        assert not heavy & set(done.stderr.split()), arguments


def test_an_option_prints_the_version(run: Run) -> None:
    assert run("--version") == Said(0, f"swarmd {installed_version()}\n", "")


def commands(group: Any, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield from commands(command, *names, name) if hasattr(command, "commands") else [(*names, name)]


@pytest.mark.parametrize("command", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_help_with_an_example(run: Run, command: Sequence[str]) -> None:
    said = run(*command, "--help")
    assert said.code == 0 and "Example: " in said.out and "<bool>" not in said.out
    assert "'swarmd'`" not in said.out  # the name of an extra, in brackets, must not be taken for markup
    shown = typer.main.get_command(app)
    for name in command:
        shown = getattr(shown, "commands")[name]  # noqa: B009
    _, *further = inspect.cleandoc(shown.help or "").split("\n\n")
    # Typer would break the line there at any screen width.
    assert not any("\n" in paragraph for paragraph in further)


@pytest.mark.net
@pytest.mark.parametrize("by, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_during_the_start_ends_a_node_with_a_message(
    by: signal.Signals, code: int, tmp_path: Path
) -> None:
    os.mkfifo(config := tmp_path / "node.toml")
    command = [sys.executable, "-m", "swarmd", "join", "--config", config, "--state-dir", tmp_path / "state"]
    with (
        killed_after(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process,
        config.open("w"),  # blocks until the node reads its configuration, which is never written
    ):
        process.send_signal(by)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (code, "stopped; `swarmd join` continues from the last checkpoint\n")


def test_a_command_that_gets_a_signal_removes_its_files(tmp_path: Path) -> None:
    """An unfinished model has a hidden name; an unfinished table has its final name."""
    code = """
import sys, time
from pathlib import Path
from swarmd.terminal import run_program
def program():
    part = Path(sys.argv[1])
    part.touch()
    try:
        print("writing", flush=True)
        time.sleep(1000)
    finally:
        part.unlink()
sys.exit(run_program("swarmd", program))
"""
    command = [sys.executable, "-c", code, part := tmp_path / "part"]
    with killed_after(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout and process.stdout.readline() == "writing\n"
        process.terminate()
        assert process.wait(TIMEOUT_S) == 130 and not part.exists()


def test_an_interrupt_gives_exit_code_130_also_for_the_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarmd", "task", "score", "bf", "3"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(b'{"text": "x"}\n')
    process.stdin.flush()
    assert process.stdout.readline()  # the command is running and waits for more input
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130 and b"Traceback" not in process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()


@pytest.mark.parametrize("words", ["\x1b[31mhostile\u202e", "one line\n\x1b[31mhostile\u202e"])
def test_text_quoted_in_an_error_cannot_move_the_cursor(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OperatorError(words)

    assert explained("swarmd-judge", fails) == OperatorError.exit_code
    said = capsys.readouterr().err
    assert "hostile" in said and not set("\x1b\u202e") & set(said)


@pytest.mark.net
@pytest.mark.parametrize("program", ["swarmd", "swarmd-judge"])
@pytest.mark.parametrize("package", ["typing", "msgspec", "typer"])
def test_an_interrupt_during_the_start_gives_no_traceback(program: str, package: str, tmp_path: Path) -> None:
    """The interrupt comes while the installed entry point imports a package."""
    (tmp_path / f"{package}.py").write_text("raise KeyboardInterrupt")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[program].partition(":")
    command = [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "option",
    [["stop", "--timeout"], ["plan", "replay", "--rho"], ["plan", "replay", "--alpha"], ["join", "--pace"]],
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_option_must_be_a_finite_number(run: Run, option: list[str], value: str) -> None:
    said = run(*option, value)
    assert said.code == 2 and option[-1] in said.err


@pytest.mark.net
def test_characters_that_a_terminal_cannot_print_are_escaped() -> None:
    code = (
        "import sys; from swarmd.terminal import run_program, tell\n"
        "run_program('x', lambda: print('¬a ∧ b') or tell('starting …'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.stdout, done.stderr) == ("\\xaca \\u2227 b\n", "starting \\u2026\n")


@pytest.mark.net
@pytest.mark.parametrize("module", ["swarmd", "judge"])
def test_output_that_cannot_be_written_ends_without_a_traceback(module: str) -> None:
    """The output goes to a pipe whose reader has ended, or to a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    cases = [(writer, "", 1, "")]
    if Path("/dev/full").exists():
        cases.append((os.open("/dev/full", os.O_WRONLY), "1", 2, "No space left on device"))
    for output, unbuffered, code, said in cases:
        command, environment = (
            [sys.executable, "-m", module, "--version"],
            os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, env=environment, text=True, timeout=TIMEOUT_S
        )
        os.close(output)
        assert (done.returncode, done.stderr.count("\n")) == (
            code,
            bool(said),
        ) and said in done.stderr, done.stderr


@pytest.mark.net
def test_shell_completion_is_available() -> None:
    environment = os.environ | {
        "_SWARMD_COMPLETE": "complete_bash",
        "COMP_WORDS": "swarmd task sh",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "swarmd"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout.split() == ["show"]


@pytest.mark.parametrize("file", ["/home/unit.service", None])
def test_a_failing_disk_gives_a_one_sentence_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def program() -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), file)

    assert run_program("swarmd", program) == 2
    said = capsys.readouterr().err
    assert said.startswith("swarmd: " + (f"{file}: " if file else "") + "Input/output error: ")
    assert len(said.splitlines()) == 1
