"""`swarmd lab`: experiments with many nodes in one process: run, report, list."""

import contextlib
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swarmd.cli.options import AsJson, answer, print_json
from swarmd.errors import ConfigError, SwarmdError, command_for
from swarmd.lab import EXPERIMENTS
from swarmd.terminal import tell

if TYPE_CHECKING:
    from swarmd.lab.results import Results
    from swarmd.lab.runs import RunsProgress

app = typer.Typer(
    help="Experiments: many nodes on this machine, settings side by side, several seeds.",
    no_args_is_help=True,
)

# Seconds between two progress lines on a terminal, and in a file or pipe.
REDRAW_S = 0.5
REDRAW_ELSEWHERE_S = 30.0


@app.command(epilog="Example: swarmd lab run sapo-table --seeds 3 --jobs 2")
def run(
    experiment: Annotated[
        str, typer.Argument(help="A TOML file, or the name of one that `swarmd lab list` shows.")
    ],
    seeds: Annotated[
        int | None, typer.Option(help="In place of the file's.", min=1, max=1000, show_default="the file's")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="In place of the file's.", min=1, show_default="the file's")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time, one core each.", min=1, max=256, show_default="1")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Play only this setting; repeatable. Further ones can follow with --resume."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The nodes' model, in place of the file's.", show_default="the file's")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The results folder.", show_default="./NAME")] = None,
    executor: Annotated[
        Literal["local", "ray"],
        typer.Option(help="local: processes here; ray: a Ray cluster, a core for each run."),
    ] = "local",
    engine: Annotated[
        Literal["memory", "torch"],
        typer.Option(help="memory: all nodes of a run in one process; torch: a process for each node."),
    ] = "memory",
    judge: Annotated[
        bool, typer.Option("--judge", help="The nodes ask a real judge, and the report draws its figure.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue a results folder: play the unfinished runs."),
    ] = False,
) -> None:
    """Play every setting of an experiment with every seed, and write the report.

    Ctrl-C stops; --resume continues, with the same results.
    """
    from swarmd.config.own_strategy import load_take
    from swarmd.exchange.swarm_id import curriculum_of
    from swarmd.lab.experiment import read_experiment
    from swarmd.lab.results import FILE, Results
    from swarmd.policy.models import preflight

    if (engine, executor) == ("torch", "ray"):
        raise typer.BadParameter(
            "torch does not work with --executor ray. Leave one of them out.", param_hint="--engine"
        )
    if jobs and executor == "ray":
        raise typer.BadParameter(
            "--executor ray plays a run on each core. Leave --jobs out.",
            param_hint="--jobs",
        )
    if executor == "ray" and find_spec("ray") is None:
        raise ConfigError(f"Ray is not installed here. Run `{command_for('ray')}`, or leave --executor out.")
    if find_spec("matplotlib") is None:
        tell(f"The report will have no figures: matplotlib is missing. Run `{command_for('research')}`.")
    if judge and (engine, executor) != ("memory", "local"):
        raise typer.BadParameter(
            "it needs --engine memory and --executor local. Leave the other values out.", param_hint="--judge"
        )
    read = read_experiment(_file(experiment))
    wanted = read.model_copy(update={"seeds": seeds or read.seeds, "rounds": rounds or read.rounds})
    wanted = wanted.with_model(model) if model else wanted
    nodes = [node for setting in wanted.settings for node in setting.nodes]
    # Find mistakes now that would otherwise end a run hours later.
    for take in {node.sharing.take for node in nodes}:
        load_take(take)
    for each in {node.model for node in nodes}:
        preflight.check(each)
    curriculum_of(nodes[0]).asked(wanted.evaluation.specialties)
    only, folder = wanted.slugs(setting or ()), out or Path(wanted.name)
    if resume and (folder / FILE).exists():
        results = Results.open(folder)
        results.resume(wanted, engine)
    else:
        results = Results.create(folder, wanted, engine)
    results.only, results.seeds = only, seeds
    tell(f"{wanted.name}: {len(results.missing)} of {len(results.runs)} runs to play into {folder}")
    try:
        _play(results, jobs or 1, executor, engine, judge)
    except (KeyboardInterrupt, SwarmdError) as error:
        # Report the error that ended the runs, rather than a failure to write the report.
        with contextlib.suppress(SwarmdError):
            _report(Results.open(folder))
        if isinstance(error, SwarmdError):
            raise
        again = f"swarmd lab run {quote(experiment)} --out {quote(str(folder))} --resume"
        tell(f"\nstopped; finished runs stay. To continue: {again}, with the same other options")
        raise typer.Exit(130) from None
    _report(Results.open(folder))


def _play(results: "Results", jobs: int, executor: str, engine: str, judge: bool) -> None:
    from swarmd.lab.runs import PLAY_NODE, play_all

    if executor == "ray":
        from swarmd.lab.ray_executor import play_on_ray  # it loads torch

        play_on_ray(results, _Teller())
    elif judge:
        from swarmd.lab.judged import judging  # it loads torch

        with judging(results) as command:
            play_all(results, jobs, _Teller(), command)
    elif engine == "torch":
        play_all(results, jobs, _Teller(), PLAY_NODE, apart=True)
    else:
        play_all(results, jobs, _Teller())


@app.command(epilog="Example: swarmd lab report sapo-table")
def report(
    folder: Annotated[Path, typer.Argument(help="A results folder.")], as_json: AsJson = False
) -> None:
    """Write the report of the finished runs: a table, figures, an HTML page."""
    from swarmd.lab.results import Results
    from swarmd.lab.statistics import document

    results = Results.open(folder)
    if as_json:
        print_json({"schema": 1, "experiment": results.experiment.name, "settings": document(results)})
    else:
        _report(results)


@app.command(epilog="Example: swarmd lab export sapo-table sapo-table-data")
def export(
    folder: Annotated[Path, typer.Argument(help="A results folder.")],
    to: Annotated[Path, typer.Argument(help="Folder for the table, its data card and experiment.json.")],
) -> None:
    """Write the finished runs as Parquet with a data card: a row for each node and round."""
    from swarmd.lab import results

    rows = results.export(results.Results.open(folder), to)
    tell(f"{to / results.TABLE}: {rows:,} rows; {to / results.CARD} explains the columns")


@app.command("list", epilog="Example: swarmd lab list")
def list_experiments(as_json: AsJson = False) -> None:
    """List the experiments that come with swarmd, and the question of each.

    With --json, list their settings and the expected result, too.
    """
    from swarmd.lab.experiment import read_experiment

    found = [read_experiment(path) for path in sorted(EXPERIMENTS.glob("*.toml"))]
    answer(
        {
            "schema": 1,
            "experiments": [
                {
                    "name": one.name,
                    "question": one.question,
                    "expects": one.expects,
                    "rounds": one.rounds,
                    "seeds": one.seeds,
                    "settings": [setting.name for setting in one.settings],
                }
                for one in found
            ],
        },
        "\n".join(
            f"{one.name:16} {len(one.settings)} settings × {one.seeds} seeds, {one.rounds} rounds."
            f" {one.question}"
            for one in found
        ),
        as_json,
        indent=" " * 17,
    )


def _file(given: str) -> Path:
    path = Path(given).expanduser()
    shipped = {file.stem: file for file in EXPERIMENTS.glob("*.toml")}
    # A results folder may have the same name.
    return shipped[given] if given in shipped and not path.is_file() else path


def _report(results: "Results") -> None:
    from swarmd.lab.report import facts, markdown, pictures_of, write_report

    # A terminal is too narrow for the table's columns; a file is not.
    print(facts(results) if sys.stdout.isatty() else markdown(results))
    try:
        pictures = pictures_of(results)
    except ConfigError as error:
        pictures = {}
        tell(f"the report has no figures: {error}")
    print(f"report: {write_report(results, pictures)}", file=sys.stderr)


class _Teller:
    """Prints the progress of the runs: on a terminal one line that is overwritten, else some lines."""

    def __init__(self) -> None:
        self._last = -REDRAW_ELSEWHERE_S
        self._terminal = sys.stderr.isatty()

    def __call__(self, progress: "RunsProgress") -> None:
        now = time.monotonic()
        ended = progress.done + len(progress.failures) == progress.total
        if now - self._last < (REDRAW_S if self._terminal else REDRAW_ELSEWHERE_S) and not ended:
            return
        self._last = now
        if self._terminal:
            print(f"\r\x1b[K{progress.sentence()}", end="\n" if ended else "", file=sys.stderr, flush=True)
        else:
            print(progress.sentence(), file=sys.stderr, flush=True)
