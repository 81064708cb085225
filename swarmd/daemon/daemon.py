"""The daemon: holds key and p2p engine, supervises the trainer, talks to the judge. Never imports torch.

    sharing      `Participant`: the swarm member, which hears peers and fetches their rollouts
    child        `TrainerChild`: starts, watches and restarts the trainer; the link to it
    guest, judging    limits and pauses; the judge's questions
    board        `StatusBoard`: the part of the node's status that the daemon itself keeps

`status` joins the knowledge of all of them into one `Status`. The terminal, the page and `swarmd status`
render it.

Everything runs in one trio loop. `Daemon` builds the parts and passes messages between them. The parts do not
know `Daemon`; they report through callables. If the trainer crashes, the node stays in the swarm; if the
network fails, the trainer goes on.
"""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio
from msgspec import structs, to_builtins

from p2p.engines.traffic import Traffic
from p2p.errors import OperatorError
from p2p.peers.introduction import PAUSED, TRAINING
from p2p.types import PeerId, Reason, Started
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.diagnosis.isolation import port_taken
from swarmd.daemon.diagnosis.reachability_survey import listen_ports, survey
from swarmd.daemon.guest.guest import Guest
from swarmd.daemon.inviting import invite
from swarmd.daemon.judging.judging import judging_of
from swarmd.daemon.local_api import control
from swarmd.daemon.local_api.status import KEPT_REWARDS, StatusBoard
from swarmd.daemon.local_api.status_words import HARMLESS, NO_FIRST, many
from swarmd.daemon.membership import addresses_present, connection_news, run
from swarmd.daemon.page.comparison import Comparison
from swarmd.daemon.page.opening import PageOpening
from swarmd.daemon.sharing import Participant
from swarmd.daemon.supervision.restarts import Death
from swarmd.daemon.supervision.trainer_process import TrainerChild, run_tracker
from swarmd.daemon.supervision.watchdog import Stuck, Watchdog
from swarmd.daemon.tracking import check_installed
from swarmd.errors import SwarmdError
from swarmd.exchange.events import RoundBegan, Share, Useless
from swarmd.protocols import View
from swarmd.state.folder import LOG_FILE, METRICS_FILE, StateFolder, node_seed
from swarmd.state.logs import installed_version, log_with, set_up_logging
from swarmd.state.metrics import read_metrics
from swarmd.state.status import AnswerList, NodeState, Status, Trouble
from swarmd.terminal import hang_up

log = logging.getLogger(__name__)

# Seconds between two updates of the view.
REDRAW_S = 0.5
# Seconds between two reports about the swarm to the trainer.
REPORT_EVERY_S = 1.0
# How long a request for the node's addresses waits for the network to listen.
LISTEN_TIMEOUT_S = 25.0
# Why the node stops, in words for its operator.
ASKED = {
    signal.SIGINT: "you pressed Ctrl-C",
    signal.SIGTERM: "the system or another program asked it to",
    signal.SIGHUP: "its terminal was closed",
}
# How long the trainer may take to finish its round after it was told to stop.
GRACE_S = 600.0
# The same time if the trainer was told to cut the round: it finishes one token or micro-batch, and saves.
NOW_GRACE_S = 15.0


def run_node(config: NodeConfig, state: StateFolder, view: View, works: Callable[[], None]) -> int:
    """Run a node until its rounds are done or it is stopped. Returns the exit code; raises OperatorError.

    works: called when the curriculum was found, the network is up and the model is loaded, and again after
        each restart of the trainer.
    """
    # The view writes to standard error.
    set_up_logging(state.path / LOG_FILE, stderr=False)
    log.info("swarmd %s starts in %s, pid %d", installed_version(), state.path, os.getpid())
    try:
        daemon = Daemon(config, state.path, view, works)
        log_with(peer=daemon.sharing.identity.peer_id, engine=config.swarm.engine)
        run(daemon.run)
    except OperatorError as error:
        log.error("node failed: %s", error)  # noqa: TRY400  no traceback: the operator can correct it
        raise
    except Exception:
        log.exception("node failed: a bug in swarmd")
        raise
    log.info("Node stopped.")
    return daemon.exit_code


class Daemon:
    def __init__(
        self, config: NodeConfig, folder: Path, view: View, works: Callable[[], None] = lambda: None
    ) -> None:
        self.config, self.view, self._works, self._folder = config, view, works, folder
        self.exit_code = 0
        check_installed(config.metrics.report_to)
        traffic = Traffic()
        self.sharing = Participant(
            config,
            folder,
            config.model.name,
            lambda delivered: self.child.tell(delivered),
            lambda: PAUSED if self.guest.pauses else TRAINING,
            view.talk,
            traffic,
        )
        self.member = self.sharing.member
        peer_id, curriculum = self.sharing.identity.peer_id, self.sharing.curriculum
        self.child = TrainerChild(
            link.StartTrainer(
                config.model_dump_json(),
                str(folder),
                peer_id,
                node_seed(config.seed, folder),
                curriculum.scoring,
            ),
            folder / "trainer.log",
            self._on_trainer_message,
            self._on_trainer_exit,
            self._on_trainer_stuck,
            Watchdog(pace=config.round.pace),
        )
        self.board = StatusBoard(config, folder, self.sharing.roster)
        self.board.replay(read_metrics(folder / METRICS_FILE, KEPT_REWARDS))
        self.guest = Guest(
            config,
            folder,
            traffic,
            self.member,
            self.child.tell,
            view.talk,
            on_gpu=self.board.on_gpu,
            helped=lambda: self.sharing.acknowledged.figures().used,
        )
        self.judging = judging_of(
            self.member,
            config,
            curriculum,
            folder,
            lambda: self.board.known.model.device,
            self.child.tell,
            view.talk,
        )
        self.comparison = Comparison(self.child.tell, self._why_no_comparison)
        self._advised: set[Reason] = set()  # reasons whose remedy was shown already
        self._nursery: trio.Nursery | None = None
        self._listens = trio.Event()  # set once other nodes can reach this one
        self._stopping = False  # whether the trainer was asked to stop

    async def run(self) -> None:
        async with trio.open_nursery() as outer:
            async with trio.open_nursery() as nursery:
                await self.startup(nursery, outer)
                # Returns when the trainer is done or stopped, or when another restart would be useless.
                await self.child.run()
                self._stopping = True
                nursery.cancel_scope.cancel()
            self.shutdown()
            outer.cancel_scope.cancel()

    async def startup(self, nursery: trio.Nursery, outer: trio.Nursery) -> None:
        """Start the network and the background tasks.

        Returns once signals are handled and the control socket answers.

        outer: nursery that handles signals until all tasks of `nursery` have ended. Otherwise a second signal
            would have its default action, and end the process before the tasks have written their last data.
        """
        self._nursery = nursery
        handlers: dict[str, control.Handler] = {
            "status": control.answering(self.status),
            "answers": control.answering(lambda: AnswerList([*self.board.answers])),
            "peers": control.answering(self.sharing.peers),
            "network": self._on_network,
            "invitation": self._on_invitation,
            "pause": self.guest.on_pause,
            "resume": self.guest.on_resume,
            "stop": self._on_stop,
            "compare": self.comparison.on_compare,
        }
        opening = PageOpening(nursery, handlers)
        handlers["ui"] = opening.on_ui
        await outer.start(self._watch_signals)
        if self.config.metrics.listen:
            await opening.serve_metrics(self.config.metrics.listen)
        await nursery.start(control.serve, self._folder, handlers)
        self.guest.begin()
        nursery.start_soon(self.sharing.driver.run, self.member)
        nursery.start_soon(self._be_in_swarm, nursery)
        for name in self.config.metrics.report_to:
            nursery.start_soon(run_tracker, name, self._folder, self.sharing.identity.peer_id, self.view.talk)
        for task in (self.guest.run, self._report_swarm, self._refresh_view):
            nursery.start_soon(task)

    def shutdown(self) -> None:
        """Show how the node ended. Raises SwarmdError if the trainer failed."""
        known = self.board.known
        if known.state is not NodeState.STOPPED and self.child.failed is None:
            # The trainer's process was killed.
            lost = (
                f"{many(known.round, 'round')}, {known.saved} of them saved"
                if self.child.ready
                else "no round had begun"
            )
            self.board.say(NodeState.STOPPED, f"at once: {lost}", "`swarmd join` goes on from there")
        self.view.status(self.status())
        if self.child.failed is not None:
            error = SwarmdError(self.child.failed.message)
            error.exit_code = self.child.failed.exit_code
            raise error

    # The network's side.

    async def _be_in_swarm(self, nursery: trio.Nursery) -> None:
        if self.config.swarm.engine != "none":
            await addresses_present(self.config.swarm.listen, self.sharing.isolation.say)
        await nursery.start(self.sharing.run)
        self._listens.set()
        if (moved := self._port_taken()) is not None:
            self.view.talk(f"listening {moved.cause}; {moved.remedy}")

    async def _report_swarm(self) -> None:
        connected: set[PeerId] = set()
        told = 0
        while True:
            refused = self.member.refused()
            now_connected = {peer.id for peer in self.member.peers()}
            for news in connection_news(connected, now_connected):
                self.view.talk(news)
            # Show each reason as a message only once; the status and each round's line show the counts.
            for reason, count in refused.items():
                if reason not in self._advised and reason.value not in HARMLESS:
                    self._advised.add(reason)
                    remedy = f"; {reason.remedy}" if reason.remedy else ""
                    self.view.talk(f"{count} refused: {reason.value}{remedy}")
            peers = self.sharing.heard()
            if refused or peers != told:
                self.child.tell(
                    link.SwarmNews(peers, {reason.value: count for reason, count in refused.items()})
                )
            connected, told = now_connected, peers
            await trio.sleep(REPORT_EVERY_S)

    # The trainer's side.

    def _on_trainer_message(self, message: link.ToDaemon) -> None:
        match message:
            case Share() | Useless():
                self.sharing.driver.put(message)
            case link.TrainerState(state, cause, remedy):
                self.board.say(state, cause, remedy)
            case link.TrainerReady():
                self._on_trainer_ready(message)
            case link.RoundDone():
                self._on_round_done(message)
            case link.RoundGoesOn(progress) if self.board.known.state is NodeState.TRAINING:
                self.board.known.progress = progress
            case link.Note(text):
                self.view.talk(text)
            case link.JudgeAnswer() if self._nursery is not None:
                self._nursery.start_soon(self.judging.answer, message)
            case link.ComparedAnswers():
                self.comparison.answer(message)
            case link.TrainerFailed():
                self.board.say(NodeState.STOPPED, "the trainer cannot go on")
            case link.Stopped(rounds):
                done = rounds >= self.config.round.rounds > 0
                more = "`swarmd join` with more rounds goes on" if done else "`swarmd join` goes on"
                self.board.say(NodeState.STOPPED, f"{many(rounds, 'round')}, saved", more)

    def _on_trainer_ready(self, ready: link.TrainerReady) -> None:
        self._works()
        self.board.resumed(ready)
        self.sharing.driver.put(RoundBegan(ready.round + 1))
        for note in ready.notes:
            self.view.talk(note)
        self.child.tell(link.SwarmNews(self.sharing.heard(), {}))
        self.guest.tell_again()
        self.comparison.ask_again()

    def _on_round_done(self, done: link.RoundDone) -> None:
        self.board.round_done(done)
        self.sharing.used([(PeerId(author), specialty) for author, specialty in done.used])
        self.view.round(done.line)
        self.sharing.driver.put(RoundBegan(done.line.round + 1, done.pass_rates))
        # Ask the judge only if another save is affordable, because the judged weights are saved first. A
        # trainer that stops or pauses after this round would not answer; the judge would count that as wrong.
        ends = self._stopping or 0 < self.config.round.rounds <= done.line.round
        absent = ends or self.guest.pauses or self.member.away
        if done.affordable and not absent and self._nursery is not None:
            self._nursery.start_soon(self.judging.ask, done.line.round)

    def _on_trainer_exit(self, death: Death) -> None:
        wait = f"in {death.backoff:.0f} s" if death.backoff else "now"
        cause, remedy = f"the trainer died: {death.cause}", f"it restarts {wait}, from its last checkpoint"
        self.board.say(NodeState.RESTARTING, cause, remedy)
        # Show this state as a message too, because it may be over before the status is shown.
        self.view.talk(f"{NodeState.RESTARTING}: {cause}; {remedy}")

    def _on_trainer_stuck(self, stuck: Stuck | None) -> None:
        """Show that the trainer is stuck; None means that it works again."""
        if stuck is None:
            self.view.talk("the trainer works again")
        elif self.board.known.state is not NodeState.STUCK:
            self.view.talk(f"{NodeState.STUCK}: {stuck.cause}; {stuck.remedy}")
        self.board.say_stuck(stuck)

    # The operator's side.

    def status(self) -> Status:
        """Return the node's current status."""
        known = self.board.known
        return structs.replace(
            known,
            **structs.asdict(self.sharing.status()),
            trainer=structs.replace(known.trainer, pid=self.child.pid, restarts=self.child.restarts),
            pauses=self.guest.pauses,
            away=self.guest.away,
            usage=self.guest.ledger.report(),
            left=self.guest.left,
            judge=self.board.judged(self.judging.status()),
        )

    async def _on_network(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.config.swarm.engine == "none":
            return {"schema": 1, "engine": "none"}
        await self._wait_until_it_listens()
        # If the node has left the swarm by itself, report why it left; peers know nothing about it then.
        trouble = next(
            (Trouble(each.cause, each.remedy) for each in self.guest.away), self.sharing.isolation.trouble
        )
        known = to_builtins({"trouble": trouble, "judge": self.judging.status()})
        return {**await survey(self.member, self.config), **known}

    async def _on_invitation(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._wait_until_it_listens()
        made = invite(self.config, self.sharing.curriculum, self.member.addresses())
        if (moved := self._port_taken()) is not None:
            made["notes"].append(
                f"it is good until the next start: this node listens {moved.cause}; {moved.remedy}"
            )
        return made

    def _port_taken(self) -> Trouble | None:
        ports = listen_ports(self.member.addresses())
        return port_taken(self.config.swarm.listen, ports, self.member.identity.peer_id)

    async def _wait_until_it_listens(self) -> None:
        # Do not wait while the member is away: it comes back only when its pause ends.
        with trio.move_on_after(0.0 if self.member.away else LISTEN_TIMEOUT_S):
            await self._listens.wait()

    def _why_no_comparison(self) -> str:
        if self.guest.pauses:
            return "The node is paused. Resume it and ask again."
        if not self.child.ready:
            return "The trainer is starting or stopping. Ask again in a moment."
        return "" if self.board.known.model.keeps_first else NO_FIRST

    async def _on_stop(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stop("you asked it to", now=bool(arguments.get("now")))
        return {"schema": 1, "stopping": True, "cause": self.board.known.cause}

    def _stop(self, why: str, *, now: bool = False) -> None:
        doing, known = "it finishes its round and saves", self.board.known
        if not self.child.ready:
            doing = "no round has begun"
        elif now:
            doing = (
                f"it saves {many(known.round, 'round')} and loses the unfinished one; what takes over"
                f" {NOW_GRACE_S:.0f} s to save is lost, too"
            )
        asked = any(known.cause.startswith(each.cause) for each in self.guest.pauses)
        if known.state is NodeState.PAUSED and not asked:
            # The trainer paused by itself, because the disk is full.
            doing = f"it cannot save, and ends with what is saved: {known.cause}"
        remedy = "wait; `swarmd stop --now` cuts the round; Ctrl-C again saves nothing"
        self.board.say(NodeState.STOPPING, f"{why}: {doing}", remedy)
        self.view.status(self.status())
        self._stopping = True
        self.child.stop(now=now)
        assert self._nursery is not None
        self._nursery.start_soon(self._kill_after, NOW_GRACE_S if now else GRACE_S)

    async def _watch_signals(self, *, task_status: Started) -> None:
        """Ask the trainer to stop on a signal; on another signal, kill it.

        A terminal that closes after the first signal (SIGHUP) does not kill it.
        """
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *hang_up()) as signals:
            task_status.started("")
            async for number in signals:
                if number == signal.SIGINT:
                    self.exit_code = 130
                if self._stopping:
                    if number != signal.SIGHUP:
                        self.child.kill()
                    continue
                log.info("stopped by %s", signal.Signals(number).name)
                self._stop(ASKED[signal.Signals(number)])

    async def _kill_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.child.kill()

    async def _refresh_view(self) -> None:
        while True:
            self.view.status(self.status())
            await trio.sleep(REDRAW_S)
