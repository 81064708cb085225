"""The command line of the judge: `swarmd-judge serve`."""

import json
import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from judge.config import JudgeSettings, default_database
from p2p.errors import OperatorError

SCHEMA = 1
INTERRUPTED = 130
EXTRA = ("fastapi", "uvicorn")  # the packages of the `judge` extra

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
    _version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """The judge of a swarm: asks nodes held-out questions, scores their answers, keeps a leaderboard."""


@app.command()
def serve(
    host: Annotated[str, typer.Option(envvar="SWARMD_JUDGE_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="SWARMD_JUDGE_PORT", min=0, max=65_535, help="0 takes any free port.")] = 8400,
    database: Annotated[
        Path | None, typer.Option(envvar="SWARMD_JUDGE_DATABASE", help="SQLite file; by default one per curriculum in the state folder.")
    ] = None,
    curriculum: Annotated[
        str, typer.Option(envvar="SWARMD_JUDGE_CURRICULUM", help="The swarm's: sapo-9, tiny-9, -strict, or its own tasks.")
    ] = "sapo-9",
    deadline: Annotated[
        float, typer.Option(envvar="SWARMD_JUDGE_DEADLINE", min=1, max=86_400, help="Seconds a node has to answer.")
    ] = 120.0,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SWARMD_JUDGE_ORIGIN", help="URL nodes reach this judge by, as https://judge.example; refuses requests to another."
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(envvar="SWARMD_JUDGE_PROXY", help="Address of a reverse proxy before this judge, whose X-Forwarded-For is believed."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line when ready: schema, url, curriculum, digest, database.")
    ] = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    try:
        from judge.serving import serve as serve_until_stopped  # FastAPI and ReasoningGYM take a second that --help need not
        from swarmd.tasks.own import find_curriculum
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRA:
            raise
        raise NotInstalled from None

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    origins, proxies = frozenset(o.rstrip("/") for o in origin or ()), tuple(proxy or ())
    found = find_curriculum(curriculum)
    settings = JudgeSettings(database or default_database(found.name), curriculum, deadline, host, port, origins, proxies)

    def announce(url: str) -> None:
        if as_json:
            line = {"schema": SCHEMA, "url": url, "curriculum": found.name, "digest": found.digest}
            print(json.dumps({**line, "database": str(settings.database)}), flush=True)
        else:
            print(f"Judging {found.name} at {url} (answers kept in {settings.database}). Stop with Ctrl-C.", flush=True)

    if serve_until_stopped(settings, announce):
        raise typer.Exit(INTERRUPTED)


def main() -> None:
    try:
        app()
    except OperatorError as error:
        print(f"swarmd-judge: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
