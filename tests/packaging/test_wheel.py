"""The built distributions. The wheel has the packages, tiny models and settings; the sdist has everything."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT
from tests.processes import killed_after

PACKAGES = ("swarmd", "p2p", "judge")
WEIGHTS = Path("swarmd/policy/models/tiny/weights")
PAGES = [
    ROOT / folder for folder in ("swarmd/daemon/page/static", "judge/pages/static", "judge/pages/templates")
]
UNITS = ROOT / "swarmd/system/units"
EXPERIMENTS = ROOT / "swarmd/lab/experiments"
MAX_BYTES = 20 * 1024 * 1024
MAX_INSTALLED_BYTES = 300 * 1024 * 1024  # without PyTorch, transformers and peft
UV = shutil.which("uv") or Path(sys.executable).with_name("uv")
NOT_COPIED = (".*", "__pycache__", "build", "dist", "demo-*", "*.egg-info", "node_modules")
BUILD = "from setuptools import build_meta as b; print(b.build_wheel('built')); print(b.build_sdist('built'))"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because a `build` folder in a checkout would end up in the wheel."""
    copy = tmp_path_factory.mktemp("source") / "swarmd"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    made = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return copy / "built"


@pytest.fixture
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    assert path.stat().st_size < MAX_BYTES
    return zipfile.ZipFile(path)


def test_the_wheel_has_exactly_the_complete_packages(wheel: zipfile.ZipFile) -> None:
    expected = (
        {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
        | {f"{package}/py.typed" for package in PACKAGES}
        | {str(path.relative_to(ROOT)) for path in (ROOT / WEIGHTS).rglob("*") if path.is_file()}
        | {str(path.relative_to(ROOT)) for path in EXPERIMENTS.glob("*.toml")}
        | {str(path.relative_to(ROOT)) for folder in (*PAGES, UNITS) for path in folder.iterdir()}
        | {
            f"swarmd-{PROJECT['version']}.data/data/share/swarmd/node_config.example.toml",
            "judge/judge.example.toml",
        }
    )
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert (sorted(files - expected), sorted(expected - files)) == ([], [])
    for name in (
        WEIGHTS / model / file
        for model in ("tiny", "tiny-latent")
        for file in ("config.json", "model.safetensors")
    ):
        assert wheel.read(str(name)) == (ROOT / name).read_bytes()


def test_the_wheels_metadata_describes_the_project(wheel: zipfile.ZipFile) -> None:
    folder = f"swarmd-{PROJECT['version']}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == (
        "swarmd",
        PROJECT["version"],
        "Apache-2.0",
    )
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert metadata["Author"] and "Typing :: Typed" in metadata.get_all("Classifier", [])
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(required) == len(PROJECT["dependencies"])
    page = str(metadata.get_payload())
    assert "swarmd join" in page
    # Relative links do not work on the index's page.
    assert [link for link in re.findall(r"\]\(([^)]*)\)", page) if not link.startswith("https://")] == []
    assert "Apache License" in wheel.read(f"{folder}/licenses/LICENSE").decode()
    scripts = wheel.read(f"{folder}/entry_points.txt").decode()
    assert "swarmd = swarmd.__main__:main" in scripts and "swarmd-judge = judge.__main__:main" in scripts


def test_the_source_distribution_has_tests_documents_and_changelog(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    folders = (
        "swarmd",
        "p2p",
        "judge",
        "testbed",
        "tiny_models",
        "tests",
        "benchmarks",
        "docs",
        "packaging",
        "scripts",
        "engines",
    )
    ours = subprocess.run(
        ["git", "ls-files", *folders, "*.md", "*.txt"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    # The fallback is for a copy without git.
    tracked = set(ours.stdout.splitlines()) or {"CHANGELOG.md", "docs/wire.md", "tests/conftest.py"}
    assert sorted(name for name in tracked - files if (ROOT / name).exists()) == []
    assert {"CHANGELOG.md", "node_config.example.toml"} <= files


@pytest.mark.skipif(not Path(UV).exists(), reason="needs uv")
def test_swarmd_can_be_installed_without_build_tools(built: Path, tmp_path: Path) -> None:
    """`packaging/install.sh` runs without a compiler or headers.

    PyTorch and the packages that read models are left out, because they take a gigabyte; a bootstrap node
    shows that the rest is complete.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "env", "dirname", "printf", "cat"):
        (tools / name).symlink_to(shutil.which(name) or f"no {name}")
    (tools / "uv").symlink_to(UV)
    without = tmp_path / "without.txt"
    without.write_text(
        "".join(f'{name}==1; python_version < "3"\n' for name in ("torch", "transformers", "peft"))
    )
    (wheel,) = built.glob("*.whl")
    places = {"UV_TOOL_DIR": tmp_path / "tools", "UV_TOOL_BIN_DIR": tmp_path / "commands"}
    environment = (
        {name: os.environ[name] for name in os.environ.keys() & {"HOME", "SSL_CERT_FILE"}}
        | {"PATH": str(tools), "UV_PYTHON": sys.executable, "UV_LINK_MODE": "copy"}
        | {name: str(folder) for name, folder in places.items()}
    )
    command = [ROOT / "packaging" / "install.sh", "--constraints", ROOT / "constraints.txt"]
    done = subprocess.run(
        [*command, "--overrides", without, wheel],
        capture_output=True,
        text=True,
        env=environment | {"UV_TORCH_BACKEND": "cpu"},
        timeout=TIMEOUT_S,
        check=False,
    )
    if "Failed to fetch" in done.stderr:
        pytest.skip("no package index is reachable")
    assert done.returncode == 0 and f"swarmd {PROJECT['version']}" in done.stderr, done.stderr
    files = [path for path in places["UV_TOOL_DIR"].rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < MAX_INSTALLED_BYTES
    swarmd = places["UV_TOOL_BIN_DIR"] / "swarmd"
    words = ["bootstrap", "--state-dir", tmp_path / "state", "--listen", "/ip4/127.0.0.1/tcp/0", "--json"]
    with killed_after(subprocess.Popen([swarmd, *words], stdout=subprocess.PIPE, env=environment)) as node:
        assert node.stdout is not None
        assert json.loads(node.stdout.readline())["addresses"]


def test_the_installer_and_the_setup_use_the_same_packages() -> None:
    installer = (ROOT / "packaging" / "install.sh").read_text(encoding="utf-8")
    lines = (ROOT / "overrides.txt").read_text(encoding="utf-8").splitlines()
    assert "\n".join(line for line in lines if not line.startswith("#")) in installer
    assert installer.count("\n") <= 61


def test_the_changelog_has_an_entry_for_this_version() -> None:
    assert f"\n## {PROJECT['version']} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kept", "asked", "wanted"),
    [
        ("", "", ""),
        ("", "judge,math", "[judge,math]"),
        ("plot", "", "[plot]"),
        ("plot", "judge", "[plot,judge]"),
    ],
)
def test_the_installer_keeps_installed_extras_and_adds_requested_ones(
    tmp_path: Path, kept: str, asked: str, wanted: str
) -> None:
    cases = 'build*) touch "$4/swarmd-1.whl" ;; "tool install"*) echo "$*" ;; *) echo "$TOOLS" ;;'
    (tmp_path / "uv").write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "swarmd").mkdir()
    if kept:
        (tmp_path / "swarmd" / "uv-receipt.toml").write_text(
            f'[tool]\nrequirements = [{{ name = "swarmd", extras = ["{kept}"], path = "/x.whl" }}]\n'
        )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "packaging" / "install.sh"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path, "TOOLS": str(tmp_path), "SWARMD_EXTRAS": asked},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout.split()[-1].endswith(f"/swarmd-1.whl{wanted}"), done.stderr


@pytest.mark.parametrize(
    ("capability", "asked", "taken"),
    [
        ("", "", "auto"),
        ("6.1", "", "cu126"),
        ("7.0\\n8.6", "", "cu126"),
        ("7.5", "", "auto"),
        ("12.0", "", "auto"),
        ("6.1", "cu130", "cu130"),
    ],
)
def test_the_installer_chooses_a_pytorch_with_kernels_for_the_gpu(
    tmp_path: Path, capability: str, asked: str, taken: str
) -> None:
    """uv considers only the driver (astral-sh/uv#14742)."""
    for name, does in (
        ("uv", f'echo "$UV_TORCH_BACKEND" >{tmp_path}/taken'),
        ("nvidia-smi", f'printf "{capability}"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    if not capability:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 127\n")
    subprocess.run(
        [ROOT / "packaging" / "install.sh", "a.whl"],
        capture_output=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "UV_TORCH_BACKEND": asked},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (tmp_path / "taken").read_text().strip() == taken


def test_an_installation_without_a_network_says_what_to_set(tmp_path: Path) -> None:
    failing = "echo 'error: dns error: failed to lookup address of download.pytorch.org' >&2; exit 2"
    (tmp_path / "uv").write_text(f"#!/bin/sh\n{failing}\n")
    (tmp_path / "uv").chmod(0o755)
    done = subprocess.run(
        [ROOT / "packaging" / "install.sh", "a.whl"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        timeout=TIMEOUT_S,
        check=False,
    )
    last = done.stderr.partition("dns error")[2]
    assert done.returncode == 1 and "install: done" not in last
    assert all(name in last for name in ("UV_TORCH_BACKEND=", "UV_DEFAULT_INDEX=", "UV_FIND_LINKS="))
