"""`swarmd ui`: the address it prints, and how a browser is led there."""

import json
import stat
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swarmd.daemon.local_api import control
from tests.swarmd.conftest import Run

ADDRESS = "http://127.0.0.1:4242/?token=secret"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the address that a browser is asked to open, on a machine with a screen whose node has a
    page."""
    addresses: list[str] = []

    def call(_folder: Path, operation: str, _kind: type, **_arguments: object) -> Mapping[str, Any]:
        assert operation == "ui"
        return {"schema": 1, "address": ADDRESS}

    monkeypatch.setattr(control, "call", call)
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return addresses


def test_the_browser_gets_a_local_file_and_not_the_secret(
    run: Run, tmp_path: Path, opened: list[str]
) -> None:
    for _ in range(2):
        assert run("ui", "--state-dir", tmp_path).out == ADDRESS + "\n"
    assert opened == [(tmp_path / "ui.html").as_uri()] * 2  # the list of processes is everybody's to read
    assert stat.S_IMODE((tmp_path / "ui.html").stat().st_mode) == 0o600
    assert f"url={ADDRESS}" in (tmp_path / "ui.html").read_text()


def test_no_browser_is_opened_without_a_display(
    run: Run, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ui", "--no-browser", "--state-dir", tmp_path).out == ADDRESS + "\n"
    assert json.loads(run("ui", "--json", "--state-dir", tmp_path).out)["address"] == ADDRESS
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 1 192.0.2.2 22")
    said = run("ui", "--state-dir", tmp_path)
    assert said.out == ADDRESS + "\n" and "ssh -L 4242:127.0.0.1:4242" in said.err
    assert opened == [] and not (tmp_path / "ui.html").exists()


def test_without_a_node_it_says_so(run: Run, tmp_path: Path) -> None:
    said = run("ui", "--state-dir", tmp_path)
    assert said.code == 6 and "swarmd join" in said.err
