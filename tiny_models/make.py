"""Makes the embedded tiny models from random weights.

    python -m tiny_models.make [--out DIR] [--seed S] [--family F] [--steps SHARE] [--quick]
                               [--device cpu|cuda] [--stages-only]

It makes a tokenizer, then weights in several stages, then the models:

    tokenizer     trained on questions and answers of tiny-9
    clean         random weights, trained on right answers
    deep          clean, trained further, mostly on slowly learned specialties
    noisy         deep, trained further with mostly wrong answers, which hides the skill but keeps it
    dark          as noisy, but with very few right answers even in specialties that reward guessing
    tiny          between deep and noisy: deep + dial·(noisy − deep); the dial is set for a pass@1 of 0.27
    tiny-latent   near dark: deep + dial·(dark − deep); the dial is set so that one in ten groups of eight
                  answers has mixed rewards
    llama-latent  as tiny-latent, with Llama's architecture and another tokenizer (`--family llama`); not
                  embedded
    mid-latent    as tiny-latent, at 15 times the size (`--family qwen2-13m`); takes hours on one core, or
                  minutes on a GPU; not embedded

The number of steps is fixed and torch uses one thread, so on one machine the result depends only on the seed.
The trained stages are kept in DIR/stages and used again; delete them to train again. If deep exists, clean is
not needed. `--device cuda` trains the stages on a GPU, with the same examples.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from swarmd.tasks.curriculum import HELD_OUT
from swarmd.tasks.source import CurriculumTasks, tasks_of
from tiny_models.card import Card
from tiny_models.corpus import BROAD, DARK, DEEP, HONEST, NOISY, Corpus
from tiny_models.evaluation import MAX_NEW_TOKENS, Skill, chance, mean, measure
from tiny_models.tokenizer import train_llama_tokenizer, train_tokenizer
from tiny_models.warm_start import Phase, new_llama, new_mid, new_model, train

Weights = Mapping[str, torch.Tensor]
PASS_AT_1 = 0.27  # for tiny: high enough to learn from, and low enough to improve
# For tiny-latent: sharing helps most if a node rarely finds a right answer itself.
MIXED = 0.10


@dataclass(frozen=True)
class Plan:
    """The amount of work; with --quick, it is enough to test the code but not to train a model."""

    texts: int  # questions per specialty for the tokenizer
    clean: Phase
    deep: Phase
    noisy: Phase
    dark: Phase
    dial_items: int  # held-out items per specialty to set the dial; the card has other items
    card_items: int
    turns: int  # how often the interval of the dial is halved

    def shortened(self, share: float) -> "Plan":
        """Return the plan with each phase's number of steps multiplied by `share`."""
        phases = {
            name: replace(phase, steps=max(1, round(share * phase.steps)))
            for name in ("clean", "deep", "noisy", "dark")
            for phase in [getattr(self, name)]
        }
        return replace(self, **phases)

    def slowed(self, share: float) -> "Plan":
        """Return the plan with each phase's learning rate for AdamW multiplied by `share`."""
        phases = {
            name: replace(phase, adam=share * phase.adam)
            for name in ("clean", "deep", "noisy", "dark")
            for phase in [getattr(self, name)]
        }
        return replace(self, **phases)


FULL = Plan(
    texts=3000,
    clean=Phase("clean", 2200, BROAD, wrong=HONEST, adam=3e-3, muon=0.02, floor=0.05),
    deep=Phase("deep", 600, DEEP, wrong=HONEST, adam=1.5e-3, muon=0.01, floor=0.05),
    noisy=Phase("noisy", 300, BROAD, wrong=NOISY, adam=5e-4, muon=0.002, floor=1.0),
    dark=Phase("dark", 200, BROAD, wrong=DARK, adam=5e-4, muon=0.002, floor=1.0, foreign=True),
    dial_items=64, card_items=200, turns=6,
)  # fmt: skip
QUICK = Plan(
    texts=200,
    clean=replace(FULL.clean, steps=5, batch=4),
    deep=replace(FULL.deep, steps=2, batch=4),
    noisy=replace(FULL.noisy, steps=2, batch=4),
    dark=replace(FULL.dark, steps=2, batch=4),
    dial_items=1, card_items=1, turns=1,
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A model to make: deep + dial·(pushed − deep).

    The dial is the largest up to `most` at which `enough` is true."""

    name: str
    pushed: Phase
    most: float
    enough: Callable[[Skill], bool]


@dataclass(frozen=True)
class Family:
    """Models of one architecture and tokenizer."""

    described: str
    train_tokenizer: Callable[[Iterable[str]], Any]
    new_model: Callable[[Any, int], Any]
    latent: str  # name of the latent model
    tiny: str = ""  # name of the tiny model; "" if there is none
    adam: float = 1.0  # factor for AdamW's learning rates

    def members(self, plan: Plan) -> list[Member]:
        tiny = Member(self.tiny, plan.noisy, 1.5, lambda skill: skill.pass_at_1 > PASS_AT_1)
        # Mixed groups are few if nearly all answers are right, and also if nearly none are. The latent model
        # must have a low pass@1.
        latent = Member(
            self.latent, plan.dark, 4.0, lambda skill: skill.mixed > MIXED or skill.pass_at_1 > PASS_AT_1
        )
        return [tiny, latent] if self.tiny else [latent]


FAMILIES = {
    "qwen2": Family(
        "Qwen2 architecture, a byte-level BPE tokenizer", train_tokenizer, new_model, "tiny-latent", "tiny"
    ),
    "llama": Family(
        "Llama architecture, a BPE tokenizer of characters with bytes to fall back on",
        train_llama_tokenizer, new_llama, "llama-latent",
    ),
    # Muon's update has the same spectral norm at every width, so its rates stay the same. The embedding is
    # also the output head. An input layer would keep AdamW's rate; an output layer would divide it by the
    # growth of the width, 3. The factor is the geometric mean of both.
    "qwen2-13m": Family(
        "Qwen2 architecture, a byte-level BPE tokenizer", train_tokenizer, new_mid, "mid-latent", adam=3**-0.5
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Workshop:
    """The inputs that all steps of the recipe need."""

    family: Family
    tokenizer: Any
    source: CurriculumTasks
    plan: Plan
    seed: int
    say: Callable[[str], None]
    device: str  # device for training; all other work is done on the CPU

    def mixture(self, deep: Weights, pushed: Weights, dial: float) -> Any:
        """Return deep + dial·(pushed − deep), rounded to the stored precision."""
        model = self.family.new_model(self.tokenizer, self.seed)
        state = {name: deep[name] + dial * (pushed[name] - deep[name]) for name in deep}
        _load(model, {name: tensor.bfloat16().float() for name, tensor in state.items()})
        return model.eval()

    def skills(self, model: Any, first: int, items: int) -> dict[str, Skill]:
        return measure(model, self.tokenizer, self.source, range(first, first + items), 8, self.seed)

    def dial(self, deep: Weights, pushed: Weights, high: float, enough: Callable[[Skill], bool]) -> float:
        """Return the dial between 0 and `high` at which `enough` becomes false."""
        low = 0.0
        for _ in range(self.plan.turns):
            middle = (low + high) / 2
            skill = mean(
                self.skills(self.mixture(deep, pushed, middle), HELD_OUT + 1_000_000, self.plan.dial_items)
            )
            self.say(f"dial {middle:.3f}: pass@1 {skill.pass_at_1:.3f}, mixed groups {skill.mixed:.3f}")
            low, high = (middle, high) if enough(skill) else (low, middle)
        return (low + high) / 2


def stages(shop: Workshop, pushed: Sequence[Phase], folder: Path) -> tuple[Weights, list[Weights]]:
    """Return the deep weights and the weights of the phases `pushed`; stages with a file are not trained."""
    model = shop.family.new_model(shop.tokenizer, shop.seed).to(shop.device)

    def kept(phase: Phase) -> Path:
        return folder / f"{phase.name}.safetensors"

    def stage(phase: Phase) -> Weights:
        path = kept(phase)
        if path.exists():
            shop.say(f"{phase.name}: found {path}")
            _load(model, load_file(path))
        else:
            train(model, shop.tokenizer, shop.source, phase, shop.seed, shop.say)
            save_file(_untied(model), path)
        return {name: tensor.clone() for name, tensor in _untied(model).items()}

    if not kept(shop.plan.deep).exists():
        stage(shop.plan.clean)
    deep = stage(shop.plan.deep)
    ends = []
    for phase in pushed:
        _load(model, deep)
        ends.append(stage(phase))
    return deep, ends


def _load(model: Any, weights: Weights) -> None:
    model.load_state_dict(weights, strict=False)
    model.tie_weights()


def _untied(model: Any) -> dict[str, torch.Tensor]:
    """Return every tensor once; the output head is left out, because it is the embedding."""
    return {
        name: tensor.detach().cpu() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }


def save(model: Any, folder: Path, tokenizer_files: Path, tokenizer: Any, card: Card) -> None:
    """Write model and tokenizer into a folder that transformers' `from_pretrained` can load."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    shutil.copytree(tokenizer_files, folder, dirs_exist_ok=True)
    (folder / "README.md").write_text(card.markdown(), encoding="utf-8")


def make(
    out: Path,
    seed: int,
    family: Family,
    plan: Plan,
    say: Callable[[str], None],
    device: str = "cpu",
    stages_only: bool = False,
) -> None:
    """Make tokenizer, stages, models and model cards."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    plan = plan.slowed(family.adam)
    kept = out / "stages"
    kept.mkdir(parents=True, exist_ok=True)
    source = tasks_of("tiny-9")
    if not (kept / "tokenizer").exists():
        texts = Corpus(source, random.Random(f"{seed}/tokenizer")).texts(plan.texts)
        family.train_tokenizer(texts).save_pretrained(kept / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(kept / "tokenizer")
    say(f"tokenizer: {len(tokenizer)} tokens")
    shop = Workshop(family, tokenizer, source, plan, seed, say, device)
    members = family.members(plan)
    deep, ends = stages(shop, [member.pushed for member in members], kept)
    if stages_only:
        return
    dials = [
        shop.dial(deep, pushed, member.most, member.enough)
        for member, pushed in zip(members, ends, strict=True)
    ]
    guessing = chance(source, range(HELD_OUT, HELD_OUT + plan.card_items), seed)
    for member, pushed, setting in zip(members, ends, dials, strict=True):
        model = shop.mixture(deep, pushed, setting)
        skills = shop.skills(model, HELD_OUT, plan.card_items)
        card = Card(
            name=member.name,
            seed=seed,
            family=next(name for name, each in FAMILIES.items() if each is family),
            described=family.described,
            shape=f"{model.config.num_hidden_layers} layers, width {model.config.hidden_size}",
            dial=setting,
            pushed=member.pushed.name,
            steps=[(p.name, p.steps) for p in (plan.clean, plan.deep, *(m.pushed for m in members))],
            parameters=model.num_parameters(),
            items=plan.card_items,
            skills=skills,
            chance=guessing,
        )
        save(model, out / member.name, kept / "tokenizer", tokenizer, card)
        say(f"{member.name}: dial {setting:.3f}\n{card.table()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the embedded tiny models. About 20 minutes on one core."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("tiny-models"),
        help="folder for the models and their stages; use one folder per family",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, default="qwen2")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device for training; all other work is done on the CPU",
    )
    parser.add_argument(
        "--stages-only", action="store_true", help="only train and keep the stages, without making models"
    )
    parser.add_argument("--steps", type=float, default=1.0, help="factor for the recipe's number of steps")
    parser.add_argument("--quick", action="store_true", help="run only a few steps, to test the code")
    arguments = parser.parse_args()
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:6.0f}s  {line}", file=sys.stderr, flush=True)

    plan = QUICK if arguments.quick else FULL.shortened(arguments.steps)
    make(
        arguments.out,
        arguments.seed,
        FAMILIES[arguments.family],
        plan,
        say,
        arguments.device,
        arguments.stages_only,
    )


if __name__ == "__main__":
    main()
