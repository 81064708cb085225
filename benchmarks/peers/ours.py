"""Our side: the policy's generate and update, as in a round. `python -m benchmarks.peers.ours FOLDER`."""

import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.meter import Meter
from benchmarks.peers.protocol import serve
from benchmarks.workload import SYSTEM, read
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.types import Rollout, Scored, TaskRef


def main() -> None:
    folder = Path(sys.argv[1])
    work, questions = read(folder)
    dtype = "float32" if work.device == "cpu" else "bfloat16"
    config = NodeConfig.model_validate(
        {
            "model": {
                "name": str(folder),
                "device": work.device,
                "dtype": dtype,
                "lora": "off",
                "system_prompt": SYSTEM,
                "threads": 1,
            },
            "generate": {"max_new_tokens": work.max_new_tokens, "temperature": work.temperature},
            "train": {"learning_rate": work.learning_rate},
        }
    )
    policy, rng, meter = LanguagePolicy.open(config, seed=0), random.Random(0), Meter(work.device)

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
        policy.update(batch)
        return {"generate": generated, "tokens": sum(len(ids) for a in answers for ids in a.tokens.ids)}

    serve(play, meter)


if __name__ == "__main__":
    main()
