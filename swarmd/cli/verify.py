"""`swarmd verify`: checks an evaluation, or has a judge evaluate this node's weights itself."""

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.judged import check_evaluation, judges_of
from swarmd.cli.options import AsJson, ConfigFile, ModelName, StateDir, answer, as_state_dir

if TYPE_CHECKING:
    from swarmd.config.config import NodeConfig
    from swarmd.daemon.weights_upload import UploadedWeights, VerifiedOutcome

POLL = 2.0  # seconds
# Of a checkpoint; of what was exported
WEIGHTS = ("weights.safetensors", "model.safetensors", "adapter_model.safetensors")
NAMED = r"[\w.-]+/[\w.-]+@\S*"  # on a hub
COMMIT = r"\S+@[0-9a-f]{40}"


def verify(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID | PATH | REPO@COMMIT]",
            help="An evaluation to check, or an upload to see what became of it. With --upload: a safetensors"
            " file, a folder with one, or a commit on the judge's hub, which the judge fetches.",
            show_default="the newest checkpoint",
        ),
    ] = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="Upload weights for the judge to evaluate.")
    ] = False,
    judge: Annotated[str | None, typer.Option(help="URL of the judge.", show_default="the node's")] = None,
    answers: Annotated[
        int,
        typer.Option(
            help="Answers to each question: the first greedy, the others for pass@k.", min=1, max=16
        ),
    ] = 1,
    lora_rank: Annotated[
        int | None, typer.Option(help="Rank of an adapter on the hub: r in its adapter_config.json.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the result.")] = True,
    curriculum: Annotated[
        str | None, typer.Option(help="The judge's, where it asks own tasks: a .py or .jsonl file.")
    ] = None,
    model: ModelName = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check an evaluation from public data; with --upload, have the judge evaluate weights itself.

    ID: makes the question again from the seed that the judge published, and scores the answers again.

    Exit code 0: signature, answers, commitment, question and score hold. 1: one does not. 4: not all known.

    --upload: on questions that the judge draws after the upload. The node may keep running.

    This proves that these weights, named by their SHA-256, scored so. It does not prove who trained them.
    """
    from swarmd.config.sources import resolve
    from swarmd.daemon import weights_upload
    from swarmd.daemon.choices import recalled
    from swarmd.daemon.evaluation import RECEIPTS_FILE, ReceiptFile
    from swarmd.daemon.judge_reader import NothingThere
    from swarmd.errors import ConfigError

    folder = as_state_dir(state_dir)
    if not upload and what is not None:
        url = judges_of([judge] if judge else None, config, folder)[0]
        try:
            check_evaluation(url, what, folder, curriculum, as_json)
        except NothingThere:
            try:
                found = weights_upload.outcome(url, what)
            except NothingThere:
                raise ConfigError(
                    f"the judge at {url} has no evaluation and no upload of this id;"
                    " check the id, and --judge."
                ) from None
            _tell(found, as_json)
        return
    node, _ = recalled(resolve(config_file(config), os.environ, {"judge": judge, "model": model}), folder)
    if node.judge.url in ("", "auto"):
        raise ConfigError("which judge? Name it with --judge, as in --judge https://judge.example.")
    if not upload:
        raise ConfigError(
            "give --upload to have weights evaluated, or the id of an evaluation or of an earlier upload."
        )
    found = _uploaded(
        node, folder, _weights(node, folder, what, answers, lora_rank), wait=wait, quiet=as_json
    )
    if found.state == "done":
        ReceiptFile(folder / RECEIPTS_FILE).add(weights_upload.receipt_of(found))
    _tell(found, as_json)


def _tell(found: "VerifiedOutcome", as_json: bool) -> None:
    answer(_document(found), _words(found), as_json)
    if found.state == "refused":
        raise typer.Exit(1)


def _uploaded(
    node: "NodeConfig", folder: Path, weights: "UploadedWeights", *, wait: bool, quiet: bool
) -> "VerifiedOutcome":
    from p2p.identity import Identity
    from swarmd.daemon import weights_upload
    from swarmd.state.folder import IDENTITY_FILE

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    def told(sent: int) -> None:
        if sys.stderr.isatty() and not quiet:
            print(
                f"\rsending {sent / 1e6:.1f} of {len(weights.data) / 1e6:.1f} MB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    id = weights_upload.upload(node.judge.url, Identity.load(folder / IDENTITY_FILE), weights, told)
    say(f"\n{'named' if weights.revision else 'uploaded'}; `swarmd verify {id}` shows what becomes of it")
    found = weights_upload.outcome(node.judge.url, id)
    while wait and not found.over:
        before = found.state, found.place
        time.sleep(POLL)
        found = weights_upload.outcome(node.judge.url, id)
        if (found.state, found.place) != before and not found.over:
            say(_words(found))
    return found


def _weights(
    node: "NodeConfig", folder: Path, what: str | None, answers: int, lora_rank: int | None
) -> "UploadedWeights":
    """Build the description of the weights to upload or to name.

    Raises ConfigError and SwarmdError.
    """
    import msgspec

    from swarmd.daemon.weights_upload import UploadedWeights
    from swarmd.errors import ConfigError
    from swarmd.exchange.swarm_id import curriculum_of
    from swarmd.trainer.snapshot import read_snapshot

    origin: dict[str, Any] = {}
    path, about = None if what is None else Path(what).expanduser(), Path("policy.json")
    if what and re.fullmatch(NAMED, what) and not Path(what).exists():
        if not re.fullmatch(COMMIT, what):
            raise ConfigError(
                f"{what}: name the whole commit, 40 hex digits: a branch may be another tomorrow."
            )
        return UploadedWeights(
            b"", node.model.name, curriculum_of(node).digest, lora_rank, None, answers, what
        )
    try:
        if path is None:
            files = read_snapshot(folder, ("policy.json", WEIGHTS[0])).files
            data, origin = files[WEIGHTS[0]], msgspec.json.decode(files["policy.json"])["base"]
        else:
            file = (
                next((path / name for name in WEIGHTS if (path / name).is_file()), path)
                if path.is_dir()
                else path
            )
            data = file.read_bytes()
            if (about := file.with_name("policy.json")).is_file():
                origin = msgspec.json.decode(about.read_bytes())["base"]
            elif (about := file.with_name("adapter_config.json")).is_file():
                origin = _of_adapter(msgspec.json.decode(about.read_bytes()))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}. Give a safetensors file, or a folder with one."
        ) from None
    except (msgspec.MsgspecError, KeyError, TypeError):
        raise ConfigError(f"{about} cannot be read. Use the version of swarmd that wrote it.") from None
    name, rank = str(origin.get("source", node.model.name)), origin.get("lora_rank")
    of = node.model_copy(update={"model": node.model.model_copy(update={"name": name})})
    base = None if rank is None else origin.get("fingerprint")
    return UploadedWeights(data, name, curriculum_of(of).digest, rank, base, answers)


def _of_adapter(config: dict[str, Any]) -> dict[str, Any]:
    """Return the adapter's description from its adapter_config.json.

    Raises ConfigError, KeyError, TypeError.
    """
    from swarmd.errors import ConfigError

    if config["lora_alpha"] != 2 * config["r"]:
        raise ConfigError(
            "the adapter's lora_alpha is not twice its rank r, as swarmd's is: the judge cannot evaluate it."
        )
    return {"lora_rank": int(config["r"])}


def _document(found: "VerifiedOutcome") -> dict[str, Any]:
    from msgspec import structs

    return {"schema": 1, **structs.asdict(found)}


def _words(found: "VerifiedOutcome") -> str:
    from swarmd.terminal import printable

    if found.state == "queued":
        return f"waiting, number {found.place or '?'} in the queue"
    if found.state == "running":
        return f"the judge {'evaluates' if found.weights else 'fetches'} the weights"
    if found.state == "refused":
        return printable(f"not evaluated: {found.error.rstrip('.')}. {found.remedy}")
    return (
        f"pass@1 {found.score:.1%} (95 %: {found.low:.1%} to {found.high:.1%}),"
        f" {found.right} of {found.n} questions\n"
        f"weights {found.weights}\nreceipt {printable(found.receipt)}\nsignature {found.signature}"
    )
