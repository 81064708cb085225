"""The newest checkpoint's model, for `swarmd chat` and `swarmd serve`.

It runs in a separate process with weights but no optimizer, and answers as the policy does in training
(`decode`). The node may keep running: `renew` loads the weights of a newer checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from swarmd.cli.trained.snapshot import read_snapshot
from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError, NoModel
from swarmd.policy.export import FILES, base_network, put_trained
from swarmd.policy.inference.decode import Sampling, decode
from swarmd.policy.inference.select import NO_LIMIT_TOKENS
from swarmd.policy.models import hub
from swarmd.policy.models.architecture import context_of
from swarmd.policy.models.chat import TemplateFails, ids_of
from swarmd.policy.models.device import choose_device, seeded, within_memory
from swarmd.policy.models.fit import chat_of, work_of
from swarmd.policy.models.load import with_adapter
from swarmd.policy.models.tokenizer import load_tokenizer
from swarmd.policy.training.policy_files import ModelIdentity, described
from swarmd.trainer.checkpoint import folder_name, saved_in

Message = Mapping[str, str]  # role and content
# The decoder's output for the first bytes of a letter whose last bytes are in the next token.
_HALF_LETTER: Final = "\ufffd"


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    temperature: float | None = None  # None: as in training
    tokens: int | None = None  # maximum number of tokens; None: as many as in training
    stop: tuple[str, ...] = ()  # the answer ends before the first of these
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    ended: bool  # True: by an end token or a stop; False: at the limit
    prompt_tokens: int
    tokens: int


class _Stopped(Exception):
    """The answer contains a text of `AnswerSettings.stop`."""


class TrainedModel:
    """Answers with the newest checkpoint of a state folder. Used from one thread at a time."""

    def __init__(self, state_dir: Path, config: NodeConfig) -> None:
        """Load the newest checkpoint.

        Raises SwarmdError, also NoModel, Unreachable and CheckpointUnfit.

        Args:
            config: the node's. Only the model's device and system prompt, and the sampling settings, are
                used.
        """
        self._state_dir, self._config = state_dir, config
        self.round = -1
        self._identity: ModelIdentity | None = None
        self._network: Any = None
        self.renew()

    @property
    def name(self) -> str:
        """The name of the base model, as a client writes it."""
        assert self._identity is not None
        return self._identity.source

    def renew(self) -> bool:
        """Load the newest checkpoint; return whether its round changed."""
        newest = saved_in(self._state_dir / "checkpoints")[-1:]
        if newest and newest[0].name == folder_name(self.round):
            return False
        run = read_snapshot(self._state_dir, FILES)
        if (identity := described(run.files["policy.json"])) != self._identity:
            self._load(identity)
        put_trained(self._network, run.files["weights.safetensors"], identity.source)
        changed, self.round = run.round != self.round, run.round
        return changed

    def _load(self, identity: ModelIdentity) -> None:
        place, model = hub.locate(identity.source, identity.revision), self._config.model
        network: Any = base_network(place, identity)
        self.chat = chat_of(model, identity.source, load_tokenizer(place, network), network, plain=True)
        if identity.lora_rank is not None:
            network = with_adapter(network, identity.lora_rank, seed=0)
        self._device = choose_device(model.device)
        with within_memory(
            NoModel(
                f"not enough memory on {self._device} for the weights of {identity.source}: other programs,"
                " such as the node, use it. Use --device cpu, or stop the node."
            )
        ):
            self._network, self._identity = network.to(self._device).eval(), identity
        self.context = context_of(network.config) or NO_LIMIT_TOKENS

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return a conversation's tokens, up to the start of the next answer. Raises ConfigError."""
        try:
            text = self.chat.conversation(messages)
        except TemplateFails as error:
            raise ConfigError(
                f"the model's chat template refuses this conversation: {error}. Let a user and the assistant"
                " speak in turn."
            ) from None
        if len(ids := ids_of(self.chat.tokenizer, text)) >= self.context:
            raise ConfigError(
                f"the conversation has {len(ids):,} tokens, and the model's context is {self.context:,}."
                " Shorten it, or begin a new one."
            )
        return ids

    def answer(
        self,
        prompt: Sequence[int],
        settings: AnswerSettings = AnswerSettings(),
        told: Callable[[str], object] = lambda _: None,
    ) -> Answer:
        """Draw one answer.

        Args:
            prompt: a result of `prompt`.
            told: called with each piece of text as it comes; may raise to end the answer.

        Raises ConfigError if memory is short.
        """
        ids: list[int] = []
        text, said, held = "", 0, max(map(len, settings.stop), default=1) - 1

        def drawn(token: Any) -> None:
            nonlocal text, said
            ids.append(int(token[0]))
            text = self.chat.read(ids, ended=ids[-1] in self.chat.ends).text
            if ends := [at for stop in settings.stop if (at := text.find(stop)) >= 0]:
                text = text[: min(ends)]
                raise _Stopped
            # The last characters may be half of a letter, or the beginning of a stop.
            if not text.endswith(_HALF_LETTER) and len(text) - held > said:
                told(text[said : len(text) - held])
                said = len(text) - held

        config = self._config
        sampling = Sampling(
            limit=settings.tokens or work_of(config).new_tokens,
            context=self.context,
            ends=self.chat.ends,
            # Rounded, because a temperature too small for float32 means 0.
            temperature=config.generate.temperature
            if settings.temperature is None
            else round(settings.temperature, 6),
        )
        generator = seeded(self._device, settings.seed)
        try:
            with within_memory(
                ConfigError(
                    f"not enough memory on {self._device} for {len(prompt):,} tokens and an answer of up to"
                    f" {sampling.limit:,}. Shorten it, ask for fewer (max_tokens), or begin a new one."
                )
            ):
                decode(self._network, [prompt], 1, sampling, generator, NO_LIMIT_TOKENS, drawn=drawn)
            ended = bool(ids) and ids[-1] in self.chat.ends
        except _Stopped:
            ended = True
        if text[said:]:
            told(text[said:])
        return Answer(text, ended, len(prompt), len(ids))
