"""TRL's GRPOTrainer in a swarm: `SwarmGRPOTrainer`, its data set and its reward. `pip install 'swarmd[trl]'`.

    with swarmd.join("swarm:…") as swarm:
        trainer = SwarmGRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", train_dataset=dataset(swarm), swarm=swarm)
        trainer.train()

A group of the batch whose rewards are all the same has no gradient. It is replaced by an informative group of
another node: its question, re-encoded with this tokenizer, its text, and advantages by this node's verifier,
weighed by `[sharing] weigh`. The trainer's own informative groups are shared. Everything else is TRL's.

Two private methods of TRL are used, only in `SwarmGRPOTrainer`: `_generate_and_score_completions` is
extended, and `_get_per_token_logps_and_entropies` computes the old log-probabilities of external text if TRL
needs them. As in SAPO, they are this policy's log-probabilities.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any

import torch

from swarmd.errors import ConfigError
from swarmd.experience.batch import ANSWER_TOO_LONG, QUESTION_TOO_LONG
from swarmd.library.joined_swarm import JoinedSwarm, ScoredGroup
from swarmd.policy.models.chat import SYSTEM_PROMPT, ids_of
from swarmd.types import Completion, Task, TaskRef

# The lowest and the newest version of TRL with which the private methods were tested.
LOWEST_TRL, NEWEST_TRL = "1.0", "1.16"
# A smaller advantage counts as 0.
NO_ADVANTAGE = 1e-6

try:
    from accelerate.utils import gather_object
    from datasets import Dataset
    from trl import GRPOTrainer
except ImportError as error:
    raise ConfigError(f"TRL is missing ({error}). Run `pip install 'swarmd[trl]'`.") from None


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


if not _release(LOWEST_TRL) <= _release(version("trl")) <= _release(NEWEST_TRL):
    raise ConfigError(
        f"swarmd.trl supports TRL {LOWEST_TRL} to {NEWEST_TRL}, and {version('trl')} is installed. Run"
        " `pip install 'swarmd[trl]'`."
    )


def dataset(swarm: JoinedSwarm, size: int = 1000, system_prompt: str = SYSTEM_PROMPT) -> Any:
    """Draw training questions of all levels as a data set: columns prompt, specialty and n.

    system_prompt: asks for <answer>…</answer>; "": none.
    """
    head = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return Dataset.from_list(
        [
            {
                "prompt": [*head, {"role": "user", "content": task.question}],
                "specialty": task.ref.specialty,
                "n": task.ref.n,
            }
            for task in swarm.tasks.draw(size, all_levels=True)
        ]
    )


def reward_func(swarm: JoinedSwarm) -> Callable[..., list[float]]:
    """Return a reward function for TRL: 1 for a right answer, by the contained verifier, else 0."""

    def right_answer(
        completions: Sequence[Any], specialty: Sequence[str], n: Sequence[int], **_: Any
    ) -> list[float]:
        pairs = zip(map(TaskRef, specialty, n), map(_text, completions), strict=True)
        items = [(ref, [text for _, text in same]) for ref, same in groupby(pairs, key=lambda pair: pair[0])]
        return [reward for rewards in swarm.score(items) for reward in rewards]

    return right_answer


class SwarmGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer that shares its informative groups, and replaces the rest by other nodes' groups."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *more: Any,
        swarm: JoinedSwarm,
        **options: Any,
    ) -> None:
        """Build the trainer.

        swarm: a joined swarm; under torchrun every rank calls `swarmd.join`. reward_funcs: by default
        `reward_func(swarm)`. The other arguments are TRL's.

        Raises ConfigError for options that cannot be combined with external groups.
        """
        _refuse(args, train_dataset, options)
        super().__init__(model, reward_funcs or reward_func(swarm), args, train_dataset, *more, **options)
        self.swarm, self.replaced = swarm, 0
        either: Any = self.processing_class
        self._words: Any = getattr(either, "tokenizer", either)
        # Ids that end an answer; before TRL 1.15 only the tokenizer's end token, which Gemma never writes.
        self._ends: Sequence[int] = getattr(self, "eos_token_ids", [self._words.eos_token_id])
        self._end: int = self._words.eos_token_id  # the end token that this model writes
        self._head: list[Any] = []  # messages before the question in a prompt

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return out
        size = self.num_generations
        self._end = next((ids[-1] for ids, ended in self._own(out) if ended), self._end)
        informative = (out["advantages"].view(-1, size).abs().amax(dim=1) > NO_ADVANTAGE).tolist()
        self._share(inputs, out, [group for group, has in enumerate(informative) if has])
        free = [group for group, has in enumerate(informative) if not has]
        self._head = inputs[0]["prompt"][:-1]
        # Each rank takes as many of the groups that rank 0 collects as it has free places
        wanted, rank = gather_object([len(free)]), self.accelerator.process_index
        theirs = self.swarm.collect(sum(wanted), unfit=self._unfit)
        mine = theirs[sum(wanted[:rank]) :][: len(free)]
        self.replaced += len(mine)
        return self._replace(out, dict(zip(free, mine, strict=False))) if theirs else out

    def _share(self, inputs: Sequence[dict[str, Any]], out: dict[str, Any], groups: Sequence[int]) -> None:
        size, own, answers = self.num_generations, [], list(self._own(out))
        for group in groups:
            row, these = inputs[group * size], answers[group * size : (group + 1) * size]
            texts = self._words.batch_decode(
                [ids for ids, _ in these], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            ends = [ended for _, ended in these]
            own.append((row["specialty"], row["n"], row["prompt"][-1]["content"], texts, ends))
        for specialty, n, question, texts, ended in gather_object(own):
            said = [Completion(text, end) for text, end in zip(texts, ended, strict=True)]
            self.swarm.share(Task(TaskRef(specialty, n), question, {}), said)

    def _own(self, out: dict[str, Any]) -> Iterator[tuple[list[int], bool]]:
        """Yield the ids of each completion of the batch, and whether it ended by itself."""
        for ids, mask in zip(out["completion_ids"], out["completion_mask"], strict=True):
            # A fully masked completion was truncated, and is not to be trained on; peers still score its
            # text.
            whole = bool(mask.any())
            kept = ids[mask.bool() if whole else slice(None)].tolist()
            yield kept, whole and kept[-1] in self._ends

    def _unfit(self, group: ScoredGroup) -> str | None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit and len(self._prompt(group.question)) + self.max_completion_length > limit:
            return QUESTION_TOO_LONG
        right = [c for c, reward in zip(group.completions, group.rewards, strict=True) if reward > 0]
        if any(len(self._answer(completion)) > self.max_completion_length for completion in right):
            return ANSWER_TOO_LONG
        return None

    def _prompt(self, question: str) -> list[int]:
        messages = [*self._head, {"role": "user", "content": question}]
        encoded = self._words.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self.chat_template_kwargs
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def _answer(self, completion: Completion) -> list[int]:
        # Control tokens spelled out in external text stay text.
        ids = ids_of(self._words, completion.text, split_special_tokens=True)
        return [*ids, self._end] if completion.ended else ids or [self._end]

    def _replace(self, out: dict[str, Any], theirs: dict[int, ScoredGroup]) -> dict[str, Any]:
        """Write external groups into these places of the batch. All ranks call it together."""
        rows: dict[int, tuple[list[int], list[int], bool, float]] = {}
        for place, group in theirs.items():
            prompt = self._prompt(group.question)
            # Of a larger group, take the completions with the largest advantages. With a smaller
            # group, some of this node's texts stay in place; they have no advantage.
            best = sorted(
                zip(group.completions, group.advantages, strict=True), key=lambda pair: -abs(pair[1])
            )
            for i, (completion, advantage) in enumerate(best[: self.num_generations]):
                answer, most = self._answer(completion), self.max_completion_length
                # Text that ends with its answer is complete: `score_others` cut off the text after it.
                whole = len(answer) <= most and (
                    completion.ended or self.swarm.curriculum.answer_end(completion.text) is not None
                )
                rows[place * self.num_generations + i] = prompt, answer[:most], whole, advantage
        out, pad, size = dict(out), self._words.pad_token_id, out["prompt_ids"].size(1)
        longest = max([size, *(len(prompt) for prompt, *_ in rows.values())])
        width = max([out["completion_ids"].size(1), *(len(answer) for _, answer, *_ in rows.values())])
        for name, fill in (("prompt_ids", pad), ("prompt_mask", 0)):
            out[name] = torch.nn.functional.pad(out[name], (longest - size, 0), value=fill)
        for name, fill in PER_TOKEN.items():
            # A ratio per sequence, of width 1, is not padded.
            if name in out and (out[name].size(1) > 1 or name != "importance_sampling_ratio"):
                out[name] = torch.nn.functional.pad(
                    out[name], (0, width - out[name].size(1)), value=pad if fill is None else fill
                )
        out["advantages"] = out["advantages"].clone()
        for row, (prompt, answer, whole, advantage) in rows.items():
            _write(out["prompt_ids"], out["prompt_mask"], row, longest - len(prompt), prompt, pad)
            _write(out["completion_ids"], out["completion_mask"], row, 0, answer, pad)
            if self.mask_truncated_completions and not whole:
                out["completion_mask"][row] = 0
            out["advantages"][row] = advantage
        out["num_items_in_batch"] = self.accelerator.gather(out["completion_mask"].sum()).sum()
        if "old_per_token_logps" in out:
            self._take_as_ours(out, list(rows))
        return out

    def _take_as_ours(self, out: dict[str, Any], rows: Sequence[int]) -> None:
        """Give these rows this policy's log-probabilities, as if it had written their text."""
        chosen = list(rows) or [0]  # with a sharded model, every rank has to make the pass
        ids = torch.cat([out["prompt_ids"][chosen], out["completion_ids"][chosen]], dim=1)
        mask = torch.cat([out["prompt_mask"][chosen], out["completion_mask"][chosen]], dim=1)
        with torch.no_grad():
            found, *_ = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                mask,
                out["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        for name in ("old_per_token_logps", "sampling_per_token_logps"):
            if name in out and rows:
                out[name][list(rows)] = found.to(out[name].dtype)
        if "importance_sampling_ratio" in out and rows:
            out["importance_sampling_ratio"][list(rows)] = 1.0


# TRL's tensors with a value per completion token, and their padding value; None: the pad token's id.
PER_TOKEN: dict[str, float | None] = {
    "completion_ids": None,
    "completion_mask": 0,
    "old_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
}


def _write(ids: Any, mask: Any, row: int, at: int, values: Sequence[int], pad: int) -> None:
    ids[row], mask[row] = pad, 0
    ids[row, at : at + len(values)] = torch.tensor(values, device=ids.device)
    mask[row, at : at + len(values)] = 1


def _text(completion: Any) -> str:
    return str(completion if isinstance(completion, str) else completion[-1]["content"])


def _refuse(args: Any, train_dataset: Any, options: dict[str, Any]) -> None:
    """Raise ConfigError for options that do not work with external groups, before anything is loaded."""
    if args is not None and args.beta:
        raise ConfigError(
            f"beta is {args.beta:g}, and external text has no log-probabilities of a reference model. Set"
            " beta=0.0."
        )
    if (
        args is not None
        and (args.per_device_train_batch_size * args.steps_per_generation) % args.num_generations
    ):
        raise ConfigError(
            "a group would be spread over several processes. Make per_device_train_batch_size ×"
            f" steps_per_generation a multiple of num_generations, {args.num_generations}."
        )
    if used := sorted(name for name in ("tools", "rollout_func", "environment_factory") if options.get(name)):
        raise ConfigError(
            f"{', '.join(used)}: not supported: nodes share one answer to one question. Leave it out."
        )
    columns = getattr(train_dataset, "column_names", None) or ["prompt", "specialty", "n"]
    if missing := sorted({"prompt", "specialty", "n"} - set(columns)):
        raise ConfigError(
            f"train_dataset has no column {', '.join(missing)}: other nodes could not make its questions."
            " Use swarmd.trl.dataset(swarm)."
        )
