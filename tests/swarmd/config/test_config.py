"""The values of a configuration, their sources, and the messages about wrong ones."""

import random
import re
import tomllib
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from swarmd.config.config import NodeConfig
from swarmd.config.messages import kind_of
from swarmd.config.sources import NODE, flatten, resolve
from swarmd.errors import ConfigError
from swarmd.experience.strategies import TAKES
from tests import ROOT

EXAMPLE = ROOT / "node_config.example.toml"
PEER = "12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F"


def mistakes(text: str | bytes, folder: Path) -> list[str]:
    path = folder / "node.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as wrong:
        resolve(path, {}, {})
    return str(wrong.value).splitlines()


def test_the_example_has_every_key_with_its_default_and_a_comment() -> None:
    text = EXAMPLE.read_text()
    resolved = resolve(EXAMPLE, {}, {})
    assert resolved.config == NodeConfig()
    for key, default in flatten(NodeConfig()).items():
        section, _, name = key.rpartition(".")
        part = (
            text.partition(f"\n[{section}]\n")[2].partition("\n[")[0] if section else text.partition("\n[")[0]
        )
        lead = "# " if default is None else ""
        assert re.search(rf"^{lead}{name} = \S.* # ", part, re.MULTILINE), (
            f"add `{lead}{name} = <default>  # <what it does>` to [{section}] in {EXAMPLE.name}"
        )
        assert resolved.origins[key].startswith(str(EXAMPLE)) != (default is None), key
    # Settings without a default are commented out in the example; without the comment signs it must still
    # load.
    load_text = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert set(tomllib.loads(load_text)["model"]) == set(NodeConfig().model.model_dump())


def test_the_example_describes_every_choice_of_a_setting() -> None:
    text = EXAMPLE.read_text()
    for section, field in NodeConfig.model_fields.items():
        for name, setting in getattr(field.annotation, "model_fields", {}).items():
            part = text.partition(f"\n[{section}]\n")[2].partition("\n[")[0]
            found = re.search(rf"^(# )?{name} = .*(\n +#.*)*", part, re.MULTILINE)
            choices = get_args(setting.annotation) if get_origin(setting.annotation) is Literal else ()
            if (section, name) == ("sharing", "take"):
                # Other tests may have added strategies from files.
                choices = tuple(take for take in TAKES if not take.endswith(".py"))
            for choice in choices:
                assert found and re.search(rf"\b{choice}\b", found[0]), (
                    f"describe {section}.{name} = {choice!r} next to {name} in {EXAMPLE.name}"
                )


def test_a_flag_beats_a_variable_which_beats_the_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        '[round]\nlocal = 1\nexternal = 1\ncompletions = 3\n[swarm]\nlisten = ["/ip4/127.0.0.1/tcp/1"]'
    )
    environment = {
        "SWARMD_ROUND_LOCAL": "2",
        "SWARMD_EXTERNAL": "2",
        "SWARMD_LISTEN": "/ip4/127.0.0.1/tcp/2, /ip6/::1/tcp/2",
        "HOME": "/",
    }
    resolved = resolve(path, environment, {"local": 3, "listen": [], "seed": None, "pace": 1.5})
    assert (
        resolved.config.round.local,
        resolved.config.round.external,
        resolved.config.round.completions,
    ) == (3, 2, 3)
    assert resolved.config.round.pace == 1.5
    assert resolved.config.swarm.listen == ("/ip4/127.0.0.1/tcp/2", "/ip6/::1/tcp/2")
    wanted = {
        "round.local": "--local",
        "round.external": "SWARMD_EXTERNAL",
        "round.completions": f"{path}:4",
        "seed": "default",
    }
    assert {key: resolved.origins[key] for key in wanted} == wanted
    assert list(resolved.origins) == list(NODE.keys)


def test_every_key_can_be_set_by_a_variable() -> None:
    texts = (
        {
            "swarm.listen": "/ip4/127.0.0.1/tcp/7",
            "swarm.bootstrap": f"/ip4/127.0.0.1/tcp/7/p2p/{PEER}",
            "gate.margin": "2",
            "judge.url": "https://judge.example/",
            "generate.engine_url": "http://127.0.0.1:8000",
            "metrics.listen": "127.0.0.1:9464",
            "seed": "9",
            "train.importance_cap": "2",
            "swarm.curriculum": "own.py",
            "sharing.take": "own.py",
            "metrics.report_to": "wandb",
            "tasks.reward": "mine.py",
            "model.examples": "on",
        }
        | {f"limits.{name}": "25 %" for name in ("cpu", "gpu_memory")}
        | {f"limits.{name}": "1 MB/s" for name in ("up", "down")}
        | {f"limits.{name}": "1 GB" for name in ("month", "state")}
        | {"when.load": "50 %", "when.gpu": "30 %", "when.hours": "sat-sun", "swarm.engine": "none"}
    )
    values = {int: "7", float: "0.25"}
    for key, default in flatten(NodeConfig()).items():
        kind = kind_of(NODE.keys[key])
        other = (
            next((choice for choice in get_args(NODE.keys[key].annotation) if choice != default), "")
            if kind is Literal
            else "some-text"
        )
        resolved = resolve(
            None, {f"SWARMD_{key.replace('.', '_').upper()}": texts.get(key) or values.get(kind, other)}, {}
        )
        assert flatten(resolved.config)[key] != default, key
    assert NODE.variables["SWARMD_MODEL"] == NODE.variables["SWARMD_MODEL_NAME"] == "model.name"


def test_empty_variables_and_other_programs_variables_are_ignored() -> None:
    assert (
        resolve(
            None,
            {"SWARMD_MODEL": "", "SWARMD_STATE_DIR": "/x", "SWARMD_CONFIG": "/y", "SWARMD_JUDGE_PORT": "1"},
            {},
        ).config
        == NodeConfig()
    )
    with pytest.raises(
        ConfigError, match="SWARMD_ROUND_LOCL: no such variable; did you mean SWARMD_ROUND_LOCAL"
    ):
        resolve(None, {"SWARMD_ROUND_LOCL": "3"}, {})
    with pytest.raises(ConfigError, match=r"^SWARMD_\\x1b\[2J: no such variable"):
        resolve(None, {"SWARMD_\x1b[2J": "3"}, {})
    with pytest.raises(ConfigError, match=r"SWARMD_MODEL_NAME: model\.name: SWARMD_MODEL sets another value"):
        resolve(None, {"SWARMD_MODEL_NAME": "a", "SWARMD_MODEL": "b"}, {})


def test_the_mistakes_of_all_sources_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('sed = 1\n[round]\nlocal = "4"\nrounds_ = 3\n[modle]\nx = 1\n')
    with pytest.raises(ConfigError) as wrong:
        resolve(path, {"SWARMD_EXTERNAL": "many", "SWARMD_PACE": "1e"}, {"local": -1, "device": "gpu"})
    assert str(wrong.value).splitlines() == [
        f"{path}:1: sed: unknown key; did you mean seed?",
        f"{path}:3: round.local: expected a whole number, at least 0 and at most 1,024, found '4'",
        f"{path}:4: round.rounds_: unknown key; did you mean round.rounds?",
        f"{path}:5: modle: unknown key; did you mean model?",
        "SWARMD_EXTERNAL: round.external: expected a whole number, at least 0 and at most 1,024, found"
        " 'many'",
        "SWARMD_PACE: round.pace: expected a number, at least 0 and at most 86,400, found '1e'",
        "--local: round.local: expected a whole number, at least 0 and at most 1,024, found -1",
        '--device: model.device: expected one of "auto", "cuda", "mps", "cpu", found \'gpu\'',
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("round = 3", "node.toml:1: round: expected a section, [round], found 3"),
        ("[[round]]\nlocal = 1", "node.toml:1: round: expected a section, [round], found"),
        (
            "[round]\nlocal = true",
            "round.local: expected a whole number, at least 0 and at most 1,024, found true",
        ),
        ("[round]\nlocal = 4.0", "found 4.0"),
        ("[round]\npace = nan", "round.pace: expected a number, at least 0 and at most 86,400, found nan"),
        ("[train]\nmax_grad_norm = inf", "train.max_grad_norm: expected a number, more than 0, found inf"),
        ("[generate]\ntemperature = 1e-40", "generate.temperature: expected a number, at least 1e-06"),
        ("[round]\nrounds = 1979-05-27", "found 1979-05-27"),
        ("[model]\nname = ''", "model.name: expected a text, not empty, found ''"),
        ("[model]\nname = {a = 1}", "model.name: expected a text, not empty, found a section"),
        ("[swarm]\nname = 'Main'", "swarm.name: expected at most 32 lower-case letters"),
        ('[swarm]\nname = "a\\nb"', r"found 'a\nb'"),
        (
            "[swarm]\ncurriculum = 'tiny9'",
            "swarm.curriculum: expected auto, ladder-9, sapo-9, tiny-9, ladder-9-strict, sapo-9-strict,",
        ),
        (
            "[swarm]\ncurriculum = 'tiny9'",
            "found 'tiny9': no installed package offers tasks of this name; did you mean tiny-9?",
        ),
        *(
            (
                f"[model]\nexamples = {wrong}",
                'model.examples: expected "auto", "off", "on" or a list of [question, answer] pairs, found ',
            )
            for wrong in ("'of'", "true", "['ab']", "[['a']]", "[['a', ' ']]", "[['a', 3]]", "'ab'")
        ),
        ("[swarm]\ncurriculum = 'own.txt'", "no installed package offers tasks of this name"),
        ("[swarm]\ncurriculum = '~nobody-here/own.py'", "there is no user 'nobody-here'"),
        ("[tasks]\nreward = '~nobody-here/own.py'", "there is no user 'nobody-here'"),
        ("[sharing]\ntake = '~nobody-here/own.py'", "there is no user 'nobody-here'"),
        ("[swarm]\ncurriculum = ''", "no installed package offers tasks of this name"),
        ("[swarm]\njudge = ''", "node.toml:2: swarm.judge: unknown key; did you mean judge.url?"),
        ("local = 4", "node.toml:1: local: unknown key; did you mean round.local?"),
        (
            "[round]\nlocal = 0\nexternal = 0",
            "round.local: expected above 0 if round.external is 0, found 0",
        ),
        ("[round]\nlocal = 0\ntrain = 'off'", 'round.local: expected above 0 if round.train is "off"'),
        (
            "[round]\nlocal = 0\n[workers]\ngenerators = 2",
            "round.local: expected above 0 if [workers] starts",
        ),
        ("[round]\nresample = 2\n[workers]\napart = 'on'", "round.resample: expected 0 if [workers] starts"),
        (
            "[round]\nlocal = 0\n[swarm]\nengine = 'none'",
            'round.local: expected above 0 if swarm.engine is "none", found 0',
        ),
        ('"\\u202e\\u001b[31m" = 4', r"node.toml: '\u202e\x1b[31m': unknown key"),
        ("[swarm]\nlisten = '/ip4/0.0.0.0/tcp/0'", "swarm.listen: expected a list of addresses"),
        ("[when]\nhours = '22:00-07:00'", "found '22:00-07:00': a list has brackets: ['22:00-07:00']"),
        (
            "[swarm]\nlisten = ['/dns/x/tcp/1']",
            "swarm.listen[0]: expected an address such as /ip4/0.0.0.0/tcp/4001, found '/dns/x/tcp/1'",
        ),
        (f"[swarm]\nbootstrap = ['/ip4/1.2.3.4/tcp/99999/p2p/{PEER}']", "'99999' is not a port"),
        (f"[swarm]\nbootstrap = ['/ip4/1.2.3.4/tcp/0/p2p/{PEER}']", "nobody can dial port 0"),
        (f"[swarm]\nbootstrap = ['/ip4/1.2.3/tcp/1/p2p/{PEER}']", "Expected 4 octets"),
        (f"[swarm]\nbootstrap = ['/dns4/-a/tcp/1/p2p/{PEER}']", "is not a host name"),
        (f"[swarm]\nbootstrap = ['/ip4/1.2.3.4/udp/1/p2p/{PEER}']", "only TCP addresses are supported"),
        (f"[swarm]\nbootstrap = ['/p2p/{PEER}']", "swarm.bootstrap[0]"),
        ("[swarm]\nbootstrap = ['/ip4/1.2.3.4/tcp/1']", "must end in /p2p/"),
        (
            f"[swarm]\nbootstrap = ['/ip4/1.2.3.4/tcp/1/p2p/{PEER[:-1]}0']",
            "not a peer id: Invalid character '0'",
        ),
        ("[swarm]\nbootstrap = ['http://a', 3]", "swarm.bootstrap[1]"),
        (
            "[judge]\nurl = 'localhost:80'",
            "judge.url: expected a web address such as http://127.0.0.1:8400, found 'localhost:80'",
        ),
        ("[judge]\nurl = 'http://a:x'", "judge.url"),
        ("[judge]\nurl = 'http://me:secret@a'", "judge.url"),
        ("[judge]\nurl = 'http://[::1'", "judge.url"),
        ("[judge]\nurl = 'http://a/?q'", "query"),
        ("[round\nlocal = 4", "node.toml:1: not valid TOML"),
        ("[round]\nlocal = 4\nlocal = 5", "node.toml:3: not valid TOML"),
        ("a = '''\n\n", "node.toml:3: not valid TOML"),
        ("a = " + "[" * 5000, "node.toml"),
        ("seed = " + "9" * 5000, "node.toml:1: not valid TOML: Exceeds the limit"),
        (b"[model]\nname = '\xff'", "node.toml:2: not UTF-8"),
        (b"\xff\xfes\x00e\x00", "node.toml:1: not UTF-8"),
    ],
)
def test_the_message_of_each_mistake_names_its_place_and_error(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    told = "\n".join(mistakes(text, tmp_path))
    assert said in told and told.startswith(str(tmp_path / "node.toml"))


def test_valid_bootstrap_addresses_are_accepted() -> None:
    hosts = ("ip4/1.2.3.4/tcp/1", "ip6/2001:db8::1/tcp/65535", "dns/a-b.example/tcp/1", "dns4/node_1/tcp/1")
    addresses = tuple(f"/{host}/p2p/{PEER}" for host in hosts)
    assert resolve(None, {}, {"bootstrap": list(addresses)}).config.swarm.bootstrap == addresses


def test_unreadable_files_give_a_message_with_a_remedy(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "absent", "no such file. Start from"),
        (tmp_path, "cannot be read: Is a directory"),
        (Path("a\0b"), "null byte"),
    ):
        with pytest.raises(ConfigError, match=said) as wrong:
            resolve(path, {}, {})
        assert "--config" in str(wrong.value)


def test_examples_must_be_pairs_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[model]\nexamples = [['2+2?', ' 4 '], ['3+3?', '6']]")
    config = resolve(path, {}, {}).config
    assert config.model.examples == (("2+2?", "4"), ("3+3?", "6"))
    assert NodeConfig.model_validate_json(config.model_dump_json()) == config


def test_a_line_number_is_named_only_if_it_is_certain(tmp_path: Path) -> None:
    text = (
        '[model]\nsystem_prompt = """\nname = 3\n"""\nname = 3\n[round]\n local = -1 # local = 3\n"external"'
        " = -1\n"
    )
    told = mistakes(text, tmp_path)
    assert [re.sub(r".*node\.toml", "", line).split(": ")[0] for line in told] == ["", ":7", ":8"]


def test_a_line_of_blanks_is_read_quickly(tmp_path: Path) -> None:
    assert mistakes(" " * 100_000 + "\n[round]\nlocal = -1\n", tmp_path)[0].count("node.toml:3:") == 1


STRAY = [
    "\x00",
    "\x07",
    "\x1b",
    "\u202e",
    "\n",
    '"',
    "[",
    "]",
    "=",
    "'" * 3,
    "nan",
    "-1",
    "{a = 1}",
    "[[1]]",
    "Q",
    "\n[modle]\n",
    "\n[swarm.x]\n",
    "\n[]\n",
]


def _break(text: str, rng: random.Random) -> str:
    """Damage a text as an editing mistake or a failing disk would.

    Letters are lost or added, lines are repeated or capitalised, or the end is cut off.
    """
    lines = text.splitlines()
    at = rng.choice([number for number, line in enumerate(lines) if line and not line.startswith("#")])
    column = rng.randrange(len(lines[at]) + 1)
    changed = (
        lines[at][:column] + lines[at][column + rng.randint(1, 3) :],
        lines[at][:column] + rng.choice(STRAY) + lines[at][column:],
        lines[at] + "\n" + lines[at],
        lines[at].upper(),
    )
    lines[at] = rng.choice(changed)
    return "\n".join(lines[: rng.choice([at + 1, len(lines), len(lines)])]) + "\n"


def test_messages_about_damaged_files_name_key_or_line_and_file(tmp_path: Path) -> None:
    text, rng = re.sub(r" +# .*", "", EXAMPLE.read_text()), random.Random(500)
    path, broken = tmp_path / "node.toml", 0
    while broken < 200:
        path.write_text(_break(text, rng), newline="")
        try:
            resolve(path, {}, {})
        except ConfigError as wrong:
            broken += 1
            for line in str(wrong).splitlines():
                assert re.match(rf"{re.escape(str(path))}(:\d+: (not valid TOML|\S+: )|: \S+: )", line), line
                assert line.isprintable()


def test_a_path_to_own_tasks_is_relative_to_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for text, path in (
        ("own.py", f"{tmp_path}/own.py"),
        ("~/own.jsonl", "/home/me/own.jsonl"),
        ("/own.py", "/own.py"),
    ):
        assert resolve(None, {}, {"curriculum": text}).config.swarm.curriculum == path
