"""The node as a guest of its machine: measures what it uses, keeps to its limits, and pauses.

It is a task of the daemon (trio). It pauses training in one way only: it tells the trainer to rest, and the
trainer does so before its next token or micro-batch (`TrainerLink.rest`). A pause comes with its cause. Short
rests, which have no cause, keep the CPU share.
"""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import trio

from p2p import durable
from p2p.engines.traffic import Traffic
from p2p.member import Member
from swarmd import link
from swarmd.config.amounts import percent, rate, size
from swarmd.config.config import NodeConfig
from swarmd.config.hours import clock_words
from swarmd.daemon.guest.conditions import (
    OVERRIDE,
    CpuShare,
    MachineFacts,
    PauseConditions,
    out_of_budget,
)
from swarmd.daemon.guest.meters import ProcessMeter
from swarmd.daemon.guest.nvidia import NvidiaGpus
from swarmd.daemon.guest.probes import Probes
from swarmd.daemon.guest.usage import USAGE_FILE, UsageLedger
from swarmd.errors import SwarmdError
from swarmd.policy.models.preflight import cores
from swarmd.state.status import PauseCause, Usage

log = logging.getLogger(__name__)

# Seconds between two checks of the conditions.
CHECK_EVERY_S: Final = 1.0
# Seconds between two readings of the GPUs' power.
ENERGY_EVERY_S: Final = 10.0
# Seconds between two decisions whether to rest for the CPU share.
SHARE_EVERY_S: Final = 0.25
REMEDY: Final = "swarmd resume"
_METERED: Final = PauseCause(
    "metered", "the network is metered: the node trains alone", None, "when it is not metered", OVERRIDE
)


class Guest:
    """Keeps the node to its limits and pauses it.

    tell: sends a message to the trainer. talk: shows one to the operator. clock: seconds since the epoch.
    """

    def __init__(
        self,
        config: NodeConfig,
        folder: Path,
        traffic: Traffic,
        member: Member,
        tell: Callable[[link.ToTrainer], None],
        talk: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        meter: ProcessMeter | None = None,
        measure: Callable[[float, float | None], MachineFacts] | None = None,
        on_gpu: Callable[[], bool] = lambda: False,
        helped: Callable[[], int] = lambda: 0,
    ) -> None:
        """Connect probes, ledger, budget and conditions for one node.

        Args:
            folder: the state folder.
            traffic: the engine's byte counters and limits.
            measure: replaces `Probes.measure`, if given.
            on_gpu: returns whether the node trains on a CUDA device now.
            helped: returns how often other nodes reported training on this node's rollouts since the start.
        """
        self._traffic, self._member, self._tell, self._talk, self._clock = traffic, member, tell, talk, clock
        self._meter = meter or ProcessMeter(clock())
        gpus = NvidiaGpus(self._meter.pids)
        probes = Probes(config.when, gpus)
        self._measure, self._unknown = measure or probes.measure, probes.unknown
        self._conditions, self._asked = PauseConditions(config.when), UserPause(folder / "pause.json", clock)
        self._watts, self._on_gpu = gpus.watts, on_gpu
        limits, share = config.limits, percent(config.limits.cpu)
        self._share = CpuShare(share * cores(logical=True), clock()) if share < 1 else None
        self._budget = size(limits.month) if limits.month else None
        self.ledger = UsageLedger(folder / USAGE_FILE, clock, self._budget)
        up, down = (rate(text) if text else None for text in (limits.up, limits.down))
        traffic.limit(up, down, self._budget)
        self._leaves_when_metered = config.when.metered == "alone"
        self._moved = (traffic.up, traffic.down)
        self._helped, self._helped_before = helped, 0
        self._ours = 0.0  # the node's CPU seconds since the meter's last search for processes
        self._all_ours: float | None = None  # CPU seconds between two searches, until used
        self._set_aside: set[str] = set()  # kinds of conditions that `resume` overrides until they end
        self._facts: MachineFacts | None = None
        self._resting = False  # whether it rests to keep the CPU share
        self._told: link.ToTrainer = link.Resume()
        self.pauses: list[PauseCause] = []
        self.away: list[PauseCause] = []  # why the node has left the swarm; empty if it has not

    def begin(self) -> None:
        """Apply the limits before the member runs: if the budget is used up, it must not even connect."""
        self._limit_traffic()
        if spent := self._spent():
            self._stay_away([spent])

    async def run(self) -> None:
        """Check conditions and meter usage until cancelled."""
        looked, read = -CHECK_EVERY_S, trio.current_time()
        try:
            while True:
                self.count()
                # Measure right after a search for processes: the node's CPU seconds are complete then.
                if self._all_ours is not None or trio.current_time() - looked >= CHECK_EVERY_S:
                    looked = trio.current_time()
                    # The time zone may change, for example on a laptop that travels.
                    time.tzset()
                    ours, self._all_ours = self._all_ours, None
                    self.decide(await trio.to_thread.run_sync(partial(self._measure, self._clock(), ours)))
                if (since := trio.current_time() - read) >= ENERGY_EVERY_S:
                    read += since
                    await self.add_energy(since)
                # Save in a thread, because the disk may be slow.
                await trio.to_thread.run_sync(self.ledger.save_where_due)
                await trio.sleep(SHARE_EVERY_S if self._share else CHECK_EVERY_S)
        finally:
            self.count()
            self.ledger.save()

    async def add_energy(self, seconds: float) -> None:
        """Add to the ledger the energy that the GPUs take at their present power, if the node trains on them.

        The GPUs' whole power counts. seconds: by trio's clock, which stands still while the machine sleeps.
        """
        if self._on_gpu() and (watts := await trio.to_thread.run_sync(self._watts)) is not None:
            self.ledger.add(Usage(energy_wh=watts * seconds / 3600))

    def count(self) -> None:
        """Add the usage since the last call to the ledger, and keep to the CPU share."""
        now, moved_before = self._clock(), self._moved
        spent = self._meter.read(now)
        self._moved = self._traffic.up, self._traffic.down
        up, down = self._moved[0] - moved_before[0], self._moved[1] - moved_before[1]
        helped_before, self._helped_before = self._helped_before, self._helped()
        helped = max(0, self._helped_before - helped_before)
        self.ledger.add(msgspec.structs.replace(spent, bytes_up=up, bytes_down=down, helped=helped))
        self._ours += spent.cpu_seconds
        if self._meter.found_at == now:
            self._all_ours, self._ours = self._ours, 0.0
        if self._share is not None:
            self._resting = self._share.spent(spent.cpu_seconds, now)
            self._tell_trainer()

    def decide(self, facts: MachineFacts) -> None:
        """Pause, resume, leave the swarm or come back, according to the facts."""
        if self._facts is None:
            for note in self._unknown(facts):
                self._talk(note)
        self._facts = facts
        self._decide()

    def _decide(self) -> None:
        facts, now = self._facts or MachineFacts(), self._clock()
        held = list(self._conditions.check(facts, now))
        away = [_METERED] if self._leaves_when_metered and facts.metered else []
        self._set_aside &= {each.kind for each in [*held, *away]}
        asked = self._asked.now()
        self.pauses = [
            *([asked] if asked else []),
            *(each for each in held if each.kind not in self._set_aside),
        ]
        self._tell_trainer()
        self._stay_away(
            [
                *([spent] if (spent := self._spent()) else []),
                *(each for each in away if each.kind not in self._set_aside),
            ]
        )

    def tell_again(self) -> None:
        """Tell a newly started trainer whether to pause."""
        self._told = link.Resume()
        self._tell_trainer()

    @property
    def left(self) -> float | None:
        """The share of a core that other programs leave to the node; None: enough, unknown or paused."""
        return self._facts.left if self._facts and not self.pauses else None

    async def on_pause(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle `swarmd pause`: pause until `until`, in seconds since the epoch, or without an end.

        Raises SwarmdError.
        """
        until = arguments.get("until")
        if until is not None and not (
            isinstance(until, int | float)
            and not isinstance(until, bool)
            and self._clock() < until < self._clock() + 366 * 86_400
        ):
            raise SwarmdError(
                "a pause has to end within a year from now. Give a shorter time, or none to pause until"
                " `swarmd resume`."
            )
        warning = self._asked.begin(until)
        self._decide()
        return {
            "schema": 1,
            "paused": True,
            "until": until,
            "pauses": self.pauses,
            "warning": warning,
        }

    async def on_resume(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle `swarmd resume`: end the user's own pause.

        Conditions that hold now are ignored until each of them has ended once.
        """
        warning, held = self._asked.end(), {each.kind for each in [*self.pauses, *self.away]}
        self._set_aside |= held
        self._decide()
        ended = sorted(held - {each.kind for each in self.away})
        return {"schema": 1, "paused": False, "ended": ended, "warning": warning}

    def _tell_trainer(self) -> None:
        """Tell the trainer to pause or resume, if that differs from the last message.

        Only the first of several causes is sent, as it is shown on one line.
        """
        wanted: link.ToTrainer = link.Pause(brief=True) if self._resting else link.Resume()
        if self.pauses:
            first = self.pauses[0]
            wanted = link.Pause(first.cause if first.remedy in first.ends else first.sentence, first.remedy)
        if wanted != self._told:
            self._told = wanted
            self._tell(wanted)

    def _stay_away(self, away: list[PauseCause]) -> None:
        before, self.away = self.away, away
        if bool(away) == bool(before):
            return
        if away:
            self._talk(f"it has left the swarm: {away[0].sentence}; {away[0].remedy}")
            self._member.leave()
        else:
            self._talk("it comes back to the swarm")
            self._limit_traffic()
            self._member.come_back()

    def _spent(self) -> PauseCause | None:
        return out_of_budget(self._budget, self.ledger.this_month.bytes_moved, self._clock())

    def _limit_traffic(self) -> None:
        """Make the traffic stop at the last byte of the month's budget."""
        left = float("inf") if self._budget is None else self._budget - self.ledger.this_month.bytes_moved
        self._traffic.stop_after(left, self._on_budget_spent)

    def _on_budget_spent(self) -> None:
        self.count()
        if spent := self._spent():
            self._stay_away([spent, *self.away])
        else:
            self._limit_traffic()  # a new month has begun, with a new budget


class _Asked(msgspec.Struct, frozen=True):
    # Seconds since the epoch; None: paused until `swarmd resume`.
    until: Annotated[float, msgspec.Meta(lt=2e11)] | None = None
    schema: int = 1


class UserPause:
    """The pause that the user asked for, kept in a file. clock: seconds since the epoch.

    `begin` and `end` return a warning if the file could not be changed, else "".
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._asked = durable.load(path, msgspec.json.Decoder(_Asked).decode, "the node is not paused")

    def begin(self, until: float | None) -> str:
        self._asked = _Asked(until)
        try:
            durable.replace(self._path, msgspec.json.encode(self._asked))
        except OSError as error:
            return _warned(f"{self._path} cannot be written ({error.strerror}): the pause ends with the node")
        return ""

    def end(self) -> str:
        self._asked = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            return _warned(f"{self._path} cannot be removed ({error.strerror}): the next start pauses again")
        return ""

    def now(self) -> PauseCause | None:
        """Return the pause that the user asked for, or None if there is none or it is over."""
        if self._asked is not None and self._asked.until is not None and self._asked.until <= self._clock():
            self.end()
        if self._asked is None:
            return None
        if (until := self._asked.until) is None:
            return PauseCause("user", "you paused it", None, f"with {REMEDY}", REMEDY)
        words = clock_words(datetime.fromtimestamp(until), datetime.fromtimestamp(self._clock()))
        return PauseCause("user", "you paused it", until, f"at {words}", REMEDY)


def _warned(text: str) -> str:
    log.warning("%s", text)
    return text
