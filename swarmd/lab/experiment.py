"""Experiment files: the settings to compare, the number of nodes and rounds.

TOML -> Experiment. Pure except for reading the file.

    name = "sapo-table"
    question = "Does sharing pay, and how much of it?"
    expects = "4/4 ahead of 8/0 by 30 % or more"
    nodes = 8
    rounds = 160
    seeds = 5

    [base]
    profile = "sapo-paper"            # defaults for everything that is not set

    [base.model]                      # of every node: sections and keys of node_config.example.toml
    name = "tiny-latent"

    [[setting]]
    name = "8/0"
    baseline = true                   # the setting that the other settings are compared with
    round = { local = 8, external = 0 }

    [[setting]]
    name = "4/4, restless"
    against = "8/0"                   # the baseline of this setting only
    sets = "whole"                    # gossip rollouts whole, without offers; also a key of the whole file
    churn = { present = 20, away = 5 }            # mean rounds that a node is present, and away
    hostile = { liars = 1, poisoners = 2 }        # extra peers (swarmd.lab.surroundings); each sends as much
                                                  # as an average node

    [[setting]]
    name = "half strong"
    [[setting.group]]                 # nodes that differ: their number, and their sections
    nodes = 4
    model = { name = "tiny" }

    [sweep.round]                     # replaces each [[setting]] except the baseline by one setting for each
    external = [4, 12]                # combination of these values; also works without any [[setting]]
"""

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarmd.config.config import NodeConfig, SwarmConfig
from swarmd.config.messages import key_name, kind_of, nearest, shown
from swarmd.config.profiles import DEFAULT, PROFILES
from swarmd.config.schema import Given
from swarmd.config.sources import NODE
from swarmd.errors import SwarmdError
from swarmd.lab import EXPERIMENTS

# Sections and keys that have no effect here, because only rounds are played.
_UNHEEDED = {"seed", "profile", "workers", "checkpoint", "judge", "limits", "when", "metrics"}
_UNHEEDED_KEYS = {"round.rounds", "round.pace"} | {
    f"swarm.{key}" for key in SwarmConfig.model_fields if key != "curriculum"
}
# Sections that an experiment may set for a node.
SECTIONS = frozenset(NodeConfig.model_fields) - _UNHEEDED

_NAME, _SETTING_NAME = r"^[a-z0-9][a-z0-9-]{0,63}$", r"^\P{C}{1,64}$"
# Messages for mistakes, by pydantic's name of the mistake, or by the pattern that a text does not match.
_WORDS = {
    "extra_forbidden": "unknown key",
    "missing": "it is missing",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected a text",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a section",
    "model_type": "expected a section",
    "too_short": "expected at least one value",
    "literal_error": "expected {expected}",
    "greater_than_equal": "expected at least {ge:,}",
    "less_than_equal": "expected at most {le:,}",
    _NAME: "expected at most 64 lower-case letters, digits and hyphens, the first no hyphen",
    _SETTING_NAME: "expected a text of 1 to 64 printable characters",
}


class BadExperiment(SwarmdError):
    """The experiment file cannot be used."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Evaluation(_Strict):
    every: Annotated[int, Field(ge=0)] = 0  # number of rounds between two evaluations; 0: only at the end
    # Number of held-out questions, which are the same for every run; 0: none.
    questions: Annotated[int, Field(ge=0, le=10_000)] = 0
    answers: Annotated[int, Field(ge=1, le=1024)] = 8  # sampled answers to each question
    # Specialties of the questions, such as a ladder's subjects at one level (`bf.2`); (): all.
    specialties: Annotated[tuple[str, ...], Field(strict=False)] = ()
    # Temperature of these answers, independent of the nodes' own; the judge uses 1 for pass@k too.
    temperature: Annotated[float, Field(ge=1e-6, le=10)] = 1.0


_Sets = Literal["offered", "whole"]


class _Head(_Strict):
    """Description of an experiment, in its file and in its results."""

    name: Annotated[str, Field(pattern=_NAME)]
    question: str = ""
    expects: str = ""  # expectation, written before the experiment was run
    rounds: Annotated[int, Field(ge=1, le=1_000_000)] = 160
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    evaluation: Evaluation = Evaluation()


class _File(_Head):
    nodes: Annotated[int, Field(ge=1, le=1024)] = 8
    # How rollouts travel: as offers, from which a node fetches its choice, or gossiped whole.
    sets: _Sets = "offered"
    base: dict[str, Any] = {}
    setting: list[dict[str, Any]] = []
    # For each section of a node and each key, the values to combine.
    sweep: dict[str, dict[str, Annotated[list[Any], Field(min_length=1)]]] = {}


class Churn(_Strict):
    """Mean number of rounds that a node is present, and away."""

    present: Annotated[int, Field(ge=1, le=10**6)]
    away: Annotated[int, Field(ge=1, le=10**6)]


class Hostile(_Strict):
    poisoners: Annotated[int, Field(ge=0, le=1024)] = 0
    liars: Annotated[int, Field(ge=0, le=1024)] = 0
    steerers: Annotated[int, Field(ge=0, le=1024)] = 0


class _Group(_Strict):
    """Nodes with the same settings. Unknown keys are sections of these nodes."""

    model_config = ConfigDict(extra="allow")

    nodes: Annotated[int, Field(ge=1, le=1024)] | None = None  # None: as many as the file says (single group)


class _Surroundings(_Strict):
    """Name and environment of a setting's nodes."""

    name: Annotated[str, Field(pattern=_SETTING_NAME)]
    baseline: bool = False
    against: str = ""  # name of the setting it is compared with; "": the experiment's baseline
    churn: Churn | None = None  # None: all nodes are always present
    hostile: Hostile = Hostile()


class _Table(_Surroundings):
    """A setting as in the file. Unknown keys are sections of each of its nodes."""

    model_config = ConfigDict(extra="allow")

    sets: _Sets | None = None  # None: the file's value
    group: Annotated[list[_Group], Field(min_length=1)] = [_Group()]


class Setting(_Surroundings):
    """One column of the comparison: the configuration of each node, and the nodes' environment."""

    nodes: tuple[NodeConfig, ...]
    # True: rollouts are gossiped whole. False: they are offered, and each node fetches its choice.
    whole: bool = False

    @property
    def slug(self) -> str:
        """The setting's name in a form that suits a folder."""
        return re.sub(r"[^\w.]+", "-", self.name.lower().replace("/", "-of-")).strip("-.") or "setting"


class Experiment(_Head):
    settings: tuple[Setting, ...]

    @property
    def baseline(self) -> Setting:
        """The setting with `baseline = true`, else the first."""
        return next((s for s in self.settings if s.baseline), self.settings[0])

    def baseline_of(self, setting: Setting) -> Setting:
        """Return the setting that this one is compared with."""
        return next((s for s in self.settings if s.name == setting.against), self.baseline)

    def setting(self, slug: str) -> Setting:
        return next(s for s in self.settings if s.slug == slug)

    def slugs(self, names: Sequence[str]) -> Sequence[str]:
        """Return the slugs of settings. Raises BadExperiment for a name that no setting has."""
        known = {name: s.slug for s in self.settings for name in (s.name, s.slug)}
        if unknown := [name for name in names if name not in known]:
            raise BadExperiment(
                f"{self.name} has no setting {shown(unknown[0])}{nearest(unknown[0], known) or '.'}"
                f" Its settings: {', '.join(s.name for s in self.settings)}"
            )
        return [known[name] for name in names]

    def with_model(self, name: str) -> Self:
        """Return the experiment with another model. Raises BadExperiment if its nodes have several."""
        names = {node.model.name for s in self.settings for node in s.nodes}
        if len(names) > 1:
            raise BadExperiment(
                f"{self.name}: its nodes have several models ({', '.join(sorted(names))}). Leave --model"
                " out, and set model.name in a copy of the experiment file."
            )

        def of(node: NodeConfig) -> NodeConfig:
            return node.model_copy(update={"model": node.model.model_copy(update={"name": name})})

        settings = [s.model_copy(update={"nodes": tuple(map(of, s.nodes))}) for s in self.settings]
        return self.model_copy(update={"settings": tuple(settings)})


def read_experiment(path: Path) -> Experiment:
    """Read an experiment's file.

    Raises BadExperiment with the file, the place in it and the expected value; all mistakes of a setting at
    once.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        shipped = [file.stem for file in EXPERIMENTS.glob("*.toml")]
        meant = nearest(path.stem, shipped) if isinstance(error, FileNotFoundError) else ""
        raise BadExperiment(
            f"{path}: {error.strerror or error}{meant or '.'} `swarmd lab list` names the experiments that"
            " come with swarmd."
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadExperiment(f"{path}: not valid TOML: {error}") from error
    return parse_experiment(document, str(path))


def parse_experiment(document: Mapping[str, Any], source: str) -> Experiment:
    """Parse an experiment.

    source: name of the document in messages. Raises BadExperiment.
    """
    try:
        parsed = _File.model_validate(document)
    except ValidationError as error:
        raise BadExperiment(_mistakes(source, "", error, _File)) from None
    tables = list(_swept(parsed))
    if not tables:
        raise BadExperiment(f"{source}: it has no [[setting]] and no [sweep]. Add one of them.")
    settings = [_setting(parsed, number, table, source) for number, table in enumerate(tables, 1)]
    _check_names(settings, source)
    return Experiment(settings=tuple(settings), **{key: getattr(parsed, key) for key in _Head.model_fields})


def _swept(file: _File) -> Iterator[Mapping[str, Any]]:
    """Yield the tables of settings; each except the baseline with every combination of the sweep's values."""
    axes = [(section, key, values) for section, keys in file.sweep.items() for key, values in keys.items()]
    for table in file.setting or [{}] * bool(axes):
        if table.get("baseline"):
            yield table
            continue
        for values in itertools.product(*(values for _, _, values in axes)):
            swept, names = dict(table), [table["name"]] if "name" in table else []
            for (section, key, _), value in zip(axes, values, strict=True):
                own = swept.get(section, {})
                # A section that is not a table is reported later, as a mistake of its setting.
                swept[section] = {**own, key: value} if isinstance(own, dict) else own
                names.append(f"{key} {value}")
            yield {**swept, "name": ", ".join(map(str, names))}


def _setting(file: _File, number: int, table: Mapping[str, Any], source: str) -> Setting:
    try:
        parsed = _Table.model_validate(table)
    except ValidationError as error:
        raise BadExperiment(_mistakes(source, f"setting {number}", error, _Table)) from None
    nodes: list[NodeConfig] = []
    for place, group in enumerate(parsed.group, 1):
        where = f"setting {number} ({parsed.name})" + (f", group {place}" if "group" in table else "")
        count = group.nodes or (file.nodes if len(parsed.group) == 1 else 0)
        if not count:
            raise BadExperiment(
                f"{source}: {where}: `nodes` is missing. Add it: several groups need their numbers of nodes."
            )
        nodes += [
            _config([file.base, parsed.model_extra or {}, group.model_extra or {}], source, where)
        ] * count
    return Setting(
        nodes=tuple(nodes),
        whole=(parsed.sets or file.sets) == "whole",
        **{key: getattr(parsed, key) for key in _Surroundings.model_fields},
    )


def _config(layers: Sequence[Mapping[str, Any]], source: str, where: str) -> NodeConfig:
    """Build a node's configuration from layers of settings.

    Later layers override earlier ones, key by key. All layers override the profile; the last layer with the
    key `profile` names it.
    """
    here, mistakes = f"{source}: {where}", list[str]()
    fixed = {"model.device": "cpu", "model.threads": 1, "swarm.engine": "none"}
    given = [Given(key, value, here) for key, value in fixed.items()]
    profile = next((layer["profile"] for layer in reversed(layers) if "profile" in layer), DEFAULT)
    for layer in (PROFILES.get(profile, {}) if isinstance(profile, str) else {}, *layers):
        for section, values in layer.items():
            if section == "profile":
                continue
            if section in SECTIONS and not isinstance(values, dict):
                raise BadExperiment(f"{here}: {section}: expected a section, found {shown(values)}")
            if section not in SECTIONS:
                meant = nearest(section, sorted(SECTIONS))
                raise BadExperiment(
                    f"{here}: {key_name(section)} is not a section of an experiment's"
                    f" node{meant or '. Leave it out.'}"
                )
            for key, value in values.items():
                if (name := f"{section}.{key}") in _UNHEEDED_KEYS:
                    raise BadExperiment(f"{here}: {name} has no effect in an experiment. Leave it out.")
                given.append(Given(name, value, here))
    given = [one for one in (*given, Given("profile", profile, here)) if NODE.accepts(one, mistakes)]
    if mistakes:
        raise BadExperiment("\n".join(mistakes))
    return NODE.build(given)[0]


def _check_names(settings: Sequence[Setting], source: str) -> None:
    slugs = [setting.slug for setting in settings]
    if twice := sorted({s.name for s in settings if slugs.count(s.slug) > 1}):
        raise BadExperiment(
            f"{source}: settings have the same name, or differ only in case or punctuation:"
            f" {', '.join(twice)}. Rename all but one."
        )
    names = [setting.name for setting in settings]
    if unknown := [s for s in settings if s.against and (s.against not in names or s.against == s.name)]:
        raise BadExperiment(
            f"{source}: setting {unknown[0].name}: `against` does not name another"
            f" setting{nearest(unknown[0].against, names) or '.'} Name one of {', '.join(names)}."
        )
    if sum(setting.baseline for setting in settings) > 1:
        raise BadExperiment(f"{source}: more than one setting has baseline = true. Leave one of them.")


def _mistakes(source: str, where: str, error: ValidationError, tree: type[BaseModel]) -> str:
    parts = {name: getattr(kind_of(field), "model_fields", ()) for name, field in tree.model_fields.items()}
    known = [*parts, *(f"{name}.{key}" for name, keys in parts.items() for key in keys)]
    lines = []
    for mistake in error.errors():
        place, kind, context = ".".join(map(str, mistake["loc"])), mistake["type"], mistake.get("ctx", {})
        said = _WORDS.get(context.get("pattern", kind), "{said}").format(said=mistake["msg"], **context)
        found = "" if kind == "missing" else f", found {shown(mistake['input'])}"
        said += nearest(place, known) if kind == "extra_forbidden" else found
        lines.append(f"{source}: {where + ': ' if where else ''}{key_name(place)}: {said}")
    return "\n".join(lines)
