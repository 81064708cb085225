from collections.abc import Iterator

import pytest

from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.scoring import Verifier


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    with Verifier(TINY_9.name) as running:
        yield running
