"""Prints the batches that `swarmd.trl` makes as JSON; needs a Python with TRL, see test_trl.py.

python tests/swarm/trl_program.py FOLDER
python -m torch.distributed.run --nproc-per-node 2 tests/swarm/trl_program.py FOLDER
"""

import json
import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig  # noqa: E402

import swarmd  # noqa: E402
from swarmd.policy.models.tiny import WEIGHTS  # noqa: E402
from swarmd.trl import SwarmGRPOTrainer, dataset, reward_func  # noqa: E402
from tests.processes import wait_until  # noqa: E402

FOLDER, MODEL = Path(sys.argv[1]), WEIGHTS["tiny-latent"]
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
# Like Llama 3's, this tokenizer otherwise removes spaces before punctuation.
tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left", clean_up_tokenization_spaces=True)
SPACED = "x . y"


def config(**settings: Any) -> GRPOConfig:
    common = {
        "output_dir": str(FOLDER / "out"),
        "num_generations": 4,
        "max_completion_length": 16,
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "seed": 1,
    }
    return GRPOConfig(**common | settings)


def refusals(swarm: swarmd.JoinedSwarm) -> list[str]:
    questions = dataset(swarm, 8, "")
    said, spread = [], config()
    spread.per_device_train_batch_size = 6  # so that a group is spread over several ranks
    for args, data, more in (
        (config(beta=0.1), questions, {}),
        (spread, questions, {}),
        (config(), questions, {"tools": [print]}),
        (config(), questions.remove_columns("n"), {}),
    ):
        try:
            SwarmGRPOTrainer(str(MODEL), None, args, data, swarm=swarm, **more)
        except swarmd.errors.ConfigError as error:
            said.append(str(error))
    return said


def trained(
    swarm: swarmd.JoinedSwarm, other: swarmd.JoinedSwarm, end: str = "", **settings: Any
) -> dict[str, Any]:
    """Train for two steps while another member's groups are waiting; return the first batch.

    end: an answer may also end with the model's end tokens.
    """
    batches: list[dict[str, Any]] = []
    shared: list[list[str]] = []
    ended: list[bool] = []

    class Shown(SwarmGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batches.append(super()._generate_and_score_completions(inputs))
            return batches[-1]

        def _share(self, inputs: Any, out: Any, groups: Any) -> None:
            def keep(_: Any, answers: Any) -> None:
                shared.append([one.text for one in answers])
                ended.extend(one.ended for one in answers)

            there = SimpleNamespace(share=keep)
            self.swarm, joined = there, self.swarm
            seen = {name: out[name].clone() for name in ("completion_ids", "completion_mask")}
            ids = torch.tensor(tokenizer(SPACED, add_special_tokens=False)["input_ids"])
            if seen["completion_ids"].size(1) > len(ids):
                seen["completion_ids"][1, : len(ids)], seen["completion_mask"][1, : len(ids)] = ids, 1
            super()._share(inputs, seen, [0])  # as if the group were informative
            self.swarm = joined
            super()._share(inputs, out, groups)

    tasks = other.tasks.draw(4)
    for task in tasks:
        right = f"<answer>{other.tasks.truth(task)}</answer>"
        other.share(
            task, [right, "a wrong one<|endoftext|>", "no answer, and it is cut" * 9, right, "one too many"]
        )
    # Groups of the previous run may still be there, so wait for these.
    wait_until(lambda: {task.ref for task in tasks} <= {group.ref for group in swarm._parts.pool})
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if end:
        ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)]
        model.generation_config.eos_token_id = ids
    before = [weights.clone() for weights in model.parameters()]
    trainer = Shown(
        model,
        args=config(**settings),
        train_dataset=dataset(swarm, 64, ""),
        processing_class=tokenizer,
        swarm=swarm,
    )
    trainer.train()
    out = batches[0]
    external = [i for i, row in enumerate(out["completion_ids"]) if "wrong one" in tokenizer.decode(row)]
    group = external[0] // 4 * 4
    rows = [
        tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(
            out["completion_ids"][group : group + 4], out["completion_mask"][group : group + 4], strict=True
        )
    ]
    old = out.get("old_per_token_logps")
    return {
        "shared": shared[0],
        "ended": ended[:4],
        "replaced": trainer.replaced,
        "rows": rows,
        "ends": (out["completion_ids"] * out["completion_mask"] == tokenizer.eos_token_id)[group : group + 4]
        .sum(1)
        .tolist(),
        "prompt": tokenizer.decode(out["prompt_ids"][group][out["prompt_mask"][group].bool()]),
        "advantages": [round(x, 3) for x in out["advantages"][group : group + 4].tolist()],
        "shapes": [
            list(out[name].shape)
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        ],
        "items": int(out["num_items_in_batch"]) == int(out["completion_mask"].sum()),
        "old": None if old is None else [list(old.shape), is_this_policys(out, range(group, group + 2))],
        "learned": any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)),
        "loss": all(
            torch.isfinite(torch.tensor(x["loss"])).item() for x in trainer.state.log_history if "loss" in x
        ),
    }


def is_this_policys(out: dict[str, Any], rows: range) -> bool:
    """Return whether the old log-probabilities of these rows come from the model before its first step."""
    at = slice(rows.start, rows.stop)
    ids = torch.cat([out["prompt_ids"][at], out["completion_ids"][at]], dim=1)
    mask = torch.cat([out["prompt_mask"][at], out["completion_mask"][at]], dim=1)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(
            ids, attention_mask=mask
        ).logits[:, :-1]
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, -out["completion_ids"].size(1) :]
    there = out["completion_mask"][at].bool()
    return torch.allclose(found[there], out["old_per_token_logps"][at][there], atol=1e-3)


def main() -> None:
    common: dict[str, Any] = {"curriculum": "tiny-9", "listen": LOOPBACK, "seed": 1}
    with (
        swarmd.join(folder=FOLDER / "other", completions=5, **common) as other,
        swarmd.join(
            folder=FOLDER / "own",
            bootstrap=other.report()["addresses"][:1],
            external=8,
            completions=5,
            **common,
        ) as swarm,
    ):
        found = {"refused": refusals(swarm), "once": trained(swarm, other)}
        found["turn"] = trained(swarm, other, end="</answer>")
        found["twice"] = trained(swarm, other, num_iterations=2, mask_truncated_completions=True)
        # Each of this trainer's answers is truncated after one token.
        short = {"generation_kwargs": {"max_new_tokens": 1}, "mask_truncated_completions": True}
        found["short"] = trained(swarm, other, num_iterations=2, **short)
        (task,) = swarm.tasks.draw()
        right = [{"role": "assistant", "content": f"<answer>{swarm.tasks.truth(task)}</answer>"}]
        columns = {"specialty": [task.ref.specialty] * 2, "n": [task.ref.n] * 2}
        found["rewards"] = reward_func(swarm)([right, "no"], **columns)
    print(json.dumps(found))


def of_two_ranks() -> None:
    """Train on two ranks, and write the batches of each. Rank 0 also plays the other member."""
    rank = os.environ["RANK"]
    common: dict[str, Any] = {"curriculum": "tiny-9", "listen": LOOPBACK, "completions": 4}
    with ExitStack() as stack:
        bootstrap: list[str] = []
        if rank == "0":
            os.environ["RANK"] = ""
            other = stack.enter_context(swarmd.join(folder=FOLDER / "other", **common))
            os.environ["RANK"], bootstrap = rank, other.report()["addresses"][:1]
        swarm = stack.enter_context(
            swarmd.join(folder=FOLDER / "own", bootstrap=bootstrap, external=8, **common)
        )
        if rank == "0":
            for task in other.tasks.draw(5):
                other.share(task, [f"<answer>{other.tasks.truth(task)}</answer>", "a", "b", "c"])
            wait_until(lambda: len(swarm._parts.pool) >= 5)
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        trainer = SwarmGRPOTrainer(
            model,
            args=config(steps_per_generation=2, per_device_train_batch_size=4, num_iterations=2, max_steps=4),
            train_dataset=dataset(swarm, 64, ""),
            processing_class=tokenizer,
            swarm=swarm,
        )
        trainer.train()
        found = {"joined": swarm.joined, "replaced": trainer.replaced}
        found["weights"] = [round(float(weights.sum()), 4) for weights in model.parameters()]
        (FOLDER / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    of_two_ranks() if "RANK" in os.environ else main()
