"""The settings of a node: one frozen tree of sections, with defaults and limits.

It does not import torch, because the daemon reads it too. node_config.example.toml has every key with its
default. `swarmd.config.sources` reads file, environment and flags.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from p2p.address import parse_bootstrap, parse_listen
from p2p.engines import offered
from swarmd.config.addresses import host_and_port, web_address
from swarmd.config.amounts import checked, percent, rate, size
from swarmd.config.curriculum_name import EXPECTED, curriculum_name, reward_file
from swarmd.config.hours import window
from swarmd.config.messages import nearest
from swarmd.config.own_strategy import take_name
from swarmd.config.profiles import DEFAULT, PROFILES
from swarmd.experience.strategies import TAKES, SharingSettings
from swarmd.policy.training.losses import LOSSES, MEANS, LossSettings


def _p2p_engine(name: str) -> str:
    """Validate `swarm.engine`: a built-in engine, or one of an installed package."""
    own = ("libp2p", "none")
    if name in own:
        return name
    known = [*own, *sorted(offered().keys() - set(own))]
    if name not in known:
        packages = (
            '; "hivemind" comes with the package swarmd-engine-hivemind'
            if name == "hivemind"
            else nearest(name, known)
        )
        raise ValueError(f"no installed package offers a p2p engine of this name{packages}")
    return name


_Said = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_PAIRS = TypeAdapter(tuple[tuple[_Said, _Said], ...])


def _examples(given: Any) -> str | tuple[tuple[str, str], ...]:
    """Validate `model.examples`: a word, or pairs of texts."""
    if given in ("auto", "off", "on"):
        return str(given)
    try:
        return _PAIRS.validate_python(given)
    except ValidationError:
        raise ValueError("each pair has two texts, and neither is empty") from None


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(_Section):
    # A short name, a Hugging Face repository id, or a local folder.
    name: Annotated[str, Field(min_length=1)] = "tiny"
    revision: Annotated[str, Field(min_length=1)] | None = (
        None  # commit, tag or branch on the hub; None: the default branch, recorded at first load
    )
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    # float16 and nf4 (4 bits; needs `pip install 'swarmd[bitsandbytes]'`) apply to the base under an adapter.
    dtype: Literal["auto", "float32", "bfloat16", "float16", "nf4"] = "auto"
    lora: Literal["auto", "on", "off"] = "auto"  # auto: on above 100 million parameters
    lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    # on: the chat template lets the model think first, for up to 4,096 tokens by default.
    thinking: Literal["off", "on"] = "off"
    system_prompt: str | None = None  # None: the built-in one, which asks for <answer>…</answer>; "": none
    # Example turns before each question. on: the curriculum's (`Curriculum.examples`).
    examples: Annotated[
        str | tuple[tuple[str, str], ...],
        BeforeValidator(_examples),
        Field(description='"auto", "off", "on" or a list of [question, answer] pairs'),
    ] = "auto"
    opening: str = "auto"  # text with which each answer begins; "": none
    # torch's threads; 0: on a CPU, one up to 100 million parameters, and above that the cores of limits.cpu.
    threads: Annotated[int, Field(ge=0, le=256)] = 0


class RoundConfig(_Section):
    local: Annotated[int, Field(ge=0, le=1024)] = 4  # I: questions that the node asks itself and answers
    external: Annotated[int, Field(ge=0, le=1024)] = 4  # J: maximum of other nodes' rollouts in the batch
    completions: Annotated[int, Field(ge=2, le=64)] = 8  # L
    # Maximum number of questions asked to replace one rollout without an advantage.
    resample: Annotated[int, Field(ge=0, le=64)] = 0
    # Own rounds for which an external rollout is kept.
    max_age: Annotated[int, Field(ge=1, le=1000)] = 2
    train: Literal["on", "off"] = "on"  # off: a frozen model that answers and shares, and learns nothing
    rounds: Annotated[int, Field(ge=0)] = 0  # stop after this many rounds; 0: run forever
    # Minimum seconds of a round, which leaves time to other programs.
    pace: Annotated[float, Field(ge=0, le=86_400)] = 0.0

    @property
    def wanted(self) -> int:
        """Maximum number of external rollouts that a round can use."""
        return self.external if self.train == "on" else 0


class GenerateConfig(_Section):
    # 0: 16 for the tiny models; for other models at most 256, chosen by `swarmd.trainer.answer_limits`.
    max_new_tokens: Annotated[int, Field(ge=0, le=32_768)] = 0
    # Below this limit, a division of logits in float32 gives infinity or NaN.
    temperature: Annotated[float, Field(ge=1e-6, le=10)] = 1.0
    engine: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$",
            description="own or the name of an installed engine",
        ),
    ] = "own"
    # For an engine that runs as a separate program:
    engine_url: Annotated[
        str, AfterValidator(web_address), Field(description="a web address such as http://127.0.0.1:8000")
    ] = ""  # URL of a server that runs already; "": the engine starts its own
    # The Python interpreter of the engine's environment; "": the engine finds one.
    engine_python: str = ""
    engine_memory: Annotated[float, Field(gt=0, le=1)] = 0.4  # share of the device's memory it may take
    # Maximum seconds for its start, or for loading new weights.
    engine_start_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    # Further command-line arguments for it.
    engine_args: Annotated[tuple[str, ...], Field(description="a list of texts")] = ()


class TrainConfig(_Section, LossSettings):
    # 0: depends on the model (policy/language_policy.py, docs/papers.md)
    learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    # "adamw8bit" takes a quarter of the memory for moments; it needs `pip install 'swarmd[bitsandbytes]'`.
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    # Updates between two measurements of the KL divergence from the initial weights; 0: never.
    kl_every: Annotated[int, Field(ge=0, le=10**9)] = 10
    # Maximum number of tokens in a forward pass; 0: as many as fit this machine.
    micro_batch_tokens: Annotated[int, Field(ge=0)] = 0
    loss: Literal[tuple(LOSSES)] = "grpo"  # type: ignore[valid-type]
    loss_mean: Literal[tuple(MEANS)] = "token"  # type: ignore[valid-type]  # unit of the mean: every token of the batch, or every completion


class SharingConfig(_Section, SharingSettings):
    """Settings of sharing; every choice is a row of a table in `swarmd.experience.strategies`, or a file."""

    take: Annotated[
        str, AfterValidator(take_name), Field(description=f"{', '.join(TAKES)} or a .py file")
    ] = "uniform"


class ReplayConfig(_Section):
    # on: train on rollouts several times; pays if generating is expensive (`swarmd plan replay`)
    mode: Literal["off", "on"] = "off"
    size: Annotated[int, Field(ge=0, le=65_536)] = 0  # N: rollouts kept, local and external; 0: three batches
    updates_per_round: Annotated[int, Field(ge=1, le=64)] = 2
    # B: rollouts of one update; 0: round.local + round.external.
    batch: Annotated[int, Field(ge=0, le=4096)] = 0
    # delta: the share of the pool reserved for older rollouts with a correct answer.
    positive_bias: Annotated[float, Field(ge=0, le=0.9)] = 0.9
    # The share of the pool that one external author may fill.
    author_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    # Own rounds for which a rollout is kept.
    max_age: Annotated[int, Field(ge=1, le=100_000)] = 32
    max_clip_fraction: Annotated[float, Field(gt=0, le=1)] = 0.09  # above it, one update a round for a while
    # Limit of the KL divergence from the generating policy, in nats per token; above it, the same happens.
    max_kl: Annotated[float, Field(gt=0, le=100)] = 1.0


class TasksConfig(_Section):
    # The specialties that this node asks; it trains on external rollouts of all. (): the whole curriculum.
    specialties: Annotated[
        tuple[str, ...], Field(description="a list of specialties, as `swarmd task list` shows them")
    ] = ()
    # A file with a reward for this node only, instead of the curriculum's scoring (docs/own-tasks.md).
    reward: Annotated[str, AfterValidator(reward_file), Field(description="a .py file")] = ""


class GateConfig(_Section):
    # How to treat external text that differs strongly from this node's (docs/gate.md). on: do not train on
    # it; report: count it and train on it; off: no check; auto: on for models of up to 100 million
    # parameters, report for larger ones, for which nothing was measured.
    mode: Literal["auto", "on", "report", "off"] = "auto"
    # A limit is this factor times the value that 99 of 100 own completions stay below.
    margin: Annotated[float, Field(ge=1, le=100)] = 1.5


class WorkersConfig(_Section):
    # W: processes that generate; on CUDA each has a separate device, as far as there are enough.
    generators: Annotated[int, Field(ge=1, le=64)] = 1
    trainers: Annotated[int, Field(ge=1, le=64)] = 1  # T: processes that share every update
    # on: the generator is a separate process even if there is one generator and one trainer.
    apart: Literal["auto", "on"] = "auto"

    @property
    def processes(self) -> int:
        """Number of processes that compute; 1 if the trainer does everything."""
        many = self.generators + self.trainers
        return many if self.apart == "on" or many > 2 else 1


class CheckpointConfig(_Section):
    every: Annotated[float, Field(ge=0, le=86_400)] = 60.0  # seconds: the most work that kill -9 loses
    # Limit of bytes written, in 10^9; if checkpoints would exceed it, they are saved less often.
    gigabytes_a_day: Annotated[float, Field(gt=0, le=10**6)] = 50.0


_Percent = Annotated[str, AfterValidator(checked(percent)), Field(description='a share such as "25 %"')]
_Size = Annotated[
    str, AfterValidator(checked(size, empty=True)), Field(description='an amount such as "20 GB"')
]
_Rate = Annotated[
    str, AfterValidator(checked(rate, empty=True)), Field(description='a rate such as "200 kB/s"')
]


class LimitsConfig(_Section):
    """Limits on the node's use of the machine (docs/guest.md); "" means no limit.

    model.threads and checkpoint.gigabytes_a_day are limits, too.
    """

    # The share of all cores of the machine, averaged over minutes; counts all processes of the node.
    cpu: _Percent = "100 %"
    priority: Literal["low", "normal"] = "low"  # for the CPU and the disk, of the trainer and its workers
    # The share of a CUDA device's memory that torch may use, with all workers on the device.
    gpu_memory: _Percent = "100 %"
    up: _Rate = ""  # bytes a second to other nodes; only libp2p supports it
    down: _Rate = ""  # the same from other nodes
    # Bytes in a calendar month, up and down together; beyond, the node leaves the swarm and trains alone.
    month: _Size = ""
    state: _Size = ""  # size of the state folder


class WhenConfig(_Section):
    """When the node pauses (docs/guest.md)."""

    battery: Literal["pause", "train"] = "pause"  # while the machine runs on its battery
    # What to do on a metered network; alone: leave the swarm and train alone.
    metered: Literal["alone", "pause", "share"] = "alone"
    load: Annotated[
        str,
        AfterValidator(checked(percent, empty=True)),
        Field(description='a share such as "50 %"'),
    ] = ""  # pause while other programs use more than this share of all cores; "": never
    gpu: Annotated[
        str,
        AfterValidator(checked(percent, empty=True)),
        Field(description='a share such as "30 %"'),
    ] = ""  # pause while other programs use more than this share of the node's NVIDIA GPU; "": never
    hours: Annotated[
        tuple[
            Annotated[
                str,
                AfterValidator(checked(window)),
                Field(description='days and hours such as "mon-fri 18:00-08:00"'),
            ],
            ...,
        ],
        Field(description='a list of days and hours such as "mon-fri 18:00-08:00"'),
    ] = ()  # hours in which the node trains; (): always


class SwarmConfig(_Section):
    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9][a-z0-9-]{0,31}$",
            description="at most 32 lower-case letters, digits and hyphens, the first no hyphen",
        ),
    ] = "main"
    # none: train alone, open no socket.
    engine: Annotated[
        str,
        AfterValidator(_p2p_engine),
        Field(description="libp2p, none or the name of an installed p2p engine"),
    ] = "libp2p"
    listen: Annotated[
        tuple[Annotated[str, AfterValidator(checked(parse_listen))], ...],
        Field(description="a list of addresses such as /ip4/0.0.0.0/tcp/4001"),
    ] = (
        "/ip4/0.0.0.0/tcp/0",
        "/ip6/::/tcp/0",
    )  # multiaddresses; port 0: a port derived from the node's key
    bootstrap: Annotated[
        tuple[Annotated[str, AfterValidator(checked(parse_bootstrap))], ...],
        Field(description="a list of addresses such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"),
    ] = ()  # multiaddresses ending in /p2p/<peer id>
    # Look for members on the local network, and announce this node there; never on loopback.
    mdns: Literal["on", "off"] = "on"
    # auto: tiny-9 for the tiny models, ladder-9 for larger ones; the strict ones reject answers that only
    # ReasoningGYM accepts. Own tasks: a file, or tasks of an installed package (docs/own-tasks.md)
    curriculum: Annotated[str, AfterValidator(curriculum_name), Field(description=EXPECTED)] = "auto"


class JudgeConfig(_Section):
    url: Annotated[
        str,
        AfterValidator(web_address),
        Field(description="a web address such as http://127.0.0.1:8400"),
    ] = ""  # "": not judged
    every: Annotated[int, Field(ge=1)] = 1  # rounds between evaluations
    name: Annotated[str, Field(max_length=40)] = ""  # shown on the leaderboard after the nickname


class MetricsConfig(_Section):
    # Address of /metrics, for Prometheus: host:port, or a port on loopback; "": off.
    listen: Annotated[str, AfterValidator(host_and_port), Field(description="host:port, or a port")] = ""
    report_to: Annotated[
        tuple[Literal["trackio", "wandb"], ...],
        Field(description='a list of "trackio" or "wandb"'),
    ] = ()
    # on: the recorded events (`exchange.replay`) also have the texts of rollouts.
    record_texts: Literal["off", "on"] = "off"


class NodeConfig(_Section):
    model: ModelConfig = ModelConfig()
    round: RoundConfig = RoundConfig()
    generate: GenerateConfig = GenerateConfig()
    train: TrainConfig = TrainConfig()
    tasks: TasksConfig = TasksConfig()
    sharing: SharingConfig = SharingConfig()
    replay: ReplayConfig = ReplayConfig()
    gate: GateConfig = GateConfig()
    workers: WorkersConfig = WorkersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    when: WhenConfig = WhenConfig()
    swarm: SwarmConfig = SwarmConfig()
    judge: JudgeConfig = JudgeConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: Literal[tuple(PROFILES)] = DEFAULT  # type: ignore[valid-type]  # defaults for everything that is not set
    # None: the seed is drawn at the first start and stored in the state folder.
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
