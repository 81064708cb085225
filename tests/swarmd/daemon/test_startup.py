"""The first seconds of a node.

The tests cover the trainer's messages about the start, and work that begins only after other nodes can reach
this node.
"""

import errno
import io
import os
import random
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from p2p.address import Endpoint, own_ports, packed
from p2p.identity import Identity
from p2p.member import Member
from p2p.peers import listen as listening
from p2p.types import PeerId
from swarmd import link
from swarmd.cli.views.plain import PlainView
from swarmd.config.config import NodeConfig
from swarmd.daemon import daemon as daemon_module
from swarmd.daemon import membership, sharing
from swarmd.daemon.bootstrap import BootstrapNode
from swarmd.daemon.daemon import Daemon
from swarmd.daemon.membership import connection_news
from swarmd.daemon.supervision.trainer_process import TrainerChild
from swarmd.exchange import offers, wire
from swarmd.state.status import NodeState, PauseCause, Status
from swarmd.trainer.__main__ import NICE
from swarmd.trainer.checkpoint import Checkpoints, RunState
from swarmd.types import Completion, Rollout, RoundLine, TaskRef
from tests.doubles import TIMEOUT_S, encoded, until

ALONE = {"swarm": {"engine": "none"}}


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="reads the niceness of each thread from Linux"
)
async def test_each_step_of_the_start_is_shown_and_the_priority_is_lowered_afterwards(tmp_path: Path) -> None:
    config = NodeConfig.model_validate(
        {"model": {"device": "cpu"}, "round": {"local": 2, "external": 0, "rounds": 3}}
    )
    start = link.StartTrainer(config.model_dump_json(), str(tmp_path), Identity(bytes(32)).peer_id, 1)
    steps, nices = list[str](), dict[str, set[int]]()

    def threads(pid: int) -> set[int]:
        """Return the niceness of each thread of a process."""
        return {
            os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()
        }

    def heard(message: link.ToDaemon) -> None:
        assert child.pid is not None
        if isinstance(message, link.TrainerState):
            steps.append(message.cause)
            nices.setdefault(message.state, threads(child.pid))
        # The second round may end before the message of the first is read.
        if isinstance(message, link.RoundDone) and message.line.round == 3:
            assert message.verifier_pid is not None
            nices["later"] = threads(child.pid) | threads(message.verifier_pid)

    child = TrainerChild(start, tmp_path / "trainer.log", heard, print)
    with trio.fail_after(TIMEOUT_S):
        await child.run()
    assert steps == [
        "loading PyTorch",
        "loading transformers",
        "loading the model tiny",
        "the first round since the start",
    ]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert nices == {"starting": {ours}, "training": {ours}, "later": {max(ours, NICE)}}


@pytest.mark.parametrize("limit", [2, 3])
async def test_no_model_is_loaded_if_all_rounds_are_done(tmp_path: Path, limit: int) -> None:
    rng = random.Random(0).getstate()
    Checkpoints(tmp_path / "checkpoints").save(RunState(3, 0, rng, rng, ()), [])
    config, heard = NodeConfig.model_validate({"round": {"rounds": limit}}), list[link.ToDaemon]()
    child = TrainerChild(
        link.StartTrainer(config.model_dump_json(), str(tmp_path), "", 1),
        tmp_path / "trainer.log",
        heard.append,
        print,
    )
    with trio.fail_after(TIMEOUT_S):
        await child.run()
    # On a busy machine, heartbeats come first.
    assert [said for said in heard if said != link.Alive()] == [link.Stopped(3)] and child.finished


@pytest.mark.net
async def test_a_node_is_announced_over_mdns_as_soon_as_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If mDNS asked for addresses before that, it would ask again only 15 s later."""
    announced: list[Sequence[str]] = []

    def nearby(member: Member) -> Any:
        async def run() -> None:
            announced.append(member.addresses())

        return SimpleNamespace(run=run)

    monkeypatch.setattr(sharing, "nearby", nearby)
    config = NodeConfig.model_validate({"swarm": {"engine": "libp2p", "listen": ("/ip4/127.0.0.1/tcp/0",)}})
    async with trio.open_nursery() as nursery:
        await Daemon(config, tmp_path, PlainView(io.StringIO())).startup(nursery, nursery)
        await until(lambda: announced)
        nursery.cancel_scope.cancel()
    (addresses,) = announced
    assert len(addresses) == 1


def test_a_nodes_offers_carry_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, sent = Daemon(NodeConfig.model_validate(ALONE), tmp_path, PlainView(io.StringIO())), list[bytes]()
    at = packed("/ip4/11.0.0.7/tcp/4001")
    monkeypatch.setattr(node.member.engine, "reached_at", lambda: "/ip4/11.0.0.7/tcp/4001")
    monkeypatch.setattr(node.member.engine, "publish", sent.append)
    rollout = Rollout(TaskRef("bf", 1), (Completion("1", True),), node.member.identity.peer_id)
    (body,), _ = encoded([rollout], 1, "tiny", node.sharing.curriculum.specialties)
    for kind in (offers.KIND, wire.KIND):
        node.member.publish(kind, body)
    assert [at in frame for frame in sent] == [True, False]


@pytest.mark.net
async def test_a_node_whose_port_is_taken_also_says_so_with_the_invitation(tmp_path: Path) -> None:
    config = NodeConfig.model_validate({"swarm": {"engine": "libp2p", "listen": ("/ip4/127.0.0.1/tcp/0",)}})
    said = io.StringIO()
    node = Daemon(config, tmp_path, PlainView(said))
    own = own_ports(node.member.identity.peer_id)[0]
    with socket.create_server(("127.0.0.1", own)):
        async with trio.open_nursery() as nursery:
            await node.startup(nursery, nursery)
            await until(
                lambda: f"because another program uses this node's port {own}; stop" in said.getvalue()
            )
            (_, note) = (await node._on_invitation({}))["notes"]
            assert "it is good until the next start" in note and str(own) in note
            nursery.cancel_scope.cancel()


@pytest.mark.net
@pytest.mark.parametrize("runs", ["a node", "a bootstrap node"])
async def test_a_node_waits_for_an_address_that_its_machine_does_not_have_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At boot a service may start before the network; a service that ends with code 2 is not restarted."""
    real, absent, here = listening._open, "cannot listen on /ip4/127.0.0.1/tcp/0: ", [False]

    def opened(endpoint: Endpoint) -> socket.socket:
        if not here[0]:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(endpoint)

    monkeypatch.setattr(listening, "_open", opened)
    monkeypatch.setattr(membership, "LOOK_EVERY_S", 0.01)
    config = NodeConfig.model_validate({"swarm": {"engine": "libp2p", "listen": ("/ip4/127.0.0.1/tcp/0",)}})
    said: list[Status] = []
    async with trio.open_nursery() as nursery:
        if runs == "a node":
            node = Daemon(config, tmp_path, PlainView(io.StringIO()))
            await node.startup(nursery, nursery)
            listens, trouble = (lambda: node.member.addresses()), lambda: node.sharing.isolation.trouble
        else:
            helper = BootstrapNode(config, tmp_path, said.append)
            nursery.start_soon(helper.run)
            listens, trouble = (lambda: said), helper._trouble
        await until(trouble)
        why = trouble()
        assert why and absent in why.cause and "tries again every 5 s" in why.remedy
        assert not listens()
        here[0] = True
        await until(listens)
        assert trouble() is None
        nursery.cancel_scope.cancel()
    assert capsys.readouterr().err.count(absent) == (runs == "a bootstrap node")


@pytest.mark.parametrize("patience", ["ends", "is cut", "is ended by Ctrl-C"])
async def test_a_node_that_was_asked_to_stop_is_killed_after_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: str
) -> None:
    """A trainer may hang, and `swarmd stop` waits only for the grace time."""
    if patience != "is ended by Ctrl-C":
        monkeypatch.setattr(daemon_module, "NOW_GRACE_S" if patience == "is cut" else "GRACE_S", 0.01)
    daemon, killed = (
        Daemon(NodeConfig.model_validate(ALONE), tmp_path, PlainView(io.StringIO())),
        trio.Event(),
    )
    async with trio.open_nursery() as nursery:
        await daemon.startup(nursery, nursery)
        codes: list[int | None] = []

        def kill() -> None:
            codes.append(daemon.exit_code)
            killed.set()

        daemon.child.ready, daemon.child.kill = True, kill  # type: ignore[method-assign]
        await daemon._on_stop({"now": patience == "is cut"})
        assert ("loses the unfinished" in daemon.board.known.cause) is (patience == "is cut")
        if patience == "is ended by Ctrl-C":
            signal.raise_signal(signal.SIGHUP)  # closing the terminal does not shorten the grace time
            signal.raise_signal(signal.SIGINT)
        with trio.fail_after(20):
            await killed.wait()
        assert codes[0] == (130 if patience == "is ended by Ctrl-C" else 0)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ends", ["", "stops", "pauses", "was its last"])
async def test_a_stopping_or_paused_node_asks_the_judge_for_no_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The trainer only finishes its round, so a new question would lapse and count as wrong."""
    config = NodeConfig.model_validate(ALONE | {"round": {"rounds": 1 if ends == "was its last" else 9}})
    daemon = Daemon(config, tmp_path, PlainView(io.StringIO()))
    asked: list[int] = []

    async def ask(round_number: int) -> None:
        asked.append(round_number)

    monkeypatch.setattr(daemon.judging, "ask", ask)
    monkeypatch.setattr(daemon.view, "round", lambda line: None)
    async with trio.open_nursery() as nursery:
        daemon._nursery = nursery
        if ends == "stops":
            daemon._stop("you asked it to")
        elif ends == "pauses":
            daemon.guest.pauses = [PauseCause("battery", "", None, "", "")]
        daemon._on_trainer_message(link.RoundDone(RoundLine(round=1), None))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert asked == ([] if ends else [1])


async def test_a_stopping_node_shows_this_until_it_has_stopped(tmp_path: Path) -> None:
    """A paused trainer continues in order to finish its round, and reports that it trains."""
    daemon = Daemon(NodeConfig.model_validate(ALONE), tmp_path, PlainView(io.StringIO()))
    async with trio.open_nursery() as nursery:
        daemon._nursery = nursery
        await daemon.guest.on_pause({})
        daemon._on_trainer_message(link.TrainerState(NodeState.PAUSED, "you paused it", "swarmd resume"))
        assert (await daemon._on_stop({}))["cause"] == "you asked it to: no round has begun"
        daemon._on_trainer_message(link.TrainerState(NodeState.TRAINING))
        assert daemon.board.known.state == "stopping"
        daemon._on_trainer_message(link.Stopped(1))
        assert daemon.board.known.state == "stopped"
        nursery.cancel_scope.cancel()


async def test_a_stopping_node_that_cannot_save_says_so(tmp_path: Path) -> None:
    daemon = Daemon(NodeConfig.model_validate(ALONE), tmp_path, PlainView(io.StringIO()))
    async with trio.open_nursery() as nursery:
        daemon._nursery = nursery
        await daemon.guest.on_pause({})  # the user also paused the node
        daemon._on_trainer_message(
            link.TrainerState(NodeState.PAUSED, "the disk is full", "it is tried again")
        )
        said = (await daemon._on_stop({}))["cause"]
        assert "it cannot save, and ends with what is saved: the disk is full" in said
        nursery.cancel_scope.cancel()


async def test_under_nohup_a_closed_terminal_does_not_stop_the_node(tmp_path: Path) -> None:
    daemon = Daemon(NodeConfig.model_validate(ALONE), tmp_path, PlainView(io.StringIO()))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with trio.open_nursery() as nursery:
            await daemon.startup(nursery, nursery)
            signal.raise_signal(signal.SIGHUP)
            await trio.testing.wait_all_tasks_blocked()
            assert daemon.board.known.state == "starting"
            nursery.cancel_scope.cancel()
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_signal_during_the_end_does_not_interrupt_the_last_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(NodeConfig.model_validate(ALONE), tmp_path, PlainView(io.StringIO()))
    writing = trio.Event()

    async def last_to_end(_member: Member) -> None:
        try:
            writing.set()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                handled.append(signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, before))

    handled, before = list[bool](), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(daemon.child, "run", writing.wait)
    monkeypatch.setattr(daemon.sharing.driver, "run", last_to_end)
    await daemon.run()
    assert handled == [True] and signal.getsignal(signal.SIGTERM) == before


def test_connections_beyond_the_dial_target_are_not_reported_each_minute() -> None:
    """In a swarm of over eight members, the DHT's connections end after a minute and are opened again."""
    members = [PeerId(f"12D3KooW{number}") for number in range(12)]
    few, enough, more = set(members[:6]), set(members[:8]), set(members[2:])
    assert len([*connection_news(set(), few)]) == 6
    told = [*connection_news(few, set(members[1:8]))]
    assert [text.split(" ")[0] for text in told] == ["connected"] * 2 + ["disconnected"]
    assert all(text.endswith("(7 connected)") for text in told)
    assert not [*connection_news(enough, more)] and not [*connection_news(more, enough)]
    assert len([*connection_news(more, few)]) == 8
