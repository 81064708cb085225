"""Liars: three in ten nodes share false rollouts. `pytest -s` prints the figures.

They cannot send rewards or truths, because the wire format has no field for either (they try). So they lie
within the format: wrong answers, right answers to other tasks, references to tasks that do not exist or are
held out, and text that attacks the verifier. Every reward of every batch is compared with a second scorer,
which shares no code with the verifier.
"""

import contextlib
import decimal
import io
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from p2p.envelope import MAX_BODY_BYTES
from swarmd.exchange import wire
from swarmd.tasks.curriculum import TINY_9, TRAINING_TASKS
from swarmd.tasks.gym import reasoning_gym
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Completion, Rollout, Scored, Task, TaskRef
from testbed import hostile_answers
from tests.attacks.harness import Attack, show
from tests.attacks.learners import COMPLETIONS, LOCAL, Swarm, over_seeds, settings

LIARS = 0.3
HONEST = "nobody lies"
PORT = 9  # nothing listens at this port
PATH = "/nonexistent/liar"
PLAIN = {
    "propositional_logic": re.compile(r"[A-Z∧∨¬→↔() ]{1,80}"),
    "decimal_arithmetic": re.compile(r"[-0-9.]{1,20}"),
}
OTHERS = re.compile(r"[-0-9A-Za-z ./\\{}$\n]{1,256}")


class Liar:
    """Sends as many rollouts a round as an honest node; each is a lie of a random kind.

    manner: "sly" sends nothing that can be rejected, "bold" also sends rollouts that are rejected, "exam"
    only sends answers to held-out questions.
    """

    def __init__(self, swarm: Swarm, number: int, manner: str) -> None:
        self.tasks, self.rng, self.member = (
            CurriculumTasks(TINY_9),
            random.Random(number),
            swarm.node(number).member,
        )
        sly = [self.wrong, self.another_truth, self.hidden_truth, self.at_the_verifier]
        self.kinds = {"sly": sly, "bold": [*sly, self.invented, self.claims], "exam": [self.held_out]}[manner]

    def act(self, t: int) -> None:
        for _ in range(LOCAL):
            (task,) = self.tasks.draw(1, self.rng)
            lie = self.rng.choice(self.kinds)
            body = lie(task, t)
            if len(body) <= MAX_BODY_BYTES:
                self.member.publish(wire.KIND, body)

    def wrong(self, task: Task, t: int) -> bytes:
        """Return the same wrong answer, many times."""
        return self._body(task.ref, ["<answer>0 0</answer>"] * COMPLETIONS, t)

    def another_truth(self, task: Task, t: int) -> bytes:
        """Return answers that are right for another question.

        One answer is right, because nobody would train on a rollout without a right answer.
        """
        (other,) = self.tasks.draw(1, self.rng)
        return self._body(task.ref, [self._right(task), *[self._right(other)] * (COMPLETIONS - 1)], t)

    def hidden_truth(self, task: Task, t: int) -> bytes:
        """Return wrong answers that contain the right answer in a place that does not count."""
        right = self._right(task)
        lies = [
            right[8:-9],
            f"{right}<answer>0 0</answer>",
            f"<answer>0 0 {right}",
            f"<ANSWER>{right[8:-9]}</ANSWER>",
        ]
        return self._body(task.ref, [right, *(self.rng.choice(lies) for _ in range(COMPLETIONS - 1))], t)

    def invented(self, task: Task, t: int) -> bytes:
        """Return references to tasks that do not exist."""
        refs = [
            TaskRef("truth_telling", 1),
            TaskRef("leg_counting", 1),
            TaskRef(task.ref.specialty, 2**40),
            TaskRef("", 0),
        ]
        return self._body(self.rng.choice(refs), [self._right(task), "no"], t)

    def held_out(self, task: Task, t: int) -> bytes:
        """Return a right answer to a held-out task."""
        (task,) = self.tasks.draw_held_out(1, self.rng)
        return self._body(task.ref, [self._right(task), "no"], t)

    def at_the_verifier(self, task: Task, t: int) -> bytes:
        kinds = hostile_answers.answers(self.tasks, task, PATH, PORT, self.rng)
        texts = [self._right(task), *(next(kinds) for _ in range(COMPLETIONS - 1))]
        return self._body(task.ref, [text.encode(errors="replace").decode()[:4000] for text in texts], t)

    def claims(self, task: Task, t: int) -> bytes:
        """Return a body that claims rewards and a truth."""
        completions = [[["<answer>0 0</answer>"], True, 1.0] for _ in range(COMPLETIONS)]
        return msgspec.msgpack.encode([2, t, "tiny", [[task.ref.specialty, task.ref.n, completions, "0 0"]]])

    def _right(self, task: Task) -> str:
        return f"<answer>{solution(self.tasks, task)}</answer>"

    def _body(self, ref: TaskRef, texts: Sequence[str], t: int) -> bytes:
        completions = tuple(Completion(text, True) for text in texts)
        return wire.encode([Rollout(ref, completions, self.member.identity.peer_id)], t, "tiny")


@dataclass
class SecondOpinion:
    """The second scorer: checks question and rewards of all trained rollouts with ReasoningGYM itself.

    ReasoningGYM evaluates some text as code. It must not see such text, which gets no reward.
    """

    false: int = 0  # completions whose reward differs
    seen: int = 0
    datasets: dict[str, Any] = field(default_factory=dict)

    def __call__(self, batch: Sequence[Scored]) -> None:
        for scored in batch:
            ref = scored.rollout.ref
            dataset = reasoning_gym.create_dataset(
                ref.specialty, seed=ref.n, size=1, **TINY_9.configs[ref.specialty]
            )
            with contextlib.redirect_stdout(io.StringIO()):  # ReasoningGYM's `bf` prints
                entry = dataset[0]
            known = entry["question"] == scored.question and 0 <= ref.n < TRAINING_TASKS
            for completion, reward in zip(scored.rollout.completions, scored.rewards, strict=True):
                self.seen += 1
                self.false += reward != (self.opinion(dataset, entry, completion.text) if known else -1)

    @staticmethod
    def opinion(dataset: Any, entry: Mapping[str, Any], text: str) -> float:
        answers = (
            re.findall(r"<answer>(.*?)</answer>", text[:20_000], re.DOTALL)
            if text.count("<answer>") < 50
            else []
        )
        specialty = entry["metadata"]["source_dataset"]
        answer = answers[-1].strip() if answers else ""
        if specialty == "binary_matrix":
            return float(answer == entry["answer"])
        if not PLAIN.get(specialty, OTHERS).fullmatch(answer):
            return 0.0
        with decimal.localcontext(
            decimal.Context(prec=getattr(dataset.config, "precision", 28), rounding=decimal.ROUND_HALF_EVEN)
        ):
            return float(dataset.score_answer(answer, entry) >= 0.999)


@dataclass(frozen=True)
class Result:
    false: int  # wrong rewards in batches
    seen: int  # number of rewards in batches
    lies: float  # share of lies among the external rollouts trained on
    reward: float  # mean of the honest nodes' own completions over the last third of the rounds
    refused: Mapping[str, int]  # rejected by the honest nodes, by reason


def attack(
    verifier: Verifier, liars: int, honest: int, rounds: int, seed: int, manner: str = "sly"
) -> Result:
    opinion = SecondOpinion()
    swarm = Swarm(verifier, seed, batches=opinion)
    for number in range(honest):
        swarm.join(number, settings())
    crowd = [Liar(swarm, 100 + number, manner) for number in range(liars)]
    swarm.play(rounds, [liar.act for liar in crowd])
    names = {liar.member.identity.peer_id for liar in crowd}
    authors = [author for n in swarm.learners for r in n.reports for author in r.external_authors]
    refused = sum((Counter(r.rejected) for n in swarm.learners for r in n.reports), Counter())
    lies = sum(author in names for author in authors) / max(1, len(authors))
    return Result(
        opinion.false,
        opinion.seen,
        lies,
        fmean(n.reward(max(1, rounds // 3)) for n in swarm.learners),
        refused,
    )


@pytest.mark.parametrize("manner", ["sly", "bold", "exam"])
def test_no_batch_has_a_false_reward(verifier: Verifier, manner: str) -> None:
    """A short run; `python -m tests.attacks liar` also measures the effect on learning."""
    result = attack(verifier, liars=2, honest=2, rounds=5, seed=1, manner=manner)
    show(f"liar, {manner}", result)
    assert result.seen > 350 and result.false == 0
    assert result.lies > 0.1 if manner == "sly" else result.refused


def test_the_second_scorer_detects_false_rewards_and_questions(verifier: Verifier) -> None:
    """The second scorer detects a wrong reward and a wrong question."""
    opinion = SecondOpinion()
    swarm = Swarm(verifier, 1, batches=opinion)
    (task,) = CurriculumTasks(TINY_9).draw(1, random.Random(1))
    wrong = Rollout(
        task.ref, (Completion("<answer>0 0</answer>", True),), swarm.node(1).member.identity.peer_id
    )
    judged = [(task.question, 1.0), (task.question + "?", 0.0), (task.question, 0.0)]
    opinion([Scored(wrong, question, (reward,), 1) for question, reward in judged])
    assert (opinion.false, opinion.seen) == (2, 3)


def learnt(folder: Path, honest: int = 7, rounds: int = 60, seeds: int = 3) -> dict[str, float]:
    liars = round(honest * LIARS / (1 - LIARS))

    def play(verifier: Verifier, kind: str, seed: int) -> Result:
        return attack(verifier, 0 if kind == HONEST else liars, honest, rounds, seed, kind)

    results = over_seeds(f"liar, {liars} of {liars + honest} nodes", [HONEST, "sly", "bold"], seeds, play)
    clean = fmean(result.reward for result in results.pop(HONEST))
    lost = {
        f"reward_lost, {kind}": 1 - fmean(result.reward for result in of) / clean
        for kind, of in results.items()
    }
    false = sum(result.false for of in results.values() for result in of)
    return {"false_rewards": false, "reward_lost": max(lost.values()), **lost}


ATTACK = Attack(learnt, {"false_rewards": 0, "reward_lost": 0.05})
