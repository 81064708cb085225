"""Small models for the tests of workers."""

from pathlib import Path

import pytest

from tests.swarmd.policy.conftest import make_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make models whose prompts are shared while answering, and lfm2, which is padded; do not change them."""
    families = ("llama", "mistral", "qwen2", "qwen3", "lfm2")
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in families}
