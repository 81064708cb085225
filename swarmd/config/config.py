"""TOML, environment and flags -> one frozen NodeConfig. Imports no torch: the daemon reads it too.

Precedence: flag > SWARMD_* variable > TOML > default. Every mistake in every source is reported at once, also one that a stronger
source would override. Every key stands in node_config.example.toml, with its default.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from swarmd.config.addresses import bootstrap_address, judge_address, listen_address, web_address
from swarmd.config.messages import expected, key_name, kind_of, nearest, nearest_choice, shown
from swarmd.errors import ConfigError
from swarmd.experience.sampling import STRATEGIES
from swarmd.policy.training.losses import LOSSES, MEANS, LossSettings
from swarmd.terminal import printable


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(_Section):
    name: Annotated[str, Field(min_length=1)] = "tiny"  # a short name, a Hugging Face repository id, or a local folder
    revision: Annotated[str, Field(min_length=1)] | None = (
        None  # commit, tag or branch on the hub; None: the default branch, recorded at first load
    )
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lora: Literal["auto", "on", "off"] = "auto"  # auto: on above 100 million parameters
    lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    system_prompt: str | None = None  # None: the built-in one, which asks for <answer>…</answer>; "": none
    threads: Annotated[int, Field(ge=0, le=256)] = 0  # torch threads; 0: one on CPU


class RoundConfig(_Section):
    local: Annotated[int, Field(ge=0, le=1024)] = 4  # I: questions we ask ourselves and answer
    external: Annotated[int, Field(ge=0, le=1024)] = 4  # J: rollouts of others in the batch, at most
    completions: Annotated[int, Field(ge=2, le=64)] = 8  # L
    max_age: Annotated[int, Field(ge=1, le=1000)] = 2  # our own rounds since an external rollout was heard; older ones are forgotten
    rounds: Annotated[int, Field(ge=0)] = 0  # stop after so many; 0: go on for ever
    pace: Annotated[float, Field(ge=0, le=86_400)] = 0.0  # seconds a round takes at least: leaves the machine to others


class GenerateConfig(_Section):
    max_new_tokens: Annotated[int, Field(ge=0, le=32_768)] = 0  # 0: 16 for the tiny models, 256 for the rest
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    engine: Annotated[
        str,
        Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", description="auto, own, continuous or the name of an installed engine"),
    ] = "auto"  # auto: the quicker of the built-in ones on CUDA, own elsewhere
    # Of an engine that is a program of its own:
    engine_url: Annotated[
        str, AfterValidator(web_address), Field(description="a web address such as http://127.0.0.1:8000")
    ] = ""  # of one that runs already; "": the engine starts its own
    engine_python: str = ""  # the interpreter of its own environment; "": the engine's own way to find one
    engine_memory: Annotated[float, Field(gt=0, le=1)] = 0.4  # share of the device's memory it may take
    engine_start_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0  # how long it may take to start, or to take new weights
    engine_args: Annotated[tuple[str, ...], Field(description="a list of texts")] = ()  # more arguments for what it starts


class TrainConfig(_Section, LossSettings):
    learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0  # 0: by the model (policy/language_policy.py, docs/papers.md)
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate, from the end of the warm-up
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 0  # updates in which the rate rises to the full one
    schedule_updates: Annotated[int, Field(ge=0, le=10**9)] = 0  # updates, the warm-up among them, until it is lowest; 0: it never falls
    lowest_rate: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the rate that is left in the end
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"  # adamw8bit: a quarter of the memory for moments; needs `pip install 'swarmd[8bit]'`
    precision: Literal["auto", "master", "stochastic"] = "auto"  # how bfloat16 weights keep small steps; see policy/training/optimizer.py
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    kl_every: Annotated[int, Field(ge=0, le=10**9)] = 10  # updates between two measurements of the KL from the start; 0: none
    micro_batch_tokens: Annotated[int, Field(ge=0)] = 0  # tokens a forward pass may hold; 0: what fits this machine
    loss: Literal[tuple(LOSSES)] = "grpo"  # type: ignore[valid-type]
    loss_mean: Literal[tuple(MEANS)] = "token"  # type: ignore[valid-type]  # what weighs the same: every token of the batch, or every completion


class ReplayConfig(_Section):
    mode: Literal["off", "on"] = "off"  # on: rollouts are trained on several times; pays where generating is dear (`swarmd plan replay`)
    size: Annotated[int, Field(ge=0, le=65_536)] = 0  # N: rollouts kept, ours and others'; 0: three batches
    updates_per_round: Annotated[int, Field(ge=1, le=64)] = 2
    batch: Annotated[int, Field(ge=0, le=4096)] = 0  # B: rollouts of one update; 0: round.local + round.external
    strategy: Literal[tuple(STRATEGIES)] = "uniform"  # type: ignore[valid-type]
    positive_bias: Annotated[float, Field(ge=0, le=0.9)] = 0.9  # delta: share of the pool that is older rollouts with a correct answer
    author_share: Annotated[float, Field(gt=0, le=1)] = 0.2  # of the pool that any one other author may fill
    max_age: Annotated[int, Field(ge=1, le=100_000)] = 32  # rollouts older than this many of our own rounds are forgotten
    max_clip_fraction: Annotated[float, Field(gt=0, le=1)] = 0.09  # above it, one update a round for a while
    max_kl: Annotated[float, Field(gt=0, le=100)] = 0.1  # nats a token between the policy and the one that drew: above it, the same


class GateConfig(_Section):
    # Others' text that is far from all that we write (docs/gate.md): on: it is not trained on; report: it is, and is counted; off: nobody
    # looks; auto: on for models of up to 100 million parameters, report above, where nothing was measured
    mode: Literal["auto", "on", "report", "off"] = "auto"
    margin: Annotated[float, Field(ge=1, le=100)] = 1.5  # a limit is this times what 99 in 100 of our own completions stay below


class WorkersConfig(_Section):
    generators: Annotated[int, Field(ge=1, le=64)] = 1  # W: processes that answer; on CUDA each has a device, as far as there are enough
    trainers: Annotated[int, Field(ge=1, le=64)] = 1  # T: processes that share every update
    apart: Literal["auto", "on"] = "auto"  # on: the generator in a process of its own also where there is one of each


class CheckpointConfig(_Section):
    every: Annotated[float, Field(ge=0, le=86_400)] = 60.0  # seconds: what kill -9 loses at most
    gigabytes_a_day: Annotated[float, Field(gt=0, le=10**6)] = 50.0  # of 10^9 bytes: where they would write more, they come less often


class SwarmConfig(_Section):
    name: Annotated[
        str,
        Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="at most 32 lower-case letters, digits and hyphens, the first no hyphen"),
    ] = "main"
    engine: Literal["auto", "libp2p", "hivemind", "none"] = "auto"  # auto: hivemind where installed; none: train alone, open no socket
    listen: Annotated[
        tuple[Annotated[str, AfterValidator(listen_address)], ...],
        Field(description="a list of addresses such as /ip4/0.0.0.0/tcp/4001"),
    ] = ("/ip4/0.0.0.0/tcp/0",)  # multiaddresses; port 0: any free one
    bootstrap: Annotated[
        tuple[Annotated[str, AfterValidator(bootstrap_address)], ...],
        Field(description="a list of addresses such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"),
    ] = ()  # multiaddresses ending in /p2p/<peer id>
    mdns: Literal["on", "off"] = "on"  # look for members on the local network, and be found there; never on loopback
    # auto: tiny-9 for the tiny models, sapo-9 for the rest; the strict ones pay for no answer that only ReasoningGYM takes for right
    curriculum: Literal["auto", "sapo-9", "tiny-9", "sapo-9-strict", "tiny-9-strict"] = "auto"


class JudgeConfig(_Section):
    url: Annotated[str, AfterValidator(judge_address), Field(description="a web address such as http://127.0.0.1:8400, or auto")] = (
        ""  # "": not judged; "auto": by one that is advertised in the swarm
    )
    every: Annotated[int, Field(ge=1)] = 1  # rounds between evaluations


class NodeConfig(_Section):
    model: ModelConfig = ModelConfig()
    round: RoundConfig = RoundConfig()
    generate: GenerateConfig = GenerateConfig()
    train: TrainConfig = TrainConfig()
    replay: ReplayConfig = ReplayConfig()
    gate: GateConfig = GateConfig()
    workers: WorkersConfig = WorkersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    swarm: SwarmConfig = SwarmConfig()
    judge: JudgeConfig = JudgeConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # None: drawn at the first start and kept with the state


FLAGS: Mapping[str, str] = {  # the flags of `swarmd join`, without the hyphens, and the keys they set; SWARMD_<FLAG> sets them too
    "model": "model.name",
    "device": "model.device",
    "swarm": "swarm.name",
    "bootstrap": "swarm.bootstrap",
    "listen": "swarm.listen",
    "judge": "judge.url",
    "rounds": "round.rounds",
    "local": "round.local",
    "external": "round.external",
    "pace": "round.pace",
    "seed": "seed",
}
RENAMED: Mapping[str, str] = {"round.checkpoint_every": "checkpoint.every, which is in seconds"}  # said, never translated
NOT_KEYS = frozenset({"SWARMD_CONFIG", "SWARMD_STATE_DIR"})  # which file, which folder: the command line's own
MAX_FILE = 1024 * 1024  # bytes
_SHOWN = 40  # mistakes; a file with more is not a configuration


@dataclass(frozen=True)
class Resolved:
    config: NodeConfig
    origins: Mapping[str, str]  # dotted key -> "default", "/path/to.toml:12", "SWARMD_ROUND_LOCAL" or "--local"


@dataclass(frozen=True)
class _Given:
    """One value somebody gave for one key."""

    key: str
    value: Any
    origin: str


def load(path: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> NodeConfig:
    """The configuration of a node. See `resolve`."""
    return resolve(path, environment, flags).config


def resolve(path: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> Resolved:
    """Read every source, check every value, and say where each came from.

    flags: by their names in FLAGS; None and () mean not given. An empty variable counts as not given.
    Raises ConfigError, with one line for each mistake: where, which key, what was expected and what was found.
    """
    mistakes: list[str] = []
    given: list[_Given] = []  # weakest source first
    for source in (_from_file(path, mistakes), _from_environment(environment, mistakes), _from_flags(flags)):
        given += [value for value in source if _acceptable(value, mistakes)]
    if mistakes:
        more = [f"… and {len(mistakes) - _SHOWN} mistakes more"] if len(mistakes) > _SHOWN else []
        raise ConfigError("\n".join([*mistakes[:_SHOWN], *more]))
    origins = dict.fromkeys(keys(), "default")
    document: dict[str, Any] = {}
    for value in given:
        section, _, name = value.key.rpartition(".")
        (document.setdefault(section, {}) if section else document)[name] = _frozen(value.value)
        origins[value.key] = value.origin
    config = NodeConfig.model_validate(document)
    train = config.train
    if 0 < train.schedule_updates < train.warmup:
        at = origins["train.schedule_updates"]
        raise ConfigError(
            f"{at}: train.schedule_updates: expected 0 or at least train.warmup, {train.warmup}, found {train.schedule_updates}: "
            "the rate would have to fall before it has risen"
        )
    if not config.round.local and (not config.round.external or config.swarm.engine == "none"):
        key, others = ("swarm.engine", '"none"') if config.round.external else ("round.external", "0")
        raise ConfigError(
            f"{origins['round.local']}: round.local: expected above 0 where {key} is {others}, found 0: there is nothing to train on"
        )
    return Resolved(config, origins)


@cache
def keys() -> Mapping[str, FieldInfo]:
    """Every key, dotted, in the order of the example file."""
    found: dict[str, FieldInfo] = {}
    for name, field in NodeConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= {f"{name}.{key}": inner for key, inner in field.annotation.model_fields.items()}
        else:
            found[name] = field
    return found


def flatten(config: NodeConfig) -> dict[str, Any]:
    """Dotted key -> value, every key."""
    document = config.model_dump(mode="json")
    sections = {key: key.rpartition(".") for key in keys()}
    return {key: document[section][name] if section else document[name] for key, (section, _, name) in sections.items()}


def variables() -> Mapping[str, str]:
    """Environment variable -> key: SWARMD_<SECTION>_<KEY> for each key, and SWARMD_<FLAG> for each flag of `swarmd join`."""
    return {f"SWARMD_{key.replace('.', '_').upper()}": key for key in keys()} | {
        f"SWARMD_{flag.upper()}": key for flag, key in FLAGS.items()
    }


def _from_file(path: Path | None, mistakes: list[str]) -> Iterator[_Given]:
    if path is None:
        return
    text = _read(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        line = re.search(r"at line (\d+)", message)
        number = int(line[1]) if line else text.count("\n") + 1
        mistakes.append(f"{path}:{number}: not valid TOML: {printable(message)}")
        return
    except (ValueError, RecursionError):  # numbers of thousands of digits; arrays nested thousands deep
        mistakes.append(f"{path}: not a configuration: a number or a nesting without measure")
        return
    places = _lines(text)
    sections = {key.partition(".")[0] for key in keys() if "." in key}
    for name, value in document.items():
        at = f"{path}:{places[name]}" if places.get(name) else str(path)
        if name in sections:
            if not isinstance(value, dict):
                mistakes.append(f"{at}: {name}: expected a section, [{name}], found {shown(value)}")
                continue
            for inner, inner_value in value.items():
                key = f"{name}.{inner}"
                yield _Given(key, inner_value, f"{path}:{places[key]}" if places.get(key) else str(path))
        else:
            yield _Given(name, value, at)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise ConfigError(f"{path}: more than {MAX_FILE} bytes: not a configuration. Start from node_config.example.toml.")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Start from node_config.example.toml, or leave --config out.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text. Save the file as UTF-8.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{printable(str(path))}: cannot be read: {reason}. Name a file that you can read with --config.") from None


def _lines(text: str) -> dict[str, int]:
    """Dotted key or section -> its line; 0 where two lines could be it (one of them inside a text of many lines)."""
    places: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+([^\[\]]+)\]", line)
        assigned = re.match(r"\s*([\w\s.\"'-]+?)\s*=", line)
        if header:
            section = _dotted(header[1])
            key = section
        elif assigned:
            key = f"{section}.{_dotted(assigned[1])}".removeprefix(".")
        else:
            continue
        places[key] = 0 if key in places else number
    return places


def _dotted(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


def _from_environment(environment: Mapping[str, str], mistakes: list[str]) -> Iterator[_Given]:
    known = variables()
    named: dict[str, _Given] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith("SWARMD_") or not text or variable in NOT_KEYS:
            continue
        key = known.get(variable)
        if key is None and variable.startswith("SWARMD_JUDGE_"):
            continue  # `swarmd-judge`'s own; both may run in one environment
        if key is None:
            old = next((name for name in RENAMED if variable == f"SWARMD_{name.replace('.', '_').upper()}"), None)
            mistakes.append(f"{printable(variable)}: " + (_gone(old) if old else f"no such variable{nearest(variable, known)}"))
        elif key in named and named[key].value != _parsed(key, text):
            mistakes.append(f"{variable}: {key}: {named[key].origin} sets it otherwise. Set one of the two.")
        else:
            named[key] = _Given(key, _parsed(key, text), variable)
    yield from named.values()


def _parsed(key: str, text: str) -> Any:
    """A variable's text as its key's type; as it is where that fails, for the check to refuse."""
    kind = kind_of(keys()[key])
    if kind is tuple:
        return tuple(text.replace(",", " ").split())
    if kind is int and re.fullmatch(r"[+-]?[0-9]{1,30}", text.strip()):
        return int(text)
    if kind is float and re.fullmatch(r"[+-]?[0-9.]{1,30}(e[+-]?[0-9]{1,3})?", text.strip(), re.IGNORECASE):
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _from_flags(flags: Mapping[str, object]) -> Iterator[_Given]:
    for flag, value in flags.items():
        if value is not None and value != () and value != []:
            yield _Given(FLAGS[flag], value, f"--{flag}")


def _acceptable(given: _Given, mistakes: list[str]) -> bool:
    field = keys().get(given.key)
    if given.key in RENAMED:
        mistakes.append(f"{given.origin}: {given.key}: {_gone(given.key)}")
        return False
    if field is None:
        meant = FLAGS.get(given.key.rpartition(".")[2])  # a flag's name where its key's should stand
        hint = f"; did you mean {meant}?" if meant else nearest(given.key, [*keys(), *NodeConfig.model_fields])
        mistakes.append(f"{given.origin}: {key_name(given.key)}: unknown key{hint}")
        return False
    try:
        _adapter(given.key).validate_python(_frozen(given.value))
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            index = error["loc"][0] if error["loc"] and isinstance(error["loc"][0], int) else None
            key, found = (given.key, given.value) if index is None else (f"{given.key}[{index}]", error["input"])
            wanted = expected(field, element=index is not None)
            why = f": {printable(str(error['ctx']['error']))}" if error["type"] == "value_error" else nearest_choice(field, found)
            mistakes.append(f"{given.origin}: {key}: expected {wanted}, found {shown(found)}{why}")
        return False
    return True


def _gone(key: str) -> str:
    return f"no longer a key; set {RENAMED[key]}"


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    field = keys()[key]
    checked: Any = Annotated[(field.annotation, *field.metadata, Field())]
    return TypeAdapter(checked, config=ConfigDict(strict=True, allow_inf_nan=False))
