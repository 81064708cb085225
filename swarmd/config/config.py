"""The settings of a node: one frozen tree of sections, with defaults and limits.

It imports no torch, as the daemon reads it too. Every key stands in node_config.example.toml, with its
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
    """Validate `swarm.engine`: one of swarmd's own, or one that an installed package offers."""
    own = ("libp2p", "none")
    if name in own:
        return name
    known = [*own, *sorted(offered().keys() - {"memory", *own})]
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
    # float16 and nf4 (4 bits; needs `pip install 'swarmd[bitsandbytes]'`) are for the base under an adapter.
    dtype: Literal["auto", "float32", "bfloat16", "float16", "nf4"] = "auto"
    lora: Literal["auto", "on", "off"] = "auto"  # auto: on above 100 million parameters
    lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    # on: the chat template lets the model think first, for up to 4,096 tokens by default.
    thinking: Literal["off", "on"] = "off"
    system_prompt: str | None = None  # None: the built-in one, which asks for <answer>…</answer>; "": none
    # Turns before each question. on: those of the curriculum (`Curriculum.examples`).
    examples: Annotated[
        str | tuple[tuple[str, str], ...],
        BeforeValidator(_examples),
        Field(description='"auto", "off", "on" or a list of [question, answer] pairs'),
    ] = "auto"
    opening: str = "auto"  # text with which each answer begins; "": none
    # torch's threads; 0: on a CPU one up to 100 million parameters, then the cores of limits.cpu.
    threads: Annotated[int, Field(ge=0, le=256)] = 0


class RoundConfig(_Section):
    local: Annotated[int, Field(ge=0, le=1024)] = 4  # I: questions we ask ourselves and answer
    external: Annotated[int, Field(ge=0, le=1024)] = 4  # J: rollouts of others in the batch, at most
    completions: Annotated[int, Field(ge=2, le=64)] = 8  # L
    # How often we ask again, at most, for each rollout of ours without an advantage.
    resample: Annotated[int, Field(ge=0, le=64)] = 0
    # Our own rounds since an external rollout was heard; older ones are forgotten.
    max_age: Annotated[int, Field(ge=1, le=1000)] = 2
    train: Literal["on", "off"] = "on"  # off: a frozen model that answers and shares, and learns nothing
    rounds: Annotated[int, Field(ge=0)] = 0  # stop after so many; 0: go on for ever
    # The least seconds of a round, which leaves the machine to others.
    pace: Annotated[float, Field(ge=0, le=86_400)] = 0.0

    @property
    def wanted(self) -> int:
        """Rollouts of others that a round can use."""
        return self.external if self.train == "on" else 0


class GenerateConfig(_Section):
    max_new_tokens: Annotated[int, Field(ge=0, le=32_768)] = 0  # 0: 16 for the tiny models, 256 for the rest
    # Less is 0 in float32 somewhere on the way, and logits divided by it are no numbers.
    temperature: Annotated[float, Field(ge=1e-6, le=10)] = 1.0
    engine: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$",
            description="own or the name of an installed engine",
        ),
    ] = "own"
    # For an engine that is a program of its own:
    engine_url: Annotated[
        str, AfterValidator(web_address), Field(description="a web address such as http://127.0.0.1:8000")
    ] = ""  # URL of a server that runs already; "": the engine starts its own
    # The interpreter of the engine's own environment; "": the engine finds one.
    engine_python: str = ""
    engine_memory: Annotated[float, Field(gt=0, le=1)] = 0.4  # share of the device's memory it may take
    # How long it may take to start, or to take new weights.
    engine_start_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    # Further arguments for what it starts.
    engine_args: Annotated[tuple[str, ...], Field(description="a list of texts")] = ()


class TrainConfig(_Section, LossSettings):
    # 0: by the model (policy/language_policy.py, docs/papers.md)
    learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    # "adamw8bit" takes a quarter of the memory for moments; it needs `pip install 'swarmd[bitsandbytes]'`.
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    # Updates between two measurements of the KL from the start; 0: none.
    kl_every: Annotated[int, Field(ge=0, le=10**9)] = 10
    # Tokens a forward pass may hold; 0: what fits this machine.
    micro_batch_tokens: Annotated[int, Field(ge=0)] = 0
    loss: Literal[tuple(LOSSES)] = "grpo"  # type: ignore[valid-type]
    loss_mean: Literal[tuple(MEANS)] = "token"  # type: ignore[valid-type]  # what weighs the same: every token of the batch, or every completion


class SharingConfig(_Section, SharingSettings):
    """Settings of sharing; every choice is a row of a table in `swarmd.experience.strategies`, or a file."""

    take: Annotated[
        str, AfterValidator(take_name), Field(description=f"{', '.join(TAKES)} or a .py file")
    ] = "uniform"


class ReplayConfig(_Section):
    # On: rollouts are trained on several times; pays where generating is dear (`swarmd plan replay`)
    mode: Literal["off", "on"] = "off"
    size: Annotated[int, Field(ge=0, le=65_536)] = 0  # N: rollouts kept, ours and others'; 0: three batches
    updates_per_round: Annotated[int, Field(ge=1, le=64)] = 2
    # B: rollouts of one update; 0: round.local + round.external.
    batch: Annotated[int, Field(ge=0, le=4096)] = 0
    # delta: the share of the pool that is older rollouts with a correct answer.
    positive_bias: Annotated[float, Field(ge=0, le=0.9)] = 0.9
    # The share of the pool that one other author may fill.
    author_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    # Rollouts older than this many of our own rounds are forgotten.
    max_age: Annotated[int, Field(ge=1, le=100_000)] = 32
    max_clip_fraction: Annotated[float, Field(gt=0, le=1)] = 0.09  # above it, one update a round for a while
    # The same above so many nats a token between the policy and the one that drew.
    max_kl: Annotated[float, Field(gt=0, le=100)] = 1.0


class TasksConfig(_Section):
    # The specialties that this node asks; it trains on others' rollouts of all. (): the whole curriculum.
    specialties: Annotated[
        tuple[str, ...], Field(description="a list of specialties, as `swarmd task list` shows them")
    ] = ()
    # A file with this node's own reward, in place of the curriculum's scoring (docs/own-tasks.md).
    reward: Annotated[str, AfterValidator(reward_file), Field(description="a .py file")] = ""


class GateConfig(_Section):
    # What to do with others' text that is far from all that we write (docs/gate.md). on: do not train on it;
    # report: count it and train on it; off: do not look; auto: on for models of up to 100 million parameters,
    # report above, where nothing was measured.
    mode: Literal["auto", "on", "report", "off"] = "auto"
    # A limit is this times the value that 99 in 100 of our own completions stay below.
    margin: Annotated[float, Field(ge=1, le=100)] = 1.5


class WorkersConfig(_Section):
    # W: processes that answer; on CUDA each has a device, as far as there are enough.
    generators: Annotated[int, Field(ge=1, le=64)] = 1
    trainers: Annotated[int, Field(ge=1, le=64)] = 1  # T: processes that share every update
    # on: the generator is a process of its own even where there is one of each.
    apart: Literal["auto", "on"] = "auto"

    @property
    def processes(self) -> int:
        """How many processes compute; 1 where the trainer does everything."""
        many = self.generators + self.trainers
        return many if self.apart == "on" or many > 2 else 1


class CheckpointConfig(_Section):
    every: Annotated[float, Field(ge=0, le=86_400)] = 60.0  # seconds: what kill -9 loses at most
    # In 10^9 bytes: where checkpoints would write more, they come less often.
    gigabytes_a_day: Annotated[float, Field(gt=0, le=10**6)] = 50.0


_Percent = Annotated[str, AfterValidator(checked(percent)), Field(description='a share such as "25 %"')]
_Size = Annotated[
    str, AfterValidator(checked(size, empty=True)), Field(description='an amount such as "20 GB"')
]
_Rate = Annotated[
    str, AfterValidator(checked(rate, empty=True)), Field(description='a rate such as "200 kB/s"')
]


class LimitsConfig(_Section):
    """Limits on what the node takes of the machine (docs/guest.md); "" means no limit.

    model.threads and checkpoint.gigabytes_a_day are limits, too.
    """

    # The share of all cores of the machine together, over minutes; all processes of the node count.
    cpu: _Percent = "100 %"
    priority: Literal["low", "normal"] = "low"  # for the CPU and the disk, of the trainer and its workers
    # The share of a CUDA device's memory that torch may take, workers on the device together.
    gpu_memory: _Percent = "100 %"
    up: _Rate = ""  # bytes a second to other nodes; libp2p alone can keep it
    down: _Rate = ""  # the same from other nodes
    # Bytes in a calendar month, up and down together; then the node leaves the swarm and trains alone.
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
    ] = ""  # pause while other programs take more than this share of all cores; "": never
    gpu: Annotated[
        str,
        AfterValidator(checked(percent, empty=True)),
        Field(description='a share such as "30 %"'),
    ] = ""  # pause while other programs take more than this share of the node's NVIDIA GPU; "": never
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
    ] = ()  # hours in which it trains; (): always


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
    )  # multiaddresses; port 0: the node's own, which follows from its key
    bootstrap: Annotated[
        tuple[Annotated[str, AfterValidator(checked(parse_bootstrap))], ...],
        Field(description="a list of addresses such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"),
    ] = ()  # multiaddresses ending in /p2p/<peer id>
    # Look for members on the local network, and be found there; never on loopback.
    mdns: Literal["on", "off"] = "on"
    # auto: tiny-9 for the tiny models, ladder-9 for the rest; the strict ones pay for no answer that only
    # ReasoningGYM takes for right. A file, or what an installed package offers: own tasks (docs/own-tasks.md)
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
    # Where /metrics is served, for Prometheus: host:port, or a port of this machine alone; "": nowhere.
    listen: Annotated[str, AfterValidator(host_and_port), Field(description="host:port, or a port")] = ""
    report_to: Annotated[
        tuple[Literal["trackio", "wandb"], ...],
        Field(description='a list of "trackio", "wandb"'),
    ] = ()


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
    profile: Literal[tuple(PROFILES)] = DEFAULT  # type: ignore[valid-type]  # whose settings stand where nothing else is set
    # None: the seed is drawn at the first start and kept with the state.
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
