"""`swarmd lab run --judge`: the nodes of every run ask a real judge, as in the paper's open demo (section 6).

The judge is a separate process on loopback, with its database in the results folder; all runs of the
experiment share it. A node asks it after every EVERY_ROUNDS rounds that it has trained, by the client and
with the signed attributes of a real node. It answers greedily, which uses no random number, so the run is the
same as without a judge. The judge uses real time and the lab virtual time, but the judge compares by rounds,
not by time. Each setting and its baseline ask under a model name that only this pair uses, so each pair is
compared separately.

`python -m swarmd.lab.judged URL FOLDER SETTING SEED` plays one run.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import trio

from p2p import durable
from p2p.identity import Identity
from swarmd.daemon.judging.client import JudgeClient
from swarmd.daemon.judging.judging import said_of
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.lab.experiment import BadExperiment, Experiment, Setting
from swarmd.lab.local_judge import local_judge
from swarmd.lab.parent_watch import LabFailed, run_program, tell_round
from swarmd.lab.play import PlayedSwarm, play
from swarmd.lab.results import JUDGE, Results, Run
from swarmd.protocols import Reward
from swarmd.state.status import Trouble

# The judge's bins have the same size, and the judge's limit of one question a second is kept.
EVERY_ROUNDS = 5


class JudgedSwarm(PlayedSwarm):
    def __init__(self, setting: Setting, seed: int, reward: Reward, url: str, compared: str) -> None:
        """Give every node of the played swarm a judge client with its own key.

        compared: label of the setting and its baseline, appended to the model's name.
        """
        super().__init__(setting, seed, reward)
        self._trained = [0] * len(self.nodes)  # rounds that each node has trained
        self._models = [f"{config.model.name}: {compared}"[:100] for config in setting.nodes]
        self._judges = []
        for number, config in enumerate(setting.nodes):
            # No other run uses this key.
            key = Identity(random.Random(f"{setting.slug} {seed} {number} judged").randbytes(32))
            said = partial(said_of, config, config.model.device, config.round.wanted)
            self._judges.append(JudgeClient(url, key, self.curriculum.digest, said=said))

    def round(self, number: int) -> dict[str, Any]:
        line = super().round(number)
        for place, reward in enumerate(line["reward"]):
            self._trained[place] += reward is not None
            if reward is not None and self._trained[place] % EVERY_ROUNDS == 0:
                trio.run(self._evaluate, place)
        return line

    async def _evaluate(self, place: int) -> None:
        """Let the judge evaluate one node.

        Raises LabFailed if the judge does not answer, because a figure with gaps would look like a complete
        one.
        """
        judge, policy = self._judges[place], self.policies[place]
        found = await judge.ask(self._trained[place], self._models[place])
        graded = found if isinstance(found, Trouble) else await judge.answer(found, policy.answer(found.text))
        if isinstance(graded, Trouble):
            raise LabFailed(f"{graded.cause}. Read judge.log in the results folder, then use --resume.")


@contextmanager
def judging(results: Results) -> Iterator[Sequence[str]]:
    """Run a judge for an experiment; yield the command that plays a run.

    When all runs are finished, the judge's comparisons are saved for the report.
    """
    nodes = [node for setting in results.experiment.settings for node in setting.nodes]
    if len({curriculum_of(node).digest for node in nodes}) != 1:
        raise BadExperiment(
            "one judge asks one curriculum, and the settings have several. Leave --judge out."
        )
    wanted = nodes[0].swarm.curriculum
    with local_judge(results.folder, curriculum_of(nodes[0]).name if wanted == "auto" else wanted) as url:
        yield (sys.executable, "-P", "-m", "swarmd.lab.judged", url)
        try:
            durable.replace(results.folder / JUDGE, json.dumps(_comparisons(url), indent=1).encode())
        except (OSError, ValueError, httpx2.HTTPError) as error:
            raise LabFailed(
                f"{results.folder / JUDGE} has not been written: {error}. All runs are saved: use --resume."
            ) from error


def _comparisons(url: str) -> list[Any]:
    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:
        models = [each["model"] for each in http.get("/v1/comparison").json()["models"]]
        return [http.get("/v1/comparison", params={"model": model}).json() for model in sorted(models)]


def judged_beside(experiment: Experiment, setting: Setting) -> str:
    """Return the name of the setting with which this one is compared; a baseline is compared with itself."""
    if any(other.against == setting.name for other in experiment.settings):
        return setting.name
    return experiment.baseline_of(setting).name


def main(url: str, folder: str, name: str, seed: str) -> None:
    results = Results.open(Path(folder))
    beside = judged_beside(results.experiment, results.experiment.setting(name))
    play(
        results,
        Run(name, int(seed)),
        tell_round,
        partial(JudgedSwarm, url=url, compared=f"over {beside}"),
    )


if __name__ == "__main__":
    run_program(main)
