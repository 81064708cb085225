"""Isolation detection: notices that a node hears no peer, and collects the facts: what peers see, and which bootstrap addresses answer.

`isolation` turns the facts into cause and remedy.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import trio

from p2p.address import parse_bootstrap
from p2p.member import Member
from p2p.types import PeerId, Reason
from swarmd.config.config import SwarmConfig
from swarmd.daemon.isolation import Facts, Trouble, dead_bootstrap, twin_trouble, why_alone
from swarmd.daemon.reachability_survey import count_others, who_answers
from swarmd.daemon.roster import Roster

CHECK_EVERY = 2.0  # seconds
QUIET = 60.0  # seconds without anybody after which the node says so
KNOCK_FIRST = 5.0  # seconds after the start at which bootstrap addresses that are not connected are tried by themselves
INQUIRE = 30.0  # seconds between two searches for the cause, while no peer is heard
KNOCK_EVERY = 600.0  # seconds, while somebody is heard
CONNECTED = {"answers": True, "says": "connected", "refused": False}

log = logging.getLogger(__name__)


class IsolationWatch:
    """talk: told when a bootstrap address stops or begins to answer. trouble: what to tell the operator, None while somebody is heard."""

    def __init__(
        self, member: Member, config: SwarmConfig, curriculum: str, roster: Roster, clock: Callable[[], float], talk: Callable[[str], None]
    ) -> None:
        self._member, self._config, self._curriculum, self._roster = member, config, curriculum, roster
        self._clock, self._talk = clock, talk
        self._bootstrap = {text: parse_bootstrap(text)[0] for text in config.bootstrap}
        self._knocked: dict[str, Mapping[str, Any]] = {}  # address -> who answers there
        self._alone_since = clock()
        self._refused_before: Counter[Reason] = Counter()  # up to the moment at which somebody was heard last
        self.trouble: Trouble | None = None

    async def run(self) -> None:
        await trio.sleep(KNOCK_FIRST)
        await self._knock()
        inquired = knocked = self._clock()
        while True:
            now = self._clock()
            if self._roster.present(now):
                self._alone_since, self._refused_before = now, Counter(self._member.rejected)
            alone = now - self._alone_since >= QUIET
            if (twin := self._member.twin()) is not None:
                self._say(twin_trouble(twin.later))
            elif not alone:
                self._say(None)
                inquired = now - INQUIRE
                if now - knocked >= KNOCK_EVERY:
                    knocked = now
                    await self._knock()
            elif now - inquired >= INQUIRE:
                inquired = knocked = now
                self._say(why_alone(await self._facts()))
            await trio.sleep(CHECK_EVERY)

    def document(self) -> dict[str, Any]:
        """For the status: the problem, and the bootstrap addresses that do not answer."""
        dead = [dead_bootstrap(entry) for entry in self._knocked.values() if not entry["answers"]]
        return {"trouble": self.trouble.document() if self.trouble else None, "bootstrap": [found.document() for found in dead]}

    def _say(self, trouble: Trouble | None) -> None:
        if trouble != self.trouble and trouble is not None:
            log.warning("%s; %s", trouble.cause, trouble.remedy)
        elif trouble != self.trouble:
            log.info("no problem with the swarm any more")
        self.trouble = trouble

    async def _facts(self) -> Facts:
        await self._knock()
        return Facts(
            name=self._config.name,
            curriculum=self._curriculum,
            connected=len(self._member.peers()),
            bootstrap=list(self._knocked.values()),
            refused=Counter(self._member.rejected) - self._refused_before,
            shards=self._member.sharding.shards,
            **await count_others(self._member, list(self._bootstrap.values())),
        )

    async def _knock(self) -> None:
        """Try the bootstrap addresses whose peer is not connected. A change is reported once."""
        connected = {peer.id for peer in self._member.peers()} | {self._member.identity.peer_id}

        async def one(address: str, peer: PeerId) -> None:
            there = peer in connected
            found = {"address": address, **(CONNECTED if there else await who_answers(address))}
            before = self._knocked.get(address, {"answers": True})
            self._knocked[address] = found
            if found["answers"] != before["answers"]:
                trouble = dead_bootstrap(found)
                text = f"bootstrap address {address} answers again" if found["answers"] else f"{trouble.cause}; {trouble.remedy}"
                self._talk(text)
                log.warning("%s", text)

        async with trio.open_nursery() as nursery:
            for address, peer in self._bootstrap.items():
                nursery.start_soon(one, address, peer)
