"""`swarmd leaderboard` and `swarmd verify`: read a judge's results, check them, upload weights to a judge."""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from swarmd.cli.options import AsJson, ConfigFile, ModelName, StateDir, answer, as_state_dir, ask
from swarmd.cli.settings import joined
from swarmd.errors import ConfigError, NotRunning, SwarmdError, Unreachable
from swarmd.state.folder import IDENTITY_FILE
from swarmd.state.status import Status
from swarmd.terminal import ago, printable, tell

if TYPE_CHECKING:
    from swarmd.config.config import NodeConfig
    from swarmd.daemon.judging.reader import (
        EvidenceCheck,
        JudgedBoard,
        PublicEvaluation,
        UploadedWeights,
        VerifiedOutcome,
    )
    from swarmd.tasks.curriculum import Curriculum

POLL_S = 2.0
# Names of the weights' file, in a checkpoint and in an export.
WEIGHTS = ("weights.safetensors", "model.safetensors", "adapter_model.safetensors")


def verify(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID | PATH]",
            help="An evaluation to check, or an upload to show. With --upload: a safetensors"
            " file, or a folder with one.",
            show_default="the newest checkpoint",
        ),
    ] = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="Upload weights for the judge to evaluate.")
    ] = False,
    judge: Annotated[str | None, typer.Option(help="URL of the judge.", show_default="the node's")] = None,
    answers: Annotated[
        int,
        typer.Option(help="Answers to each question: the first greedy, the rest for pass@k.", min=1, max=16),
    ] = 1,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the result.")] = True,
    curriculum: Annotated[
        str | None, typer.Option(help="The judge's own tasks, if it asks such: a .py or .jsonl file.")
    ] = None,
    model: ModelName = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check an evaluation from public data; with --upload, have the judge evaluate weights itself.

    ID: makes the question again from the seed that the judge published, and scores the answers again.

    Exit code 0: signature, answers, commitment, question and score are right. 1: one is wrong. 4: unknown.

    --upload: on questions that the judge draws after the upload. The node may keep running.

    This proves the score of these weights, named by their SHA-256. It does not prove who trained them.
    """
    from swarmd.daemon.judging import reader
    from swarmd.daemon.judging.judging import keep_receipt

    folder = as_state_dir(state_dir)
    if not upload and what is not None:
        url = judge_of(judge, config, folder)
        try:
            check_evaluation(url, what, folder, curriculum, as_json)
        except reader.NothingThere:
            try:
                found = reader.outcome(url, what)
            except reader.NothingThere:
                raise ConfigError(
                    f"the judge at {url} has no evaluation and no upload of this id."
                    " Check the id, and --judge."
                ) from None
            _tell(found, as_json)
        return
    node = joined(config, folder, {"judge": judge, "model": model})
    if not node.judge.url:
        raise ConfigError(
            "this node has no judge. Name one with --judge, as in --judge https://judge.example."
        )
    if not upload:
        raise ConfigError(
            "nothing to verify. Give --upload to have weights evaluated, or the id of an evaluation or"
            " upload."
        )
    found = _uploaded(node, folder, _weights(node, folder, what, answers), wait=wait, quiet=as_json)
    if found.state == "done":
        keep_receipt(folder, reader.receipt_of(found))
    _tell(found, as_json)


def _tell(found: "VerifiedOutcome", as_json: bool) -> None:
    answer({"schema": 1, **msgspec.structs.asdict(found)}, _upload_words(found), as_json)
    if found.state == "refused":
        raise typer.Exit(1)


def _uploaded(
    node: "NodeConfig", folder: Path, weights: "UploadedWeights", *, wait: bool, quiet: bool
) -> "VerifiedOutcome":
    from p2p.identity import Identity
    from swarmd.daemon.judging import reader

    def told(sent: int) -> None:
        if sys.stderr.isatty() and not quiet:
            print(
                f"\rsending {sent / 1e6:.1f} of {len(weights.data) / 1e6:.1f} MB",
                end="\n" * (sent == len(weights.data)),
                file=sys.stderr,
                flush=True,
            )

    say = (lambda _: None) if quiet else tell
    id = reader.upload(node.judge.url, Identity.load(folder / IDENTITY_FILE), weights, told)
    say(f"uploaded; `swarmd verify {id}` shows its state")
    found = reader.outcome(node.judge.url, id)
    while wait and not found.over:
        before = found.state, found.place
        time.sleep(POLL_S)
        found = reader.outcome(node.judge.url, id)
        if (found.state, found.place) != before and not found.over:
            say(_upload_words(found))
    return found


def _weights(node: "NodeConfig", folder: Path, what: str | None, answers: int) -> "UploadedWeights":
    """Read the weights to upload, with their model and adapter rank.

    Raises ConfigError and SwarmdError.
    """
    from swarmd.cli.trained.snapshot import read_snapshot
    from swarmd.daemon.judging.reader import UploadedWeights
    from swarmd.exchange.swarm_id import curriculum_of

    origin: dict[str, Any] = {}
    path, about = None if what is None else Path(what).expanduser(), Path("policy.json")
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
    return UploadedWeights(
        data,
        name,
        curriculum_of(of).digest,
        rank,
        None if rank is None else origin.get("fingerprint"),
        answers,
    )


def _of_adapter(config: dict[str, Any]) -> dict[str, Any]:
    """Return the adapter's description from its adapter_config.json.

    Raises ConfigError, KeyError, TypeError.
    """
    if config["lora_alpha"] != 2 * config["r"] or config.get("use_rslora"):
        raise ConfigError(
            "the adapter's scale is not lora_alpha / r = 2: use one of `swarmd export --adapter`."
        )
    return {"lora_rank": int(config["r"])}


def _upload_words(found: "VerifiedOutcome") -> str:
    if found.state == "queued":
        return f"waiting, number {found.place or '?'} in the queue"
    if found.state == "running":
        return "the judge evaluates the weights"
    if found.state == "refused":
        return printable(f"not evaluated: {found.error.rstrip('.')}. {found.remedy}")
    several = "".join(f"; pass@{k} {100 * share:.1f} %" for k, share in found.pass_at.items() if k != "1")
    return (
        f"pass@1 {100 * found.score:.1f} % (95 %: {100 * found.low:.1f} % to {100 * found.high:.1f} %),"
        f" {found.right:g} of {found.n} questions{several}\n"
        f"weights {found.weights}\n--json also prints the receipt, which the state folder of the upload keeps"
    )


def leaderboard(
    judge: Annotated[str | None, typer.Option(help="URL of the judge.", show_default="the node's")] = None,
    after: Annotated[int, typer.Option(help="Show the ranks after this one.", min=0)] = 0,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the leaderboard of the node's judge.

    Each node's score is pass@1 with its 95 % interval; nodes are ranked by its lower end.
    """
    from swarmd.daemon.judging.reader import JudgedBoard, read

    url = judge_of(judge, config, as_state_dir(state_dir))
    board, document = read(url, f"/v1/leaderboard?after={after}", JudgedBoard)
    answer({"schema": 1, "url": url, **document}, "\n".join(_board_lines(url, board, time.time())), as_json)


def check_evaluation(url: str, id: str, folder: Path, curriculum: str | None, as_json: bool) -> None:
    """Check an evaluation from public data, and print the result of each check.

    Exit code 0: all are right; 1: one is wrong; 4: some cannot be checked yet. Raises NothingThere if the
    judge has no such evaluation.
    """
    from swarmd.daemon.judging.reader import PublicEvaluation, examine, read, said
    from swarmd.tasks.sandbox.client import Verifier
    from swarmd.tasks.source import open_tasks

    evaluation, _ = read(url, f"/v1/evaluations/{quote(id, safe='')}", PublicEvaluation)
    if (fields := said(evaluation)) is None:
        raise SwarmdError(
            f"{url} gives a receipt that is not signed by the judge named in it. Nothing else was checked:"
            " tell its operator."
        )
    found = _curriculum(str(fields.get("curriculum", "")), curriculum)
    with Verifier(found) as verifier:
        tasks = open_tasks(found, verifier)
        findings = examine(id, evaluation, _own_receipt(folder, id), tasks, verifier.judge)
        shown = _question(fields, tasks)
    held = {f.holds for f in findings}
    holds = False if False in held else None if None in held else True
    document = {"schema": 1, "evaluation": id, "judge": url, "holds": holds, **shown}
    answer(
        document | {"findings": [asdict(f) for f in findings]},
        "\n".join(_evaluation_lines(shown, evaluation, findings)),
        as_json,
    )
    if holds is not True:
        raise typer.Exit(1 if holds is False else Unreachable.exit_code)


def judge_of(given: str | None, config: Path | None, folder: Path) -> str:
    """Return the judge to ask: `given`, else the running node's, else the next join's."""
    if given:
        return given
    with suppress(NotRunning, Unreachable):
        if (judge := ask(folder, "status", Status).judge) is not None:
            return judge.url
    if not (url := joined(config, folder, {}).judge.url):
        raise ConfigError("this node has no judge. Give --judge URL, or set judge.url.")
    return url


def _board_lines(url: str, board: "JudgedBoard", now: float) -> list[str]:
    from swarmd.daemon.local_api.status_words import columns, many

    lines = [
        printable(
            f"{url}: {board.curriculum.name}, {many(board.listed, 'node')} listed, {board.unlisted} with"
            " too few answers"
        )
    ]
    rows: list[tuple[str, ...]] = [("#", "node", "score", "95 %", "answers", "last seen", "model")]
    for peer in board.peers:
        name = peer.said.get("name")
        row = (
            str(peer.rank),
            f"{peer.nickname} …{peer.peer[-6:]}",
            f"{peer.score:.3f}",
            f"{peer.low:.3f}–{peer.high:.3f}",
            f"{peer.answered:,}",
            ago(now - peer.last_seen),
            peer.model + (f', "{name}"' if isinstance(name, str) else ""),
        )
        rows.append(tuple(printable(cell)[:60] for cell in row))
    lines += chain.from_iterable(columns(rows))
    return [*lines, *([f"more: --after {board.more_after}"] if board.more_after is not None else [])]


def _own_receipt(folder: Path, id: str) -> dict[str, str] | None:
    """Return the receipt of evaluation `id` that this folder's node stored, or None."""
    from swarmd.daemon.judging.judging import RECEIPTS_FILE

    with suppress(OSError):
        for line in (folder / RECEIPTS_FILE).read_text("utf-8", "replace").splitlines():
            # A line may be damaged.
            with suppress(ValueError, KeyError, TypeError):
                if id in line:
                    return {name: str(json.loads(line)[name]) for name in ("receipt", "signature")}
    return None


def _curriculum(digest: str, given: str | None) -> "Curriculum":
    from swarmd.tasks.curriculum import CURRICULA
    from swarmd.tasks.own_tasks import find_curriculum

    found = find_curriculum(given) if given else {one.digest: one for one in CURRICULA.values()}.get(digest)
    if found is None or (digest and found.digest != digest):
        raise ConfigError(
            f"the judge asks other tasks (digest {digest[:16] or 'unknown'}). Use the"
            " judge's version of swarmd and reasoning-gym; for own tasks give --curriculum with the same"
            " file."
        )
    return found


def _question(fields: Any, tasks: Any) -> dict[str, Any]:
    from swarmd.tasks.scoring.grading import solution
    from swarmd.tasks.source import CurriculumTasks
    from swarmd.types import TaskRef

    specialty, n = fields.get("specialty"), fields.get("n")
    task = tasks.task(TaskRef(specialty, n)) if isinstance(specialty, str) and type(n) is int else None
    right = solution(tasks, task) if task is not None and isinstance(tasks, CurriculumTasks) else None
    return {
        "peer": fields.get("peer"),
        "specialty": specialty,
        "n": n,
        "question": task.question if task else None,
        "right": right,
    }


def _evaluation_lines(
    shown: dict[str, Any], evaluation: "PublicEvaluation", findings: "list[EvidenceCheck]"
) -> list[str]:
    words = {True: "holds", False: "DOES NOT HOLD", None: "not checked"}
    failed, open_ = (", ".join(f.what for f in findings if f.holds is held) for held in (False, None))
    verdict = f"All that can be checked holds; not checked: {open_}." if open_ else "All of it holds."
    return [
        printable(f"Node: {shown['peer']}"),
        printable(f"Question: {shown['specialty']} {shown['n']}"),
        "",
        str(shown["question"]),
        "",
        f"A right answer: {shown['right']}",
        *(f"Given: {printable(answer.text[-200:])}" for answer in evaluation.answers),
        "",
        *(f"{words[f.holds]:<14} {f.what}: {printable(f.why)}" for f in findings),
        "",
        f"This evaluation is not as the judge says: {failed}." if failed else verdict,
    ]
