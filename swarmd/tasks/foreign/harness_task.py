"""Task files of lm-evaluation-harness (.yaml) as own tasks.

Their templates make the questions, their filters and metric score the replies. This module runs in the
contained process, like taskset.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmd.errors import command_for
from swarmd.tasks.foreign.taskset import OpenedTaskset, one_turn
from swarmd.tasks.sandbox.worker import PluginRefused


def open_harness_task(path: Path) -> OpenedTaskset:
    """Load the task that a file of lm-evaluation-harness describes. Raises PluginRefused."""
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError:
        raise PluginRefused(
            f"it is a task of lm-evaluation-harness, which is not installed: run `{command_for('lm-eval')}`"
        ) from None
    (task, *more) = TaskManager(include_defaults=False).load(str(path))["tasks"].values()
    if more or task.OUTPUT_TYPE != "generate_until":
        raise PluginRefused(f"its output_type is {task.OUTPUT_TYPE}. Name one task with generate_until")
    # The harness' default seed. Without it, each process would choose other examples, and so other questions.
    task.set_fewshot_seed(1234)
    questions = [task.fewshot_context(doc, task.config.num_fewshot or 0) for doc in task.eval_docs]
    score = HarnessScores(task, questions)
    notes: list[str] = []
    plugin = one_turn(questions, score, notes)
    return OpenedTaskset(plugin, [*questions, *map(str, score.targets)], path, notes)


class HarnessScores:
    """Scores a reply by the task's first metric, after the filter that scores highest."""

    def __init__(self, task: Any, questions: Sequence[str]) -> None:
        self._task, self._docs = task, list(task.eval_docs)
        # Computed here: a contained process cannot compile templates.
        self.targets = [task.doc_to_target(doc) for doc in self._docs]
        self._asked = task.construct_requests(doc=self._docs[0], ctx=questions[0], metadata=("", 0, 1))
        ends = (task.config.generation_kwargs or {}).get("until") or ()
        self._ends = (ends,) if isinstance(ends, str) else ends
        self._metric = next(iter(task._metric_fn_list))

    def __call__(self, place: str, reply: str) -> float:
        task, asked, at = self._task, self._asked, int(place)
        for end in self._ends:
            reply = reply.partition(end)[0]
        asked.doc, asked.resps, asked.filtered_resps = self._docs[at], [reply], {}
        task.doc_to_target = lambda *_: self.targets[at]
        task._instances = [asked]
        task.apply_filters()
        found = [task.process_results(asked.doc, [text]) for text in asked.filtered_resps.values()]
        return max(float(metrics[self._metric]) for metrics in found)
