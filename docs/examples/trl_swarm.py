"""TRL's trainer in a swarm, with an embedded model, on a CPU: some minutes for 100 steps.

python docs/examples/trl_swarm.py STATE_FOLDER [BOOTSTRAP_ADDRESS…]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import swarmd
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.trl import SwarmGRPOTrainer, dataset

STEPS = 100
model = WEIGHTS["tiny-latent"]  # or a name on the hub
config = GRPOConfig(
    output_dir=sys.argv[1] + "/trl",
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=16,
    max_steps=STEPS,
    learning_rate=6e-4,
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
)
with swarmd.join(curriculum="tiny-9", bootstrap=sys.argv[2:], folder=sys.argv[1], external=8) as swarm:
    print("others can join with", swarm.report()["addresses"])
    trainer = SwarmGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=config,
        train_dataset=dataset(swarm, 8 * STEPS, system_prompt=""),  # a larger model gets the built-in one
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        swarm=swarm,
    )
    trainer.train()
    print(f"{trainer.replaced} external groups trained on; {swarm.report()['cause']}")
