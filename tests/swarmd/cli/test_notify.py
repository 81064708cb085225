"""Notifications on the desktop, through a `notify-send` that writes down what it is given."""

import os
from pathlib import Path

import pytest

from swarmd.cli.views.notify import LONG_PAUSE_S, NotifyView, notifier
from swarmd.cli.views.plain import PlainView
from tests.swarmd.cli.test_view import document
from tests.swarmd.conftest import Run


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, log = tmp_path / "bin", tmp_path / "shown"
    folder.mkdir()
    program = folder / "notify-send"
    program.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {log}; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return log


def test_a_long_pause_is_told_once_and_an_end_with_its_reason(tmp_path: Path) -> None:
    now, told = [0.0], list[tuple[str, str]]()
    with (tmp_path / "view").open("w") as stream:
        view = NotifyView(PlainView(stream), lambda title, text: told.append((title, text)), lambda: now[0])
        paused = document() | {"state": "paused", "cause": "on battery", "remedy": "plug it in"}
        for state in (paused, document(), paused, paused):
            view.status(state)
            now[0] += LONG_PAUSE_S - 1
        assert told == []
        view.status(paused)
        view.status(paused)
        assert told == [("swarmd has been paused for 30 minutes", "paused: on battery; plug it in")]
        view.ended(None)
        assert len(told) == 1  # it was stopped: nobody has to be told
        view.status(document() | {"round": 300, "rounds": 300})
        view.ended(None)
        view.ended("no room on the disk")
    assert told[1:] == [
        ("swarmd has finished", "300 rounds"),
        ("swarmd stopped with an error", "no room on the disk"),
    ]


def test_a_notifications_text_is_neither_markup_nor_option(shown: Path) -> None:
    send = notifier()
    assert send is not None
    sent = send("title", "<b>--urgency=critical\x1b[31m & more")
    assert sent is not None
    sent.wait()
    assert shown.read_text().splitlines() == [
        "--app-name=swarmd",
        "--",
        "title",
        "&lt;b&gt;--urgency=critical\\x1b[31m &amp; more",
    ]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A state folder with which no node can start."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "identity.key").write_text("damaged")
    (tmp_path / "state" / "identity.key").chmod(0o600)
    return tmp_path / "state"


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_node_that_fails_says_so_on_the_desktop_if_it_is_asked_to(
    run: Run, shown: Path, damaged: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("SWARMD_NOTIFY", setting)
    assert run("join", "--state-dir", damaged).code != 0 and shown.exists() is (setting == "on")
    if setting == "on":
        assert "swarmd stopped with an error" in shown.read_text() and "is damaged" in shown.read_text()


def test_a_desktop_without_notifications_is_reported(
    run: Run, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(damaged))
    monkeypatch.setenv("SWARMD_NOTIFY", "on")
    assert "neither notify-send nor osascript" in run("join", "--state-dir", damaged).err
