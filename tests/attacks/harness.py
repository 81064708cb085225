"""The common parts of all attacks: options, figures and promised bounds.

A function `attack(folder, *, option=default, ...)` plays the attack, prints its outcome with `show`, and
returns its figures. `Attack(attack, bounds)` makes the function a program: each keyword becomes an option of
`python -m tests.attacks NAME`, with the type of its default. A bound is the highest value that its figure may
have.
"""

import argparse
import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ENGINES = ("libp2p", "hivemind")
REDIALS = ("none", "same", "fresh")  # after a victim hung up: no redial, the same key, a new key


@dataclasses.dataclass(frozen=True)
class Attack:
    """One attack as a program. choices: allowed values of options. about: help texts of options."""

    play: Callable[..., Any]
    bounds: Mapping[str, float]
    choices: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def figures(self, name: str, argv: Sequence[str]) -> Mapping[str, Any]:
        """Play the attack with these options, and return its figures."""
        summary = (inspect.getmodule(self.play).__doc__ or "").partition("\n\n")[0]
        parser = argparse.ArgumentParser(prog=f"python -m tests.attacks {name}", description=summary)
        taken = list(inspect.signature(self.play).parameters.values())[1:]
        declare(parser, {option.name: option.default for option in taken}, self.choices, self.about)
        # `is not False`, because 0 equals False but is a valid value.
        given = {
            name: value
            for name, value in vars(parser.parse_args(argv)).items()
            if value is not None and value is not False
        }
        with tempfile.TemporaryDirectory() as folder:
            return figures_of(self.play(Path(folder), **given))


def declare(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any],
    choices: Mapping[str, Iterable[str]],
    about: Mapping[str, str],
) -> None:
    """Add an option for each default, of its type; booleans are switches, tuples may be repeated."""
    for name, default in defaults.items():
        many = isinstance(default, tuple)
        kind = type(default[0] if many else default)
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        if kind is not bool:
            how |= {"action": "append"} if many else {"default": default}
        if kind is not bool and name in choices:
            how["choices"] = choices[name]
        told = f"{about.get(name, '')} (default: {default})".strip().replace("%", "%%")
        parser.add_argument(f"--{name}", help=told, **how)


def figures_of(result: Any) -> Mapping[str, Any]:
    """Return the fields and properties of a result, by name."""
    if isinstance(result, Mapping):
        return result
    properties = [
        name for kind in type(result).__mro__ for name, of in vars(kind).items() if isinstance(of, property)
    ]
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)} | {
        n: getattr(result, n) for n in properties
    }


@dataclasses.dataclass
class Shares:
    """The attacker's share of each batch."""

    shares: list[float] = dataclasses.field(default_factory=list)

    @property
    def most(self) -> float:
        return max(self.shares)

    @property
    def mean(self) -> float:
        return fmean(self.shares)


def show(case: str, result: Any) -> None:
    """Print a line with the case and its figures (visible with `pytest -s`)."""
    figures = {
        name: figure
        for name, figure in figures_of(result).items()
        if isinstance(figure, int | float | Mapping)
    }
    said = (
        f"{name} {figure:.4g}" if isinstance(figure, float) else f"{name} {figure}"
        for name, figure in figures.items()
    )
    print(f"\n{case}: {', '.join(said)}", end="", flush=True)


def worst(results: Mapping[str, Any], figure: str) -> float:
    """Return the highest value of this figure over all cases."""
    return max(float(figures_of(result)[figure]) for result in results.values())
