"""The second `swarmd join` on a folder: remembered choices, their overrides, and refusals."""

import io
import json
import zipfile
from pathlib import Path

import pytest

from swarmd import link
from swarmd.cli.app import main
from swarmd.cli.views.plain import PlainView
from swarmd.config.config import NodeConfig
from swarmd.config.sources import resolve
from swarmd.daemon.choices import recalled, remember
from swarmd.daemon.daemon import Daemon
from swarmd.errors import CannotRecord, ConfigError
from swarmd.state.status import ModelDescription, NodeState
from tests.disk import failing_at
from tests.swarmd.conftest import Run

QWEN, COMMIT = "Qwen/Qwen2.5-0.5B-Instruct", "c0ffee"
JUDGE = "https://judge.example"
PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def trained(folder: Path, source: str, revision: str | None = None, rounds: int = 7) -> Path:
    checkpoint = folder / "checkpoints" / f"round-{rounds:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "policy.json").write_text(json.dumps({"base": {"source": source, "revision": revision}}))
    return folder


def test_the_model_is_the_checkpoints(tmp_path: Path) -> None:
    trained(tmp_path, "tiny")
    trained(tmp_path, QWEN, COMMIT, rounds=11)
    config, (note,) = recalled(resolve(None, {}, {}), tmp_path)
    assert (config.model.name, config.model.revision) == (QWEN, COMMIT) and QWEN in note
    config, notes = recalled(resolve(None, {}, {"model": "qwen2.5-0.5b"}), tmp_path)
    assert config.model.name == "qwen2.5-0.5b" and not notes
    assert recalled(resolve(None, {}, {}), tmp_path / "fresh") == (resolve(None, {}, {}).config, [])


def test_config_show_and_a_bug_report_have_the_remembered_choices(run: Run, tmp_path: Path) -> None:
    folder, report = trained(tmp_path / "state", "tiny-latent"), tmp_path / "report.zip"
    remember(resolve(None, {}, {"swarm": "friends"}), folder)
    keys = json.loads(run("config", "show", "--json", "--state-dir", folder).out)["keys"]
    remembered = f"remembered in {folder}"
    assert keys["swarm.name"] == {"value": "friends", "origin": remembered}
    assert keys["model.name"] == {"value": "tiny-latent", "origin": remembered}
    assert keys["round.local"] == {"value": 4, "origin": "default"}
    run("bug-report", "--yes", "--out", report, "--state-dir", folder)
    with zipfile.ZipFile(report) as archive:
        assert '"friends"' in archive.read("settings.json").decode()


def test_another_model_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, QWEN)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert main(["join", "--model", "tiny", "--state-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("swarmd: --model: the model is tiny, and the checkpoint in")
        and f"trained from {QWEN}." in said
    )
    assert not (tmp_path / "lock").exists()


def test_an_invitation_only_suggests_a_model(tmp_path: Path) -> None:
    trained(tmp_path, QWEN, COMMIT)
    config, (note,) = recalled(resolve(None, {}, {}, {"model.name": "tiny"}), tmp_path)
    assert (config.model.name, config.model.revision) == (QWEN, COMMIT) and QWEN in note


def test_a_folder_may_be_a_copy_of_the_base_model(tmp_path: Path) -> None:
    trained(tmp_path, "/gone/model")
    assert recalled(resolve(None, {}, {"model": "./copy"}), tmp_path)[0].model.name == "./copy"
    with pytest.raises(ConfigError):
        recalled(resolve(None, {}, {"model": "tiny"}), trained(tmp_path / "other", "tiny-latent"))


def test_the_judge_is_remembered_overridden_and_forgotten(tmp_path: Path) -> None:
    chosen = resolve(None, {}, {"judge": JUDGE})
    assert recalled(chosen, tmp_path)[1] == []
    remember(chosen, tmp_path)
    remember(resolve(None, {}, {}), tmp_path)  # a join without one changes nothing
    config, (note,) = recalled(resolve(None, {}, {}), tmp_path)
    assert config.judge.url == JUDGE and "as before" in note
    other = resolve(None, {"SWARMD_JUDGE": "http://127.0.0.1:8400"}, {})
    config, (note,) = recalled(other, tmp_path)
    assert config.judge.url == "http://127.0.0.1:8400" and "SWARMD_JUDGE says" in note and JUDGE in note
    none = resolve(None, {}, {"judge": ""})
    assert recalled(none, tmp_path)[0].judge.url == ""
    remember(none, tmp_path)
    assert recalled(resolve(None, {}, {}), tmp_path) == (resolve(None, {}, {}).config, [])


DAMAGED = ["", "{", "[]", "[" * 100_000, "\0" * 80]  # contents after a power cut or on a bad disk


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_choices_are_no_reason_to_join_another_swarm(run: Run, content: str, tmp_path: Path) -> None:
    remember(resolve(None, {}, {"swarm": "lab"}), tmp_path)
    (tmp_path / "choices.json").write_text(content)
    said = run("join", "--state-dir", tmp_path)
    assert said.code == 2 and "choices.json: cannot be read" in said.err and "--swarm" in said.err
    with pytest.raises(ConfigError):
        remember(resolve(None, {}, {"swarm": "other"}), tmp_path)
    assert (tmp_path / "choices.json").read_text() == content


def test_a_file_given_as_the_state_folder_is_told_as_such(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = run("join", "--state-dir", tmp_path / "notes.txt")
    assert said.code == 2 and "notes.txt: cannot be used as the state folder" in said.err
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", [*DAMAGED, '{"base": 3}', '{"base": {"source": ""}}', '{"judge": 3}'])
def test_unusable_choices_are_not_remembered(content: str, tmp_path: Path) -> None:
    trained(tmp_path, "x")
    (tmp_path / "checkpoints" / "round-00000007" / "policy.json").write_text(content)
    if content not in DAMAGED:
        (tmp_path / "choices.json").write_text(content)
    config, notes = recalled(resolve(None, {}, {}), tmp_path)
    assert config == resolve(None, {}, {}).config and [note.partition(" ")[0] for note in notes] == [
        "judge"
    ] * ("judge" in content)


def test_swarm_curriculum_bootstrap_and_model_are_remembered_too(tmp_path: Path) -> None:
    invited = {
        "swarm.name": "lab",
        "swarm.curriculum": "tiny-9",
        "swarm.bootstrap": (PEER,),
        "model.name": "tiny-latent",
    }
    remember(resolve(None, {}, {"judge": JUDGE}, invited), tmp_path)
    config, (note,) = recalled(resolve(None, {}, {}), tmp_path)
    assert (config.swarm.name, config.swarm.curriculum, config.swarm.bootstrap) == ("lab", "tiny-9", (PEER,))
    assert (config.model.name, config.judge.url) == ("tiny-latent", JUDGE)
    assert note.startswith(
        f"as before: swarm lab, curriculum tiny-9, bootstrap {PEER}, judge {JUDGE}, model tiny-latent;"
    )
    other = resolve(None, {}, {"swarm": "main"})
    config, notes = recalled(other, tmp_path)
    assert config.swarm.name == "main" and "swarm main, as --swarm says; before it was lab" in notes
    assert notes[-1].endswith("what is configured overrides it, as --judge '' for no judge")
    _, (*_, note) = recalled(resolve(None, {}, {"judge": ""}), tmp_path)
    assert note.endswith("; what is configured overrides it")
    remember(other, tmp_path)
    assert recalled(resolve(None, {}, {}), tmp_path)[0].swarm == config.swarm
    # A checkpoint's comes first
    assert recalled(resolve(None, {}, {}), trained(tmp_path, "tiny"))[0].model.name == "tiny"


def test_a_choice_that_fails_is_not_remembered(run: Run, tmp_path: Path) -> None:
    remember(resolve(None, {}, {"curriculum": "tiny-9", "judge": JUDGE}), tmp_path)
    before = (tmp_path / "choices.json").read_bytes()
    for wrong in (
        ["--curriculum", tmp_path / "gone.jsonl"],
        ["--curriculum", "tiny-9-strict", "--model", tmp_path / "gone"],
    ):
        said = run("join", *wrong, "--swarm", "lab", "--judge", "", "--state-dir", tmp_path)
        assert said.code != 0 and "gone" in said.err and "--curriculum auto" not in said.err
        assert (tmp_path / "choices.json").read_bytes() == before


def test_missing_remembered_tasks_are_told_with_the_overriding_option(run: Run, tmp_path: Path) -> None:
    gone = tmp_path / "gone.jsonl"
    remember(resolve(None, {}, {"curriculum": str(gone)}), tmp_path)
    said = run("join", "--state-dir", tmp_path)
    assert (
        said.code == 2
        and f"own tasks cannot be used: {gone}" in said.err
        and f"curriculum {gone}" in said.err
    )
    assert recalled(resolve(None, {}, {"curriculum": "auto"}), tmp_path)[0].swarm.curriculum == "auto"


def test_choices_are_remembered_once_the_model_is_loaded(tmp_path: Path) -> None:
    chosen = resolve(None, {}, {"judge": JUDGE})
    config = NodeConfig.model_validate({"swarm": {"engine": "none"}})
    daemon = Daemon(config, tmp_path, PlainView(io.StringIO()), lambda: remember(chosen, tmp_path))
    daemon.child.on_message(link.TrainerState(NodeState.STARTING, "loading the model tiny", "wait"))
    assert not (tmp_path / "choices.json").exists()
    daemon.child.on_message(link.TrainerReady(ModelDescription(), 0, []))
    assert recalled(resolve(None, {}, {}), tmp_path)[0].judge.url == JUDGE


def test_choices_that_cannot_be_written_name_both_remedies(tmp_path: Path) -> None:
    with (
        failing_at(2),
        pytest.raises(
            CannotRecord, match=r"choices.json: .*\. Free some space, or correct its permissions\.$"
        ),
    ):
        remember(resolve(None, {}, {"judge": JUDGE}), tmp_path)
