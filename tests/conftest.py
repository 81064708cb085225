"""Makes test runs repeatable.

Property tests draw from a fixed seed, and no test depends on the machine's load.
"""

import gc
import inspect
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from tests.engines.p2pd import p2pd_missing

# Imports create many objects that stay. Visiting them in each garbage collection took a third of pytest's
# collection time.
gc.disable()

os.environ.setdefault("OMP_NUM_THREADS", "1")
for setting in [name for name in os.environ if name.startswith("SWARMD_")]:  # set by the developer
    del os.environ[setting]
os.environ["SWARMD_LIMITS_PRIORITY"] = "normal"  # else nodes would wait for other programs
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing may be downloaded in a test
# A shell's background jobs ignore SIGINT, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("swarmd", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("swarmd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run async tests on trio unless they are marked otherwise, and sort the tests.

    Fast tests come first, so that a failure shows early. Of the slow tests those with whole nodes come first,
    so that no worker waits long for another at the end.
    """
    for item in items:
        if inspect.iscoroutinefunction(getattr(item, "obj", None)) and not item.get_closest_marker("anyio"):
            item.add_marker("trio")
        if item.get_closest_marker("p2pd") and (reason := p2pd_missing()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=turn)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def turn(item: pytest.Item) -> int:
    slow, net, gpu = (item.get_closest_marker(name) is not None for name in ("slow", "net", "gpu"))
    return 0 if not (slow or net or gpu) else 1 if slow and net else 2 if slow else 3


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    """Yield a contained verifier, shared by all tests that do not break it."""
    with Verifier(TINY_9) as running:
        yield running
