"""TRL's side: its own GRPOTrainer, unchanged, from its published package in an environment of its own.

`python benchmarks/peers/trl.py FOLDER [--checkpointing]`. The settings are the cheapest that do the same work: one update on all
completions, no reference model (beta 0), gradient checkpointing off unless asked for (TRL's default is on), no logging, no saving.
"""

import json
import random
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]  # or this file would be `import trl`
sys.path.append(str(Path(__file__).parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.peers.protocol import peak_mib, say, wait_for_turn  # noqa: E402

ROUNDS = 10_000  # the driver hangs up long before


class Turns(TrainerCallback):
    """A step begins when the driver says so, and is reported when it ends."""

    def __init__(self, figures):
        self.figures = figures

    def on_step_begin(self, *_, **__):
        wait_for_turn()
        self.figures.update(generate=0.0, tokens=0)
        self.begun = time.process_time()

    def on_step_end(self, *_, **__):
        say({**self.figures, "cpu": time.process_time() - self.begun, "peak_mib": peak_mib()})


def main() -> None:
    folder = Path(sys.argv[1])
    document = json.loads((folder / "work.json").read_text())
    work, questions = document["work"], document["questions"]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    figures = {"generate": 0.0, "tokens": 0}

    class Timed(GRPOTrainer):
        """Where the time goes; nothing is changed."""

        def _generate_single_turn(self, *arguments, **keywords):
            begun = time.process_time()
            result = super()._generate_single_turn(*arguments, **keywords)
            figures["generate"] += time.process_time() - begun
            figures["tokens"] += sum(map(len, result[1] if isinstance(result[1], list) else result[0]))
            return result

    messages = [
        [{"role": "system", "content": document["system"]}, {"role": "user", "content": question}] for question in questions
    ]
    rng = random.Random(0)
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=lambda completions, **_: [float(rng.random() < 0.5) for _ in completions],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in messages] * 50),
        callbacks=[Turns(figures)],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=work["questions"] * work["completions"],
            num_generations=work["completions"],
            max_completion_length=work["max_new_tokens"],
            max_steps=ROUNDS,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            temperature=work["temperature"],
            learning_rate=work["learning_rate"],
            gradient_checkpointing="--checkpointing" in sys.argv,
            shuffle_dataset=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    say({"ready": True})
    trainer.train()


if __name__ == "__main__":
    main()
