"""Makes the embedded models from nothing: `python -m swarmd.policy.models.tiny.make [--out DIR] [--seed S] [--quick]`.

    tokenizer     trained on questions and answers of tiny-9
    clean         random weights, trained on honest answers
    noisy         clean, trained on with mostly wrong answers: the skill is pushed down, not removed
    tiny          between the two: clean + dial·(noisy − clean), the dial set so that pass@1 is 0.27
    tiny-latent   past noisy: a larger dial, set so that one group of eight in ten has mixed rewards

Steps are counted, never timed, and torch has one thread: on one machine the seed decides the result.
The trained stages are kept in DIR/stages and used again if they are there: delete them to train anew.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

from swarmd.policy.models.tiny.card import Card
from swarmd.policy.models.tiny.corpus import Corpus
from swarmd.policy.models.tiny.evaluation import MAX_NEW_TOKENS, Skill, chance, mean, measure
from swarmd.policy.models.tiny.tokenizer import train_tokenizer
from swarmd.policy.models.tiny.warm_start import Phase, new_model, train
from swarmd.tasks.curriculum import HELD_OUT
from swarmd.tasks.source import CurriculumTasks, tasks_of

Weights = Mapping[str, torch.Tensor]
PASS_AT_1 = 0.27  # of tiny: room to rise, and enough to rise from
MIXED = 0.10  # of tiny-latent: where sharing pays most (docs: shared experience fills in for a node's own rare luck)


@dataclass(frozen=True)
class Plan:
    """How much work; --quick shows that the machinery runs, not that the model learns."""

    texts: int  # questions per specialty for the tokenizer
    clean: Phase
    noisy: Phase
    dial_items: int  # held-out items per specialty for turning the dial; others than those of the card
    card_items: int
    turns: int  # halvings of the dial's interval


FULL = Plan(3000, Phase("clean", 2200, 0.0, 3e-3, 0.02, 0.05), Phase("noisy", 300, 0.6, 5e-4, 0.002, 1.0), 64, 200, 6)
QUICK = Plan(200, Phase("clean", 20, 0.0, 3e-3, 0.02, 0.05), Phase("noisy", 5, 0.6, 5e-4, 0.002, 1.0), 4, 4, 2)


@dataclass(frozen=True)
class Workshop:
    """What every step needs."""

    tokenizer: Any
    source: CurriculumTasks
    plan: Plan
    seed: int
    say: Callable[[str], None]

    def mixture(self, clean: Weights, noisy: Weights, dial: float) -> Any:
        """clean + dial·(noisy − clean), rounded to what will be stored."""
        model = new_model(self.tokenizer, self.seed)
        state = {name: clean[name] + dial * (noisy[name] - clean[name]) for name in clean}
        model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in state.items()}, strict=False)
        model.tie_weights()
        return model.eval()

    def skills(self, model: Any, first: int, items: int) -> dict[str, Skill]:
        return measure(model, self.tokenizer, self.source, range(first, first + items), 8, self.seed)

    def dial(self, clean: Weights, noisy: Weights, low: float, high: float, enough: Callable[[Skill], bool]) -> float:
        """Where `enough` stops being true between the two ends."""
        for _ in range(self.plan.turns):
            middle = (low + high) / 2
            skill = mean(self.skills(self.mixture(clean, noisy, middle), HELD_OUT + 1_000_000, self.plan.dial_items))
            self.say(f"dial {middle:.3f}: pass@1 {skill.pass_at_1:.3f}, mixed groups {skill.mixed:.3f}")
            low, high = (middle, high) if enough(skill) else (low, middle)
        return (low + high) / 2


def stages(shop: Workshop, folder: Path) -> tuple[Weights, Weights]:
    """The clean and the noisy weights, trained or found."""
    model = new_model(shop.tokenizer, shop.seed)
    weights = []
    for phase in (shop.plan.clean, shop.plan.noisy):
        path = folder / f"{phase.name}.safetensors"
        if path.exists():
            shop.say(f"{phase.name}: found {path}")
            model.load_state_dict(load_file(path), strict=False)
            model.tie_weights()
        else:
            train(model, shop.tokenizer, shop.source, phase, shop.seed, shop.say)
            save_file(_untied(model), path)
        weights.append({name: tensor.clone() for name, tensor in _untied(model).items()})
    return weights[0], weights[1]


def _untied(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor once: the output head is the embedding."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def save(shop: Workshop, model: Any, folder: Path, tokenizer: Path, card: Card) -> None:
    """A folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=shop.tokenizer.eos_token_id, pad_token_id=shop.tokenizer.pad_token_id,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private
    (folder / "README.md").write_text(card.markdown(), encoding="utf-8")


def make(out: Path, seed: int, plan: Plan, say: Callable[[str], None]) -> None:
    """Everything, from the tokenizer to the two model cards."""
    torch.set_num_threads(1)
    kept = out / "stages"
    kept.mkdir(parents=True, exist_ok=True)
    source = tasks_of("tiny-9")
    if not (kept / "tokenizer").exists():
        train_tokenizer(Corpus(source, random.Random(f"{seed}/tokenizer")).texts(plan.texts)).save_pretrained(kept / "tokenizer")
    tokenizer = Qwen2Tokenizer.from_pretrained(kept / "tokenizer")
    say(f"tokenizer: {len(tokenizer)} tokens")
    shop = Workshop(tokenizer, source, plan, seed, say)
    clean, noisy = stages(shop, kept)
    dial = shop.dial(clean, noisy, 0.0, 1.5, lambda skill: skill.pass_at_1 > PASS_AT_1)
    latent = shop.dial(clean, noisy, dial, 4.0, lambda skill: skill.mixed > MIXED)
    guessing = chance(source, range(HELD_OUT, HELD_OUT + plan.card_items), seed)
    for name, setting in (("tiny", dial), ("tiny-latent", latent)):
        model = shop.mixture(clean, noisy, setting)
        skills = shop.skills(model, HELD_OUT, plan.card_items)
        card = Card(
            name=name, seed=seed, dial=setting, clean_steps=plan.clean.steps, noisy_steps=plan.noisy.steps, wrong=plan.noisy.wrong,
            parameters=model.num_parameters(), items=plan.card_items, skills=skills, chance=guessing,
        )  # fmt: skip
        save(shop, model, out / name, kept / "tokenizer", card)
        say(f"{name}: dial {setting:.3f}\n{card.table()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded tiny models. About 20 minutes on one core.")
    parser.add_argument("--out", type=Path, default=Path("tiny-models"), help="folder for tiny/, tiny-latent/ and stages/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps only: shows that everything runs")
    arguments = parser.parse_args()
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:6.0f}s  {line}", file=sys.stderr, flush=True)

    make(arguments.out, arguments.seed, QUICK if arguments.quick else FULL, say)


if __name__ == "__main__":
    main()
