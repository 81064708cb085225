"""The first seconds of a node: what begins only when others can reach it."""

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.member import Member
from swarmd.cli.view_plain import PlainView
from swarmd.config.config import NodeConfig
from swarmd.daemon import daemon as daemon_module
from swarmd.daemon.daemon import Daemon
from swarmd.testing import until


@pytest.mark.net
async def test_it_is_announced_on_the_local_network_as_soon_as_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for addresses before, mDNS would look again a quarter of a minute later."""
    announced: list[Sequence[str]] = []

    def nearby(member: Member) -> Any:
        async def run() -> None:
            announced.append(member.addresses())

        return SimpleNamespace(run=run)

    monkeypatch.setattr(daemon_module, "nearby", nearby)
    config = NodeConfig.model_validate({"swarm": {"engine": "libp2p", "listen": ("/ip4/127.0.0.1/tcp/0",)}})
    async with trio.open_nursery() as nursery:
        await Daemon(config, tmp_path, PlainView(io.StringIO())).startup(nursery)
        await until(lambda: announced)
        nursery.cancel_scope.cancel()
    (addresses,) = announced
    assert len(addresses) == 1
