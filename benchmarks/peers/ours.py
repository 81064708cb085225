"""swarmd's side of a comparison: the policy's generate and update, as in a round.

`python -m benchmarks.peers.ours FOLDER [--answer]`. --answer: only generate, and give every answer the full
length, as on llama.cpp's side.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import serve
from benchmarks.round.meter import Meter
from benchmarks.round.workload import SYSTEM, read
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.types import Rollout, Scored, TaskRef


def main() -> None:
    folder = Path(sys.argv[1])
    work, questions = read(folder)
    config = NodeConfig.model_validate(
        {
            "model": {
                "name": str(folder),
                "device": work.device,
                "dtype": work.torch_dtype,
                "lora": "on" if work.lora else "off",
                "system_prompt": SYSTEM,
                "threads": 1,
            },
            "round": {"local": len(questions), "external": 0, "completions": work.completions},
            "generate": {"max_new_tokens": work.max_new_tokens, "temperature": work.temperature},
            "train": {"learning_rate": work.learning_rate},
        }
    )
    rng, meter = random.Random(0), Meter(work.device)
    imported = meter.peak_mib()
    policy = LanguagePolicy.open(config, seed=0)
    if "--answer" in sys.argv:
        policy._sampling = replace(policy._sampling, ends=frozenset())
    planned = imported + policy._loaded.plan.expected / 2**20

    def play() -> dict[str, Any]:
        begun = meter.now()
        answers = policy.generate(questions, work.completions)
        generated = meter.now() - begun
        batch = [
            Scored(
                Rollout(TaskRef("bf", n), answer.completions, PeerId("us")), question,
                tuple(float(rng.random() < 0.5) for _ in answer.completions), 1, answer.tokens,
            )
            for n, (question, answer) in enumerate(zip(questions, answers, strict=True))
        ]  # fmt: skip
        if "--answer" not in sys.argv:
            policy.update(batch)
        tokens = sum(len(ids) for a in answers for ids in a.tokens.ids)
        return {"generate": generated, "tokens": tokens, "planned_mib": planned}

    serve(play, meter)


if __name__ == "__main__":
    main()
