"""The settings of one program, read from its file, environment and flags.

`swarmd.config.sources` defines the schema of a node, `judge.config` the schema of a judge. Every mistake in
every source is reported at once, including mistakes in values that a stronger source overrides.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from swarmd.config.messages import expected, key_name, kind_of, nearest, nearest_choice, shown
from swarmd.errors import ConfigError
from swarmd.terminal import printable

Tree = TypeVar("Tree")
INVITED = "the invitation"  # the origin of settings from an invitation
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Given:
    """A value for a key, and its origin."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Schema(Generic[Tree]):
    """A tree of settings with one level of sections, and the variables and flags that set them."""

    tree: type[Tree]  # a pydantic class
    prefix: str  # the prefix of environment variables
    others: str  # a pattern: variables with this prefix that belong to other programs
    remedy: str  # remedy in messages, if the file cannot be used
    # Flags without hyphens, and their keys; environment variables may use these names, too.
    flags: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def keys(self) -> Mapping[str, FieldInfo]:
        """Every key, dotted, in the order of the example file."""
        found: dict[str, FieldInfo] = {}
        for name, info in _fields(self.tree).items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                found |= {f"{name}.{key}": inner for key, inner in _fields(info.annotation).items()}
            else:
                found[name] = info
        return found

    @cached_property
    def variables(self) -> Mapping[str, str]:
        """Environment variables and their keys: <prefix><SECTION>_<KEY>, and <prefix><FLAG>."""
        return {f"{self.prefix}{key.replace('.', '_').upper()}": key for key in self.keys} | {
            f"{self.prefix}{flag.upper()}": key for flag, key in self.flags.items()
        }

    def read(
        self,
        path: Path | None,
        environment: Mapping[str, str],
        flags: Mapping[str, object],
        invited: Mapping[str, object] = MappingProxyType({}),
    ) -> list[Given]:
        """Return the values of every source, weakest first.

        flags: by their names; None and () mean not given. An empty variable counts as not given. invited:
        keys of an invitation. Raises ConfigError, with one line for each mistake: its place, the key, the
        expected value and the value found.
        """
        mistakes: list[str] = []
        sources: tuple[Iterable[Given], ...] = (
            self._from_file(path, mistakes) if path else (),
            self._from_environment(environment, mistakes),
            (Given(key, value, INVITED) for key, value in invited.items()),
            self._from_flags(flags),
        )
        given = [value for source in sources for value in source if self.accepts(value, mistakes)]
        # A value can be wrong for each of several types, with the same message.
        if mistakes := list(dict.fromkeys(mistakes)):
            raise ConfigError("\n".join(mistakes))
        return given

    def build(self, given: Iterable[Given]) -> tuple[Tree, Mapping[str, str]]:
        """Return the settings, and the origin of each: "default", a file's line, a variable or a flag."""
        origins = dict.fromkeys(self.keys, "default")
        document: dict[str, Any] = {}
        for value in given:
            section, _, name = value.key.rpartition(".")
            (document.setdefault(section, {}) if section else document)[name] = _frozen(value.value)
            origins[value.key] = value.origin
        return self.tree(**document), origins

    def _from_file(self, path: Path, mistakes: list[str]) -> Iterator[Given]:
        text = self._text_of(path)
        try:
            document = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # Includes numbers of thousands of digits, and arrays nested thousands deep.
            message = str(error)
            line = re.search(r"at line (\d+)", message)
            number = int(line[1]) if line else text.count("\n") + 1
            mistakes.append(f"{path}:{number}: not valid TOML: {printable(message)}")
            return
        places = {key: f"{path}:{line}" for key, line in _lines(text).items() if line}
        sections = {key.partition(".")[0] for key in self.keys if "." in key}
        for name, value in document.items():
            if name not in sections:
                yield Given(name, value, places.get(name, str(path)))
            elif isinstance(value, dict):
                for key, inner in ((f"{name}.{inner}", value[inner]) for inner in value):
                    yield Given(key, inner, places.get(key, str(path)))
            else:
                mistakes.append(
                    f"{places.get(name, path)}: {name}: expected a section, [{name}], found {shown(value)}"
                )

    def _text_of(self, path: Path) -> str:
        try:
            return path.read_text("utf-8-sig")
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file. {self.remedy}") from None
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise ConfigError(f"{path}:{line}: not UTF-8 text. Save the file as UTF-8.") from None
        except (OSError, ValueError) as error:
            # A ValueError means that the path contains a NUL.
            raise ConfigError(
                f"{printable(str(path))}: cannot be read: {getattr(error, 'strerror', None) or error}."
                " Name a file that you can read with --config."
            ) from None

    def _from_environment(self, environment: Mapping[str, str], mistakes: list[str]) -> Iterator[Given]:
        named: dict[str, Given] = {}
        for variable, text in sorted(environment.items()):
            if not variable.startswith(self.prefix) or not text:
                continue
            if (key := self.variables.get(variable)) is None:
                if not re.fullmatch(self.others, variable):
                    mistakes.append(
                        f"{printable(variable)}: no such variable{nearest(variable, self.variables)}"
                    )
            elif key in named and named[key].value != self._parsed(key, text):
                mistakes.append(
                    f"{variable}: {key}: {named[key].origin} sets another value. Set only one of the two."
                )
            else:
                named[key] = Given(key, self._parsed(key, text), variable)
        yield from named.values()

    def _parsed(self, key: str, text: str) -> Any:
        """Convert a variable's text to its key's type; other text is left to the validation."""
        if (kind := kind_of(self.keys[key])) is tuple:
            # A space between days and hours is within an entry: "mon-fri 18:00-08:00".
            between = r",\s*|(?<![a-zA-Z\s])\s+|\s+(?!\s|\d?\d:\d\d)"
            return tuple(filter(None, re.split(between, text)))
        if kind is bool:
            return _TRUTHS.get(text.lower(), text)
        if kind is int and re.fullmatch(r"[+-]?[0-9]{1,30}", text.strip()):
            return int(text)
        if kind is float and re.fullmatch(r"(?i)[+-]?[0-9.]{1,30}(e[+-]?[0-9]{1,3})?", text.strip()):
            with suppress(ValueError):
                return float(text)
        return text

    def _from_flags(self, flags: Mapping[str, object]) -> Iterator[Given]:
        for flag, value in flags.items():
            if value is not None and value != () and value != []:
                yield Given(self.flags.get(flag, flag), value, f"--{flag.replace('_', '-')}")

    def accepts(self, given: Given, mistakes: list[str]) -> bool:
        """Return whether a key may have this value; if not, add the mistake to `mistakes`."""
        if (info := self.keys.get(given.key)) is None:
            # The name of a flag was used as a key.
            meant = self.flags.get(given.key.rpartition(".")[2])
            hint = (
                f"; did you mean {meant}?" if meant else nearest(given.key, [*self.keys, *_fields(self.tree)])
            )
            mistakes.append(f"{given.origin}: {key_name(given.key)}: unknown key{hint}")
            return False
        value = _frozen(given.value)
        if any("\0" in str(text) for text in (value if isinstance(value, tuple) else (value,))):
            # No valid value contains a NUL.
            mistakes.append(
                f"{given.origin}: {given.key}: expected no NUL character, found {shown(given.value)}"
            )
            return False
        try:
            checked: Any = Annotated[(info.annotation, *info.metadata, Field())]
            TypeAdapter(checked, config=_STRICT).validate_python(value)
        except ValidationError as errors:
            for error in errors.errors(include_url=False):
                index = error["loc"][0] if error["loc"] and isinstance(error["loc"][0], int) else None
                key, found = (
                    (given.key, given.value) if index is None else (f"{given.key}[{index}]", error["input"])
                )
                wanted = expected(info, element=index is not None)
                why = (
                    f": {printable(str(error['ctx']['error']))}"
                    if error["type"] == "value_error"
                    else f": a list has brackets: {shown([found])}"
                    if error["type"] == "tuple_type" and isinstance(found, str)
                    else nearest_choice(info, found)
                )
                mistakes.append(f"{given.origin}: {key}: expected {wanted}, found {shown(found)}{why}")
            return False
        return True


def _fields(tree: Any) -> Mapping[str, FieldInfo]:
    found: Mapping[str, FieldInfo] = tree.__pydantic_fields__
    return found


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _lines(text: str) -> dict[str, int]:
    """Map each dotted key or section to its line in a TOML text.

    The line is 0 if it is ambiguous, for example because one of two is inside a multi-line string.
    """
    places: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+([^\[\]]+)\]", line)
        name, assigned, _ = line.partition("=")
        if header:
            section = _dotted(header[1])
            key = section
        elif assigned and re.fullmatch(r"[\w\s.\"'-]+", name):
            key = f"{section}.{_dotted(name)}".removeprefix(".")
        else:
            continue
        places[key] = 0 if key in places else number
    return places


def _dotted(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))
