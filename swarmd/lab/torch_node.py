"""One node of `swarmd lab run --engine torch`, in its own process. Started by `swarmd.lab.runs`.

All nodes play a round at the same time. Between its answers and its update, each node gathers the frames of
all other nodes: the exchange of the paper's controlled experiment (SAPO, section 5). So every node receives
all rollouts of a round in that round. Absences and the frames of hostile peers depend on the seed alone, so
each rank computes them itself.

`python -m swarmd.lab.torch_node FOLDER SETTING SEED RANK MEETING`. Rank 0 writes the results, and prints the
number of each finished round.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId
from swarmd.exchange.virtual import VirtualNode
from swarmd.lab.experiment import Evaluation, Setting
from swarmd.lab.parent_watch import run_program, tell_round
from swarmd.lab.play import NOTHING, PlayedSwarm, lines_of, play
from swarmd.lab.results import Results, Run
from swarmd.lab.runs import LOST_EXIT_CODE
from swarmd.policy.parallel.data_parallel import all_gather, join, leave
from swarmd.policy.parallel.worker import ProcessLost
from swarmd.protocols import Reward
from swarmd.trainer.round import run_round
from swarmd.types import Rollout, RoundReport, Task

_frames = msgspec.msgpack.Decoder(list[bytes])
_report = msgspec.msgpack.Decoder(tuple[RoundReport, float])


class RankNetwork(MemorySwarm):
    """The network as one rank sees it: its node, and the hostile peers.

    It keeps the frames that the node sends, for the other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[PeerId | None, bytes]] = []

    def inject(self, frame: bytes, sender: PeerId | None = None) -> None:
        self.sent.append((sender, frame))
        super().inject(frame, sender)


class RankNode(VirtualNode):
    """A node that first gathers the frames of all ranks. gather: called before it collects."""

    def __init__(self, *args: Any, gather: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._gather = gather

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        self._gather()
        return super().collect()


class RankedSwarm(PlayedSwarm):
    """The swarm of a run, of which this process holds one node.

    Its results cover all nodes, and are the same on every rank.
    """

    def __init__(self, setting: Setting, seed: int, reward: Reward, rank: int) -> None:
        self._rank, self._network = rank, RankNetwork()
        super().__init__(
            setting.model_copy(update={"whole": True}), seed, reward, self._network,
            partial(RankNode, gather=self._gather_frames), [rank],
        )  # fmt: skip

    def _reports(self, number: int, gone: Collection[int]) -> Sequence[RoundReport]:
        begun = time.process_time()
        if self._rank in gone:
            self._gather_frames()
        report = NOTHING if self._rank in gone else run_round(number, self.nodes[0])
        told = all_gather(msgspec.msgpack.encode((report, time.process_time() - begun)))
        reports, seconds = zip(*map(_report.decode, told), strict=True)
        self.cpu = [so_far + more for so_far, more in zip(self.cpu, seconds, strict=True)]
        return list(reports)

    def evaluate(
        self, questions: Sequence[Task], wanted: Evaluation, seed: int, scored: Reward | None = None
    ) -> dict[str, Any]:
        own = super().evaluate(questions, wanted, seed, scored)
        told = [msgspec.json.decode(each) for each in all_gather(msgspec.json.encode(own))]
        return {
            key: [each[key][0] for each in told] if isinstance(value, list) else value
            for key, value in own.items()
        }

    def _gather_frames(self) -> None:
        sent, self._network.sent = self._network.sent, []
        own = [frame for sender, frame in sent if sender == self.nodes[0].me]
        for place, data in enumerate(all_gather(msgspec.msgpack.encode(own))):
            for frame in _frames.decode(data) if place != self._rank else ():
                self._network.inject(frame, self.ids[place])


def main(folder: str, name: str, seed: str, rank: str, meeting: str) -> None:
    results = Results.open(Path(folder))
    setting, made = results.experiment.setting(name), partial(RankedSwarm, rank=int(rank))
    try:
        join(meeting, int(rank), len(setting.nodes))
        if rank == "0":
            play(results, Run(name, int(seed)), tell_round, made, engine="torch")
        else:
            # All ranks compute the same lines, and rank 0 writes them.
            deque(lines_of(results.experiment, setting, int(seed), made), maxlen=0)
    except ProcessLost as error:
        print(f"another node's process ended: {error}", file=sys.stderr)
        sys.exit(LOST_EXIT_CODE)
    finally:
        leave()


if __name__ == "__main__":
    run_program(main)
