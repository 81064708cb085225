"""`swarmd doctor model` and `swarmd export`: what a model needs on this machine, and the trained model as files."""

import os
from pathlib import Path
from typing import Annotated

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, DeviceName, ModelName, StateDir, answer, as_state_dir

doctor_app = typer.Typer(help="Check this machine and its network.", no_args_is_help=True)


@doctor_app.command("model", epilog="Example: swarmd doctor model --model qwen2.5-0.5b --device cuda")
def doctor_model(
    model: ModelName = None,
    device: DeviceName = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what training the model needs on this machine, and what `swarmd join` will use. Downloads no weights."""
    from swarmd.config.sources import load
    from swarmd.policy.models.doctor import examine

    found = examine(load(config_file(config), os.environ, {"model": model, "device": device}))
    answer(found.document(), "\n".join(found.lines()), as_json)
    found.require()


def export(
    out: Annotated[Path, typer.Option(help="Folder to write to, new or empty.")] = Path("swarmd-export"),
    adapter: Annotated[bool, typer.Option("--adapter", help="Export the LoRA adapter only, in peft's format.")] = False,
    push: Annotated[str | None, typer.Option(help="Also upload to this Hugging Face repository, owner/name.")] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Export the newest checkpoint's model for transformers, with a model card. The node may keep running."""
    from swarmd.config.sources import load
    from swarmd.exchange.swarm_id import curriculum_of
    from swarmd.policy.export.export import FILES, base_of
    from swarmd.policy.export.export import export as write
    from swarmd.policy.export.upload import upload
    from swarmd.trainer.snapshot import read_snapshot

    run = read_snapshot(as_state_dir(state_dir), FILES)
    curriculum = curriculum_of(load(config_file(config), os.environ, {"model": base_of(run.files)})).name
    made = write(run.files, run.metrics, curriculum, out.expanduser().absolute(), adapter_only=adapter)
    address = upload(made.folder, push) if push else None
    text = f"{made.folder}" if address is None else f"{made.folder}\n{address}"
    answer({"schema": 1, **made.document(), "pushed": address}, text, as_json)
