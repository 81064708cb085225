"""Isolation detection: notices that a node is alone, and collects the facts for a diagnosis.

It asks peers what they see, and checks which bootstrap addresses answer. `isolation` turns the facts into
cause and remedy.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio

from p2p.address import parse_bootstrap
from p2p.member import Member
from p2p.peers.noise_probe import probe
from p2p.peers.outbound import TARGET_MEMBERS
from p2p.types import PeerId, Reason
from swarmd.config.config import SwarmConfig
from swarmd.daemon.diagnosis.isolation import Facts, certain, twin_trouble, why_alone
from swarmd.daemon.diagnosis.reachability_survey import ask_around, is_offline, whom_to_ask
from swarmd.daemon.local_api.roster import Roster
from swarmd.state.status import Trouble

CHECK_EVERY_S = 2.0
# After this many seconds alone, other nodes had time to be found.
SETTLED_S = 18.0
# Seconds between two searches for the cause; SEARCH_LATER_S applies after LATER_S alone.
SEARCH_EVERY_S, SEARCH_LATER_S, LATER_S = 10.0, 30.0, 300.0
# Seconds between two searches while a peer is heard.
CALM_S = 25.0
# After this many seconds alone, silence itself is reported.
PATIENT_S = 900.0
# A peer of a small swarm counts as gone after it was disconnected for this many seconds.
LEFT_S = 10.0

log = logging.getLogger(__name__)


class IsolationWatch:
    """Watches whether the node hears other peers; `trouble` says why not, and is None if all is well.

    clock: seconds since the epoch, as in the roster. Durations are measured by trio's clock.
    """

    def __init__(
        self,
        member: Member,
        config: SwarmConfig,
        curriculum: str,
        roster: Roster,
        clock: Callable[[], float],
        runs: str = "",
    ) -> None:
        self.member, self._config, self._curriculum, self._roster = member, config, curriculum, roster
        self._clock, self._runs = clock, runs
        self._bootstrap = {text: parse_bootstrap(text)[0] for text in config.bootstrap}
        # Refused frames up to the moment when a peer was last heard.
        self._refused_before: Counter[Reason] = Counter()
        self._connected: frozenset[PeerId] = frozenset()
        self._lost: dict[PeerId, float] = {}  # when the connection ended, by peer
        self.trouble: Trouble | None = None

    async def run(self) -> None:
        alone_since = searched = trio.current_time()
        heard_before = False
        while True:
            now = trio.current_time()
            if self.member.away:
                # The node has left the swarm by itself, and its status says why. It hears no peer now.
                self.trouble, alone_since = None, now
                for author in self._roster.present(self._clock()):
                    self._roster.gone(author)
                await trio.sleep(CHECK_EVERY_S)
                continue
            self._note_connections(now)
            if heard := bool(self._roster.present(self._clock())):
                alone_since, self._refused_before = now, Counter(self.member.rejected)
            alone = now - alone_since
            every = CALM_S if heard else SEARCH_EVERY_S if alone < LATER_S else SEARCH_LATER_S
            if (earlier := self.member.earlier_twin()) is not None:
                self.say(twin_trouble(earlier))
            elif heard != heard_before or now - searched >= every:
                searched = now
                self.say(await self._search(heard, alone))
            heard_before = heard
            await trio.sleep(CHECK_EVERY_S)

    def say(self, trouble: Trouble | None) -> None:
        """Set `trouble`, and log it if it changed."""
        if trouble != self.trouble and trouble is not None:
            log.warning("%s; %s", trouble.cause, trouble.remedy)
        elif trouble != self.trouble:
            log.info("no problem with the swarm any more")
        self.trouble = trouble

    def _note_connections(self, now: float) -> None:
        """Record which connections ended.

        In a small swarm, a peer that stays disconnected is no longer counted as heard. In a large swarm
        nodes also close connections that they do not need, so a closed connection means nothing.
        """
        connected = frozenset(self.member.engine.connected())
        changed, self._connected = self._connected ^ connected, connected
        self._lost = {
            peer: since for peer, since in self._lost.items() if peer not in connected
        } | dict.fromkeys(changed - connected, now)
        for peer in [peer for peer, since in self._lost.items() if now - since >= LEFT_S]:
            del self._lost[peer]
            if len(connected) < TARGET_MEMBERS:
                self._roster.gone(peer)

    async def _search(self, heard: bool, alone: float) -> Trouble | None:
        asked = whom_to_ask(self.member, [] if heard else [*self._bootstrap.values()])
        said: dict[str, Any] = {}
        bootstrap: list[dict[str, Any]] = []

        async def ask() -> None:
            said.update(await ask_around(self.member, asked, self._clock))

        async def knock() -> None:
            there = {*self.member.engine.connected(), self.member.identity.peer_id}
            bootstrap.extend(await probe(self._bootstrap, there))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            if not heard:
                nursery.start_soon(knock)
        facts = Facts(
            name=self._config.name,
            curriculum=self._curriculum,
            digest=self.member.topic.digest,
            runs=self._runs,
            heard=heard,
            settled=alone >= SETTLED_S,
            offline=is_offline(self._config.bootstrap),
            connected=len(self.member.peers()),
            bootstrap=bootstrap,
            refused=Counter(self.member.rejected) - self._refused_before,
            **said,
        )
        return certain(facts) if heard or alone < PATIENT_S else why_alone(facts)
