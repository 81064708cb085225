"""`swarmd models`, `swarmd doctor model` and `swarmd export`.

What models need on this machine, and the trained model as files.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, DeviceName, ModelName, StateDir, answer, as_state_dir
from swarmd.terminal import tell

RECORDED = 50  # rounds whose median says how long one takes
doctor_app = typer.Typer(help="Check this machine and its network.", no_args_is_help=True)


@doctor_app.command("model", epilog="Example: swarmd doctor model --model qwen2.5-0.5b --device cuda")
def doctor_model(
    model: ModelName = None,
    device: DeviceName = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what training the model needs on this machine, and what `swarmd join` will use.

    Downloads no weights.
    """
    from swarmd.config.sources import load
    from swarmd.policy.models.doctor import examine

    found = examine(load(config_file(config), os.environ, {"model": model, "device": device}))
    answer(found.document(), "\n".join(found.lines()), as_json)
    found.require()


def export(
    to: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="Folder to write to, new or empty.", show_default="swarmd-export"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The same.", show_default="swarmd-export")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the LoRA adapter only, in peft's format.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(help="Also upload to this Hugging Face repository, owner/name.")
    ] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Export the newest checkpoint's model for transformers, with a model card. The node may keep running."""
    from swarmd.config.sources import resolve
    from swarmd.daemon.choices import recalled
    from swarmd.errors import ConfigError
    from swarmd.exchange.swarm_id import curriculum_of
    from swarmd.policy.export.export import FILES, base_of
    from swarmd.policy.export.export import export as write
    from swarmd.policy.export.model_card import loss_of
    from swarmd.policy.export.upload import upload
    from swarmd.trainer.snapshot import read_snapshot

    if to is not None and out is not None:
        raise ConfigError(
            f"the folder to write to is given twice: {to}, and {out} with --out. Leave one out."
        )
    out = to or out or Path("swarmd-export")
    folder = as_state_dir(state_dir)
    run = read_snapshot(folder, FILES)
    joined, _ = recalled(resolve(config_file(config), os.environ, {"model": base_of(run.files)}), folder)
    try:
        curriculum = curriculum_of(joined).name
    except ConfigError:  # own tasks that are gone: for the card their file's name will do
        curriculum = Path(joined.swarm.curriculum).stem
    made = write(run.files, run.metrics, curriculum, out.expanduser().absolute(), adapter_only=adapter)
    if note := loss_of(made.origin):
        typer.echo(note, err=True)
    address = upload(made.folder, push) if push else None
    text = f"{made.folder}" if address is None else f"{made.folder}\n{address}"
    if not as_json:
        tell(
            f"a model of {'peft' if adapter else 'transformers'}, with its card README.md, which shows how to"
            " load it:"
        )
    answer({"schema": 1, **made.document(), "pushed": address}, text, as_json)


def models(
    device: DeviceName = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List the models that have a short name: memory, disk and seconds a round on this machine.

    Downloads nothing.
    """
    from swarmd.config.sources import load
    from swarmd.daemon.choices import trained_from
    from swarmd.policy.models.hub import REPOSITORIES
    from swarmd.policy.models.listing import lines, list_models
    from swarmd.state.folder import METRICS_FILE
    from swarmd.state.metrics import read_metrics

    folder = as_state_dir(state_dir)
    trained, _ = trained_from(folder)
    name = next((short for short, repository in REPOSITORIES.items() if repository == trained), trained)
    seconds = [
        sum(line["seconds"].values())
        for line in read_metrics(folder / METRICS_FILE, RECORDED)
        if "seconds" in line
    ]
    where, listed = list_models(
        load(config_file(config), os.environ, {"device": device}), {name: seconds} if name else {}
    )
    document = {"schema": 1, "device": where, "models": [model.document() for model in listed]}
    answer(document, "\n".join(lines(where, listed)), as_json)
