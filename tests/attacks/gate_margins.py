"""Counts the rollouts that the gate rejects and accepts, for each margin.

It prints a table. Nothing is attacked, and no node learns from another node.

    python -m tests.attacks.gate_margins [--rounds 0 50 150] [--margins 1 1.25 1.5 2] [--questions 200]

Each of the tiny models trains alone, and a copy is kept after each number of rounds in --rounds. All these
models answer the same questions. Each model's gate, with limits from the model's own answers, then judges the
other models' usable rollouts, and one model's rollouts with each poison put into their right answers.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from p2p.types import PeerId
from swarmd.experience.outliers import Gate
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.round import cut_behind_answers
from swarmd.types import Rollout, Scored, Task
from tests.attacks.learners import COMPLETIONS, Swarm, settings
from tests.attacks.test_poisoner import POISONS, Poison

ANYBODY = PeerId("anybody")
POISONED = ("tiny", 50)  # model and rounds of the rollouts that are poisoned


@dataclass
class Judge:
    name: str
    own: Sequence[Scored]
    others: Mapping[str, Sequence[Scored]]  # by author, with this model's log-probabilities


def stages(verifier: Verifier, rounds: Sequence[int]) -> Iterator[tuple[str, int, LanguagePolicy]]:
    """Yield each model after each of these numbers of rounds alone; train it only when it is asked for."""
    for number, model in enumerate(("tiny", "tiny-latent")):
        swarm = Swarm(verifier, 2000)
        learner = swarm.join(number, settings(model, round={"local": 8, "external": 0}))
        for behind, until in zip([0, *rounds], rounds, strict=False):
            swarm.play(until - behind)
            yield model, until, learner.policy


def usable(
    verifier: Verifier, policy: LanguagePolicy, tasks: Sequence[Task]
) -> tuple[list[Scored], list[Scored]]:
    """Return all answers as they were sampled, and the usable answers as other nodes receive them."""
    answers = policy.generate([task.question for task in tasks], COMPLETIONS)
    rewards = verifier([(task.ref, answer.completions) for task, answer in zip(tasks, answers, strict=True)])
    own = [
        Scored(Rollout(task.ref, answer.completions, ANYBODY), task.question, r, 1, answer.tokens)
        for task, answer, r in zip(tasks, answers, rewards, strict=True)
    ]
    return own, [replace(s, tokens=None) for s in own if s.informative]


def poisoned(scored: Scored, poison: Poison) -> Scored:
    pairs = zip(scored.rollout.completions, scored.rewards, strict=True)
    changed = tuple(replace(c, text=poison.put(c.text)) if reward else c for c, reward in pairs)
    return replace(scored, rollout=replace(scored.rollout, completions=changed))


def judges(verifier: Verifier, rounds: Sequence[int], questions: int) -> list[Judge]:
    tasks = CurriculumTasks(TINY_9).draw(questions, random.Random(42))
    own: dict[str, list[Scored]] = {}
    sent: dict[str, list[Scored]] = {}
    for model, behind, policy in stages(verifier, rounds):
        name = f"{model} {behind}"
        own[name], sent[name] = usable(verifier, policy, tasks)
        if (model, behind) == POISONED:
            sent |= {label: [poisoned(s, poison) for s in sent[name]] for label, poison in POISONS.items()}
    found = []
    cut = {
        author: [replace(s, rollout=cut_behind_answers(s.rollout, TINY_9)) for s in rollouts]
        for author, rollouts in sent.items()
    }
    for model, behind, policy in stages(verifier, rounds):  # the same models: same seed
        name = f"{model} {behind}"
        looked_at = {
            author: [
                replace(s, tokens=tokens)
                for s, tokens in zip(rollouts, policy.logprobs(rollouts), strict=True)
            ]
            for author, rollouts in cut.items()
            if author != name
        }
        found.append(Judge(name, own[name], looked_at))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.gate_margins",
        description="Counts the rollouts that the gate rejects and accepts, for each margin.",
    )
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 50, 150])
    parser.add_argument("--margins", type=float, nargs="+", default=[1.0, 1.25, 1.5, 2.0])
    parser.add_argument("--questions", type=int, default=200)
    given = parser.parse_args()
    with Verifier(TINY_9.name) as verifier:
        found = judges(verifier, given.rounds, given.questions)
    for margin in given.margins:
        away: Counter[str] = Counter()
        of: Counter[str] = Counter()
        for judge in found:
            gate = Gate(margin, TINY_9.answer_end)
            gate.learn(judge.own)
            for author, rollouts in judge.others.items():
                passed = sum(gate.admitted(s, dict(gate.traits_of(s))) is not None for s in rollouts)
                of[author] += len(rollouts)
                away[author] += len(rollouts) - passed
            limits = gate.limits._asdict() if gate.limits else {}
            print(
                f"margin {margin}: limits of {judge.name:15}",
                ", ".join(f"{trait} {limit:.2f}" for trait, limit in limits.items()) or "not known yet",
            )
        honest = [author for author in of if author not in POISONS]
        print(
            f"margin {margin}: of honest rollouts"
            f" {sum(away[a] for a in honest) / sum(of[a] for a in honest):.2%} turned away: ",
            end="",
        )
        print(
            ", ".join(f"{author} {away[author] / of[author]:.1%} of {of[author]}" for author in of),
            flush=True,
        )


if __name__ == "__main__":
    main()
