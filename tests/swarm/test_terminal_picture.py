"""`scripts/terminal-picture` turns a short real run into an SVG."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: Path) -> str:
    """Return the picture's text at all moments."""
    parts = (part.strip() for part in ElementTree.parse(picture).getroot().itertext())
    return " ".join(" ".join(parts).split())


@pytest.mark.slow
@pytest.mark.net
def test_a_short_run_becomes_a_picture_with_its_output(tmp_path: Path) -> None:
    picture = tmp_path / "join.svg"
    command = [sys.executable, ROOT / "scripts" / "terminal-picture", picture, "--rounds", "2"]
    slowly = os.environ | {"SWARMD_ROUND_PACE": "3", "SWARMD_SWARM_MDNS": "off"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=6 * TIMEOUT_S, env=slowly)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{picture}: {picture.stat().st_size / 1000:.0f} kB\n"
    shown = words(picture)
    for said in ("swarmd join swarm:… --model tiny --rounds 2", "round 2 of 2", "peers", "swarm main"):
        assert said in shown, said
    assert not list(ElementTree.parse(picture).getroot().iter(f"{SVG}script"))


def test_the_picture_in_the_documents_shows_a_complete_run() -> None:
    shown = words(ROOT / "docs" / "join.svg")
    assert "round 40 of 40" in shown and "2 heard, 2 connected" in shown
