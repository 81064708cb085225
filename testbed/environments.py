"""Separate environments with the published packages of peers; each is created if it is missing.

python -m testbed.environments NAME…
"""

import argparse
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
from pathlib import Path

from testbed import ROOT

# The packages that pip installs, one list after the other; the peer itself is last. GenRL requires over a
# hundred packages that its trainer never imports, a blockchain client's among them. So it is installed
# without dependencies, and the packages that the trainer does import are named.
PACKAGES = {
    "trl": [["torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "trl==1.16.0"]],
    # The lowest versions that swarmd.trl supports.
    "trl-lowest": [["torch==2.13.0", "transformers==5.23.0", "trl==1.0.0"]],
    # llama.cpp, built for CPUs, with its server.
    "llama": [["xllamacpp==2026.10.11549"]],
    # Tasksets that swarmd.tasks.foreign.taskset loads.
    "verifiers": [["verifiers==0.4.0"]],
    "lm-eval": [["lm-eval==0.4.13"]],
    "genrl": [
        ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "wandb==0.22.3", "tensorboard==2.21.0"],
        ["--no-deps", "gensyn-genrl==0.3.0"],
    ],
    # GenRL's exchange, with the network library that `pip install gensyn-genrl` installs.
    "genrl-exchange": [
        ["torch==2.13.0", "hivemind==1.1.12", "psutil==7.2.2"],
        ["--no-deps", "gensyn-genrl==0.3.0"],
    ],
}

# Packages whose Python files are only read, not run; they are taken from the source distribution on PyPI.
SOURCES = {"vllm-sources": "vllm==0.33.0"}


def default_environment(peer: str) -> Path:
    return Path(os.environ.get("BENCHMARK_PEERS", ROOT / "build" / "peers")) / peer


def environment_of(peer: str, folder: Path) -> Path:
    """Return the Python of an environment with the peer's published package; create it if it is missing."""
    python = folder / "bin" / "python"
    if holds(folder, peer):
        return python
    print(f"making an environment for {peer} in {folder}", file=sys.stderr)
    steps = [[str(python), "-m", "pip", "install", "-q", *packages] for packages in PACKAGES[peer]]
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        for step in steps:
            subprocess.run(step, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:  # no network, a full disk, or no venv module
        lines = "\n".join(
            "    " + " ".join(step) for step in [["python3", "-m", "venv", str(folder)], *steps]
        )
        raise SystemExit(
            f"The environment for {peer} could not be made: {error}. It needs a network once. If there is"
            f" one, run\n{lines}\nand give the folder with --environment."
        ) from error
    return python


def sources_of(name: str, folder: Path) -> Path:
    """Return a folder with the Python files of a package in SOURCES; download them if they are missing."""
    package, version = SOURCES[name].split("==")
    found = folder / version
    if not found.is_dir():
        index = urllib.request.Request(
            f"https://pypi.org/simple/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )  # PEP 691
        with urllib.request.urlopen(index) as reply:
            files = {each["filename"]: each["url"] for each in json.load(reply)["files"]}
        url = files[f"{package}-{version}.tar.gz"]
        print(f"fetching {url}", file=sys.stderr)
        with urllib.request.urlopen(url) as reply, tarfile.open(fileobj=io.BytesIO(reply.read())) as archive:
            parts = [each for each in archive.getmembers() if each.name.endswith(".py")]
            archive.extractall(folder, parts, filter="data")
        (folder / f"{package}-{version}").rename(found)
    return found


def beside(python: Path) -> dict[str, str]:
    """Return environment variables with which our Python finds another environment's packages after its own.

    They also turn off the search for peers on the local network, and give torch one thread.
    """
    (theirs,) = python.parents[1].glob("lib/python3*/site-packages")
    path = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"], str(theirs)])
    quiet = {"SWARMD_SWARM_MDNS": "off", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return os.environ | quiet | {"PYTHONPATH": path}


def holds(folder: Path, peer: str) -> bool:
    """Return whether the environment has the peer's package, in the version of PACKAGES."""
    name, version = PACKAGES[peer][-1][-1].split("==")
    return any(folder.glob(f"lib/python3*/site-packages/{name.replace('-', '_')}-{version}.dist-info"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m testbed.environments")
    parser.add_argument("names", nargs="+", choices=[*PACKAGES, *SOURCES])
    for named in parser.parse_args().names:
        make = sources_of if named in SOURCES else environment_of
        print(make(named, default_environment(named)))
