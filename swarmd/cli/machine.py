"""Commands about this machine (`models`, `doctor`, `plan`) and the model (`export`, `chat`, `serve`)."""

import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from secrets import randbits
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2p.errors import CannotListen
from swarmd.cli.options import (
    AsJson,
    ConfigFile,
    DeviceName,
    ModelName,
    StateDir,
    answer,
    as_state_dir,
    ask,
)
from swarmd.cli.settings import configured, joined
from swarmd.errors import ConfigError, Unreachable
from swarmd.state.folder import IDENTITY_FILE, METRICS_FILE, StateFolder, in_use
from swarmd.terminal import hang_up, interrupted_at_once, printable, tell

if TYPE_CHECKING:
    from swarmd.cli.trained.trained_model import TrainedModel
    from swarmd.config.config import NodeConfig
    from swarmd.daemon.diagnosis.reachability_report import Diagnosis

doctor_app = typer.Typer()


@doctor_app.callback(invoke_without_command=True, epilog="Example: swarmd doctor")
def doctor(context: typer.Context) -> None:
    """Check this machine and its network: both, unless one is named."""
    if context.invoked_subcommand is None:
        # Called through their parsers, which read --state-dir and --config from the environment.
        model, network = context.command.commands.values()  # type: ignore[attr-defined]
        try:
            model.main([], prog_name="swarmd doctor model", standalone_mode=False)
        finally:
            tell("", sys.stdout)
            code = network.main([], prog_name="swarmd doctor network", standalone_mode=False)
        raise typer.Exit(code or 0)


@doctor_app.command("model", epilog="Example: swarmd doctor model --model qwen2.5-0.5b --device cuda")
def doctor_model(
    named: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As --model.", show_default="the folder's")
    ] = None,
    model: ModelName = None,
    device: DeviceName = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the needs of training the model on this machine, and the choices of `swarmd join`.

    Downloads no weights.
    """
    with interrupted_at_once():
        from swarmd.policy.models.doctor import document, examine, explain, round_seconds
        from swarmd.policy.models.hub import has_weights
        from swarmd.trainer.trial import by_style, examined, table

        # The folder's model, unless another one is named.
        asked = (
            joined(config, as_state_dir(state_dir), {"device": device})
            if (model := named or model) is None
            else configured(config, {"model": model, "device": device}).config
        )
        found = examine(asked)
        seconds = round_seconds(asked, found)
        styles = {} if found.refusal or not has_weights(found.place) else examined(asked)
    told, lines = document(found, seconds), explain(found, seconds)
    if styles:
        told["styles"], lines = by_style(styles), [*lines, "", *(f"  {line}" for line in table(styles))]
    answer(told, "\n".join(lines), as_json)
    found.require()


@doctor_app.command("network", epilog="Example: swarmd doctor network --json")
def doctor_network(
    state_dir: StateDir = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            help="If no node runs: a peer to connect to first, /ip4/…/tcp/…/p2p/<peer id>. Repeatable."
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="If no node runs: address to listen on, /ip4/…/tcp/<port>.", show_default="as configured"
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check whether other nodes can reach this node, and what to change.

    If no node runs, joins for some seconds. Exit code 4 if it cannot.
    """
    diagnosis, found = _examine(as_state_dir(state_dir), config, {"bootstrap": bootstrap, "listen": listen})
    answer(diagnosis.document(found), "\n".join(map(printable, diagnosis.lines())), as_json)
    if not diagnosis.takes_part:
        raise typer.Exit(Unreachable.exit_code)


def _examine(
    folder: Path, config: Path | None, flags: Mapping[str, object]
) -> "tuple[Diagnosis, Mapping[str, Any]]":
    """Return the running node's survey; if none runs, make one as the next `swarmd join` would."""
    from p2p.identity import Identity
    from swarmd.daemon.diagnosis.reachability_report import diagnose, no_network, no_port
    from swarmd.daemon.diagnosis.reachability_survey import survey_alone

    if in_use(folder):
        found = ask(folder, "network", dict, timeout=45.0)
        return (diagnose(found) if found["engine"] != "none" else no_network()), found
    node_config = joined(config, folder, flags)
    if node_config.swarm.engine == "none":
        return no_network(), {}
    with ExitStack() as stack:
        folder = (
            stack.enter_context(StateFolder.open(folder, briefly=True)).path
            if (folder / IDENTITY_FILE).exists()
            else Path(stack.enter_context(TemporaryDirectory(prefix="swarmd-doctor-")))
        )
        try:
            found = survey_alone(node_config, folder, Identity.load_or_create(folder / IDENTITY_FILE))
        except CannotListen as error:
            return no_port(error, node_config.swarm.listen), {}
    return diagnose(found), found


def export(
    to: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder to write to, new or empty; with --gguf a new file."),
    ] = Path("swarmd-export"),
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the LoRA adapter only, in peft's format.")
    ] = False,
    ollama: Annotated[
        bool, typer.Option("--ollama", help="Write a Modelfile too, with template, stops and parameters.")
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write one GGUF file instead, for llama.cpp and ollama.")
    ] = False,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Export the newest checkpoint's model for transformers, with a model card. The node may keep running."""
    _say_loading()
    from swarmd.cli.trained.snapshot import read_snapshot
    from swarmd.policy import export as exporting
    from swarmd.policy.inference.modelfile import COMMANDS
    from swarmd.policy.training.policy_files import described
    from swarmd.state.metrics import each_round

    folder = as_state_dir(state_dir)
    run = read_snapshot(folder, exporting.FILES)
    node = joined(config, folder, {"model": described(run.files["policy.json"]).source})
    made = exporting.export(
        run.files,
        each_round(folder / METRICS_FILE, run.round),
        _curriculum_name(node),
        (to if to.suffix or not gguf else to.with_suffix(".gguf")).expanduser().absolute(),
        adapter_only=adapter,
        gguf=gguf,
        ollama=node if ollama else None,
        loading=interrupted_at_once,
    )
    if note := exporting.loss_of(made.origin):
        tell(note)
    if made.figures.untrained:
        tell(f"nothing was trained yet: the exported weights are {made.origin.base}, unchanged")
    if ollama:
        tell("for ollama, in that folder:\n" + "\n".join(f"    {command}" for command in COMMANDS))
    if not as_json and not gguf:
        tell(
            f"exported for {'peft' if adapter else 'transformers'}; README.md in it shows how to load it:\n"
            f"To publish it: hf upload OWNER/NAME {quote(str(made.folder))}"
        )
    answer({"schema": 1, **made.document()}, str(made.folder), as_json)


def _curriculum_name(node: "NodeConfig") -> str:
    """Return the name of the node's curriculum; if own tasks are gone, the name of their file."""
    from swarmd.exchange.swarm_id import curriculum_of

    try:
        return curriculum_of(node).name
    except ConfigError:
        return Path(node.swarm.curriculum).stem


def _a_question(node: "NodeConfig") -> str:
    """Draw a question of the node's curriculum. Raises ConfigError if own tasks are gone."""
    from swarmd.exchange.swarm_id import curriculum_of
    from swarmd.tasks.sandbox.client import Verifier
    from swarmd.tasks.source import open_tasks

    curriculum = curriculum_of(node)
    with Verifier(curriculum) as maker:
        (task,) = open_tasks(curriculum, maker, node.tasks.specialties).draw(1, Random())
    return task.question


def _say_loading() -> None:
    """Explain a delay on a terminal: PyTorch and transformers take seconds to load."""
    if sys.stderr.isatty():
        tell("loading the model …")


@interrupted_at_once()
def _trained_model(state_dir: Path | None, config: Path | None, device: str | None) -> "TrainedModel":
    from swarmd.cli.trained.trained_model import TrainedModel

    folder = as_state_dir(state_dir)
    return TrainedModel(folder, joined(config, folder, {"device": device}))


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Answer only this question, and exit.", show_default="a conversation")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: the likeliest answer.", show_default="the training's", min=0, max=2),
    ] = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    device: DeviceName = None,
) -> None:
    """Talk to the newest checkpoint's model. The node may keep running.

    One question a line; ? asks one that it trains on, an empty line starts over, Ctrl-D ends.
    """
    _say_loading()
    from swarmd.cli.trained.trained_model import AnswerSettings
    from swarmd.policy.models.tiny import WEIGHTS as TINY

    model = _trained_model(state_dir, config, device)
    node = joined(config, as_state_dir(state_dir), {})
    learns = f"It trains on {_curriculum_name(node)}" + ", and knows nothing else" * (model.name in TINY)

    def say(text: str) -> None:
        print("\n".join(map(printable, text.split("\n"))), end="", flush=True)

    turns: list[dict[str, str]] = []
    if question is None:
        tell(
            f"{model.name}, {model.round} rounds trained. {learns}. Try ? for one of its questions.\n"
            "An empty line starts over, Ctrl-D ends."
        )
    elif sys.stderr.isatty():
        tell(f"{learns}: `swarmd chat` offers its questions.")
    while (asked := question if question is not None else _line()) is not None:
        if question is None and not asked.strip():
            turns = []
            continue
        if model.renew():
            tell(f"a newer checkpoint answers now, of round {model.round}")
        try:
            if question is None and asked.strip() == "?":
                turns, asked = [], _a_question(node)
                tell(asked)
            turns.append({"role": "user", "content": asked})
            made = model.answer(model.prompt(turns), AnswerSettings(temperature, seed=randbits(32)), say)
        except ConfigError as error:
            if question is not None:
                raise
            tell(str(error))
            turns = turns[:-1]
        else:
            print("" if made.ended else " …", flush=True)
            turns.append({"role": "assistant", "content": made.text})
            if question is not None:
                return


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def serve(
    listen: Annotated[
        str, typer.Option(help="host:port, or a port of this machine alone.")
    ] = "127.0.0.1:8000",
    state_dir: StateDir = None,
    config: ConfigFile = None,
    device: DeviceName = None,
) -> None:
    """Serve the newest checkpoint's model to programs that use OpenAI's chat API.

    Runs beside the node; each request is answered by the newest checkpoint.
    """
    import trio

    from swarmd.config.addresses import host_and_port
    from swarmd.daemon.page import http, opening

    try:
        host, port = opening.split_address(host_and_port(listen))
    except ValueError as error:
        raise ConfigError(f"--listen {listen}: {error}") from None
    anybody = host not in opening.LOOPBACK
    _say_loading()
    from swarmd.cli.trained.chat_api import MAX_BODY_BYTES, ChatApi

    model = _trained_model(state_dir, config, device)
    if anybody:
        tell("No password is set: every machine that reaches this address may ask.")

    async def run() -> None:
        listeners = await opening.listen(host, port)
        tell(f"{model.name}, {model.round} rounds trained. Ctrl-C ends.")
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        api = ChatApi(
            model,
            anybody=anybody,
            renewed=lambda number: tell(f"answers with round {number} from now on"),
            ignored=lambda names: tell(f"ignored fields of a client's request: {names} (docs/trained.md)"),
        )
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *hang_up()) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    partial(http.serve, api.respond, listeners, MAX_BODY_BYTES, gone_ends=True)
                )
                await anext(aiter(signals))
                nursery.cancel_scope.cancel()

    trio.run(run)


def models(
    device: DeviceName = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List the models that have a short name: memory, disk and seconds a round on this machine.

    Downloads nothing.
    """
    from swarmd.policy.models.doctor import lines, list_models

    where, listed = list_models(configured(config, {"device": device}).config)
    answer(
        {"schema": 1, "device": where, "models": [model.document() for model in listed]},
        "\n".join(lines(where, listed)),
        as_json,
    )


plan_app = typer.Typer(help="Measure this machine and suggest settings.", no_args_is_help=True)


@plan_app.command(epilog="Example: swarmd plan replay --model qwen2.5-0.5b")
def replay(
    model: ModelName = None,
    device: DeviceName = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds to measure, after one of warm-up.", min=1, max=1000)
    ] = 5,
    # No node knows rho and alpha for its model beforehand. At mu = 6 the defaults give N = 8 R and five
    # rollouts trained for one generated, which is close to the best measured setting on the tiny model
    # (N = 8 R, four; 2026-11-21).
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
    from swarmd.cli.replay_plan import document, lines, plan_replay

    made = plan_replay(
        configured(config, {"model": model, "device": device}).config,
        rounds,
        rho,
        alpha,
        lambda download: print(download.words, file=sys.stderr),
        interrupted_at_once,
    )
    answer(document(made), "\n".join(lines(made)), as_json)
