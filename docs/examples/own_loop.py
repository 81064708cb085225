"""A training loop of one's own in a swarm, in plain PyTorch, with an embedded model on a CPU.

python docs/examples/own_loop.py STATE_FOLDER STEPS [BOOTSTRAP_ADDRESS…]
"""

import statistics
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import swarmd
from swarmd.policy.models.tiny import WEIGHTS

QUESTIONS, ANSWERS, TOKENS = 4, 8, 16
tokenizer = AutoTokenizer.from_pretrained(WEIGHTS["tiny-latent"])
model = AutoModelForCausalLM.from_pretrained(WEIGHTS["tiny-latent"], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)


def prompt(question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    return list(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def answers(question: str) -> list[swarmd.Completion]:
    ids = torch.tensor([prompt(question)] * ANSWERS)
    rows = model.generate(ids, do_sample=True, max_new_tokens=TOKENS, top_k=0)[:, ids.shape[1] :].tolist()
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [swarmd.Completion(text, tokenizer.eos_token_id in row) for text, row in zip(texts, rows)]


def loss(question: str, completion: swarmd.Completion, advantage: float) -> torch.Tensor:
    """REINFORCE with GRPO's advantage: on-policy, so there is no ratio to clip."""
    before = prompt(question)
    after = tokenizer(completion.text)["input_ids"][:TOKENS] + [tokenizer.eos_token_id] * completion.ended
    logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return advantage * torch.nn.functional.cross_entropy(logits, torch.tensor(after), reduction="sum")


with swarmd.join(curriculum="tiny-9", bootstrap=sys.argv[3:], folder=sys.argv[1]) as swarm:
    for step in range(int(sys.argv[2])):
        tasks = swarm.tasks.draw(QUESTIONS)
        own = [answers(task.question) for task in tasks]
        rewards = swarm.score([(task.ref, texts) for task, texts in zip(tasks, own)])
        rows = []
        for task, texts, earned in zip(tasks, own, rewards):
            swarm.share(task, texts)
            mean, std = statistics.fmean(earned), statistics.pstdev(earned) + 1e-4
            rows += [(task.question, t, (r - mean) / std) for t, r in zip(texts, earned)]
        for group in swarm.collect(QUESTIONS):
            rows += [(group.question, *pair) for pair in zip(group.completions, group.advantages)]
        if useful := [loss(*row) for row in rows if row[2]]:
            optimizer.zero_grad()
            (torch.stack(useful).mean() / TOKENS).backward()
            optimizer.step()
        mean = statistics.fmean(map(statistics.fmean, rewards))
        print(f"step {step}: reward {mean:.3f}, rollouts of other nodes {swarm.report()['collected']}")
