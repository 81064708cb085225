"""Trains TRL alone on the questions of the experiment `real`: reward, held-out answers and CPU seconds.

    python -m benchmarks.lab.trl_real --model FILE_OR_FOLDER [--seed 1] [--rounds 120]

TRL's GRPOTrainer, unchanged, takes the place of a node of the setting 8/0. Prompts, levels of difficulty,
verifier, learning rate, temperature, adapter and number of completions are the node's. The held-out questions
are those of `swarmd lab run real`, answered by swarmd with TRL's weights. TRL draws questions a step ahead,
so its levels follow the rewards a step later. Prints a JSON object for each step; CPU seconds are those of
all steps so far, without the verifier's process.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.round.pairs import positive
from testbed import ROOT
from testbed.environments import beside, default_environment, environment_of


def train(model: str, seed: int, rounds: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from p2p.types import PeerId
    from swarmd.cli.lab import _file
    from swarmd.exchange.swarm_id import curriculum_of
    from swarmd.lab.experiment import read_experiment
    from swarmd.lab.play import held_out
    from swarmd.policy.language_policy import LanguagePolicy
    from swarmd.policy.models import hub
    from swarmd.policy.models.fit import chat_of, fit, spelled_out, work_of
    from swarmd.policy.models.load import lora_config
    from swarmd.tasks.sandbox.client import Verifier
    from swarmd.tasks.source import open_tasks
    from swarmd.types import Rollout, Scored, Task

    torch.set_num_threads(1)
    experiment = read_experiment(_file("real")).with_model(model)
    config, wanted = experiment.setting("8-of-0").nodes[0], experiment.evaluation
    questions, completions = config.round.local, config.round.completions
    found, spelled = fit(config.model, work_of(config)), spelled_out(config)
    folder = hub.with_weights(found.place, lambda _: None)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=found.dtype)
    chat = chat_of(spelled.model, config.model.name, found.tokenizer, network)
    verifier = Verifier(curriculum_of(config))
    tasks, rng = open_tasks(curriculum_of(config), verifier, config.tasks.specialties), random.Random(seed)

    def evaluate(name: str) -> dict[str, float]:
        asked = held_out(open_tasks(tasks.curriculum, verifier), wanted)
        model = config.model.model_copy(update={"name": name})
        policy = LanguagePolicy.open(config.model_copy(update={"model": model}), seed)
        given = policy.generate(
            [task.question for task in asked], wanted.answers, seed=seed, temperature=wanted.temperature
        )
        policy.close()
        items = [(task.ref, answer.completions) for task, answer in zip(asked, given, strict=True)]
        right = [[reward >= 1 for reward in rewards] for rewards in verifier(items)]
        return {"pass@1": fmean(map(fmean, right)), f"pass@{wanted.answers}": fmean(map(any, right))}

    drawn: dict[int, Task] = {}

    def asked_now(rows: dict[str, list[int]]) -> dict[str, list[Any]]:
        """Return the prompts of these places; each is drawn when TRL first asks for it."""
        for place in rows["place"]:
            if place not in drawn:
                (drawn[place],) = tasks.draw(1, rng)
        prompts = [chat.tokenizer.decode(chat.prompt(drawn[place].question)) for place in rows["place"]]
        return {"prompt": prompts, "place": rows["place"]}

    def rewards_of(completion_ids: Any, place: Any, **_: Any) -> list[float]:
        read = [chat.read(ids, ended=ids[-1] in chat.ends) for ids in completion_ids]
        asked = [
            (drawn[number], tuple(text for _, text in group))
            for number, group in groupby(zip(place, read, strict=True), key=lambda pair: pair[0])
        ]
        rewards = verifier([(task.ref, texts) for task, texts in asked])
        tasks.staircase.saw(
            Scored(Rollout(task.ref, texts, PeerId("trl")), task.question, given, 0)
            for (task, texts), given in zip(asked, rewards, strict=True)
        )
        print(
            json.dumps({"reward": fmean(map(fmean, rewards)), "cpu": time.process_time() - begun}), flush=True
        )
        return [reward for given in rewards for reward in given]

    print(json.dumps({"before": evaluate(config.model.name)}), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        dataset = Dataset.from_dict({"place": range(questions * rounds * 2)}).with_transform(asked_now)
        begun = time.process_time()
        trainer = GRPOTrainer(
            network,
            rewards_of,
            GRPOConfig(
                output_dir=scratch, seed=seed, max_steps=rounds, bf16=found.dtype == torch.bfloat16,
                per_device_train_batch_size=completions, num_generations=completions,
                gradient_accumulation_steps=questions, steps_per_generation=questions,
                max_completion_length=config.generate.max_new_tokens, beta=0.0, epsilon_high=0.28,
                temperature=config.generate.temperature, learning_rate=config.train.learning_rate,
                lr_scheduler_type="constant", gradient_checkpointing=False, shuffle_dataset=False,
                use_cpu=True, report_to=[], logging_strategy="no", save_strategy="no", disable_tqdm=True,
            ),
            dataset,
            processing_class=chat.tokenizer,
            peft_config=lora_config(found.plan.lora_rank or 0, network),
        )  # fmt: skip
        trainer.train()
        cpu = time.process_time() - begun
        merged = Path(scratch) / "merged"
        trainer.model.merge_and_unload().save_pretrained(merged)
        chat.tokenizer.save_pretrained(merged)
        print(json.dumps({"cpu": cpu, "after": evaluate(str(merged))}), flush=True)
    verifier.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=120)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.here:
        train(str(Path(wanted.model).resolve()), wanted.seed, wanted.rounds)
        return
    python = environment_of("trl", default_environment("trl"))
    command = [sys.executable, "-m", "benchmarks.lab.trl_real", *sys.argv[1:], "--here"]
    raise SystemExit(subprocess.run(command, env=beside(python), cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
