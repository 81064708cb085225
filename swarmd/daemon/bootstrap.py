"""A bootstrap node: other nodes find each other through it, and it relays for nodes behind NAT.

It trains nothing and never imports torch. Every curriculum has a swarm under the node's swarm name. The
node is a member of all of them, so it forwards their messages after its inbox has checked them. For nodes of
swarms with other names it is a DHT peer, through which they find each other.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import trio
from msgspec import to_builtins

from p2p.address import parse_endpoint
from p2p.identity import Identity, nickname
from p2p.member import Member
from p2p.peers.introduction import HELPING
from p2p.sequence import SequenceFile
from p2p.types import Started
from swarmd.config.config import NodeConfig
from swarmd.daemon.diagnosis.isolation import twin_trouble
from swarmd.daemon.diagnosis.reachability_survey import survey
from swarmd.daemon.inviting import PLACES, invite, place
from swarmd.daemon.local_api import control
from swarmd.daemon.local_api.roster import Roster
from swarmd.daemon.local_api.status import peers_of
from swarmd.daemon.membership import addresses_present, engine_builder, introduce, nearby, run, topic_of
from swarmd.errors import ConfigError
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.state.folder import IDENTITY_FILE, LOG_FILE, StateFolder
from swarmd.state.logs import set_up_logging
from swarmd.state.status import NodeState, Status, SwarmLabel, Trouble
from swarmd.tasks.curriculum import CURRICULA
from swarmd.terminal import hang_up, printable, tell

# The default listening port. Other people write the address down, so the port must stay the same.
PORT = 4001

log = logging.getLogger(__name__)


class BootstrapNode:
    def __init__(self, config: NodeConfig, folder: Path, announce: Callable[[Status], None]) -> None:
        if config.swarm.engine == "none":
            raise ConfigError(
                'swarm.engine is "none": a bootstrap node is nothing without a network. Set it to "libp2p".'
            )
        self.exit_code = 0
        self._config, self._folder, self._announce = config, folder, announce
        curriculum = curriculum_of(config)
        others = [other for other in CURRICULA.values() if other.name != curriculum.name]
        identity, topic = Identity.load_or_create(folder / IDENTITY_FILE), topic_of(config.swarm, curriculum)
        self._roster = Roster()
        self._started_at = time.time()
        self.member = Member(
            identity,
            topic,
            engine_builder(identity, topic, config.swarm, folder, public=True),
            sequence=SequenceFile(folder / "sequence", time.time),
            clock=time.time,
            admitted=lambda envelope: self._roster.heard(envelope.author, time.time()),
            folder=folder,
            also=sorted({topic_of(config.swarm, other) for other in others} - {topic}, key=str),
        )
        introduce(self.member, curriculum, lambda: HELPING)
        self._curricula = [curriculum.name, *(other.name for other in others)]
        self._stop = trio.Event()
        self._waits: Trouble | None = None  # why it cannot listen yet

    async def run(self) -> None:
        handlers: Mapping[str, control.Handler] = {
            "status": control.answering(self.status),
            "peers": control.answering(lambda: peers_of(self._roster, self.member.peers(), time.time())),
            "network": self._on_network,
            "invitation": control.answering(lambda: invite(self._config, None, self.member.addresses())),
            "stop": self._on_stop,
        }
        async with trio.open_nursery() as outer:
            # As in the daemon, signals are handled until all other tasks have ended.
            await outer.start(self._watch_signals)
            async with trio.open_nursery() as nursery:
                await nursery.start(control.serve, self._folder, handlers)
                await addresses_present(self._config.swarm.listen, self._wait)
                await nursery.start(self.member.run)
                if self._config.swarm.mdns == "on":
                    nursery.start_soon(nearby(self.member).run)
                self._announce(self.status())
                await self._stop.wait()
                nursery.cancel_scope.cancel()
            outer.cancel_scope.cancel()

    def _wait(self, trouble: Trouble | None) -> None:
        if trouble and trouble != self._waits:
            tell(f"{trouble.cause}; {trouble.remedy}")
        self._waits = trouble

    def status(self) -> Status:
        """Return the node's current status."""
        connected = len(self.member.peers())
        return Status(
            peer_id=self.member.identity.peer_id,
            name=nickname(self.member.identity.peer_id),
            swarm=SwarmLabel(
                self.member.topic.name,
                curricula=tuple(self._curricula),
                topics=tuple(map(str, self.member.topics)),
            ),
            engine=self._config.swarm.engine,
            peers=len(self._roster.present(time.time())),
            connected=connected,
            addresses=sorted(self.member.addresses(), key=lambda address: PLACES.index(place(address))),
            rejected={reason.value: count for reason, count in self.member.rejected.items() if count},
            trouble=self._trouble(),
            role="bootstrap",
            state=NodeState.HELPING,
            cause="it trains nothing: nodes find each other through it",
            remedy="nothing to do" if connected else "give its address to other people, for --bootstrap",
            pid=os.getpid(),
            started_at=self._started_at,
            state_dir=str(self._folder),
            relay="at most 64 MiB for each pair of nodes"
            + ", and 1 MiB a second for all" * (self._config.swarm.engine == "libp2p"),
        )

    async def _watch_signals(self, *, task_status: Started) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *hang_up()) as signals:
            task_status.started("")
            async for number in signals:
                self.exit_code = 130 if number == signal.SIGINT else 0
                log.info("stopped by %s", signal.Signals(number).name)
                self._stop.set()

    async def _on_network(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **await survey(self.member, self._config),
            "curriculum": " or ".join(self._curricula),
            "trouble": to_builtins(self._trouble()),
        }

    def _trouble(self) -> Trouble | None:
        earlier = self.member.earlier_twin()
        return twin_trouble(earlier) if earlier is not None else self._waits

    async def _on_stop(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stop.set()
        return {"schema": 1, "stopping": True}


def run_bootstrap(config: NodeConfig, state: StateFolder, announce: Callable[[Status], None]) -> int:
    """Run until stopped. Returns the exit code; raises OperatorError.

    announce: called once with the node's status and addresses, as soon as other nodes can connect.
    """
    set_up_logging(state.path / LOG_FILE, stderr=False)
    node = BootstrapNode(config, state.path, announce)
    run(node.run)
    return node.exit_code


def announcement(status: Status) -> list[str]:
    """Format the announcement as lines of text, without the addresses."""
    lines = [
        (
            f"{status.name} {status.peer_id} helps swarm {status.swarm.name}:"
            f" {', '.join(status.swarm.curricula)}"
        ),
        f"engine {status.engine}",
        f"relays for nodes behind NAT: {status.relay}",
        f"ask for it with --state-dir {quote(status.state_dir)}: swarmd status, peers, stop, doctor network",
    ]
    places = {*map(place, status.addresses)}
    if not places - {"machine"}:
        lines.append(
            "only this machine can dial it; for other machines let it listen on /ip4/0.0.0.0/tcp/4001"
        )
    elif "internet" not in places:
        ports = {found.port for each in status.addresses if (found := parse_endpoint(each)) is not None}
        lines.append(
            "it has no public address, so only its own network can dial it; for other machines forward TCP"
            f" port {', '.join(map(str, sorted(ports)))} of your router to this machine, and give away the"
            " router's address in place of this one"
        )
    return [*map(printable, lines), "other nodes join with --bootstrap and one of:"]
