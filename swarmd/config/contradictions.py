"""Settings that are valid each by itself but contradict each other. Pure."""

from collections.abc import Iterator, Mapping

from swarmd.config.amounts import percent
from swarmd.config.config import NodeConfig

OUR_ENGINES = ("auto", "own", "continuous")


def contradictions(config: NodeConfig, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each contradiction: where, which keys, why, and what to do."""
    if not config.round.local and (not config.round.wanted or config.swarm.engine == "none"):
        if config.round.train == "off":
            key, others = "round.train", '"off"'
        else:
            key, others = ("swarm.engine", '"none"') if config.round.external else ("round.external", "0")
        yield (
            f"{origins['round.local']}: round.local: expected above 0 where {key} is {others}, found 0: there"
            " is nothing to do"
        )
    yield from _of_limits(config, origins)


def _of_limits(config: NodeConfig, origins: Mapping[str, str]) -> Iterator[str]:
    limits, generate = config.limits, config.generate
    for key, value in (("limits.up", limits.up), ("limits.down", limits.down)):
        if value and config.swarm.engine not in ("auto", "libp2p", "none"):
            yield (
                f"{origins[key]}: {key}: {value!r} cannot be kept where swarm.engine is"
                f' {config.swarm.engine!r}: libp2p alone limits its rate. Set swarm.engine to "libp2p" or'
                ' "auto", or leave it out'
            )
    if generate.engine not in OUR_ENGINES and generate.engine_memory > percent(limits.gpu_memory):
        yield (
            f"{origins['limits.gpu_memory']}: limits.gpu_memory: {limits.gpu_memory!r} is less than"
            f" generate.engine_memory, {generate.engine_memory:g}, which {generate.engine} takes alone. Lower"
            " that, or raise this"
        )
