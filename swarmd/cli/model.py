"""`swarmd doctor model` and `swarmd export`: what a model needs on this machine, and the trained model as files."""

import os
from pathlib import Path
from typing import Annotated

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, StateDir, as_state_dir, print_json

doctor_app = typer.Typer(help="Check this machine and its network.", no_args_is_help=True)


@doctor_app.command("model", epilog="Example: swarmd doctor model --model qwen2.5-0.5b --device cuda")
def doctor_model(
    model: Annotated[
        str | None, typer.Option(help="tiny, qwen2.5-0.5b, …, a Hugging Face repository or a local folder.", show_default="tiny")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda, mps or cpu.", show_default="auto")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what training the model needs on this machine, and what `swarmd join` will use. Downloads no weights."""
    from swarmd.config.sources import load
    from swarmd.policy.models.doctor import examine

    found = examine(load(config_file(config), os.environ, {"model": model, "device": device}))
    if as_json:
        print_json(found.document())
    else:
        print("\n".join(found.lines()))
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
    if as_json:
        print_json({"schema": 1, **made.document(), "pushed": address})
    else:
        print(made.folder if address is None else f"{made.folder}\n{address}")
