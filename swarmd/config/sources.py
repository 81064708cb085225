"""Reads the configuration: TOML, environment and flags -> one NodeConfig, and where each value came from.

Precedence: flag > invitation > SWARMD_* variable > TOML > profile > default. Every mistake in every source is
reported at once, also one that a stronger source would override.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from swarmd.config.config import NodeConfig
from swarmd.config.contradictions import contradictions
from swarmd.config.messages import expected, key_name, kind_of, nearest, nearest_choice, shown
from swarmd.config.profiles import DEFAULT, PROFILES
from swarmd.errors import ConfigError
from swarmd.terminal import printable

# The flags of `swarmd join`, without the hyphens, and the keys they set; SWARMD_<FLAG> sets them too
FLAGS: Mapping[str, str] = {
    "model": "model.name",
    "device": "model.device",
    "swarm": "swarm.name",
    "curriculum": "swarm.curriculum",
    "bootstrap": "swarm.bootstrap",
    "listen": "swarm.listen",
    "judge": "judge.url",
    "rounds": "round.rounds",
    "local": "round.local",
    "external": "round.external",
    "pace": "round.pace",
    "train": "round.train",
    "profile": "profile",
    "seed": "seed",
}
INVITED = "the invitation"  # the origin of what one sets (invitation.py)
# Which file, which folder: the command line's own
NOT_KEYS = frozenset({"SWARMD_CONFIG", "SWARMD_STATE_DIR"})
MAX_FILE_BYTES = 1024 * 1024
# A file with more mistakes is not a configuration.
_MAX_MISTAKES = 40


@dataclass(frozen=True)
class Resolved:
    config: NodeConfig
    # Dotted key -> "default", "profile sapo-paper", "/path/to.toml:12", "SWARMD_PACE", INVITED or "--local"
    origins: Mapping[str, str]


@dataclass(frozen=True)
class _Given:
    """A value for a key, and where it was given."""

    key: str
    value: Any
    origin: str


def load(path: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> NodeConfig:
    """Return the configuration of a node; see `resolve`."""
    return resolve(path, environment, flags).config


def resolve(
    path: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
    invited: Mapping[str, object] = MappingProxyType({}),
) -> Resolved:
    """Read every source, check every value, and say where each came from.

    flags: by their names in FLAGS; None and () mean not given. An empty variable counts as not given.
    invited: keys of an invitation. Raises ConfigError, with one line for each mistake: where, which key, what
    was expected and what was found.
    """
    mistakes: list[str] = []
    given: list[_Given] = []  # weakest source first
    invitation = (_Given(key, value, INVITED) for key, value in invited.items())
    for source in (
        _from_file(path, mistakes),
        _from_environment(environment, mistakes),
        invitation,
        _from_flags(flags),
    ):
        given += [value for value in source if _acceptable(value, mistakes)]
    if mistakes:
        more = (
            [f"… and {len(mistakes) - _MAX_MISTAKES} mistakes more"] if len(mistakes) > _MAX_MISTAKES else []
        )
        raise ConfigError("\n".join([*mistakes[:_MAX_MISTAKES], *more]))
    origins = dict.fromkeys(keys(), "default")
    document: dict[str, Any] = {}
    for value in [*_from_profile(given), *given]:
        section, _, name = value.key.rpartition(".")
        (document.setdefault(section, {}) if section else document)[name] = _frozen(value.value)
        origins[value.key] = value.origin
    config = NodeConfig.model_validate(document)
    if found := list(contradictions(config, origins)):
        raise ConfigError("\n".join(found))
    return Resolved(config, origins)


@cache
def keys() -> Mapping[str, FieldInfo]:
    """Return every key, dotted, in the order of the example file."""
    found: dict[str, FieldInfo] = {}
    for name, field in NodeConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= {f"{name}.{key}": inner for key, inner in field.annotation.model_fields.items()}
        else:
            found[name] = field
    return found


def flatten(config: NodeConfig) -> dict[str, Any]:
    """Return every value by its dotted key."""
    document = config.model_dump(mode="json")
    sections = {key: key.rpartition(".") for key in keys()}
    return {
        key: document[section][name] if section else document[name]
        for key, (section, _, name) in sections.items()
    }


def variables() -> Mapping[str, str]:
    """Map environment variables to keys.

    They are SWARMD_<SECTION>_<KEY> for each key, and SWARMD_<FLAG> for each flag of `swarmd join`.
    """
    return {f"SWARMD_{key.replace('.', '_').upper()}": key for key in keys()} | {
        f"SWARMD_{flag.upper()}": key for flag, key in FLAGS.items()
    }


def _from_profile(given: Sequence[_Given]) -> Iterator[_Given]:
    """Yield the settings of the profile that the strongest source names."""
    name = next((value.value for value in reversed(given) if value.key == "profile"), DEFAULT)
    for section, values in PROFILES[name].items():
        for key, value in values.items():
            yield _Given(f"{section}.{key}", value, f"profile {name}")


def _from_file(path: Path | None, mistakes: list[str]) -> Iterator[_Given]:
    if path is None:
        return
    text = _read(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        line = re.search(r"at line (\d+)", message)
        number = int(line[1]) if line else text.count("\n") + 1
        mistakes.append(f"{path}:{number}: not valid TOML: {printable(message)}")
        return
    except (ValueError, RecursionError):  # numbers of thousands of digits; arrays nested thousands deep
        mistakes.append(f"{path}: not a configuration: a number or a nesting without measure")
        return
    places = _lines(text)
    sections = {key.partition(".")[0] for key in keys() if "." in key}
    for name, value in document.items():
        at = f"{path}:{places[name]}" if places.get(name) else str(path)
        if name in sections:
            if not isinstance(value, dict):
                mistakes.append(f"{at}: {name}: expected a section, [{name}], found {shown(value)}")
                continue
            for inner, inner_value in value.items():
                key = f"{name}.{inner}"
                yield _Given(key, inner_value, f"{path}:{places[key]}" if places.get(key) else str(path))
        else:
            yield _Given(name, value, at)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: more than {MAX_FILE_BYTES} bytes: not a configuration. Start from"
                " node_config.example.toml."
            )
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file. Start from node_config.example.toml, or leave --config out."
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text. Save the file as UTF-8.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{printable(str(path))}: cannot be read: {reason}. Name a file that you can read with --config."
        ) from None


def _lines(text: str) -> dict[str, int]:
    """Map each dotted key or section to its line in a TOML text.

    It is 0 where two lines could be it (one of them inside a text of many lines).
    """
    places: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+([^\[\]]+)\]", line)
        assigned = re.match(r"\s*([\w\s.\"'-]+?)\s*=", line)
        if header:
            section = _dotted(header[1])
            key = section
        elif assigned:
            key = f"{section}.{_dotted(assigned[1])}".removeprefix(".")
        else:
            continue
        places[key] = 0 if key in places else number
    return places


def _dotted(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


def _from_environment(environment: Mapping[str, str], mistakes: list[str]) -> Iterator[_Given]:
    known = variables()
    named: dict[str, _Given] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith("SWARMD_") or not text or variable in NOT_KEYS:
            continue
        key = known.get(variable)
        if key is None and variable.startswith("SWARMD_JUDGE_"):
            continue  # `swarmd-judge`'s own; both may run in one environment
        if key is None:
            mistakes.append(f"{printable(variable)}: no such variable{nearest(variable, known)}")
        elif key in named and named[key].value != _parsed(key, text):
            mistakes.append(f"{variable}: {key}: {named[key].origin} sets it otherwise. Set one of the two.")
        else:
            named[key] = _Given(key, _parsed(key, text), variable)
    yield from named.values()


def _parsed(key: str, text: str) -> Any:
    """Convert a variable's text to its key's type; leave what does not convert for validation to refuse."""
    kind = kind_of(keys()[key])
    if kind is tuple:
        return tuple(text.replace(",", " ").split())
    if kind is int and re.fullmatch(r"[+-]?[0-9]{1,30}", text.strip()):
        return int(text)
    if kind is float and re.fullmatch(r"[+-]?[0-9.]{1,30}(e[+-]?[0-9]{1,3})?", text.strip(), re.IGNORECASE):
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _from_flags(flags: Mapping[str, object]) -> Iterator[_Given]:
    for flag, value in flags.items():
        if value is not None and value != () and value != []:
            yield _Given(FLAGS[flag], value, f"--{flag}")


def _acceptable(given: _Given, mistakes: list[str]) -> bool:
    field = keys().get(given.key)
    if field is None:
        # A flag's name was given where its key is expected.
        meant = FLAGS.get(given.key.rpartition(".")[2])
        hint = (
            f"; did you mean {meant}?" if meant else nearest(given.key, [*keys(), *NodeConfig.model_fields])
        )
        mistakes.append(f"{given.origin}: {key_name(given.key)}: unknown key{hint}")
        return False
    try:
        _adapter(given.key).validate_python(_frozen(given.value))
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            index = error["loc"][0] if error["loc"] and isinstance(error["loc"][0], int) else None
            key, found = (
                (given.key, given.value) if index is None else (f"{given.key}[{index}]", error["input"])
            )
            wanted = expected(field, element=index is not None)
            why = (
                f": {printable(str(error['ctx']['error']))}"
                if error["type"] == "value_error"
                else nearest_choice(field, found)
            )
            mistakes.append(f"{given.origin}: {key}: expected {wanted}, found {shown(found)}{why}")
        return False
    return True


def is_valid(key: str, value: object) -> bool:
    """Return whether a key may have this value: of what a state folder remembers, which may be damaged."""
    return _acceptable(_Given(key, value, ""), [])


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    field = keys()[key]
    checked: Any = Annotated[(field.annotation, *field.metadata, Field())]
    return TypeAdapter(checked, config=ConfigDict(strict=True, allow_inf_nan=False))
