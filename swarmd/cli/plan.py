"""`swarmd plan`: measure this machine and suggest settings."""

import os
import sys
from typing import Annotated

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, DeviceName, ModelName, answer

app = typer.Typer(help="Measure this machine and suggest settings.", no_args_is_help=True)


@app.command(epilog="Example: swarmd plan replay --model qwen2.5-0.5b")
def replay(
    model: ModelName = None,
    device: DeviceName = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds to measure, after one of warm-up.", min=1, max=1000)
    ] = 5,
    rho: Annotated[
        float, typer.Option(help="Assumed correlation of two uses of one rollout.", min=0, max=1)
    ] = 0.1,
    alpha: Annotated[
        float, typer.Option(help="Assumed growth of variance with age, below 0.5.", min=0.01, max=0.49)
    ] = 0.15,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure whether training several times on each rollout pays here, and with which settings.

    Saves nothing.
    """
    from swarmd.config.sources import load
    from swarmd.trainer.replay_plan import document, lines, plan_replay

    node_config = load(config_file(config), os.environ, {"model": model, "device": device})
    made = plan_replay(
        node_config, rounds, rho, alpha, lambda download: print(download.words, file=sys.stderr)
    )
    answer(document(made), "\n".join(lines(made)), as_json)
