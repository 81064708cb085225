"""The documents behind `swarmd status` and `swarmd peers`.

Every state but "training" has a cause and a remedy.
"""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from p2p.identity import nickname
from p2p.types import Peer, PeerId
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.config.sources import flatten
from swarmd.daemon.diagnosis.isolation import Trouble
from swarmd.daemon.diagnosis.learning import KEPT_LINES, trouble_of
from swarmd.daemon.local_api.roster import AuthorRecord, Roster
from swarmd.types import ShownRollout

# Rounds of the reward curve, and of the answers that `swarmd status --answers` shows.
KEPT_REWARDS, KEPT_ANSWERS = 500, 8
LIMITS = ("model.threads", "round.pace", "checkpoint.gigabytes_a_day")  # limits outside their own sections


class StatusBoard:
    """Collects what happens in the daemon; documents are made from it on demand."""

    def __init__(self, config: NodeConfig, folder: Path, roster: Roster) -> None:
        self.config, self.folder, self._roster = config, folder, roster
        self.state, self.cause, self.remedy = "starting", "starting the trainer", "wait: usually 1 s"
        # `since` is the time of the last change of state or cause.
        self.started_at = self.since = time.time()
        self.limits = {
            key: value
            for key, value in flatten(config).items()
            if key in LIMITS or key.startswith(("limits.", "when."))
        }
        self.model: Mapping[str, Any] = {"model": config.model.name}
        self.round = 0
        self.saved = 0  # rounds in a checkpoint; kill -9 loses later ones
        self.judged: Mapping[str, Any] | None = None  # the judge's last score before this start
        self.verifier_pid: int | None = None
        self.last: Mapping[str, Any] | None = None
        self.kl: Mapping[str, Any] | None = None  # the last measured KL, and its round
        self.progress: Mapping[str, Any] | None = None  # how far a long round is
        self.learning: Trouble | None = None  # why nothing is learnt
        self.answers: deque[ShownRollout] = deque(maxlen=KEPT_ANSWERS)
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=KEPT_LINES)  # of this start's last rounds
        self.rewards: deque[float | None] = deque(maxlen=KEPT_REWARDS)
        # Rollouts of others in the batches of these rounds.
        self.external: deque[int] = deque(maxlen=KEPT_REWARDS)

    def device(self) -> str:
        """Return the device that the model runs on; "" until it is loaded."""
        return str(self.model.get("device", ""))

    def on_gpu(self) -> bool:
        """Return whether it trains on a CUDA device now."""
        return self.state == "training" and self.device().startswith("cuda")

    def say(self, state: str, cause: str, remedy: str) -> None:
        if (state, cause) != (self.state, self.cause):
            self.since = time.time()
        self.state, self.cause, self.remedy, self.progress = state, cause, remedy, None

    def replay(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take up the rounds of earlier runs, from metrics.jsonl."""
        self.rewards.extend(line.get("reward_mean") for line in lines)
        self.external.extend(line.get("external", 0) for line in lines)
        self.round = lines[-1]["round"] if lines else 0
        self.judged = next((line["judge"] for line in reversed(lines) if line.get("judge")), None)

    def resumed(self, ready: link.TrainerReady) -> None:
        """Show that the trainer is ready, and drop rounds lost with the one before it: they are run again."""
        for _ in range(min(self.round - ready.round, len(self.rewards))):
            self.rewards.pop()
            self.external.pop()
        self.model, self.round, self.saved = ready.model, ready.round, ready.round

    def round_done(self, done: link.RoundDone) -> None:
        self.saved = done.saved
        if self.state == "training":
            # The first round is over.
            self.say("training", "", "")
        self.last, self.round, self.verifier_pid = done.line, done.line["round"], done.verifier_pid
        self.progress = None
        if "answers" in done.line:
            self._learn(done)
        self.rewards.append(done.line["reward_mean"])
        self.external.append(done.line.get("external", 0))
        if done.line.get("kl") is not None:
            # Not every update measures the KL.
            self.kl = {"round": self.round, "value": done.line["kl"]}
        for author, said in done.authors.items():
            self._roster.says(PeerId(author), said[0], said[1])

    def _learn(self, done: link.RoundDone) -> None:
        self._lines.append(done.line)
        if done.shown is not None:
            self.answers.append(done.shown)
        sample = self.answers[-1].answers[0][0] if self.answers else ""
        found = trouble_of(self._lines, self.model, sample) if self.config.round.train == "on" else None
        # What was said stays as it is, with its sample, while it is the same trouble.
        if found is None or self.learning is None or found.remedy != self.learning.remedy:
            self.learning = found

    async def on_answers(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer "answers" of the control API."""
        return {"schema": 1, "answers": list(map(asdict, self.answers))}

    def document(
        self,
        swarm: Mapping[str, Any],
        trainer: Mapping[str, Any],
        guest: Mapping[str, Any],
        judge: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        if judge and judge["score"] is None and self.judged:
            judge = {**judge, **self.judged, "earlier": True}
        return {
            "schema": 1,
            "state": self.state,
            "cause": self.cause,
            "remedy": self.remedy,
            "since": self.since,
            "model": dict(self.model),
            "pid": os.getpid(),
            "started_at": self.started_at,
            "state_dir": str(self.folder),
            "round": self.round,
            "rounds": self.config.round.rounds or None,
            "saved": self.saved,
            "last": self.last,
            "rewards": list(self.rewards),
            "external": list(self.external),
            "kl": self.kl,
            "progress": self.progress,
            "learning": self.learning.document() if self.learning else None,
            **swarm,
            **guest,
            "limits": self.limits,
            "judge": judge,
            "trainer": {**trainer, "verifier_pid": self.verifier_pid},
        }


def peers_document(roster: Roster, peers: Sequence[Peer], now: float) -> dict[str, Any]:
    """Return the peers document: connected peers first, then authors heard through others."""
    connected = {peer.id: peer for peer in peers}
    known = dict.fromkeys([*connected, *roster.present(now)])
    return {"schema": 1, "peers": [_row(each, connected.get(each), roster.get(each)) for each in known]}


def _row(peer_id: PeerId, peer: Peer | None, author: AuthorRecord | None) -> dict[str, Any]:
    return {
        "id": peer_id,
        "name": nickname(peer_id),
        "address": peer.address if peer else None,
        "direction": peer.direction if peer else "relayed",
        "connected_at": peer.connected_at if peer else None,
        "heard_at": author.last if author else None,
        "frames": author.frames if author else 0,
        "rejected": author.rejected if author else 0,
        "round": author.round if author else None,
        "model": author.model if author else None,
        "learnt": dict(author.learnt) if author else {},
    }
