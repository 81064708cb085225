"""The wheel as a volunteer gets it: the three packages, the tiny models, and nothing else."""

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT

PACKAGES = ("swarmd", "p2p", "judge")
WEIGHTS = Path("swarmd/policy/models/tiny/weights")
MAX_BYTES = 20 * 1024 * 1024

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: a `build` folder left in a checkout would end up in the wheel."""
    copy, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "tests", "packaging", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), str(copy)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (path,) = built.iterdir()
    assert path.stat().st_size < MAX_BYTES
    return zipfile.ZipFile(path)


def test_it_holds_the_packages_and_the_tiny_models_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / WEIGHTS).rglob("*") if path.is_file()}
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert sorted(files - expected) == []
    assert sorted(expected - files) == []


def test_it_holds_both_tiny_models_whole(wheel: zipfile.ZipFile) -> None:
    for model in ("tiny", "tiny-latent"):
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"):
            inside = str(WEIGHTS / model / name)
            assert wheel.read(inside) == (ROOT / inside).read_bytes()


def test_its_metadata_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = f"swarmd-{project['version']}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("swarmd", project["version"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(required) == len(project["dependencies"])
    assert "Apache License" in wheel.read(f"{folder}/licenses/LICENSE").decode()
    scripts = wheel.read(f"{folder}/entry_points.txt").decode()
    assert "swarmd = swarmd.cli.app:main" in scripts
    assert "swarmd-judge = judge.cli:main" in scripts
