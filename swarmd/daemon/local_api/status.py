"""The daemon's own part of the status, and the peers of `swarmd peers`."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import structs

from p2p.identity import nickname
from p2p.types import Peer, PeerId
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.config.sources import flatten
from swarmd.daemon.diagnosis.learning import FROZEN, KEPT_LINES, trouble_of
from swarmd.daemon.local_api.roster import AuthorRecord, Roster
from swarmd.daemon.supervision.watchdog import Stuck
from swarmd.state.status import (
    NEXT,
    JudgeStatus,
    KnownPeer,
    MeasuredKl,
    ModelDescription,
    NodeState,
    PeerList,
    Status,
    TrainerFigures,
)
from swarmd.types import RoundLine, Score, ShownRollout

# Rounds in the reward curve, and rounds whose answers `swarmd status --answers` shows.
KEPT_REWARDS, KEPT_ANSWERS = 500, 8
LIMITS = ("model.threads", "round.pace", "checkpoint.gigabytes_a_day")  # limits outside [limits] and [when]


class StatusBoard:
    """Keeps the daemon's own part of the status in `known`; the daemon adds the fields of its parts."""

    def __init__(self, config: NodeConfig, folder: Path, roster: Roster) -> None:
        self.config, self._roster = config, roster
        now = time.time()
        self.known = Status(
            cause="starting the trainer",
            remedy="wait: usually 1 s",
            since=now,
            pid=os.getpid(),
            started_at=now,
            state_dir=str(folder),
            model=ModelDescription(config.model.name),
            rounds=config.round.rounds or None,
            learning=None if config.round.train == "on" else FROZEN,
            limits={
                key: value
                for key, value in flatten(config).items()
                if key in LIMITS or key.startswith(("limits.", "when."))
            },
        )
        self._before = self.known  # the status before the trainer was stuck
        self._judged: Score | None = None  # the judge's last score before this start
        self.answers: deque[ShownRollout] = deque(maxlen=KEPT_ANSWERS)
        self._lines: deque[RoundLine] = deque(maxlen=KEPT_LINES)  # the last rounds since this start

    def on_gpu(self) -> bool:
        """Return whether the node trains on a CUDA device now."""
        return self.known.state is NodeState.TRAINING and self.known.model.device.startswith("cuda")

    def say(self, state: NodeState, cause: str = "", remedy: str = "") -> None:
        """Change to a state, unless NEXT forbids it: then the trainer's message came too late."""
        known = self.known
        if state not in NEXT[known.state]:
            return
        if (state, cause) != (known.state, known.cause):
            known.since = time.time()
        known.state, known.cause, known.remedy, known.progress = state, cause, remedy, None

    def say_stuck(self, stuck: Stuck | None) -> None:
        """Show that the trainer is stuck; for None, return to the state before."""
        if stuck is not None:
            if self.known.state is not NodeState.STUCK:
                self._before = structs.replace(self.known)
            self.say(NodeState.STUCK, stuck.cause, stuck.remedy)
        elif self.known.state is NodeState.STUCK:
            self.say(self._before.state, self._before.cause, self._before.remedy)

    def replay(self, lines: Sequence[RoundLine]) -> None:
        """Add the rounds of earlier runs, from metrics.jsonl."""
        for line in lines:
            self._note(line)
            self._judged = line.judge or self._judged

    def resumed(self, ready: link.TrainerReady) -> None:
        """Show that the trainer is ready. Drop rounds that its predecessor lost, as they are run again."""
        known = self.known
        if lost := min(known.round - ready.round, len(known.rewards)):
            known.rewards, known.external = known.rewards[:-lost], known.external[:-lost]
        known.model, known.round, known.saved = ready.model, ready.round, ready.round

    def round_done(self, done: link.RoundDone) -> None:
        known, line = self.known, done.line
        if known.state is NodeState.TRAINING:
            # Remove the cause, which described the first round.
            self.say(NodeState.TRAINING)
        self._note(line)
        known.last, known.saved, known.progress = line, done.saved, None
        known.trainer = TrainerFigures(verifier_pid=done.verifier_pid)
        if line.answers is not None:
            self._learn(done)
        if line.kl is not None:
            known.kl = MeasuredKl(line.round, line.kl)

    def _note(self, line: RoundLine) -> None:
        known = self.known
        known.round = line.round
        known.rewards = [*known.rewards, line.reward_mean][-KEPT_REWARDS:]
        known.external = [*known.external, line.external][-KEPT_REWARDS:]

    def _learn(self, done: link.RoundDone) -> None:
        self._lines.append(done.line)
        if done.shown is not None:
            self.answers.append(done.shown)
        sample = self.answers[-1].answers[0][0] if self.answers else ""
        found = (
            trouble_of(self._lines, self.known.model, sample) if self.config.round.train == "on" else FROZEN
        )
        # Keep the earlier text and its sample while the trouble is the same.
        if found is None or self.known.learning is None or found.remedy != self.known.learning.remedy:
            self.known.learning = found

    def judged(self, judge: JudgeStatus | None) -> JudgeStatus | None:
        """Add the judge's last score before this start to its status, unless there is a newer one."""
        if judge is None or judge.score is not None or self._judged is None:
            return judge
        return structs.replace(judge, score=self._judged.score, n=self._judged.n, earlier=True)


def peers_of(
    roster: Roster,
    peers: Sequence[Peer],
    now: float,
    score: Callable[[PeerId], float] | None = None,
    said: Mapping[PeerId, tuple[int, str]] = MappingProxyType({}),
) -> PeerList:
    """Return the known peers: first connected ones, then authors heard through other nodes.

    said: round and model that authors state about themselves.
    """
    connected = {peer.id: peer for peer in peers}
    known = dict.fromkeys([*connected, *roster.present(now)])
    return PeerList([_known(each, connected.get(each), roster, score, said.get(each)) for each in known])


def _known(
    peer_id: PeerId,
    peer: Peer | None,
    roster: Roster,
    score: Callable[[PeerId], float] | None,
    said: tuple[int, str] | None,
) -> KnownPeer:
    author = roster.get(peer_id) or AuthorRecord(0.0)
    return KnownPeer(
        peer_id,
        nickname(peer_id),
        peer.address if peer else None,
        peer.direction if peer else "relayed",
        peer.connected_at if peer else None,
        heard_at=author.last or None,
        frames=author.frames,
        rejected=author.rejected,
        round=said[0] if said else None,
        model=said[1] if said else None,
        learnt=dict(author.learnt),
        score=round(score(peer_id), 1) if score else None,
    )
