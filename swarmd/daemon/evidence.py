"""Checks an evaluation from public data: signature, answers, commitment, question and score.

Pure but for what scores the answers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import gmtime, strftime
from typing import Any

from p2p.identity import verify
from swarmd.daemon.judge_client import RECEIPT
from swarmd.daemon.judge_reader import CommittedWindow, PublicEvaluation
from swarmd.tasks import held_out
from swarmd.tasks.answers import GradeReason
from swarmd.types import Completion, TaskRef

Mark = Callable[[Sequence[tuple[TaskRef, Sequence[Completion]]]], Sequence[tuple[GradeReason, ...]]]


@dataclass(frozen=True, slots=True)
class EvidenceCheck:
    what: str
    holds: bool | None  # None: it cannot be checked, or not yet
    why: str


def said(evaluation: PublicEvaluation) -> Mapping[str, Any] | None:
    """Return what the receipt says, or None if the judge that it names has not signed it."""
    try:
        fields = json.loads(evaluation.receipt)
        genuine = verify(
            fields["judge"], RECEIPT, evaluation.receipt.encode(), bytes.fromhex(evaluation.signature)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return fields if genuine and isinstance(fields, dict) else None


def examine(
    id: str,
    evaluation: PublicEvaluation,
    own: Mapping[str, str] | None,
    tasks: held_out.Regenerating,
    mark: Mark,
) -> list[EvidenceCheck]:
    """Check an evaluation against its receipt, its questions and its answers.

    own: the receipt of it that this node has kept.
    """
    fields = said(evaluation)
    if fields is None or fields.get("evaluation") != id:
        return [
            EvidenceCheck(
                "signature",
                False,
                "the receipt is not of this evaluation, or not signed by the judge that it names",
            )
        ]
    found = [EvidenceCheck("signature", True, f"signed by the judge {fields['judge']}")]
    if own is not None:
        same = own == {"receipt": evaluation.receipt, "signature": evaluation.signature}
        why = f"the judge {'still says what' if same else 'says something else than'} it told this node"
        found.append(EvidenceCheck("own receipt", same, why))
    try:
        return [*found, *_facts(fields, evaluation, tasks, mark)]
    except (KeyError, TypeError, ValueError, AttributeError):
        return [*found, EvidenceCheck("receipt", False, "it lacks what a receipt has to say")]


def _facts(
    fields: Mapping[str, Any], evaluation: PublicEvaluation, tasks: held_out.Regenerating, mark: Mark
) -> list[EvidenceCheck]:
    given = [Completion(answer.text, answer.ended) for answer in evaluation.answers]
    digests = [sha256(answer.text.encode(errors="replace")).hexdigest() for answer in given]
    texts = "the stored answers are those that the receipt names"
    found = [
        EvidenceCheck(
            "answers",
            digests == fields["answers"],
            texts if digests == fields["answers"] else f"not so: {texts}",
        )
    ]
    ref = TaskRef(fields["specialty"], fields["n"])
    found += _drawn(fields, ref, evaluation.window, tasks)
    task = tasks.task(ref)
    if task is None or not given:
        return [
            *found,
            EvidenceCheck(
                "score", False, f"{ref.specialty} {ref.n} names no question, or there is no answer"
            ),
        ]
    reasons = mark([(ref, given)])[0]
    again = ([reason.reward for reason in reasons], [reason.value for reason in reasons])
    held = again == (fields["rewards"], fields["reasons"])
    words = (
        ", ".join(again[1])
        if held
        else f"{', '.join(again[1])}; the judge says {', '.join(map(str, fields['reasons']))}"
    )
    return [*found, EvidenceCheck("score", held, f"scored again here: {words}")]


def _drawn(
    fields: Mapping[str, Any], ref: TaskRef, window: CommittedWindow | None, tasks: held_out.Regenerating
) -> list[EvidenceCheck]:
    """Check whether the judge could have chosen the question."""
    if window is None or "commitment" not in fields:
        return [
            EvidenceCheck(
                "commitment", None, "the question is from before the judge committed to its questions"
            )
        ]
    if window.seed is None:
        closes = strftime("%Y-%m-%d %H:%M UTC", gmtime(window.closes))
        return [
            EvidenceCheck(
                "commitment",
                None,
                f"window {window.number} is not revealed; it closes at {closes}. Ask again some minutes"
                " later",
            )
        ]
    seed, curriculum = bytes.fromhex(window.seed), tasks.curriculum.digest
    terms = held_out.Terms(curriculum, window.number, window.opens, window.closes, window.questions)
    kept = (
        fields["window"] == window.number
        and held_out.commitment(terms, seed) == window.commitment == fields["commitment"]
    )
    found = [
        EvidenceCheck(
            "commitment",
            kept,
            f"the seed of window {window.number} {'is' if kept else 'is not'} the one committed to",
        )
    ]
    index = held_out.place_in_set(seed, fields["peer"], fields["place"], window.questions)
    drawn = held_out.question(tasks, seed, index).ref == ref and fields["place"] >= 0
    number = f"question {fields['place'] + 1} of this node in window {window.number}"
    return [
        *found,
        EvidenceCheck("question", drawn, f"the seed gives {'it' if drawn else 'another one'} as {number}"),
    ]
