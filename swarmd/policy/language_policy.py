"""The policy of a node: a language model that answers questions and learns from scored rollouts."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
from msgspec import structs

from swarmd.config.config import NodeConfig
from swarmd.errors import NoModel
from swarmd.experience.advantages import advantages, unweighed
from swarmd.experience.batch import ANSWER_TOO_LONG, QUESTION_TOO_LONG, UNKNOWN_CHARACTERS, UNOPENED
from swarmd.policy.inference.decode import Done, Sample, Sampling
from swarmd.policy.inference.engine import OWN
from swarmd.policy.inference.engine_driver import EngineDriver
from swarmd.policy.inference.own_engine import OwnEngine
from swarmd.policy.inference.select import NO_LIMIT_TOKENS, importance_cap, open_engine
from swarmd.policy.models.architecture import context_of
from swarmd.policy.models.chat import Chat, Examples
from swarmd.policy.models.device import (
    LORA_FROM_PARAMETERS,
    choose_device,
    free_memory,
    keep_freed_memory,
    limit_memory,
    seeded,
    use_threads,
)
from swarmd.policy.models.files.progress import Download
from swarmd.policy.models.fit import chat_of, spelled_out, work_of
from swarmd.policy.models.load import Loaded, load_model
from swarmd.policy.training import policy_files
from swarmd.policy.training.learner import Learner, Learning
from swarmd.policy.training.losses import LOSSES, MEANS
from swarmd.policy.training.packing import Row, encoded, rows_of
from swarmd.state.status import ModelDescription
from swarmd.types import Completion, Generation, Observe, Scored, Tokens, UpdateReport, Weigh

log = logging.getLogger(__name__)

# Freed memory is kept for models up to this size. At 135 million parameters this saves 10 ms of system time
# per decoding step; no larger model was measured.
KEEP_FREED_PARAMETERS = 150_000_000
# The values for train.learning_rate = 0, if all weights are trained: of models up to a number of parameters.
RATES = (
    # tiny on tiny-9, 160 rounds of 8/0, three seeds: held-out pass@1 from 0.31 to 0.65; at 2e-4 and 5e-4 to
    # 0.64, at 1e-3 to 0.49 (`swarmd lab run learning-rate`).
    (LORA_FROM_PARAMETERS, 3e-4),
    # SmolLM2-135M, three subjects of tiny-9, 40 rounds of 8/0, three seeds: rewards added up 8.5; at 1e-5
    # 5.8, at 1e-4 5.2; at 1e-6 1.5, at 3e-6 2.3, two seeds (`swarmd lab run real-rate`).
    (150_000_000, 3e-5),
    # A usual value for post-training, not measured here.
    (math.inf, 1e-6),
)
# The same with LoRA of rank 16: 8.6; at 5e-5 5.5, at 1e-4 7.5, at 4e-4 8.3. At 1e-5 it hardly learns.
RATE_LORA = 2e-4


class LanguagePolicy:
    """Implements `swarmd.protocols.Policy`, `LogprobPolicy` and `SelectivePolicy`. Build one with `open`.

    network: the model that is trained. parameters: their number. fingerprint: identifies the base weights
        (`fingerprint_of`). notes: notes for the operator about the model's files.
    trained: the weights that updates change: all weights, or the adapter's.
    """

    def __init__(
        self,
        loaded: Loaded,
        chat: Chat,
        learner: Learner,
        loss: Callable[[Scored], Sequence[float]],
        mean: Callable[[Sequence[int]], Sequence[float]],
        sampling: Sampling,
        generator: torch.Generator,
        driver: EngineDriver,
        *,
        versions: bool = False,
        on_policy: bool = False,
    ) -> None:
        """Store the parts that `open` has made.

        Args:
            loaded: the model and its files.
            chat: the prompt format and tokenizer.
            learner: takes the update steps.
            loss: returns the advantages of a rollout's completions.
            mean: returns the completions' weights in an update from their lengths (`losses.MEANS`).
            sampling: the configured sampling parameters.
            generator: source of the random numbers.
            driver: drives the engine that answers; closed with the policy.
            versions: whether each token records the version of the weights that drew it.
            on_policy: whether the node's own text in a batch was always drawn last by the network itself.
        """
        self._loaded, self._chat, self._sampling, self._generator = loaded, chat, sampling, generator
        self._loss, self._mean, self._driver = loss, mean, driver
        self._step: Callable[[Learner, Sequence[Row]], UpdateReport] = Learner.step
        self._versions, self._on_policy = versions, on_policy
        self.learner, self.trained = learner, learner.weights
        self.network, self.device, self.parameters = loaded.network, loaded.device, loaded.shape.parameters
        self.fingerprint, self.notes = loaded.fingerprint, loaded.notes

    @classmethod
    def open(
        cls,
        config: NodeConfig,
        seed: int,
        sharing: int = 1,
        free: Callable[[torch.device], int] | None = None,
        report: Callable[[Download], None] = lambda _: None,
        rest: Callable[[], object] = lambda: None,
        between: Callable[[], int] | None = None,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> "LanguagePolicy":
        """Load the configured model and its engine.

        Args:
            config: the node's configuration.
            seed: seed of sampling, and of a new adapter's weights.
            sharing: number of this run's processes on the device, including this one.
            free: returns the bytes free on a device for each of these processes.
            report: receives the progress of a download.
            rest: called often; blocks while the process must rest.
            between: called between two tokens; returns the version of the weights in use.
            loading: context that is entered while the model is looked up and loaded.

        Raises:
            NoModel, Unreachable: if the model is not available or does not fit.
            NoEngine, EngineFailed: if the engine cannot be used.
        """
        # Memory is planned for the longest prompts that a trial may choose.
        work, loss = work_of(config), LOSSES[config.train.loss]
        config = spelled_out(config)
        limit_memory(config, choose_device(config.model.device), sharing)
        free = free or partial(free_memory, processes=sharing)
        with loading():
            loaded = load_model(config.model, seed, free, work, report)
        use_threads(config, loaded.device, loaded.shape.parameters)
        # The steps of a large model are long enough without this, and its memory is scarce.
        if loaded.shape.parameters <= KEEP_FREED_PARAMETERS:
            keep_freed_memory(loaded.device)
        chat = chat_of(config.model, config.model.name, loaded.tokenizer, loaded.network)
        sampling = Sampling(
            limit=work.new_tokens,
            context=context_of(loaded.network.config) or NO_LIMIT_TOKENS,
            ends=chat.ends,
            temperature=config.generate.temperature,
        )
        _check_context(chat, sampling, loaded.source)
        learning = Learning(
            config.train.model_copy(
                update={
                    "learning_rate": config.train.learning_rate or _default_rate(loaded),
                    "importance_cap": importance_cap(config),
                }
            ),
            temperature=sampling.temperature,
            micro_batch_tokens=loaded.plan.micro_batch_tokens,
            checkpointing=loaded.plan.checkpointing,
            head_tokens=loaded.plan.head_tokens,
        )
        return cls(
            loaded,
            chat,
            Learner(loaded.network, learning, loaded.device, rest),
            lambda scored: loss.advantages(scored, config.train),
            MEANS[config.train.loss_mean],
            sampling,
            seeded(loaded.device, seed),
            EngineDriver(open_engine(config, loaded, sampling, rest, between), loaded, rest, between),
            versions=between is not None,
            on_policy=config.generate.engine == OWN
            and config.replay.mode == "off"
            and config.workers.processes == 1
            and not learning.train.importance_cap,
        )

    @property
    def description(self) -> ModelDescription:
        """A description of the model that is trained."""
        loaded = self._loaded
        return ModelDescription(
            loaded.source,
            loaded.place.revision,
            str(loaded.device),
            loaded.plan.dtype,
            loaded.shape.parameters,
            loaded.plan.lora_rank,
            new_tokens=self._sampling.limit,
            context=self._sampling.context,
            examples=len(self._chat.examples),
            opening=self._chat.opening,
            keeps_first=self.learner.reference is not None and not self._driver.foreign,
        )

    def generate(
        self,
        questions: Sequence[str],
        completions: int,
        limits: Sequence[int] = (),
        *,
        observe: Observe | None = None,
        seed: int | None = None,
        temperature: float | None = None,
    ) -> Sequence[Generation]:
        """Sample answers to each question, with their tokens and log-probabilities.

        Args:
            questions: the questions' texts.
            completions: number of answers to each question.
            limits: lower the configured limit on an answer's tokens, for each question; 0 leaves it.
            observe: replies to the texts of tasks with several turns.
            seed: a separate seed for these answers, which leaves the policy's random state unchanged.
            temperature: replaces the configured temperature.
        """
        prompts = [self._chat.prompt(q) for q in questions]
        if full := sum(len(prompt) >= self._sampling.context for prompt in prompts):
            log.warning(
                "%d of %d questions fill the model's context of %d tokens: they get no answer, and nothing is"
                " learnt from them. Choose a model with a longer context, or a shorter model.system_prompt or"
                " model.examples.",
                full,
                len(prompts),
                self._sampling.context,
            )
        own = self._sampling
        lower = tuple(min(own.limit, limit or own.limit) for limit in limits)
        sampling = replace(
            own,
            temperature=own.temperature if temperature is None else temperature,
            limit=max(lower, default=own.limit),
            limits=lower,
            reply=observe and partial(self._reply, observe),
        )
        return [
            Generation(
                tuple(map(self._read, samples)),
                Tokens(
                    tuple(s.ids for s in samples),
                    tuple(s.logprobs for s in samples),
                    tuple(s.versions for s in samples) if self._versions else (),
                    sampled=tuple(s.drawn for s in samples) if observe else (),
                ),
            )
            for samples in self._decode(prompts, completions, sampling, seed)
        ]

    def _read(self, sample: Sample) -> Completion:
        if sample.drawn:
            return self._chat.read_turns(sample.ids, sample.ended, sample.drawn)
        return self._chat.read(sample.ids, sample.ended)

    def _reply(
        self, observe: Observe, asked: Sequence[tuple[int, Sequence[int], Sequence[bool]]]
    ) -> Sequence[Sequence[int]]:
        """Give the texts of turns that ended to `observe`, and encode the observations.

        Decoding calls this between two turns (`decode.Reply`).
        """
        texts = [(i, self._chat.read_turns(ids, True, drawn).texts) for i, ids, drawn in asked]
        return [() if seen is None else self._chat.turn(seen) for seen in observe(texts)]

    def answer(self, question: str, observe: Observe | None = None) -> Completion:
        """Return one greedy answer, without drawing random numbers."""
        return self.greedy([question], observe)[0]

    def next_text(self, question: str, turns: Sequence[tuple[str, str]]) -> Completion:
        """Return the greedy text after these turns: pairs of an answered text and its observation."""
        before = Completion(self._chat.opening, False, tuple(text for text, _ in turns))
        ids, _ = self._chat.encode_turns(before, [seen for _, seen in turns], self._sampling.context)
        sampling = replace(self._sampling, temperature=0.0)
        ((sample,),) = self._decode([self._chat.prompt(question) + ids], 1, sampling)
        return self._read(sample)

    def first_answer(self, question: str, observe: Observe | None = None) -> Completion:
        """Return one greedy answer by the weights from before training."""
        reference = self.learner.reference
        assert reference is not None and not self._driver.foreign
        with reference.in_place():
            return self.answer(question, observe)

    def greedy(self, questions: Sequence[str], observe: Observe | None = None) -> Sequence[Completion]:
        """Return one greedy answer to each question, without drawing random numbers."""
        prompts = [self._chat.prompt(question) for question in questions]
        reply = observe and partial(self._reply, observe)
        answers = self._decode(prompts, 1, replace(self._sampling, temperature=0.0, reply=reply))
        return [self._read(sample) for (sample,) in answers]

    def update(self, batch: Sequence[Scored], weigh: Weigh = unweighed) -> UpdateReport:
        """Take one policy-gradient step on the batch; see `Learner.step`.

        No step is taken if no completion has an advantage.
        """
        given = [advantages(scored, self._loss, weigh) for scored in batch]
        rows = rows_of(batch, given, self._chat, self._sampling.limit, self._sampling.context, self._mean)
        if not rows:
            return UpdateReport()
        self._driver.sleep()
        self.learner.rest()
        self.learner.on_policy = self._on_policy and self._driver.synced == self.version
        report = self._step(self.learner, rows)
        # A skipped step taught nothing.
        return structs.replace(report, useful=sum(map(any, given)) if report.tokens else 0)

    def logprobs(self, batch: Sequence[Scored]) -> Sequence[Tokens]:
        """Return our tokens of another node's completions, with the current policy's log-probabilities.

        The tokens are truncated as in `update`.
        """
        self._driver.sleep()
        rows = [
            [Row(prompt, ids, 0.0, None, 0.0, mask=mask) for ids, mask in found]
            for prompt, found in (
                encoded(scored, self._chat, self._sampling.limit, self._sampling.context) for scored in batch
            )
        ]
        logprobs = self.learner.logprobs([row for rollout in rows for row in rollout if row.targets])
        return [
            Tokens(
                tuple(row.completion for row in rollout),
                tuple(logprobs.get(row, ()) for row in rollout),
                sampled=tuple(row.mask for row in rollout) if any(row.mask for row in rollout) else (),
                own=False,
            )
            for rollout in rows
        ]

    def unfit(self, scored: Scored) -> str | None:
        """Return why another node's rollout cannot be trained on (`protocols.SelectivePolicy`), or None.

        A wrong answer that is too long is truncated where sampling would have stopped, and stays wrong. A
        truncated right answer could become wrong, so it makes the rollout unfit. Similarly, only right
        answers must begin with this model's opening.
        """
        room = min(self._sampling.limit, self._sampling.context - len(self._chat.prompt(scored.question)))
        if room <= 0:
            return QUESTION_TOO_LONG
        completions, replies = scored.rollout.completions, scored.observations or repeat(())
        for completion, seen, reward in set(zip(completions, replies, scored.rewards, strict=False)):
            if not all(text.startswith(self._chat.opening) for text in completion.texts):
                if reward > 0:
                    return UNOPENED
                continue
            if not all(map(self._chat.has_tokens_for, completion.texts)):
                return UNKNOWN_CHARACTERS
            ids, _ = self._chat.encode_turns(replace(completion, ended=False), seen, room + 1)
            if reward > 0 and len(ids) > room:
                return ANSWER_TOO_LONG
        return None

    def stepping(self, step: Callable[[Learner, Sequence[Row]], UpdateReport]) -> "LanguagePolicy":
        """Return a copy of this policy with another step function, such as one shared by several ranks."""
        other = copy(self)
        other._step = step
        return other

    def showing(self, examples: Examples, opening: str) -> "LanguagePolicy":
        """Return a copy of this policy with other example turns and another opening; see `[model]`.

        Raises NoModel if the new prompt leaves no room for an answer.
        """
        other = copy(self)
        other._chat = self._chat.showing(examples, opening)
        _check_context(other._chat, self._sampling, self._loaded.source)
        return other

    def watch(self, done: Done) -> None:
        """Report to `done` the number of answers generated, and of completions trained on in a batch."""
        self.learner.done = done
        if isinstance(self._driver.engine, OwnEngine):
            self._driver.engine.done = done

    @property
    def version(self) -> int:
        """The number of updates that led to these weights."""
        return self.learner.updates

    def save(self, folder: Path) -> None:
        """Save the complete state into an existing folder, so that a later process can continue exactly here.

        Raises OSError if the disk is full.
        """
        for name, content in self.files():
            (folder / name).write_bytes(content)

    def files(self) -> Iterator[tuple[str, bytes | memoryview]]:
        """Yield the name and the present content of each file that `save` writes, one at a time."""
        return policy_files.contents(self._identity(), self.learner, self._generator)

    def close(self) -> None:
        """End the engine's processes. The policy cannot be used afterwards."""
        self._driver.close()

    def restore(self, folder: Path) -> bool:
        """Continue from the state that `save` wrote. Returns whether the prompts have changed since then.

        If they have, token ids and log-probabilities of that time must not be used. Raises CheckpointUnfit if
        the state belongs to another base model; see `policy_files.read`.
        """
        for note in policy_files.read(folder, self._identity(), self.learner, self._generator):
            log.warning("%s", note)
        self._driver.forget()
        before = policy_files.described((folder / "policy.json").read_bytes())
        return before.prompt != self._identity().prompt

    def load_weights(self, weights: bytes) -> None:
        """Replace all trained weights by the tensors of a safetensors file.

        Raises ValueError if they belong to another model.
        """
        policy_files.put_weights(self.trained, weights)
        self._driver.forget()

    def _identity(self) -> policy_files.ModelIdentity:
        x = self._loaded
        return policy_files.ModelIdentity(
            x.source,
            x.place.revision,
            x.fingerprint,
            x.plan.lora_rank,
            x.plan.dtype,
            x.device.type,
            hashlib.sha256(repr(self._chat.prompt("")).encode()).hexdigest()[:16],
        )

    def _decode(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, seed: int | None = None
    ) -> list[list[Sample]]:
        return self._driver.generate(
            prompts,
            copies,
            sampling,
            self._generator if seed is None else seeded(self.device, seed),
            self.version,
        )


def _check_context(chat: Chat, sampling: Sampling, source: str) -> None:
    """Raise NoModel if even an empty question leaves no room for an answer."""
    least = len(chat.prompt(""))
    if least >= sampling.context:
        raise NoModel(
            f"{source} has a context of {sampling.context:,} tokens, and the prompt takes {least:,} even for"
            f" an empty question: there is no room for an answer. Choose a model with a longer context,"
            " or a shorter model.system_prompt or model.examples."
        )
    if sampling.limit > sampling.context - least:
        log.warning(
            "answers of %s end before the %d tokens of generate.max_new_tokens: its context is %d tokens,"
            " question included",
            source,
            sampling.limit,
            sampling.context,
        )


def _default_rate(loaded: Loaded) -> float:
    whole = next(rate for most, rate in RATES if loaded.shape.parameters <= most)
    return whole if loaded.plan.lora_rank is None else RATE_LORA
