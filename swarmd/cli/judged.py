"""`swarmd leaderboard`, and what `swarmd verify ID` does for an evaluation.

What the swarm's judges say, and whether it is so.
"""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, StateDir, as_state_dir, print_json
from swarmd.errors import ConfigError, SwarmdError, Unreachable

if TYPE_CHECKING:
    from swarmd.daemon.evidence import EvidenceCheck
    from swarmd.daemon.judge_reader import JudgedBoard, PublicEvaluation
    from swarmd.tasks.curriculum import Curriculum

DIFFERS, NOT_YET = 1, 4

Judges = Annotated[
    list[str] | None, typer.Option("--judge", help="URL of a judge. Repeatable.", show_default="the node's")
]


def leaderboard(
    judge: Judges = None,
    after: Annotated[int, typer.Option(help="Show the ranks behind this one.", min=0)] = 0,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the leaderboard of the swarm's judges.

    Each node's score is pass@1 with its 95 % interval; nodes are ranked by its lower end.
    """
    from swarmd.daemon.judge_reader import JudgedBoard, read

    found: list[tuple[str, JudgedBoard, dict[str, Any]]] = []
    silent: list[str] = []
    for url in judges_of(judge, config, as_state_dir(state_dir)):
        try:
            found.append((url, *read(url, f"/v1/leaderboard?after={after}", JudgedBoard)))
        except Unreachable as error:
            silent.append(str(error))
    if as_json:
        print_json(
            {
                "schema": 1,
                "judges": [{"url": url, **document} for url, _, document in found],
                "errors": silent,
            }
        )
    else:
        print("\n\n".join("\n".join(_board_lines(url, board, time.time())) for url, board, _ in found))
    if silent:
        raise Unreachable("\n".join(f"swarmd: {line}" for line in silent) if len(silent) > 1 else silent[0])


def check_evaluation(url: str, id: str, folder: Path, curriculum: str | None, as_json: bool) -> None:
    """Check an evaluation from public data, and say what holds.

    Exit code 0: all of it; 1: not all; 4: not all can be checked yet.

    Raises NothingThere where the judge has no such evaluation.
    """
    from swarmd.daemon.evidence import examine, said
    from swarmd.daemon.judge_reader import PublicEvaluation, read
    from swarmd.tasks.scoring import Verifier
    from swarmd.tasks.source import open_tasks

    evaluation, _ = read(url, f"/v1/evaluations/{quote(id, safe='')}", PublicEvaluation)
    fields = said(evaluation)
    if fields is None:
        raise SwarmdError(
            f"{url} gives a receipt that is not signed by the judge that it names. Nothing else was checked."
        )
    found = _curriculum(str(fields.get("curriculum", "")), curriculum)
    with Verifier(found) as verifier:
        tasks = open_tasks(found, verifier)
        findings = examine(id, evaluation, _own_receipt(folder, id), tasks, verifier.judge)
        shown = _question(fields, tasks)
    holds = (
        False
        if any(f.holds is False for f in findings)
        else None
        if any(f.holds is None for f in findings)
        else True
    )
    if as_json:
        rows = [{"what": f.what, "holds": f.holds, "why": f.why} for f in findings]
        print_json({"schema": 1, "evaluation": id, "judge": url, "holds": holds, **shown, "findings": rows})
    else:
        print("\n".join(_evaluation_lines(shown, evaluation, findings)))
    if holds is not True:
        raise typer.Exit(DIFFERS if holds is False else NOT_YET)


def judges_of(given: list[str] | None, config: Path | None, folder: Path) -> list[str]:
    """Return the judges to ask: `given`, else the running node's, else the next join's."""
    from swarmd.config.sources import resolve
    from swarmd.daemon.choices import recalled
    from swarmd.daemon.control import call
    from swarmd.errors import NotRunning

    if given:
        return given
    try:
        if url := (call(folder, "status").get("judge") or {}).get("url"):
            return [str(url)]
    except (NotRunning, Unreachable):
        pass
    url = recalled(resolve(config_file(config), os.environ, {}), folder)[0].judge.url
    if url == "auto":
        raise ConfigError(
            "judge.url is auto, and no running node of this state folder has found a judge. Start the node,"
            " or give --judge URL."
        )
    if not url:
        raise ConfigError("this node has no judge. Give --judge URL, or set judge.url.")
    return [url]


def _board_lines(url: str, board: "JudgedBoard", now: float) -> list[str]:
    from swarmd.terminal import printable

    lines = [
        printable(
            f"{url}: {board.curriculum.name}, {board.listed} nodes listed, {board.unlisted} with too few"
            " answers"
        )
    ]
    rows: list[tuple[str, ...]] = [
        ("#", "node", "score", "95 % interval", "questions", "answers", "last seen", "model")
    ]
    for peer in board.peers:
        name = peer.said.get("name")
        node = f"{peer.nickname} …{peer.peer[-6:]}" + (f' "{name}"' if isinstance(name, str) else "")
        interval, ago = f"{peer.low:.3f} to {peer.high:.3f}", _ago(now - peer.last_seen)
        row = (peer.rank, node, f"{peer.score:.3f}", interval, peer.n, f"{peer.answered:,}", ago, peer.model)
        rows.append(tuple(printable(str(cell))[:60] for cell in row))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines += [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [*lines, *([f"more: --after {board.more_after}"] if board.more_after is not None else [])]


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def _own_receipt(folder: Path, id: str) -> dict[str, str] | None:
    """Return the receipt of evaluation `id` that this folder's node has kept, or None."""
    from swarmd.daemon.evaluation import RECEIPTS_FILE

    try:
        lines = (folder / RECEIPTS_FILE).read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if id in line:
            try:
                return {name: str(json.loads(line)[name]) for name in ("receipt", "signature")}
            except (ValueError, KeyError, TypeError):
                continue
    return None


def _curriculum(digest: str, given: str | None) -> "Curriculum":
    from swarmd.tasks.curriculum import CURRICULA
    from swarmd.tasks.own import find_curriculum

    found = (
        find_curriculum(given)
        if given
        else next((one for one in CURRICULA.values() if one.digest == digest), None)
    )
    if found is None or (digest and found.digest != digest):
        raise ConfigError(
            f"the judge asks tasks of the digest {digest[:16] or 'unknown'}, which are not these. Use the"
            " judge's version of swarmd and reasoning-gym; for own tasks give --curriculum with the same"
            " file."
        )
    return found


def _question(fields: Any, tasks: Any) -> dict[str, Any]:
    """Regenerate the question that a receipt names, with a right answer to it."""
    from swarmd.tasks.grading import solution
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
    from swarmd.terminal import printable

    lines = [
        f"Node: {printable(str(shown['peer']))}",
        f"Question: {printable(str(shown['specialty']))} {shown['n']}",
        "",
    ]
    lines += [str(shown["question"]), "", f"A right answer: {shown['right']}"]
    lines += [f"Given: {printable(answer.text[-200:])}" for answer in evaluation.answers] + [""]
    words = {True: "holds", False: "DOES NOT HOLD", None: "not checked"}
    lines += [f"{words[f.holds]:<14} {f.what}: {printable(f.why)}" for f in findings]
    failed, open_ = (
        [f.what for f in findings if f.holds is False],
        [f.what for f in findings if f.holds is None],
    )
    if failed:
        return [*lines, "", f"This evaluation is not as the judge says: {', '.join(failed)}."]
    return [
        *lines,
        "",
        f"All that can be checked holds; not checked: {', '.join(open_)}." if open_ else "All of it holds.",
    ]
