"""The contained process of a task plug-in, started by `client.Verifier`.

It runs as `python -m swarmd.tasks.sandbox.plugin_process SOURCE DIGEST [REWARD DIGEST]`. It loads the plug-in
under a memory limit; during loading the plug-in may read files and import modules. The plug-in's `generate`
and `score` run in a worker that has given up these rights (worker.py, containment.py).
"""

import contextlib
import resource
import sys
from collections.abc import Iterator
from functools import partial

from swarmd.tasks.plugin import SAMPLES, LoadedPlugin, load, rewarded
from swarmd.tasks.sandbox.containment import address_space
from swarmd.tasks.sandbox.pipe import ScoreItem
from swarmd.tasks.sandbox.worker import Marker, PluginRefused, Work, run

# Address space in bytes, in addition to what the process already uses.
LOADING_MEMORY_BYTES = 4 * 2**30


def work(source: str, digest: str, *own_reward: str) -> Work:
    """Load the plug-in.

    Args:
        source: the plug-in, as `plugin.load` takes it.
        digest: the digest that the plug-in must have, since it names the node's swarm; "" for any.
        own_reward: file and digest.

    Raises:
        PluginRefused: if the plug-in cannot be used or has changed.
    """
    try:
        with _little_memory():
            plugin = load(source)
    except MemoryError:
        raise PluginRefused(f"it takes more than {LOADING_MEMORY_BYTES >> 30} GiB to load") from None
    found = plugin.description
    if digest and found.digest != digest:
        raise PluginRefused(
            f"{source} has changed since this node started; stop the node and join again. All nodes of the"
            " swarm need the same tasks"
        )
    return rewarded(
        Work(
            plugin.prepare,
            found.limits.seconds,
            found.limits.memory,
            found,
            partial(_check, plugin, source if source.endswith(".py") and not digest else ""),
        ),
        found.name,
        found.specialties,
        *own_reward,
    )


def _check(plugin: LoadedPlugin, file: str, marker: Marker) -> None:
    """Check that each specialty generates the same question each time, and rewards from 0 to 1.

    file: the plug-in, if it is to be loaded a second time, as values that it draws while it loads stay the
        same until then. A file that cannot run twice, because it registers something, is not compared.

    Raises PluginRefused.
    """
    again, limits = plugin, plugin.description.limits
    turns = limits.turns if plugin.description.environment else 1
    with contextlib.suppress(PluginRefused, MemoryError), _little_memory():
        again = load(file) if file else plugin
    # This process ends soon after it has loaded a file twice, and its second worker with it.
    second = marker if again is plugin else Marker(Work(again.prepare, limits.seconds, limits.memory))
    for specialty in plugin.description.specialties:
        first, *more = (each.make("", specialty, 1) for each in (marker, marker, second))
        if first.question is None:
            raise PluginRefused(f"no question for {specialty}, seed 1: {first.fault}")
        if any(made.question != first.question for made in more):
            raise PluginRefused(
                f"{specialty}, seed 1, gives another question each time, so other nodes could not check"
                " answers to it: draw everything from random.Random(seed)"
            )
        texts = (*(text * turns for text in SAMPLES), *([first.answer] if first.answer else []))
        (scores, fault), *repeated = (
            each.mark("", ScoreItem(specialty, 1, texts)) for each in (marker, marker, second)
        )
        if fault.startswith(("score gave", "step gave")) or "refused in the verifier" in fault:
            raise PluginRefused(f"{specialty}, seed 1: {fault}")
        pairs = (pair for marks, _ in repeated for pair in zip(scores, marks, strict=True))
        if different := [pair for pair in pairs if pair[0] != pair[1]]:
            one, other = ((*each.observations, f"reward {each.reward}") for each in different[0])
            raise PluginRefused(
                f"{specialty}, seed 1: the same texts give {one} and then {other}, so other nodes could not"
                " check answers to it: draw everything from random.Random(seed)"
            )


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Limit the address space until the block ends, if the system supports it (macOS does not)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = address_space() + LOADING_MEMORY_BYTES
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(
            resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    run(lambda: work(*sys.argv[1:]))
