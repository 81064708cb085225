"""Fixtures for rounds with real parts: the tiny model, the contained verifier, the in-memory swarm."""

import itertools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.member import Member
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.node import build
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round
from swarmd.trainer.trainer import Trainer, open_trainer
from swarmd.trainer.trainer_link import TrainerLink
from swarmd.types import Completion, Rollout, RoundReport, Scored, TaskRef
from tests.doubles import TIMEOUT_S, gossip, memory_node


def join(
    swarm: MemorySwarm, number: int, verifier: Verifier, settings: NodeConfig, **sent: int
) -> tuple[RoundParts, LanguagePolicy, Member]:
    """Return a swarm member that trains with real parts; its clock advances one second per reading."""
    clock = map(float, itertools.count(1_700_000_000)).__next__
    node = memory_node(swarm, number, clock, config=settings, model=settings.model.name, **sent)
    policy, me = LanguagePolicy.open(settings, seed=number), node.member.identity.peer_id
    return build(settings, number, me, node, policy, verifier), policy, node.member


def swarm_of(verifier: Verifier, *settings: NodeConfig) -> list[tuple[RoundParts, LanguagePolicy, Member]]:
    """Return the members of a new swarm, one for each of the settings."""
    swarm = MemorySwarm()
    return [join(swarm, number, verifier, one) for number, one in enumerate(settings, 1)]


TrainerIn = Callable[..., AbstractContextManager[tuple[Trainer, socket.socket]]]


@pytest.fixture
def trainer_in(verifier: Verifier) -> TrainerIn:
    """Return a function that opens a trainer in a folder and yields it with the daemon's end of its link."""

    @contextmanager
    def opened(
        folder: Path,
        rounds: int,
        local: int = 2,
        external: int = 0,
        judge: str = "",
        model: Mapping[str, Any] = {},
        **checkpoint: float,
    ) -> Iterator[tuple[Trainer, socket.socket]]:
        sections = {
            "round": {"local": local, "external": external, "rounds": rounds},
            "checkpoint": checkpoint,
            "judge": {"url": judge},
        }
        config = NodeConfig.model_validate({"model": {"device": "cpu", **model}, **sections})
        folder.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        daemon = TrainerLink(theirs, on_eof=lambda: None)
        start = link.StartTrainer(config.model_dump_json(), str(folder), Identity(bytes(32)).peer_id, 1)
        ours.sendall(link.pack(start))
        try:
            with open_trainer(daemon.open(), daemon, verifier) as trainer:
                yield trainer, ours
        finally:
            daemon.close()
            ours.close()

    return opened


def watched(node: RoundParts, built: Callable[[Sequence[Scored]], object]) -> RoundParts:
    """Return the node, changed so that `built` is called with each of its batches."""
    return replace(node, build_batch=replace(node.build_batch, built=built))


def without_seconds(report: RoundReport) -> RoundReport:
    return structs.replace(report, seconds={})


def weights(policy: LanguagePolicy, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    policy.save(folder)
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def share(member: Member, node: RoundParts, t: int, count: int, prefix: str = "", suffix: str = "") -> None:
    """Share rollouts with one right and one wrong sum each, for other questions in each round `t`."""
    tasks = [
        task
        for n in range(count)
        if (task := node.tasks.task(TaskRef("basic_arithmetic", 100 * t + n))) is not None
    ]
    right = [int(task.entry["answer"]) for task in tasks]
    texts = [(f"{prefix}<answer>{n}</answer>{suffix}", f"<answer>{n + 1}</answer>") for n in right]
    completions = [(Completion(good, True), Completion(bad, True)) for good, bad in texts]
    rollouts = [
        Rollout(task.ref, both, member.identity.peer_id)
        for task, both in zip(tasks, completions, strict=True)
    ]
    gossip(member, rollouts, t)


def play(
    node: RoundParts, other: Member, rounds: Sequence[int], prefix: str = "evil ", suffix: str = ""
) -> list[RoundReport]:
    reports = []
    for t in rounds:
        share(other, node, t, 4, prefix, suffix)
        reports.append(without_seconds(run_round(t, node)))
    return reports
