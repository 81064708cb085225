"""Small models for the workers' tests."""

from pathlib import Path

import pytest

from tests.swarmd.policy.conftest import make_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One family whose prompts are shared while answering, one that is padded. Not to be changed."""
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in ("qwen2", "lfm2")}
