"""The settings of a judge, its fixed limits, and judge.toml: a key for each option of `swarmd-judge serve`.

What the file says becomes the options' defaults: flags and variables win. The names of variables are checked
here; the options read them.
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from ipaddress import ip_network
from pathlib import Path
from typing import Any, get_args, get_type_hints

from platformdirs import user_state_path

from judge.errors import JudgeError
from swarmd.terminal import printable

MAX_ASK_BYTES = 4 * 1024
# All answers to a question. One of MAX_ANSWER_CHARACTERS, every one of them escaped, has 192 KiB.
MAX_ANSWERS_BYTES = 512 * 1024
# Answers to a question.
MAX_ANSWERS = 16
# Questions asked for at once.
MAX_QUESTIONS = 8
MAX_ANSWER_CHARACTERS = 16_384
MAX_MODEL_CHARACTERS = 100
# Open questions of all peers together.
OPEN_QUESTIONS = 5_000
# Open questions of the peers of one network that have no record, and of those that have one.
NEWCOMERS_QUESTIONS = 64
NETWORK_QUESTIONS = 1_000
# Answers waiting for the verifier.
SCORING_BACKLOG = 128
# Questions waiting to be made.
QUESTIONS_BACKLOG = 128
# A peer may ask for ASK_BURST questions at once, and then for one every ASK_S.
ASK_BURST = 10
ASK_S = 1.0
# The peers of one network that have no record may ask for NETWORK_ASK_BURST questions at once, and then for
# so many a second.
NETWORK_ASKS_PER_S = 50.0
NETWORK_ASK_BURST = 500.0
# Peers whose asking is remembered.
REMEMBERED_PEERS = 10_000
# The peers of one network may send ANSWER_BYTES_BURST of answers, which are kept, and then so many a second.
ANSWER_BYTES_PER_S = 32 * 1024.0
ANSWER_BYTES_BURST = 32 * 2.0**20
# The time for a body to arrive.
BODY_S = 5.0
# The time for a whole request to arrive, headers included.
REQUEST_S = 10.0
# The time for the answer to be worked out, and for it to be taken.
RESPONSE_S = 30.0
TAKE_S = 10.0
# Connections with an answer that is not yet taken, in all and of one network.
SLOW_READERS = 256
SLOW_READERS_OF_A_NETWORK = 16
CONNECTIONS = 4_096
# So long after its deadline an open question belongs to a judge that is gone.
ABANDONED_S = 60.0
# How often to look for questions that nobody answered.
EXPIRE_S = 1.0
# The gap between questions that are made before somebody needs them.
AHEAD_S = 0.02
# Pages of the leaderboard that are worked out for the readers of one network.
BOARDS_PER_S = 8.0
BOARDS_BURST = 200.0
# A page of the leaderboard is worked out once for all who look within this time.
LEADERBOARD_S = 2.0
# How long /healthz repeats what it found, and how long it tells of a write that failed.
PROBE_S = 2.0
FAILED_S = 30.0
# The same as LEADERBOARD_S for swarm against solo of a model.
COMPARISON_S = 10.0
# Answers that are kept of each of these two.
ANSWERS_KEPT = 16

# An extension of the ASGI scope: its `wait` takes the seconds that this request may take.
TIMEOUT_EXTENSION = "swarmd.patience"
# Uploads of weights that arrive or wait, in all and of one network.
VERIFIED_WAITING = 8
VERIFIED_WAITING_OF_A_NETWORK = 2
# A peer may upload VERIFIED_BURST times at once, and then once every VERIFIED_PAUSE_S.
VERIFIED_BURST = 2
VERIFIED_PAUSE_S = 600.0
# The same for all peers of one network.
VERIFIED_NETWORK_BURST = 8.0
VERIFIED_NETWORK_PAUSE_S = 120.0
# An upload may stand still for so long, or be so much later than one of VERIFIED_BYTES_PER_S.
VERIFIED_STALL_S = 3.0
VERIFIED_BYTES_PER_S = 32 * 1024
# An evaluation's time by the clock on the wall, and of processor time.
VERIFIED_S = 1_800.0
VERIFIED_CPU_S = 900
# Beyond the base model and three times the weights.
VERIFIED_MEMORY_BYTES = 512 * 2**20
# The time until the hub sends the first byte of a file, and the last.
HUB_S = 20.0
FETCH_S = 900.0
# When an outcome that could not be written is written again.
VERIFIED_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    database: Path | str  # a SQLite file, or the address of a PostgreSQL database
    curriculum: str = "sapo-9"
    deadline: float = 120.0  # seconds from question to answer
    host: str = "127.0.0.1"
    port: int = 8400  # 0: any free one
    origins: frozenset[str] = frozenset()  # names nodes reach this judge by; empty: any
    key: Path | None = None  # of the receipts' signatures; None: default_key
    window: float = 86_400.0  # seconds from one set of questions to the next
    # Addresses of reverse proxies, which say whom they speak for (X-Forwarded-For)
    proxies: tuple[str, ...] = ()
    verified_bytes: int = 0  # of one upload of weights; 0: none is taken
    verified_models: tuple[str, ...] = ("tiny",)  # whose weights are evaluated
    verified_questions: int = 20  # of each specialty
    # Address of a hub whose repositories may be named instead of an upload; empty: none
    verified_hub: str = ""
    verified_folder: Path | None = None  # of uploads; None: default_folder
    shared: bool = False  # other judges use this database too
    invitation: str = ""  # to the swarm, shown on the page "Join"


def default_database(curriculum: str) -> Path:
    """One file per curriculum, because a leaderboard compares answers to one."""
    return user_state_path("swarmd") / f"judge-{curriculum}.sqlite3"


def default_key(database: Path | str) -> Path:
    """Beside a database that is a file; else in the state folder."""
    if "://" in str(database):
        return user_state_path("swarmd") / "judge.key"
    return Path(f"{database}.key")


def default_folder(database: Path | str) -> Path:
    """Where uploads wait: beside the database, or in the state folder."""
    if "://" in str(database):
        return user_state_path("swarmd") / "judge-uploads"
    return Path(f"{database}.uploads")


EXAMPLE = Path(__file__).with_name("judge.example.toml")
NAME = "judge.toml"
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]+)?")
NOT_KEYS = frozenset({"config", "as_json", "only_check", "return"})  # options that are no settings
PREFIX = "SWARMD_JUDGE_"  # of variables
# Keys of a node, which may run in one environment
OF_NODES = frozenset({"SWARMD_JUDGE_URL", "SWARMD_JUDGE_EVERY", "SWARMD_JUDGE_NAME"})
_WORDS: Mapping[type, tuple[str, str]] = {
    str: ("a text", "texts"),
    bool: ("true or false", ""),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
}


class ConfigurationWrong(JudgeError):
    """The judge's configuration cannot be used."""


@dataclass(frozen=True, slots=True)
class JudgeSetting:
    """A key of the file."""

    kind: type  # str, bool, int or float
    many: bool
    least: float
    most: float
    default: object

    def refuses(self, value: object) -> str:
        """Return what the setting expects where this is no value for it; else nothing."""
        items = value if self.many and isinstance(value, list) else [value]
        if (isinstance(value, list) == self.many) and all(map(self._takes, items)):
            return ""
        limits = [f"at least {self.least:g}"] if self.least > -math.inf else []
        limits += [f"at most {self.most:,.0f}"] if self.most < math.inf else []
        one, several = _WORDS[self.kind]
        return ", ".join([f"a list of {several}" if self.many else one, *limits])

    def _takes(self, value: object) -> bool:
        if isinstance(value, bool) or self.kind in (bool, str):
            return type(value) is self.kind
        # NaN is not
        return (
            isinstance(value, int if self.kind is int else (int, float)) and self.least <= value <= self.most
        )


def checked_origins(origins: Iterable[str]) -> frozenset[str]:
    """As nodes sign them: scheme, host and port, nothing behind. Raises ConfigurationWrong."""
    found = frozenset(origin.rstrip("/") for origin in origins)
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            said = f"{printable(origin)!r} is not of the form https://host[:port], in small letters"
            raise ConfigurationWrong(
                f"--origin, origin: {said}; give it as nodes reach this judge, https://judge.example"
            )
    return found


def checked_proxies(proxies: Iterable[str]) -> tuple[str, ...]:
    """Addresses, networks, or *.

    A name is refused: no connection comes from a name, so it would never be believed.
    """
    for proxy in (found := tuple(proxies)):
        try:
            proxy == "*" or ip_network(proxy)
        except ValueError:
            raise ConfigurationWrong(
                f"--proxy, proxy: {printable(proxy)!r} is no address; give the proxy's, such as 127.0.0.1"
            ) from None
    return found


def settings_of(serve: Callable[..., None]) -> Mapping[str, JudgeSetting]:
    """Return the keys of the file: a command's options."""
    defaults = {name: parameter.default for name, parameter in signature(serve).parameters.items()}
    found: dict[str, JudgeSetting] = {}
    for name, hint in get_type_hints(serve, include_extras=True).items():
        if name in NOT_KEYS:
            continue
        annotation, option = get_args(hint)
        kinds = {str if part is Path else part for part in _parts(annotation)}
        least, most = (
            (-math.inf if option.min is None else option.min),
            (math.inf if option.max is None else option.max),
        )
        found[name] = JudgeSetting(
            next(kind for kind in _WORDS if kind in kinds), list in kinds, least, most, defaults[name]
        )
    return found


def _parts(annotation: Any) -> Iterator[Any]:
    """Of `list[str] | None`: list, str and None's type."""
    yield getattr(annotation, "__origin__", annotation)
    for part in get_args(annotation):
        yield from _parts(part)


def read_config(file: Path, settings: Mapping[str, JudgeSetting]) -> Mapping[str, Any]:
    """Read the settings of the file. Raises ConfigurationWrong, with a line for each mistake."""
    document = _read(file)
    mistakes = []
    for key, value in document.items():
        if key not in settings:
            near = get_close_matches(key, settings, n=1)
            meant = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(settings)}"
            mistakes.append(f"{file}: {printable(key)[:60]}: unknown key; {meant}")
        elif expected := settings[key].refuses(value):
            mistakes.append(f"{file}: {key}: expected {expected}, found {printable(repr(value))[:60]}")
    if mistakes:
        raise ConfigurationWrong("\n".join(mistakes))
    return document


def refuse_unknown_variables(environment: Mapping[str, str], settings: Iterable[str]) -> None:
    """Refuse unknown variables.

    Raises ConfigurationWrong where a SWARMD_JUDGE_ variable is neither the judge's nor a node's.
    """
    known = [name.upper() for name in (*settings, "config")]
    mistakes = []
    for variable in sorted(
        {name for name, text in environment.items() if name.startswith(PREFIX) and text} - OF_NODES
    ):
        name = variable.removeprefix(PREFIX)
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
            mistakes.append(f"{printable(variable)[:60]}: no such variable; {meant}")
    if mistakes:
        raise ConfigurationWrong("\n".join(mistakes))


def write_example(folder: Path) -> Path:
    """Write a commented judge.toml into this folder.

    Raises ConfigurationWrong; an existing file is left as it is.
    """
    file = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as new:
            new.write(EXAMPLE.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigurationWrong(
            f"{file} exists already and was left as it is; name another folder"
        ) from None
    except OSError as error:
        raise ConfigurationWrong(f"cannot write {file}: {error.strerror}; name another folder") from None
    return file


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationWrong(f"{file}: not valid TOML: {printable(str(error))}") from None
    except UnicodeDecodeError:
        raise ConfigurationWrong(f"{file}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise ConfigurationWrong(
            f"{file} cannot be read: {error.strerror}; `swarmd-judge init` writes one"
        ) from None
    except (ValueError, RecursionError):  # numbers of thousands of digits; arrays nested thousands deep
        raise ConfigurationWrong(f"{file}: a number or a nesting without measure") from None
