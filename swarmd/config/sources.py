"""Resolve a node's configuration: TOML, environment and flags -> one NodeConfig.

Precedence: flag > invitation > SWARMD_* variable > TOML > profile > default.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from swarmd.config.amounts import percent
from swarmd.config.config import NodeConfig
from swarmd.config.profiles import DEFAULT, PROFILES
from swarmd.config.schema import Given, Schema
from swarmd.errors import ConfigError

# The flags of `swarmd join`, without the hyphens, and the keys they set; SWARMD_<FLAG> sets them too.
FLAGS: Mapping[str, str] = {
    "model": "model.name",
    "device": "model.device",
    "swarm": "swarm.name",
    "curriculum": "swarm.curriculum",
    "bootstrap": "swarm.bootstrap",
    "listen": "swarm.listen",
    "judge": "judge.url",
    "rounds": "round.rounds",
    "local": "round.local",
    "external": "round.external",
    "pace": "round.pace",
    "train": "round.train",
    "profile": "profile",
    "seed": "seed",
}
NODE = Schema(
    NodeConfig,
    "SWARMD_",
    r"SWARMD_(CONFIG|STATE_DIR|JUDGE_.*)",  # `swarmd-judge` may run in the same environment
    "Start from node_config.example.toml, or leave --config out.",
    FLAGS,
)


@dataclass(frozen=True)
class Resolved:
    config: NodeConfig
    # Dotted key -> "default", "profile sapo-paper", "/path/to.toml:12", "SWARMD_PACE", INVITED or "--local"
    origins: Mapping[str, str]


def resolve(
    path: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
    invited: Mapping[str, object] = MappingProxyType({}),
) -> Resolved:
    """Read every source, check every value, and record the origin of each. Raises ConfigError.

    flags: by their names in FLAGS; None and () mean not given. invited: keys of an invitation.
    """
    given = NODE.read(path, environment, flags, invited)
    config, origins = NODE.build([*_from_profile(given), *given])
    if found := list(contradictions(config, origins)):
        raise ConfigError("\n".join(found))
    return Resolved(config, origins)


def flatten(config: NodeConfig) -> dict[str, Any]:
    """Return every value by its dotted key."""
    document = config.model_dump(mode="json")
    sections = {key: key.rpartition(".") for key in NODE.keys}
    return {
        key: document[section][name] if section else document[name]
        for key, (section, _, name) in sections.items()
    }


def _from_profile(given: Sequence[Given]) -> Iterator[Given]:
    name = next((value.value for value in reversed(given) if value.key == "profile"), DEFAULT)
    for section, values in PROFILES[name].items():
        for key, value in values.items():
            yield Given(f"{section}.{key}", value, f"profile {name}")


def contradictions(config: NodeConfig, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each contradiction: its place, the keys, the cause and the remedy."""
    if not config.round.local and (not config.round.wanted or config.swarm.engine == "none"):
        if config.round.train == "off":
            key, others = "round.train", '"off"'
        else:
            key, others = ("swarm.engine", '"none"') if config.round.external else ("round.external", "0")
        yield (
            f"{origins['round.local']}: round.local: expected above 0 if {key} is {others}, found 0: there"
            " is nothing to do"
        )
    if config.workers.processes > 1:
        for key, wrong, wanted in (
            ("local", not config.round.local, "above 0"),
            ("resample", config.round.resample, "0"),
        ):
            if wrong:
                yield (
                    f"{origins[f'round.{key}']}: round.{key}: expected {wanted} if [workers] starts"
                    f" generators, found {getattr(config.round, key)}: they answer this node's questions"
                    " between the rounds. Change it, or leave the section [workers] out"
                )
    limits, generate = config.limits, config.generate
    for key, value in (("limits.up", limits.up), ("limits.down", limits.down)):
        if value and config.swarm.engine not in ("libp2p", "none"):
            yield (
                f"{origins[key]}: {key}: {value!r} cannot be enforced if swarm.engine is"
                f' {config.swarm.engine!r}: only libp2p limits its rate. Set swarm.engine to "libp2p",'
                " or leave it out"
            )
    if generate.engine != "own" and generate.engine_memory > percent(limits.gpu_memory):
        yield (
            f"{origins['limits.gpu_memory']}: limits.gpu_memory: {limits.gpu_memory!r} is less than"
            f" generate.engine_memory, {generate.engine_memory:g}, which {generate.engine} needs. Lower"
            " generate.engine_memory, or raise limits.gpu_memory"
        )
