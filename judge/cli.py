"""Command line of the judge: `swarmd-judge serve`, and commands on its database."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from judge.config import SCHEMA, JudgeSettings, default_database, write_example
from judge.errors import JudgeError
from swarmd.errors import command_for
from swarmd.state.logs import installed_version
from swarmd.tasks.own_tasks import find_curriculum
from swarmd.terminal import printable, tell

EXTRA = ("fastapi", "numpy", "scipy", "sqlalchemy", "uvicorn")  # the packages of the `judge` extra


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's table cuts long words off at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"swarmd-judge {installed_version()}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run the judge of a swarm.

    It asks nodes held-out questions, scores their answers and keeps a leaderboard.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise JudgeError("the folder you are in was removed. Change to another one.") from None


DEFAULTS = JudgeSettings()
Database = Annotated[
    str | None,
    typer.Option(
        help="SQLite file, or postgresql://user@host/name.",
        show_default="a file per curriculum in the state folder",
    ),
]
Curriculum = Annotated[
    str | None,
    typer.Option(
        help="The swarm's: ladder-9, sapo-9, tiny-9, -strict, or its own tasks.",
        show_default=DEFAULTS.curriculum,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(envvar="SWARMD_JUDGE_CONFIG", show_envvar=False, help="A judge.toml; `init` writes one."),
]


def _settings(given: Mapping[str, Any]) -> JudgeSettings:
    """Merge the settings of every source. `given`: a command's parameters."""
    flags = {key: given[key] for key in SCHEMA.keys if key in given}
    settings, _ = SCHEMA.build(SCHEMA.read(given["config"], os.environ, flags))
    named = settings.database or default_database(find_curriculum(settings.curriculum).name)
    return replace(settings, database=named)


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default=DEFAULTS.host)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="0 takes any free one.", show_default=str(DEFAULTS.port))
    ] = None,
    database: Database = None,
    curriculum: Curriculum = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds a node has to answer.", show_default=f"{DEFAULTS.deadline:g}"),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            help="URL nodes reach this judge by, as https://judge.example; refuses requests to another."
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address of a reverse proxy before this judge, whose X-Forwarded-For is believed."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            help="Key file that signs the receipts; created if it is missing.",
            show_default="next to the database",
        ),
    ] = None,
    window: Annotated[
        float | None,
        typer.Option(
            help="Seconds until a set of questions is published and the next begins.",
            show_default=f"{DEFAULTS.window:g}",
        ),
    ] = None,
    keep_days: Annotated[
        float | None,
        typer.Option(
            help="Days that every evaluation is kept; then each node's last 100 and some for its curve.",
            show_default=f"{DEFAULTS.keep_days:g}",
        ),
    ] = None,
    verified_bytes: Annotated[
        int | None,
        typer.Option(
            help="Evaluate weights that peers upload, up to this many bytes; 0: none.",
            show_default=str(DEFAULTS.verified_bytes),
        ),
    ] = None,
    verified_model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model whose weights may be uploaded: tiny, a folder or a repository.",
            show_default=", ".join(DEFAULTS.verified_model),
        ),
    ] = None,
    verified_questions: Annotated[
        int | None,
        typer.Option(
            help="Questions of each specialty for an upload.", show_default=str(DEFAULTS.verified_questions)
        ),
    ] = None,
    verified_folder: Annotated[
        Path | None,
        typer.Option(help="Folder of waiting uploads.", show_default="next to the database"),
    ] = None,
    log_json: Annotated[bool | None, typer.Option(help="Log JSON lines, for a collector.")] = None,
    invitation: Annotated[
        str | None,
        typer.Option(help="Invitation, as `swarmd invite` prints it; a page shows how to join with it."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON line when ready: schema, url, curriculum, digest, database."
        ),
    ] = False,
    config: Config = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Each option is also a variable (--deadline is SWARMD_JUDGE_DEADLINE) and a key of judge.toml.
    """
    settings = _settings(locals())
    if not settings.verified_bytes and settings.verified_model != DEFAULTS.verified_model:
        raise JudgeError("--verified-model needs --verified-bytes, which allows uploads: give it too")
    if settings.invitation:
        from swarmd.config.invitation import read_invitation
        from swarmd.tasks.curriculum import CURRICULA

        # A wrong invitation is rejected at the start, not when somebody opens the page "Join".
        invited = CURRICULA.get(read_invitation(settings.invitation).curriculum)
        if invited and invited.questions != find_curriculum(settings.curriculum).questions:
            raise JudgeError(
                f"the invitation is to a swarm of {invited.name}, and this judge asks other questions. Set"
                f" curriculum = {invited.name!r}, or show another invitation."
            )
    from judge.logs import set_up_logging

    set_up_logging(as_json=settings.log_json)
    with _its_packages():
        _serve(settings, as_json)


def _serve(settings: JudgeSettings, as_json: bool) -> None:
    from judge import server
    from judge.store.database import database_url, shown

    found, name = find_curriculum(settings.curriculum), shown(database_url(settings.database))

    def announce(url: str) -> None:
        if as_json:
            ready = {
                "schema": 1,
                "url": url,
                "curriculum": found.name,
                "digest": found.digest,
                "database": name,
            }
            print(json.dumps(ready), flush=True)
        else:
            tell(
                f"Judging {found.name} at {url} (answers kept in {name}). {server.reach(settings.host)}"
                " Stop with Ctrl-C.",
                sys.stdout,
            )

    if server.serve(settings, announce):
        raise typer.Exit(130)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder for judge.toml.")] = Path(),
    invitation: Annotated[
        str,
        typer.Option(
            help="Invitation, as `swarmd invite` prints it; the judge asks that swarm's curriculum."
        ),
    ] = "",
) -> None:
    """Write a commented judge.toml with every setting. An existing file is left as it is."""
    file = write_example(folder, invitation)
    tell(
        f"{file} written. Edit it, then run: swarmd-judge serve --config {file}",
        sys.stdout,
    )


@app.command()
def moderate(
    act: Annotated[
        Literal["hide", "ban", "undo", "log"],
        typer.Argument(help="hide, ban, undo, or log: print earlier acts."),
    ],
    peer: Annotated[str, typer.Argument(help="The peer's id.")] = "",
    why: Annotated[str, typer.Option(help="The reason, kept in the log.")] = "",
    database: Database = None,
    curriculum: Curriculum = None,
    config: Config = None,
) -> None:
    """Hide a peer's self-chosen texts, or ban its key. A running judge applies it within seconds.

    hide: name, model, strategy and version are not shown; the peer is asked, scored and ranked as before.

    ban: hidden too, its requests are refused, and it is off the leaderboard; its page and its answers
    stay.

    undo: end both.
    """
    kept = _settings(locals()).database
    with _its_packages():
        from judge.store import moderation
    if act == "log":
        for entry in moderation.history(kept):
            tell(
                f"{datetime.fromtimestamp(entry.at, UTC):%Y-%m-%d %H:%M:%S} UTC  {entry.act:<4} "
                f" {entry.peer}  {printable(entry.why)}",
                sys.stdout,
                indent=" " * 31,
            )
        return
    if not peer or not why.strip():
        raise typer.BadParameter("peer or reason missing: give the peer's id, and the reason with --why")
    moderation.act(kept, act, peer, why, time.time())
    tell(f"{act}: {peer}. A running judge applies it within seconds.", sys.stdout)


@contextmanager
def _its_packages() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in EXTRA:
            raise
        raise JudgeError(
            f"The judge needs packages that are not installed. Run `{command_for('judge')}`."
        ) from None
