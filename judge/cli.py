"""The command line of the judge: `swarmd-judge serve`, and what is done with its database."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import typer

from judge.config import (
    JudgeSettings,
    checked_origins,
    checked_proxies,
    default_database,
    read_config,
    refuse_unknown_variables,
    settings_of,
    write_example,
)
from judge.errors import NotAlone
from judge.evaluation.receipts import checked
from judge.logs import set_up_logging
from p2p.errors import OperatorError
from swarmd.terminal import printable, run_program

SCHEMA = 1
INTERRUPTED = 130
DIFFERS = 1
NOT_WELL = 1
EXTRA = ("alembic", "fastapi", "numpy", "scipy", "sqlalchemy", "uvicorn")  # the packages of the `judge` extra

Option = partial(typer.Option, show_envvar=False)  # the help says once how the variables are named

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's table cuts long words off at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


class CannotWrite(OperatorError):
    """The file cannot be written."""


class NotInstalled(OperatorError):
    """The judge needs packages that are not installed. Run `pip install 'swarmd[judge]'`."""


def _say_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"swarmd-judge {version('swarmd')}")
        except PackageNotFoundError:  # run from a checkout
            print("swarmd-judge, not installed")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run the judge of a swarm.

    It asks nodes held-out questions, scores their answers and keeps a leaderboard.
    """


DATABASE = Option(
    envvar="SWARMD_JUDGE_DATABASE",
    help="SQLite file, or postgresql://user@host/name; by default a file per curriculum in the state folder.",
)


def _use_config(context: typer.Context, file: Path | None) -> Path | None:
    refuse_unknown_variables(os.environ, settings_of(serve))
    if file is not None:
        context.default_map = dict(read_config(file, settings_of(serve)))
    return file


CONFIG = Option(
    envvar="SWARMD_JUDGE_CONFIG", is_eager=True, callback=_use_config, help="A judge.toml; `init` writes one."
)
CURRICULUM = Option(
    envvar="SWARMD_JUDGE_CURRICULUM", help="The swarm's: sapo-9, tiny-9, -strict, or its own tasks."
)


@app.command()
def serve(
    host: Annotated[str, Option(envvar="SWARMD_JUDGE_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, Option(envvar="SWARMD_JUDGE_PORT", min=0, max=65_535, help="0 takes any free port.")
    ] = 8400,
    database: Annotated[str | None, DATABASE] = None,
    curriculum: Annotated[str, CURRICULUM] = "sapo-9",
    deadline: Annotated[
        float, Option(envvar="SWARMD_JUDGE_DEADLINE", min=1, max=86_400, help="Seconds a node has to answer.")
    ] = 120.0,
    origin: Annotated[
        list[str] | None,
        Option(
            envvar="SWARMD_JUDGE_ORIGIN",
            help="URL nodes reach this judge by, as https://judge.example; refuses requests to another.",
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        Option(
            envvar="SWARMD_JUDGE_PROXY",
            help="Address of a reverse proxy before this judge, whose X-Forwarded-For is believed.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        Option(
            envvar="SWARMD_JUDGE_KEY",
            help="Key file of the receipts; by default beside the database. Made where there is none.",
        ),
    ] = None,
    window: Annotated[
        float,
        Option(
            envvar="SWARMD_JUDGE_WINDOW",
            min=60,
            max=2_678_400,
            help="Seconds until a set of questions is published and the next begins.",
        ),
    ] = 86_400.0,
    verified_bytes: Annotated[
        int,
        Option(
            envvar="SWARMD_JUDGE_VERIFIED_BYTES",
            min=0,
            help="Evaluate weights that peers upload, of so many bytes at most; 0: none.",
        ),
    ] = 0,
    verified_model: Annotated[
        list[str] | None,
        Option(
            envvar="SWARMD_JUDGE_VERIFIED_MODEL",
            help="A model whose weights may be uploaded: tiny, a folder or a repository.",
        ),
    ] = None,
    verified_questions: Annotated[
        int,
        Option(
            envvar="SWARMD_JUDGE_VERIFIED_QUESTIONS",
            min=1,
            max=100,
            help="Asked of each specialty for an upload.",
        ),
    ] = 20,
    verified_hub: Annotated[
        str,
        Option(
            envvar="SWARMD_JUDGE_VERIFIED_HUB",
            help="Fetch weights that peers name, from this hub alone, as https://huggingface.co.",
        ),
    ] = "",
    shared: Annotated[
        bool,
        Option(
            envvar="SWARMD_JUDGE_SHARED",
            help="Other judges use this database too: PostgreSQL, and all started so.",
        ),
    ] = False,
    log_json: Annotated[
        bool, Option(envvar="SWARMD_JUDGE_LOG_JSON", help="Log JSON lines, for a collector.")
    ] = False,
    invitation: Annotated[
        str,
        Option(
            envvar="SWARMD_JUDGE_INVITATION",
            help="What `swarmd invite` prints: a page shows how to join by it.",
        ),
    ] = "",
    as_json: Annotated[
        bool,
        Option("--json", help="Print one JSON line when ready: schema, url, curriculum, digest, database."),
    ] = False,
    only_check: Annotated[bool, Option(hidden=True)] = False,
    config: Annotated[Path | None, CONFIG] = None,  # noqa: ARG001 - its callback reads it
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Each option is a variable too, as SWARMD_JUDGE_DEADLINE for --deadline, and a key of judge.toml.
    """
    with _its_packages():  # they take a second that --help need not
        from judge.server import serve as serve_until_stopped
        from judge.store.database import database_url, shown
        from swarmd.config.invitation import read_invitation
        from swarmd.tasks.own import find_curriculum

    set_up_logging(as_json=log_json)
    origins, proxies = checked_origins(origin or ()), checked_proxies(proxy or ())
    if invitation:
        read_invitation(invitation)  # refused here, and not when somebody reads it
    if (verified_hub or verified_model) and not verified_bytes:
        raise NotAlone
    found = find_curriculum(curriculum)
    kept = database or str(default_database(found.name))
    name = shown(database_url(kept))
    settings = JudgeSettings(kept, curriculum, deadline, host, port, origins, key, window, proxies)
    settings = replace(
        settings,
        shared=shared,
        invitation=invitation,
        verified_bytes=verified_bytes,
        verified_models=tuple(verified_model or ("tiny",)),
        verified_questions=verified_questions,
        verified_hub=verified_hub,
    )

    if only_check:
        _say_checks(settings)
        return

    def announce(url: str) -> None:
        if as_json:
            line = {"schema": SCHEMA, "url": url, "curriculum": found.name, "digest": found.digest}
            print(json.dumps({**line, "database": name}), flush=True)
        else:
            print(f"Judging {found.name} at {url} (answers kept in {name}). Stop with Ctrl-C.", flush=True)

    if serve_until_stopped(settings, announce):
        raise typer.Exit(INTERRUPTED)


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="Where judge.toml is to be.")] = Path()) -> None:
    """Write a commented judge.toml with every setting. A file that is there is left as it is."""
    file = write_example(folder)
    print(
        f"{file} written. Change what you like, then: swarmd-judge check --config {file}; swarmd-judge serve"
        f" --config {file}"
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(context: typer.Context, config: Annotated[Path | None, CONFIG] = None) -> None:
    """Check curriculum, database, key, address and disk. Takes the options of serve.

    Exit code 1: one is not. 2: the configuration cannot be read.
    """
    serving: Any = getattr(context.find_root().command, "commands")["serve"]  # noqa: B009
    given = [*context.args, "--only-check", *(["--config", str(config)] if config else [])]
    with serving.make_context("serve", given, parent=context.parent) as started:
        serving.invoke(started)


def _say_checks(settings: JudgeSettings) -> None:
    from judge.checks import check as found

    wrong = 0
    for finding in found(settings):
        wrong += not finding.well
        print(f"{'ok   ' if finding.well else 'WRONG'}  {finding.what:<10}  {finding.said}")
    if wrong:
        raise typer.Exit(NOT_WELL)


@app.command()
def backup(
    to: Annotated[str, typer.Argument(help="A new SQLite file, or an empty postgresql:// database.")],
    database: Annotated[str | None, DATABASE] = None,
    curriculum: Annotated[str, CURRICULUM] = "sapo-9",
    config: Annotated[Path | None, CONFIG] = None,  # noqa: ARG001
) -> None:
    """Copy the database, while the judge goes on. To restore: serve the copy, or copy it back."""
    with _its_packages():
        from judge.store import archive
    rows = archive.backup(database or default_database(curriculum), to)
    print(f"{rows:,} rows copied.")


@app.command()
def moderate(
    act: Annotated[
        Literal["hide", "ban", "undo", "log"],
        typer.Argument(help="hide, ban, undo, or log: print what was done."),
    ],
    peer: Annotated[str, typer.Argument(help="The peer's id.")] = "",
    why: Annotated[str, Option(help="The reason, kept in the log.")] = "",
    database: Annotated[str | None, DATABASE] = None,
    curriculum: Annotated[str, CURRICULUM] = "sapo-9",
    config: Annotated[Path | None, CONFIG] = None,  # noqa: ARG001
) -> None:
    """Hide what a peer calls itself, or ban its key. A running judge heeds it within seconds.

    hide: its name, model, strategy and version are not shown; it is asked, scored and ranked as before.

    ban: hidden too, its requests are refused, and it is off the leaderboard; its own page and its answers
    stay.

    undo: neither any more.
    """
    with _its_packages():
        from judge.store import moderation
    kept = database or default_database(curriculum)
    if act == "log":
        for entry in moderation.history(kept):
            print(
                f"{datetime.fromtimestamp(entry.at, UTC):%Y-%m-%d %H:%M:%S} UTC  {entry.act:<4} "
                f" {entry.peer}  {printable(entry.why)}"
            )
        return
    if not peer or not why.strip():
        raise typer.BadParameter("name the peer by its id, and the reason with --why")
    moderation.act(kept, act, peer, why, time.time())
    print(f"{act}: {peer}. A running judge heeds it within seconds.")


@app.command()
def export(
    to: Annotated[
        Path, typer.Argument(help="A CSV file, or one that ends in .parquet; - is CSV to standard output.")
    ],
    database: Annotated[str | None, DATABASE] = None,
    curriculum: Annotated[str, CURRICULUM] = "sapo-9",
    config: Annotated[Path | None, CONFIG] = None,  # noqa: ARG001
) -> None:
    """Write every question and answer as CSV or Parquet.

    Names and answers are strangers' text: mind what your spreadsheet makes of it.
    """
    with _its_packages():
        from judge.store import archive
    kept = database or default_database(curriculum)
    if str(to) == "-":
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr] # whatever the locale
        archive.export(kept, sys.stdout)
        return
    with _whole_or_none(to) as file:
        if to.suffix == ".parquet":
            rows = archive.export_parquet(kept, file)
        else:
            with TextIOWrapper(file, encoding="utf-8", newline="") as text:
                rows = archive.export(kept, text)
    print(f"{rows:,} questions written.")


@contextmanager
def _whole_or_none(to: Path) -> Iterator[BinaryIO]:
    """Open a new file, which is removed where it cannot be written whole. Raises CannotWrite."""
    try:
        with to.open("xb") as file:
            try:
                yield file
            except BaseException:
                to.unlink()
                raise
    except OSError as error:
        raise CannotWrite(f"cannot write {to}: {error.strerror}; name another file") from None


@app.command()
def verify(
    database: Annotated[str | None, DATABASE] = None,
    curriculum: Annotated[str, CURRICULUM] = "sapo-9",
    receipts: Annotated[
        Path | None,
        Option(
            help="Check these receipts instead, without a judge: a node's receipts.jsonl.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    config: Annotated[Path | None, CONFIG] = None,  # noqa: ARG001
) -> None:
    """Score every stored answer again, and add up the figures again. Exit code 1: something differs."""
    if receipts is not None:
        _verify_receipts(receipts)
        return
    with _its_packages():
        from judge.store import archive
        from swarmd.tasks.own import find_curriculum
        from swarmd.tasks.sandbox.client import Verifier
    lessons = find_curriculum(curriculum)
    with Verifier(lessons) as verifier:
        answers, differences = archive.verify(
            database or default_database(lessons.name), f"{lessons.name} {lessons.digest}", verifier.judge
        )
    for difference in differences:
        print(f"{difference.what}: stored {difference.stored}, found {difference.found}")
    print(f"{answers:,} answers scored again, {len(differences)} differences.")
    if differences:
        raise typer.Exit(DIFFERS)


def _verify_receipts(file: Path) -> None:
    """Check the signatures.

    Whose judge signed how many is printed: it is for the reader to know the judge's id.
    """
    judges: Counter[str] = Counter()
    forged = 0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = checked(json.loads(line))
            except ValueError:
                fields = None
            if fields is None:
                forged += 1
                print(f"line {number}: not signed by the judge that it names")
            else:
                judges[fields["judge"]] += 1
    for judge, many in judges.items():
        print(f"{many:,} receipts of the judge {judge}")
    if forged:
        raise typer.Exit(DIFFERS)


@contextmanager
def _its_packages() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in EXTRA:
            raise
        raise NotInstalled from None


def main() -> None:
    sys.exit(run_program("swarmd-judge", _run))


def _run() -> int:
    try:
        app()
    except OperatorError as error:
        print(f"swarmd-judge: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    main()
