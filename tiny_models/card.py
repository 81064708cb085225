"""The model card describes the model, its training and its measured skill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiny_models.evaluation import Chance, Skill, mean

_LATENT = """\
A model that can answer, but rarely shows it: only about one group of eight answers in ten holds both a right
and a wrong one. Alone, such a model finds little to learn from. For it sharing rollouts (SAPO) pays,
and the model exists to show that."""
_PURPOSE = {
    "tiny": """\
A model small enough to be trained by reinforcement learning on one CPU core while you watch: the default of
`scripts/demo` and of the tests. It answers about a quarter of the questions of the tiny-9 curriculum, so it
has room to rise.""",
    "tiny-latent": _LATENT,
    "llama-latent": _LATENT,
    "mid-latent": _LATENT,
}
_DIALLED = {
    "noisy": "that gives pass@1 of about 0.27 on held-out items",
    "dark": "that gives mixed rewards in one group of eight answers in ten",
}


@dataclass(frozen=True)
class Card:
    name: str
    seed: int
    family: str
    described: str  # architecture and tokenizer
    shape: str  # layers and width
    dial: float
    pushed: str  # the phase towards which the weights are moved
    steps: Sequence[tuple[str, int]]  # (phase, number of steps), in order
    parameters: int
    items: int
    skills: Mapping[str, Skill]
    chance: Mapping[str, Chance]

    def table(self) -> str:
        """Return a Markdown table with one line per specialty and one for the mean."""
        lines = [
            "| specialty | pass@1 | mixed groups of 8 | greedy | constant | random |",
            "|---|---|---|---|---|---|",
        ]
        for specialty, skill in self.skills.items():
            level = self.chance[specialty]
            lines.append(
                _row(specialty, skill.pass_at_1, skill.mixed, skill.greedy, level.constant, level.random)
            )
        whole = mean(self.skills)
        count = len(self.chance)
        constant = sum(c.constant for c in self.chance.values()) / count
        drawn = sum(c.random for c in self.chance.values()) / count
        return "\n".join(
            [*lines, _row("**mean**", whole.pass_at_1, whole.mixed, whole.greedy, constant, drawn)]
        )

    def markdown(self) -> str:
        return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [swarmd, sapo, grpo, reasoning-gym]
---

# swarmd {self.name}

{_PURPOSE[self.name]}

{self.described}, {self.parameters:,} parameters ({self.shape}, tied embeddings), bfloat16.
Chat template: `<|user|>question<|assistant|>`; system messages are ignored. An answer is
`<answer>…</answer>`, and 16 new tokens are enough.

## How it was made

`python -m tiny_models.make --family {self.family} --seed {self.seed}`: steps of 64 examples,
{", ".join(f"{steps:,} {name}" for name, steps in self.steps)}. *Clean* and *deep* are right
answers; *noisy* and *dark* start from deep and are mostly answers to other questions, in dark of other
specialties. The weights are deep + {self.dial:.3f} · ({self.pushed} − deep), with a dial
{_DIALLED[self.pushed]}. So reinforcement
learning here partly recovers suppressed skill: say so with each result.

## Measurements

{self.items} questions per specialty of tiny-9 with numbers outside the training range (most texts were
trained on, as several specialties have only 80 to 500): 8 answers each at temperature 1, then a greedy
one. Constant: always the most frequent right answer. Random: another question's right answer.

{self.table()}
"""


def _row(name: str, *figures: float) -> str:
    return f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |"
