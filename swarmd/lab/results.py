"""The results folder of an experiment: its configuration, the versions that played it, one file per run.

OUT/experiment.json                 name, question, expectation, every setting in full, versions;
                                    written once, at the start
OUT/runs/<setting>/seed-<n>.jsonl   a line for each round, lists by node; only a finished run has this name
OUT/runs/<setting>/seed-<n>.part    the lines of a run in progress, or of one that was interrupted
OUT/judge.json, judge.sqlite        of `swarmd lab run --judge`: the judge's comparisons of swarm and solo,
                                    and its database
OUT/report.html, *.png              made by `swarmd lab report`

`export` writes the lines of all runs as one Parquet table with a data card, for a notebook.
"""

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import msgspec

from p2p import durable
from swarmd.config.messages import shown
from swarmd.errors import SwarmdError, command_for
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.lab.experiment import Experiment
from swarmd.state.logs import installed_version
from swarmd.tasks.own_tasks import OwnCurriculum
from swarmd.terminal import printable

SCHEMA = 3
FILE = "experiment.json"
JUDGE = "judge.json"
MEMORY = "memory"  # the engine that plays all nodes of a run in one process
PACKAGES = ("swarmd", "torch", "transformers", "reasoning-gym")
TABLE, CARD = "rounds.parquet", "README.md"
# Columns of the table: type and meaning. The columns after `round` are figures of one node in one round.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "setting": ("string", "name of the setting; experiment.json has it in full"),
    "seed": ("int32", "runs of all settings with one seed are paired"),
    "node": ("int32", "the node's place in its setting, from 0"),
    "round": ("int32", "from 1; 0: the evaluation before training"),
    "reward": ("double", "mean reward of the node's own completions; null: it was away"),
    "generated": ("int32", "own rollouts"),
    "informative": ("int32", "of these, rollouts whose completions earned different rewards"),
    "in_form": ("double", "share of own completions in the asked form; null: there are none"),
    "updates": ("int32", "updates of the policy"),
    "useful": ("int32", "rollouts trained on in which a completion had an advantage"),
    "local": ("int32", "own rollouts trained on"),
    "external": ("int32", "external rollouts trained on"),
    "hostile": ("int32", "of these, rollouts of hostile peers; null: there are none"),
    "tokens": ("int64", "tokens of own completions"),
    "trained": ("int64", "tokens trained on"),
    "gated": ("int32", "external rollouts that the gate rejected"),
    "unfit": ("int32", "external rollouts that the model cannot be trained on"),
    "dropped": ("int32", "external rollouts that have no advantage"),
    "off_policy": ("double", "age of the rollouts trained on, in updates"),
    "staleness": ("double", "age of the rollouts trained on, in rounds"),
    "entropy": ("double", "entropy of the policy, in nats a token; null: nothing was trained on"),
    "grad_norm": ("double", "norm of the gradient"),
    "skipped": ("int32", "updates left out, as a loss or gradient was not finite"),
    "cpu": ("double", "CPU seconds of the node's rounds so far"),
    "answers": ("int32", "answers to each held-out question; null: no evaluation after this round"),
    "right": ("list", "how many of these are right, by question; the same questions everywhere"),
}


class BadResults(SwarmdError):
    """The results folder cannot be used."""


@dataclass(frozen=True, order=True)
class Run:
    setting: str  # the setting's slug
    seed: int


class Results:
    """One results folder. `Results.create` begins one, `Results.open` reads one."""

    def __init__(self, folder: Path, experiment: Experiment, versions: Mapping[str, str]) -> None:
        self.folder, self.experiment, self.versions = folder, experiment, versions
        self.only: Collection[str] = ()  # slugs of the settings to play; (): all
        self.seeds: int | None = None  # how many seeds to play, if not all

    @classmethod
    def create(cls, folder: Path, experiment: Experiment, engine: str = MEMORY) -> Self:
        """Begin a folder. Raises BadResults if it is not empty, or cannot be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / FILE).exists():
                raise BadResults(
                    f"{folder} holds results. Continue them (--resume), or give another folder with --out."
                )
            if any(folder.iterdir()):
                raise BadResults(
                    f"{folder} is not empty, and holds no results. Give another folder with --out."
                )
        except OSError as error:
            raise BadResults(
                f"{folder}: cannot be written: {error.strerror or error}. Give another folder with --out."
            ) from error
        made = cls(folder, experiment, versions(experiment, engine))
        made._write()
        return made

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a results folder.

        Raises BadResults if it holds no results, or was written by another version.
        """
        path = folder / FILE
        try:
            document = json.loads(path.read_bytes())
            if document["schema"] != SCHEMA:
                raise BadResults(
                    f"{path} is of schema {shown(document['schema'])}; this swarmd reads {SCHEMA}. Run the"
                    " experiment again into another folder."
                )
            versions = msgspec.convert(document["versions"], dict[str, str])
            return cls(folder, Experiment.model_validate_json(json.dumps(document["experiment"])), versions)
        except FileNotFoundError:
            raise BadResults(
                f"{folder} holds no results: {FILE} is not there. `swarmd lab run` makes them."
            ) from None
        except OSError as error:
            raise BadResults(
                f"{path}: cannot be read: {error.strerror or error}. Correct its permissions."
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            told = printable(f"{type(error).__name__}: {error}")[:300]
            raise BadResults(
                f"{path} is damaged ({told}). Run the experiment again into another folder."
            ) from error

    def resume(self, experiment: Experiment, engine: str = MEMORY) -> None:
        """Prepare the folder to continue this experiment, which may have more seeds than before.

        Raises BadResults if the folder belongs to another experiment, or was played by other versions.
        """
        if self.experiment.model_copy(update={"seeds": experiment.seeds}) != experiment:
            raise BadResults(
                f"{self.folder} is of {self.experiment.rounds} rounds of {self.experiment.name}, and not of"
                " these rounds and settings. Give the original experiment, or another folder with --out."
            )
        now = versions(experiment, engine)
        if changed := "; ".join(
            # A digest says nothing to people, so only the fact of a change is named.
            f"the {name} before it was changed"
            if name.startswith(("tasks ", "reward ", "strategy "))
            else f"{name} {old}, now {now.get(name)}"
            for name, old in self.versions.items()
            if now.get(name) != old
        ):
            raise BadResults(
                f"{self.folder} was begun with {changed}: its runs would not be comparable. Give another"
                " folder with --out."
            )
        if experiment.seeds > self.experiment.seeds:
            self.experiment = experiment
            self._write()

    def _write(self) -> None:
        document = {
            "schema": SCHEMA,
            "versions": dict(self.versions),
            "experiment": self.experiment.model_dump(mode="json"),
        }
        try:
            durable.replace(self.folder / FILE, json.dumps(document, indent=1).encode())
        except OSError as error:
            raise BadResults(
                f"{self.folder}: cannot be written: {error.strerror or error}. Free some space, or give"
                " another folder with --out."
            ) from error

    @property
    def runs(self) -> Sequence[Run]:
        """Return the runs of `only` and `seeds`, seed by seed.

        So all settings have about equally many finished runs if the experiment is stopped early.
        """
        return [
            Run(setting.slug, seed)
            for seed in range(1, (self.seeds or self.experiment.seeds) + 1)
            for setting in self.experiment.settings
            if not self.only or setting.slug in self.only
        ]

    @property
    def missing(self) -> Sequence[Run]:
        return [run for run in self.runs if not self.path(run).exists()]

    def path(self, run: Run) -> Path:
        return self.folder / "runs" / run.setting / f"seed-{run.seed}.jsonl"

    @contextmanager
    def writing(self, run: Run) -> Iterator[Callable[[Any], None]]:
        """Begin a run's file, and yield a function that appends a line to it.

        The file gets its final name when the block ends without an error. If another process plays this run,
        wait for that process. Raises BadResults if the file cannot be written.
        """
        final = self.path(run)
        part = final.with_suffix(".part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if final.exists():
                    raise BadResults(f"{final} is finished: another process has played this run meanwhile.")
                file.truncate(0)

                def append(line: Any) -> None:
                    file.write(msgspec.json.encode(line) + b"\n")
                    file.flush()

                yield append
                os.fsync(file.fileno())
                # Renamed while this process holds the lock: a waiting process must find the run finished.
                part.replace(final)
        except OSError as error:
            raise BadResults(
                f"{final}: cannot be written: {error.strerror or error}. Finished runs stay: free some"
                " space, then use --resume."
            ) from error

    def lines(self, run: Run) -> Sequence[Mapping[str, Any]]:
        """Return the lines of a finished run.

        Raises BadResults if the file is damaged.
        """
        try:
            lines = [json.loads(line) for line in self.path(run).read_text().splitlines()]
            whole = {"round", "reward"} <= lines[-1].keys() and lines[-1]["round"] == self.experiment.rounds
        except (OSError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise self.damaged(run, error) from error
        if not whole:
            raise self.damaged(run, f"its last line is not of round {self.experiment.rounds}")
        return lines

    def damaged(self, run: Run, why: object) -> BadResults:
        return BadResults(
            f"{self.path(run)} is damaged ({printable(str(why))[:200]}). Remove it and go on with --resume:"
            " that run is played again."
        )


def judged(results: Results) -> list[Any]:
    """Return the judge's comparisons of swarm and solo; [] if the experiment had no judge.

    Raises BadResults if they are damaged.
    """
    path = results.folder / JUDGE
    try:
        return list(json.loads(path.read_bytes())) if path.exists() else []
    except (OSError, ValueError, TypeError) as error:
        raise BadResults(
            f"{path} is damaged ({error}). Remove it; `swarmd lab run --judge --resume` writes it again."
        ) from error


def export(results: Results, to: Path) -> int:
    """Write the finished runs as a table, a row for each node and round, with a data card; return the rows.

    Raises BadResults if no run is finished, a file is damaged or `to` cannot be written.
    """
    if find_spec("pyarrow") is None:
        raise BadResults(f"Parquet needs a package that is not installed. Run `{command_for('research')}`.")
    finished = [run for run in results.runs if run not in results.missing]
    if not finished:
        raise BadResults(f"{results.folder}: no run is finished. `swarmd lab run … --resume` goes on.")
    try:
        to.mkdir(parents=True, exist_ok=True)
        if any(to.iterdir()):
            raise BadResults(f"{to} is not empty. Give a new folder.")
        try:
            rows = _write_table(results, finished, to / TABLE)
            shutil.copyfile(results.folder / FILE, to / FILE)
            (to / CARD).write_text(_card(results, len(finished), rows), encoding="utf-8")
        except BaseException:
            # A partial table is useless, and the next attempt needs an empty folder.
            for name in (TABLE, FILE, CARD):
                (to / name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BadResults(
            f"{to}: cannot be written: {error.strerror or error}. Give another folder."
        ) from error
    return rows


def _write_table(results: Results, finished: Sequence[Run], to: Path) -> int:
    """Write the Parquet file; return its number of rows. Raises BadResults if a run is damaged, OSError."""
    import pyarrow
    from pyarrow import parquet

    kinds = {
        name: pyarrow.list_(pyarrow.int32()) if kind == "list" else kind
        for name, (kind, _) in COLUMNS.items()
    }
    schema, rows = pyarrow.schema(list(kinds.items())), 0
    with parquet.ParquetWriter(to, schema, compression="zstd") as writer:
        for run in finished:
            try:
                part = pyarrow.Table.from_pylist(list(_rows(results, run)), schema)
            except (LookupError, TypeError, ValueError, OverflowError, pyarrow.ArrowException) as error:
                raise results.damaged(run, repr(error)) from error
            writer.write_table(part)
            rows += part.num_rows
    return rows


def _rows(results: Results, run: Run) -> Iterator[Mapping[str, Any]]:
    setting = results.experiment.setting(run.setting)
    for line in results.lines(run):
        figures = {**line, **(line.get("evaluation") or {}), "setting": setting.name, "seed": run.seed}
        for node in range(len(setting.nodes)):
            yield {"node": node} | {
                name: value[node] if isinstance(value, list) else value for name, value in figures.items()
            }


def _card(results: Results, runs: int, rows: int) -> str:
    """Return the data card: the question, the runs played, and the meaning of each column."""
    experiment = results.experiment
    return "\n".join(
        [
            f"---\npretty_name: {json.dumps(experiment.name)}\ntags: [swarmd, reinforcement-learning]",
            f"configs:\n- config_name: default\n  data_files: {TABLE}\n---\n\n# {experiment.name}\n",
            f"- **Question**: {experiment.question}",
            f"- **Expected before it was run**: {experiment.expects}",
            f"- **Played**: {runs} of {len(results.runs)} runs of {experiment.rounds} rounds, {rows:,} rows",
            f"- **Versions**: {', '.join(f'{name} {value}' for name, value in results.versions.items())}",
            f"- **Settings**: {'; '.join(setting.name for setting in experiment.settings)}",
            f"- **Baseline**: {experiment.baseline.name}",
            "\nMade by `swarmd lab run` and `swarmd lab export`.",
            "\nColumns:\n",
            *(f"- `{name}`: {meaning}" for name, (_, meaning) in COLUMNS.items()),
            "",
        ]
    )


def versions(experiment: Experiment, engine: str = MEMORY) -> Mapping[str, str]:
    """Return versions of Python and packages, digests of own tasks, rewards and strategies, and the engine.

    Raises ConfigError if own tasks cannot be used.
    """
    found = {"python": platform.python_version(), "engine": engine}
    nodes = [node for setting in experiment.settings for node in setting.nodes]
    known = set[tuple[str, str]]()
    for node in {(node.swarm.curriculum, node.tasks.reward): node for node in nodes}.values():
        curriculum = curriculum_of(node)
        if isinstance(curriculum, OwnCurriculum):
            known.add((f"tasks {curriculum.name}", curriculum.digest))
        if own := curriculum.own_reward:
            known.add((f"reward {Path(own.file).name}", own.digest))
    for take in {node.sharing.take for node in nodes if node.sharing.take.endswith(".py")}:
        with suppress(OSError):
            # A missing file is reported when its run is played.
            known.add((f"strategy {Path(take).name}", sha256(Path(take).read_bytes()).hexdigest()))
    for name, digest in sorted(known):
        # Files in several folders may have the same name, so their digests are joined.
        found[name] = found.get(name, "") + digest
    return found | {package: installed_version(package) for package in PACKAGES}
