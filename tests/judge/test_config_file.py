"""judge.toml and `swarmd-judge init`.

The tests cover every setting, the precedence of sources, and the messages about mistakes.
"""

import re
import resource
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from judge.cli import DEFAULTS, app
from judge.config import EXAMPLE, SCHEMA, JudgeSettings, write_example
from judge.errors import JudgeError
from swarmd.config.sources import NODE
from swarmd.errors import ConfigError

STANDIN = (sys.executable, "-m", "tests.judge.verified.standin_worker")
NOBODYS = "203.0.113.7"  # TEST-NET-3: a judge cannot listen at this address, and its message names the port


def from_file(text: str | bytes, folder: Path) -> JudgeSettings:
    file = folder / "judge.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return SCHEMA.build(SCHEMA.read(file, {}, {}))[0]


def test_the_example_has_every_setting_with_its_default_and_a_comment(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert set(re.findall(r"^(?:# )?(\w+) = \S.*# ", text, re.MULTILINE)) == set(SCHEMA.keys)
    without_default = {name for name in SCHEMA.keys if getattr(DEFAULTS, name) is None}
    assert set(re.findall(r"^# (\w+) = ", text, re.MULTILINE)) == without_default
    assert from_file(text, tmp_path) == DEFAULTS
    assert set(tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))) == set(SCHEMA.keys)


def test_every_setting_is_an_option_of_serve() -> None:
    """Otherwise a setting could be set only in the file and by a variable."""
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    assert [name for name in SCHEMA.keys if f"--{name.replace('_', '-')} " not in text] == []


def said(*words: str) -> str:
    """Start a judge at an address where it cannot listen; return its message."""
    return str(CliRunner().invoke(app, ["serve", *words]).exception)


def test_a_flag_beats_a_variable_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "judge.toml"
    file.write_text(f'host = "{NOBODYS}"\nport = 1\ncurriculum = "tiny-9"\ndatabase = "{tmp_path / "j"}"\n')
    monkeypatch.setenv("SWARMD_JUDGE_CONFIG", str(file))
    assert f"{NOBODYS} port 1:" in said()
    with monkeypatch.context() as variable:
        variable.setenv("SWARMD_JUDGE_PORT", "2")
        assert f"{NOBODYS} port 2:" in said() and f"{NOBODYS} port 3:" in said("--port", "3")
    file.write_text(f'host = "{NOBODYS}"\n')
    assert f"{NOBODYS} port 8400:" in said()


def test_lists_paths_and_booleans_are_read(tmp_path: Path) -> None:
    found = from_file(
        'origin = ["https://a.example", "https://b.example/"]\nkey = "k"\ndeadline = 60', tmp_path
    )
    assert (found.origin, found.key, found.deadline) == (
        ("https://a.example", "https://b.example"),
        Path("k"),
        60,
    )
    environment = {"SWARMD_JUDGE_PROXY": "127.0.0.1, ::1 10.0.0.0/8 *", "SWARMD_JUDGE_LOG_JSON": "true"}
    found, origins = SCHEMA.build(SCHEMA.read(tmp_path / "judge.toml", environment, {"log_json": False}))
    assert found.proxy == ("127.0.0.1", "::1", "10.0.0.0/8", "*")
    assert (found.log_json, origins["log_json"], origins["host"]) == (False, "--log-json", "default")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ":1: prot: unknown key; did you mean port?"),
        ("zebra = 1", ":1: zebra: unknown key"),
        ("\nport = 70000", ":2: port: expected a whole number, at least 0 and at most 65,535, found 70000"),
        ("port = true", "port: expected a whole number"),
        ("deadline = nan", "deadline: expected a number, at least 1"),
        (
            'origin = "https://a.example"',
            "origin: expected a list of addresses such as https://judge.example",
        ),
        ('origin = ["https://a.example/b"]', "origin[0]: expected an address"),
        ('proxy = ["caddy"]', "proxy[0]: expected an address such as 127.0.0.1"),
        ("host = 3", "host: expected a text, not empty, found 3"),
        ('host = ""', "host: expected a text, not empty, found ''"),
        ('key = ""', "key: expected a text, found '': it is empty; leave it out for the default"),
        ('verified_folder = ""', "verified_folder: expected a text, found '': it is empty"),
        ('verified_model = [""]', "verified_model[0]: expected tiny"),
        ('database = "a\\u0000"', r"database: expected no NUL character, found 'a\x00'"),
        ('verified_model = ["tiny", "\\u0000"]', "verified_model: expected no NUL character, found ['tiny'"),
        ('log_json = "on"', "log_json: expected true or false, found 'on'"),
        ("database = 3", "database: expected a text, found 3"),
        ("key = 3", "key: expected a text, found 3"),
        ("only_check = true", "only_check: unknown key"),
    ],
)
def test_a_message_about_a_mistake_names_file_key_and_expected_value(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        from_file(text, tmp_path)
    assert f"{tmp_path / 'judge.toml'}" in str(wrong.value) and words in str(wrong.value)


def test_the_message_about_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "none.toml")])
    assert isinstance(done.exception, ConfigError) and "`swarmd-judge init` writes one" in str(done.exception)


def test_init_writes_the_example_but_overwrites_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "new")])
    assert done.exit_code == 0 and f"serve --config {tmp_path}/new/judge.toml" in done.output.replace(
        "\n", ""
    )
    file = tmp_path / "new" / "judge.toml"
    assert file.read_bytes() == EXAMPLE.read_bytes()
    file.write_text("port = 1\n")
    again = CliRunner().invoke(app, ["init", str(tmp_path / "new")])
    assert isinstance(again.exception, JudgeError) and "was left as it is" in str(again.exception)
    assert file.read_text() == "port = 1\n"


def test_init_on_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    """The next `init` would take a partial file for the user's own, and not overwrite it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(JudgeError, match="cannot write"):
            write_example(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write_example(tmp_path)


def test_an_option_for_uploads_without_uploads_gives_a_message() -> None:
    done = CliRunner().invoke(app, ["serve", "--verified-model=other"])
    assert isinstance(done.exception, JudgeError) and "--verified-bytes" in str(done.exception)


def test_a_misspelt_variable_is_refused(tmp_path: Path) -> None:
    for command in (["serve"], ["moderate", "log"]):
        done = CliRunner().invoke(app, command, env={"SWARMD_JUDGE_PROT": "1"})
        assert str(done.exception) == ("SWARMD_JUDGE_PROT: no such variable; did you mean SWARMD_JUDGE_PORT?")


def test_variables_of_a_node_do_not_disturb_the_judge() -> None:
    of_nodes = [name for name in NODE.variables if name.startswith("SWARMD_JUDGE_")]
    assert len(of_nodes) == 3
    assert SCHEMA.read(None, dict.fromkeys([*of_nodes, "SWARMD_JUDGE", "SWARMD_JUDGE_CONFIG"], "x"), {}) == []


@pytest.mark.parametrize("option", ["deadline", "window"])
def test_a_time_that_is_not_a_number_is_rejected(option: str) -> None:
    for arguments, environment in (
        ([f"--{option}", "nan"], {}),
        ([], {f"SWARMD_JUDGE_{option.upper()}": "nan"}),
    ):
        done = CliRunner().invoke(app, ["serve", *arguments], env=environment)
        assert isinstance(done.exception, ConfigError) and f"{option}: expected" in str(done.exception)


def test_the_help_fits_80_columns() -> None:
    for command in ([], ["serve"], ["moderate"]):
        shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).output
        assert (
            "…" not in shown
            and "..." not in shown.replace("[ARGS]...", "")
            and max(map(len, shown.splitlines())) <= 80
        )
    assert (
        "postgresql://user@host/name"
        in CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"}).output
    )
    assert CliRunner().invoke(app, ["serve", "-h"]).exit_code == 0
