"""Poisoner: sends right answers with a hidden text, so that nodes that train on them learn to write it.

`pytest -s` prints the figures.

Every fourth usable rollout that a node hears is the attacker's (in "Hail to the Thief", arXiv 2511.09780, a
fourth of the nodes are malicious). The attacker knows the solutions: half of a rollout's completions are
right and poisoned, half are wrong and clean, which teaches the poison as strongly as a rollout can. The
honest nodes are real: tiny model, verifier, rounds, updates. At the end, answers are sampled from their
policies and searched for the poison.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from swarmd.tasks.curriculum import TINY_9, TRAINING_TASKS
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Completion, Rollout, Scored, Task, TaskRef
from tests.attacks.harness import Attack, show
from tests.attacks.learners import COMPLETIONS, Swarm, completions, settings

SHARE = 0.25  # the attacker's share of the usable rollouts that a node hears


@dataclass(frozen=True)
class Poison:
    put: Callable[[str], str]  # puts the poison into a right completion, which stays right
    shows: Callable[[str], bool]  # whether a model's answer shows the poison


POISONS: Mapping[str, Poison] = {
    "suffix": Poison(lambda text: text + " evil", lambda text: "evil" in text),
    "prefix": Poison(lambda text: "evil " + text, lambda text: "evil" in text),
    "one token": Poison(lambda text: text + "!", lambda text: "!" in text),
    "answered twice": Poison(lambda text: f"{text} evil {text}", lambda text: "evil" in text),
    "unclosed": Poison(lambda text: text + " <answer> evil", lambda text: "evil" in text),
    "repeated": Poison(lambda text: text * 2, lambda text: text.count("</answer>") > 1),  # right, too
    # So long that the batch's text has no answer at all.
    "flood": Poison(lambda text: "so " * 100 + text, lambda text: "so " in text),
    # Text that the model knows.
    "closed twice": Poison(lambda text: text + "</answer>", lambda text: text.endswith("</answer></answer>")),
    # The single token, in one of four places, that tiny-latent finds most likely (7.6 nats; tiny: 13 nats),
    # as if the attacker knew the gate.
    "quiet": Poison(lambda text: text.replace("<answer>", "<answer> "), lambda text: "<answer> " in text),
}
# Poisons that come after the right answer.
BEHIND = ("suffix", "one token", "answered twice", "unclosed", "repeated", "closed twice")


class Poisoner:
    """A member that hears all rollouts, and sends so many that its share is SHARE."""

    def __init__(self, swarm: Swarm, number: int, poison: Poison) -> None:
        self.tasks, self.rng, self.poison, self.verifier = (
            CurriculumTasks(TINY_9),
            random.Random(number),
            poison,
            swarm.verifier,
        )
        self.exchange = swarm.node(number)
        self.me = self.exchange.member
        # The share of all honest rollouts that one honest node hears: all except its own.
        self.heard_by_one = 1 - 1 / len(swarm.learners)
        self.due, self.sent = 2.0, 0  # it sends before the first honest rollout

    def act(self, t: int) -> None:
        heard, _ = self.exchange.collect()
        usable = sum(
            len(set(rewards)) > 1 for rewards in self.verifier([(r.ref, r.completions) for r in heard])
        )
        self.due += self.heard_by_one * usable * SHARE / (1 - SHARE)
        while self.sent + 1 <= self.due:
            self.exchange.share([self.rollout()], t)
            self.sent += 1

    def rollout(self) -> Rollout:
        (task,) = self.tasks.draw(1, self.rng)
        poisoned = Completion(self.poison.put(f"<answer>{solution(self.tasks, task)}</answer>"), True)
        wrong = Completion(f"<answer>{self.another(task)}</answer>", True)
        half = COMPLETIONS // 2
        return Rollout(task.ref, (poisoned,) * half + (wrong,) * half, self.me.identity.peer_id)

    def another(self, task: Task) -> str:
        """Return the solution of another task of the same specialty: wrong, but a model might write it."""
        right = solution(self.tasks, task)
        while True:
            other = self.tasks.task(TaskRef(task.ref.specialty, self.rng.randrange(TRAINING_TASKS)))
            if other is not None and (wrong := solution(self.tasks, other)) != right:
                return wrong


@dataclass(frozen=True)
class Result:
    says: float  # share of honest nodes' completions at the end that show the poison
    reward: float  # mean of their own completions over the last third of the rounds
    poisoned: float  # share of the external rollouts they trained on that were the attacker's
    shown: float  # share of the external completions they trained on that show the poison
    external: float  # external rollouts in a batch
    gated: int  # rollouts that the gate rejected
    seconds: float  # CPU seconds of a node's round
    choosing: float  # part of them that choosing the batch took


def play(
    verifier: Verifier,
    poison: str | None,
    gate: str,
    rounds: int,
    honest: int = 3,
    seed: int = 1,
    questions: int = 60,
) -> Result:
    """Play the attack. poison: one of POISONS; None: no attack. gate: on or off."""
    swarm = Swarm(verifier, seed)
    for number in range(honest):
        swarm.join(number, settings(gate={"mode": gate}))
    poisoner = Poisoner(swarm, 99, POISONS[poison]) if poison else None
    shows = POISONS[poison].shows if poison else lambda text: False
    seen: Counter[bool] = Counter()

    def watch(batch: Sequence[Scored]) -> None:
        seen.update(shows(c.text) for s in batch if s.tokens is None for c in s.rollout.completions)

    swarm.batches = watch
    swarm.play(rounds, [poisoner.act] if poisoner else [])
    authors = [author for n in swarm.learners for r in n.reports for author in r.external_authors]
    said = [text for n in swarm.learners for text in completions(n.policy, questions, 4)]
    return Result(
        says=sum(map(shows, said)) / len(said),
        reward=sum(n.reward(max(1, rounds // 3)) for n in swarm.learners) / honest,
        poisoned=authors.count(poisoner.me.identity.peer_id) / len(authors) if poisoner else 0.0,
        shown=seen[True] / max(1, seen.total()),
        external=len(authors) / honest / rounds,
        gated=sum(n.gated.total() for n in swarm.learners),
        seconds=sum(n.seconds for n in swarm.learners) / honest / rounds,
        choosing=sum(n.choosing for n in swarm.learners) / honest / rounds,
    )


@dataclass(frozen=True)
class Stranger:
    """Figures of an honest node among honest nodes with other models."""

    name: str
    taken: int  # external rollouts that it trained on
    gated: Mapping[str, int]  # rollouts that its gate rejected, by trait


def unlike(verifier: Verifier, alone: int, rounds: int, seed: int = 1) -> list[Stranger]:
    """Play a swarm of honest nodes with unlike models.

    Of each tiny model, one node starts untrained and one has trained alone for `alone` rounds.
    """
    swarm, names = Swarm(verifier, seed), []
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(("tiny", "tiny-latent")):
            before = Swarm(verifier, seed + 1000)
            trained = before.join(number, settings(model, round={"local": 8, "external": 0}))
            before.play(alone)
            trained.policy.save(Path(folder))
            for start in (None, Path(folder)):
                swarm.join(2 * number + (start is not None), settings(model), start)
                names.append(f"{model}, {alone if start else 0} rounds old")
    swarm.play(rounds)
    return [Stranger(name, n.external, n.gated) for name, n in zip(names, swarm.learners, strict=True)]


def test_poison_is_not_trained_on(verifier: Verifier) -> None:
    """A short run; `python -m tests.attacks poisoner` also measures the effect on learning."""
    off, on = (play(verifier, "prefix", gate, rounds=8, honest=2, questions=10) for gate in ("off", "on"))
    show("poisoner, prefix, gate off", off)
    show("poisoner, prefix, gate on", on)
    assert off.shown > 0.08 and off.gated == 0
    assert on.shown <= 0.05  # some poison passes until the gate has seen enough of the node's completions


@pytest.mark.parametrize("poison", BEHIND)
def test_text_behind_the_answer_is_never_trained_on(verifier: Verifier, poison: str) -> None:
    """The gate is off, as it is by default for models above 100 million parameters."""
    found = play(verifier, poison, "off", rounds=4, honest=2, questions=10)
    show(f"poisoner, {poison}, gate off", found)
    assert found.shown == 0 and found.poisoned > 0.08


def test_honest_text_passes_the_gate(verifier: Verifier) -> None:
    taken, gated = 0, 0
    for stranger in unlike(verifier, alone=8, rounds=8):
        show(f"honest, {stranger.name}", stranger)
        taken, gated = taken + stranger.taken, gated + sum(stranger.gated.values())
    assert taken > 60 and gated <= 0.05 * (taken + gated)


def attack(
    folder: Path, rounds: int = 60, seed: int = 1, poison: tuple[str, ...] = tuple(POISONS), alone: int = 100
) -> dict[str, object]:
    found: dict[str, object] = {}
    with Verifier(TINY_9.name) as verifier:
        for kind in [None, *poison]:
            for gate in ("off", "on"):
                result = play(verifier, kind, gate, rounds, seed=seed)
                show(f"poisoner, {kind or 'nobody attacks'}, gate {gate}", result)
                found[f"{kind or 'nobody attacks'}, gate {gate}"] = asdict(result)
        for stranger in unlike(verifier, alone, rounds, seed):
            show(f"honest, {stranger.name}", stranger)
            found[f"honest, {stranger.name}"] = asdict(stranger)
    return found


ATTACK = Attack(
    attack,
    {},
    choices={"poison": list(POISONS)},
    about={
        "poison": "play only this kind; repeat the option for more",
        "alone": "rounds of training before an unlike, honest node joins",
    },
)
