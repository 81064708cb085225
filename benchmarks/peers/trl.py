"""TRL's side of a comparison: its own GRPOTrainer, unchanged, from its published package.

`python benchmarks/peers/trl.py FOLDER [--defaults]`. It runs in a separate environment. The settings are the
cheapest that do the same work as swarmd: one update on all completions, no reference model (beta 0), no
gradient checkpointing unless --defaults is given, no logging, no saving; on CUDA in bfloat16. With an
adapter, the update goes question by question, which takes less memory and the same time.
"""

import json
import random
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
# Otherwise `import trl` would import this file.
sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
sys.path.append(str(Path(__file__).parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.peers.protocol import say, wait_for_turn  # noqa: E402
from benchmarks.round.meter import Meter  # noqa: E402

ROUNDS = 10_000  # the driver ends the process long before that


class Turns(TrainerCallback):
    """Begins a step when the driver asks for one, and reports it when it ends."""

    def __init__(self, figures, meter):
        self.figures, self.meter = figures, meter

    def on_step_begin(self, *_, **__):
        wait_for_turn()
        self.figures.update(generate=0.0, tokens=0)
        self.begun = self.meter.begin()

    def on_step_end(self, *_, **__):
        say({**self.figures, "seconds": self.meter.now() - self.begun, "peak_mib": self.meter.peak_mib()})


def main() -> None:
    folder = Path(sys.argv[1])
    document = json.loads((folder / "work.json").read_text())
    work, questions = document["work"], document["questions"]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cuda, meter = work["device"] == "cuda", Meter(work["device"])
    figures = {"generate": 0.0, "tokens": 0}

    class Timed(GRPOTrainer):
        """The trainer, with its time measured; nothing else is changed."""

        def _generate_single_turn(self, *arguments, **keywords):
            begun = meter.now()
            result = super()._generate_single_turn(*arguments, **keywords)
            figures["generate"] += meter.now() - begun
            figures["tokens"] += sum(map(len, result[1] if isinstance(result[1], list) else result[0]))
            return result

    messages = [
        [{"role": "system", "content": document["system"]}, {"role": "user", "content": question}]
        for question in questions
    ]
    rng, parts = random.Random(0), len(questions) if work["lora"] else 1
    adapter = None
    if work["lora"]:
        from peft import LoraConfig

        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, work["torch_dtype"])),
        peft_config=adapter,
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=lambda completions, **_: [float(rng.random() < 0.5) for _ in completions],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in messages] * 50),
        callbacks=[Turns(figures, meter)],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=len(questions) * work["completions"] // parts,
            gradient_accumulation_steps=parts,
            steps_per_generation=parts,
            num_generations=work["completions"],
            max_completion_length=work["max_new_tokens"],
            max_steps=ROUNDS,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            temperature=work["temperature"],
            learning_rate=work["learning_rate"],
            gradient_checkpointing="--defaults" in sys.argv,
            shuffle_dataset=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            use_cpu=not cuda,
            bf16=work["torch_dtype"] == "bfloat16",
            disable_tqdm=True,
        ),
    )
    say({"ready": True})
    trainer.train()


if __name__ == "__main__":
    main()
