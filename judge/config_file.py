"""judge.toml: a key for each option of `swarmd-judge serve`. What it says becomes the options' defaults: flags and variables win.

Checks the names of variables too; the options read them.
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

from judge.errors import JudgeError
from swarmd.terminal import printable

EXAMPLE = Path(__file__).with_name("judge.example.toml")
NAME = "judge.toml"
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]+)?")
NOT_KEYS = frozenset({"config", "as_json", "only_check", "return"})  # options that are no settings
PREFIX = "SWARMD_JUDGE_"  # of variables
OF_NODES = frozenset({"SWARMD_JUDGE_URL", "SWARMD_JUDGE_EVERY", "SWARMD_JUDGE_NAME"})  # keys of a node, which may run in one environment
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
        """What it expects, where this is no value for it; else nothing."""
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
        return isinstance(value, int if self.kind is int else (int, float)) and self.least <= value <= self.most  # NaN is not


def checked_origins(origins: Iterable[str]) -> frozenset[str]:
    """As nodes sign them: scheme, host and port, nothing behind. Raises ConfigurationWrong."""
    found = frozenset(origin.rstrip("/") for origin in origins)
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            said = f"{printable(origin)!r} is not of the form https://host[:port], in small letters"
            raise ConfigurationWrong(f"--origin, origin: {said}; give it as nodes reach this judge, https://judge.example")
    return found


def checked_proxies(proxies: Iterable[str]) -> tuple[str, ...]:
    """Addresses, networks, or *. A name is refused: no connection comes from a name, so it would never be believed."""
    for proxy in (found := tuple(proxies)):
        try:
            proxy == "*" or ip_network(proxy)
        except ValueError:
            raise ConfigurationWrong(f"--proxy, proxy: {printable(proxy)!r} is no address; give the proxy's, such as 127.0.0.1") from None
    return found


def settings_of(serve: Callable[..., None]) -> Mapping[str, JudgeSetting]:
    """The keys: what options a command has."""
    defaults = {name: parameter.default for name, parameter in signature(serve).parameters.items()}
    found: dict[str, JudgeSetting] = {}
    for name, hint in get_type_hints(serve, include_extras=True).items():
        if name in NOT_KEYS:
            continue
        annotation, option = get_args(hint)
        kinds = {str if part is Path else part for part in _parts(annotation)}
        least, most = (-math.inf if option.min is None else option.min), (math.inf if option.max is None else option.max)
        found[name] = JudgeSetting(next(kind for kind in _WORDS if kind in kinds), list in kinds, least, most, defaults[name])
    return found


def _parts(annotation: Any) -> Iterator[Any]:
    """Of `list[str] | None`: list, str and None's type."""
    yield getattr(annotation, "__origin__", annotation)
    for part in get_args(annotation):
        yield from _parts(part)


def read_config(file: Path, settings: Mapping[str, JudgeSetting]) -> Mapping[str, Any]:
    """What the file says. Raises ConfigurationWrong, with a line for each mistake."""
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
    """Raises ConfigurationWrong where a SWARMD_JUDGE_ variable is none of the judge's, nor of a node's."""
    known = [name.upper() for name in (*settings, "config")]
    mistakes = []
    for variable in sorted({name for name, text in environment.items() if name.startswith(PREFIX) and text} - OF_NODES):
        name = variable.removeprefix(PREFIX)
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
            mistakes.append(f"{printable(variable)[:60]}: no such variable; {meant}")
    if mistakes:
        raise ConfigurationWrong("\n".join(mistakes))


def write_example(folder: Path) -> Path:
    """A commented judge.toml in this folder. Raises ConfigurationWrong; a file that is there is left as it is."""
    file = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as new:
            new.write(EXAMPLE.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigurationWrong(f"{file} exists already and was left as it is; name another folder") from None
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
        raise ConfigurationWrong(f"{file} cannot be read: {error.strerror}; `swarmd-judge init` writes one") from None
    except (ValueError, RecursionError):  # numbers of thousands of digits; arrays nested thousands deep
        raise ConfigurationWrong(f"{file}: a number or a nesting without measure") from None
