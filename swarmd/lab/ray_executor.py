"""`swarmd lab run --executor ray`: the runs of an experiment on a Ray cluster, each on one core.

It needs the extra `ray`. A worker plays a run and returns its lines; they are written here once the run is
finished. swarmd must be installed on every machine.
"""

import importlib
from collections.abc import Callable
from typing import Any

from swarmd.lab.experiment import Experiment
from swarmd.lab.play import lines_of
from swarmd.lab.results import Results, Run
from swarmd.lab.runs import RunsProgress


def play_on_ray(results: Results, told: Callable[[RunsProgress], None], **cluster: Any) -> None:
    """Play the missing runs, as many at a time as the cluster has cores. Raises LabFailed.

    cluster: arguments of `ray.init`; without any it joins the cluster that RAY_ADDRESS names, or starts one
    on this machine. The other arguments are as in `runs.play_all`.
    """
    ray = importlib.import_module("ray")
    progress = RunsProgress.of(results)
    ray.init(**{"log_to_driver": False, "include_dashboard": False, **cluster})
    try:
        remote = ray.remote(num_cpus=1, max_retries=1)(_lines)
        runs = {remote.remote(results.experiment, run): run for run in results.missing}
        while waiting := list(runs):
            (ready, *_), _ = ray.wait(waiting)
            run = runs.pop(ready)
            try:
                lines = ray.get(ready)
            except ray.exceptions.RayError as error:
                progress.finished(run, str(error).strip().splitlines()[-1])
            else:
                with results.writing(run) as append:
                    for line in lines:
                        append(line)
                progress.finished(run, None)
            told(progress)
    finally:
        ray.shutdown()
    progress.require_whole()


def _lines(experiment: Experiment, run: Run) -> list[dict[str, Any]]:
    return list(lines_of(experiment, experiment.setting(run.setting), run.seed))
