"""`swarmd verify` and `swarmd leaderboard`: claims that are true, false, or cannot be checked yet."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from judge.evaluation import receipts
from judge.types import Attributes, GradedEvaluation, QuestionWindow
from p2p.identity import Identity
from swarmd.cli import app
from swarmd.daemon.judging.reader import EvidenceCheck, PublicEvaluation, examine, outcome
from swarmd.errors import SwarmdError, Unreachable
from swarmd.tasks import held_out
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import tasks_of
from swarmd.types import Completion
from tests.loopback import Handler, listening

TASKS = tasks_of("tiny-9")
JUDGE, PEER = Identity(b"\x05" * 32), Identity(b"\x06" * 32).peer_id
ID = "ab" * 16
TERMS = held_out.Terms(TINY_9.digest, 3, 1_800_000_000, 1_800_086_400, 1_000)
WINDOW = QuestionWindow(TERMS, b"\x09" * 32, 1_799_913_600.0, 1_800_000_000.0, 1_800_086_405.0)
TASK = held_out.question(TASKS, WINDOW.seed, held_out.place_in_set(WINDOW.seed, PEER, 2, 1_000))
RIGHT = Completion(f"<answer>{solution(TASKS, TASK)}</answer>", True)
WRONG = Completion("no", True)


@pytest.fixture(scope="module")
def honest(verifier: Verifier) -> dict[str, Any]:
    """Return an evaluation as an honest judge reports it after its window has closed."""
    answers, at = [RIGHT, WRONG], 1_800_000_100.5
    (scores,) = verifier.judge([(TASK.ref, answers)])
    return told(
        GradedEvaluation(ID, PEER, Attributes(4, "tiny"), TASK.ref, WINDOW, 2, 7, at, answers, scores)
    )


def told(graded: GradedEvaluation, **changed: Any) -> dict[str, Any]:
    """Return the judge's document of an evaluation. changed: fields of the signed statement."""
    receipt = receipts.signed(JUDGE, receipts.fields(graded, TINY_9.digest) | changed)
    answers = [{"text": answer.text, "ended": answer.ended} for answer in graded.answers]
    window = graded.window
    return {"schema": 1, **receipt, "answers": answers, "window": window.document() if window else None}


def lied(honest: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """Return the evaluation with other values, signed again by the judge."""
    return {**honest, **receipts.signed(JUDGE, json.loads(honest["receipt"]) | changed)}


def findings(
    verifier: Verifier, document: Mapping[str, Any], own: Mapping[str, str] | None = None
) -> dict[str, bool | None]:
    found: list[EvidenceCheck] = examine(
        ID, msgspec.convert(document, PublicEvaluation), own, TASKS, verifier.judge
    )
    assert all(finding.why for finding in found)
    return {finding.what: finding.holds for finding in found}


ALL = {"signature": True, "answers": True, "commitment": True, "question": True, "score": True}


def test_verdicts_of_an_honest_judge_pass_verification(verifier: Verifier, honest: dict[str, Any]) -> None:
    assert findings(verifier, honest) == ALL
    own = {name: honest[name] for name in ("receipt", "signature")}
    assert findings(verifier, honest, own) == {**ALL, "own receipt": True}


def test_each_lie_is_detected(verifier: Verifier, honest: dict[str, Any]) -> None:
    window: dict[str, Any] = honest["window"]
    other = "cd" * 32
    lies: list[tuple[str, dict[str, Any]]] = [
        ("signature", {**honest, "receipt": honest["receipt"].replace('"number":7', '"number":8')}),
        ("signature", lied(honest, evaluation="cd" * 16)),
        ("answers", {**honest, "answers": [{"text": "changed", "ended": True}, honest["answers"][1]]}),
        ("answers", {**honest, "answers": []}),
        ("commitment", {**honest, "window": {**window, "seed": other}}),
        ("commitment", {**honest, "window": {**window, "commitment": other}}),
        ("commitment", {**honest, "window": {**window, "closes": window["closes"] + 1}}),
        ("commitment", lied(honest, commitment=other)),
        ("commitment", lied(honest, window=2)),
        ("commitment", {**honest, "window": None}),
        ("question", lied(honest, place=3)),
        ("question", lied(honest, peer=JUDGE.peer_id)),
        ("question", lied(honest, n=TASK.ref.n + 1)),
        ("score", lied(honest, rewards=[0.0, 0.0])),
        ("score", lied(honest, reasons=["wrong", "wrong"])),
        ("receipt", lied(honest, place="first")),
    ]
    for what, document in lies:
        assert findings(verifier, document).get(what) is False, (what, document)
    own = {"receipt": honest["receipt"], "signature": lied(honest, number=8)["signature"]}
    assert findings(verifier, honest, own)["own receipt"] is False


def test_checks_that_are_not_possible_yet_are_reported(verifier: Verifier, honest: dict[str, Any]) -> None:
    window = replace(WINDOW, revealed=None).document()
    assert findings(verifier, {**honest, "window": window}) == {
        "signature": True,
        "answers": True,
        "commitment": None,
        "score": True,
    }
    with pytest.raises(msgspec.ValidationError, match="closes"):  # beyond the last representable year
        findings(verifier, {**honest, "window": {**window, "closes": 10**18}})


def serving(pages: Mapping[str, Any]) -> AbstractContextManager[str]:
    """Serve these JSON documents; yield the server's URL."""

    class Pages(Handler):
        def get(self) -> None:
            nothing = {"error": "nothing is here", "remedy": "look elsewhere"}
            self.answer(pages.get(self.path, nothing), 200 if self.path in pages else 404)

    return listening(Pages)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = app.main([*arguments, "--state-dir", str(tmp_path)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


Run = Callable[..., tuple[int, str, str]]


@pytest.mark.net
@pytest.mark.slow  # starts three scoring processes
def test_verify_prints_its_verdict_and_returns_an_exit_code(
    run: Run, tmp_path: Path, honest: dict[str, Any]
) -> None:
    (tmp_path / "receipts.jsonl").write_text(
        f"no JSON {ID}\n" + json.dumps({name: honest[name] for name in ("receipt", "signature")})
    )
    pages = {f"/v1/evaluations/{ID}": honest}
    with serving(pages) as url:
        code, said, _ = run("verify", ID, "--judge", url)
        assert code == 0 and "All of it holds." in said and TASK.question in said and "own receipt" in said
        pages[f"/v1/evaluations/{ID}"] = lied(honest, rewards=[0.0, 0.0])
        code, said, _ = run("verify", ID, "--judge", url)
        assert (
            code == 1
            and "DOES NOT HOLD  score" in said
            and "not as the judge says: own receipt, score" in said
        )
        pages[f"/v1/evaluations/{ID}"] = lied(honest, n="\x1b[2J")
        code, said, _ = run("verify", ID, "--judge", url)
        assert code == 1 and "\x1b" not in said
        pages[f"/v1/evaluations/{ID}"] = {**honest, "window": replace(WINDOW, revealed=None).document()}
        code, said, _ = run("verify", ID, "--judge", url, "--json")
        document = json.loads(said)
        assert code == 4 and document["holds"] is None and document["question"] == TASK.question
        code, said, error = run("verify", "../0", "--judge", url)  # not a valid id
        assert code == 2 and not said and "no evaluation and no upload of this id" in error
        assert run("verify", "--judge", url)[0] == 2  # no id is given
    code, said, error = run("verify", ID, "--judge", url)
    assert code == 4 and not said and "cannot be reached" in error
    assert run("verify", ID)[0] == run("verify")[0] == 2  # no judge is set


@pytest.mark.net
def test_an_error_that_quotes_a_judge_has_no_control_characters(run: Run, honest: dict[str, Any]) -> None:
    with serving({f"/v1/evaluations/{ID}": lied(honest, curriculum="\x1b[2J\u202e")}) as url:
        code, _, error = run("verify", ID, "--judge", url)
    assert code == 2 and r"\x1b[2J\u202e" in error and "\x1b" not in error


@pytest.mark.net
def test_a_verdict_on_an_upload_must_name_the_upload_and_be_signed() -> None:
    said = {"verification": ID, "peer": PEER, "weights": "ab" * 32, "right": 3, "n": 4, "pass_at": {}}
    signed = receipts.signed(JUDGE, said)
    done = {**said, "state": "done", "score": 0.75, **signed}
    pages: dict[str, Any] = {}
    with serving(pages) as url:
        for document in (done, {**done, "right": 4, **receipts.signed(JUDGE, {**said, "right": 4})}):
            pages[f"/v1/verified/{ID}"] = document
            assert outcome(url, ID).right == document["right"]
        lies: Sequence[dict[str, Any]] = [
            {"right": 4},
            {"pass_at": {"2": 0.9}},
            {"weights": "cd" * 32},
            {"signature": "0" * 128},
            {"receipt": "{"},
            {"verification": "cd" * 16, **receipts.signed(JUDGE, {**said, "verification": "cd" * 16})},
            {"verification": "cd" * 16, "state": "queued"},
        ]
        for lie in lies:
            pages[f"/v1/verified/{ID}"] = {**done, **lie}
            with pytest.raises(SwarmdError, match="breaks the judge's protocol"):
                outcome(url, ID)
        # A terminal would execute this control sequence.
        for odd in (
            {"weights": "\x1b[2J", **receipts.signed(JUDGE, {**said, "weights": "\x1b[2J"})},
            {"signature": signed["signature"] + "\r"},
        ):
            pages[f"/v1/verified/{ID}"] = {**done, **odd}
            with pytest.raises(Unreachable, match="is not from a judge"):
                outcome(url, ID)


BOARD = {
    "curriculum": {"name": "tiny-9", "digest": TINY_9.digest},
    "listed": 51,
    "unlisted": 2,
    "more_after": 50,
    "peers": [
        {
            "rank": 1,
            "peer": PEER,
            "nickname": "brave-otter",
            "model": "tiny\x1b[2J",
            "last_seen": 0.0,
            "answered": 1_234,
            "score": 0.62,
            "low": 0.522,
            "high": 0.709,
            "n": 100,
            "said": {"name": "otter\u202e"},
        }
    ],
}


@pytest.mark.net
def test_the_leaderboard_is_printed_as_a_table_or_as_json(run: Run) -> None:
    with (
        serving({"/v1/leaderboard?after=0": BOARD}) as url,
        serving({"/v1/leaderboard?after=0": {"peers": 3}}) as odd,
    ):
        code, said, _ = run("leaderboard", "--judge", url)
        assert (
            code == 0
            and "tiny-9, 51 nodes listed, 2 with too few answers" in said
            and "more: --after 50" in said
        )
        assert max(map(len, said.splitlines())) <= 80
        assert "0.620  0.522–0.709  1,234" in said and "\x1b" not in said and "\u202e" not in said
        code, said, _ = run("leaderboard", "--judge", url, "--json")
        document = json.loads(said)
        assert code == 0 and document["url"] == url and document["peers"] == BOARD["peers"]
        for other, why in ((odd, "is not from a judge"), ("http://127.0.0.1:1", "cannot be reached")):
            code, said, error = run("leaderboard", "--judge", other)
            assert (code, said) == (4, "") and why in error
    assert run("leaderboard")[0] == 2


@pytest.mark.net
def test_a_redirect_of_a_judge_is_reported(run: Run) -> None:
    """Caddy redirects from http to https in this way."""

    class Redirects(Handler):
        def get(self) -> None:
            self.answer(status=308, location="https://judge.example/")

    with listening(Redirects) as url:
        code, _, error = run("leaderboard", "--judge", url)
    assert code == 4 and "HTTP 308" in error and "redirects to" in error
