"""What a person asks about tasks: which there are, what one looks like, what an answer to it earns. Returns data; printing is the CLI's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmd.errors import SwarmdError
from swarmd.tasks.curriculum import HELD_OUT_END
from swarmd.tasks.grading import solution
from swarmd.tasks.scoring import Completion, Judgement, Verifier
from swarmd.tasks.source import CurriculumTasks, Task, TaskRef, tasks_of


class NoSuchTask(SwarmdError):
    """This curriculum has no such task."""


class BadLine(SwarmdError):
    """A line of the input is not a completion."""


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task as it is shown. `answer` is one that earns the reward; other spellings may earn it too."""

    curriculum: str
    specialty: str
    n: int
    question: str
    answer: str
    config: Mapping[str, Any]  # the specialty's ReasoningGYM configuration, where it is not the default


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    ended: bool = True


def specialties(curriculum_name: str) -> Sequence[TaskView]:
    """Every specialty of the curriculum, each with its first task as an example. Raises ConfigError where there is no such curriculum."""
    tasks = tasks_of(curriculum_name)
    return [_view(tasks, _first(tasks, specialty)) for specialty in tasks.curriculum.specialties]


def show(curriculum_name: str, specialty: str, n: int) -> TaskView:
    """One task. Raises ConfigError for an unknown curriculum, NoSuchTask for the rest."""
    tasks = tasks_of(curriculum_name)
    return _view(tasks, _task(tasks, specialty, n))


def score_lines(verifier: Verifier, curriculum_name: str, specialty: str, n: int, lines: Iterable[str | bytes]) -> Iterator[Judgement]:
    """Reward and reason of each completion, one JSON object a line: {"text": …, "ended": true}. Blank lines are passed over.

    Judged one by one as they come. Raises NoSuchTask at once, BadLine at the first line that is none, with its number.
    """
    ref = _task(tasks_of(curriculum_name), specialty, n).ref
    return _score_lines(verifier, ref, lines)


def _score_lines(verifier: Verifier, ref: TaskRef, lines: Iterable[str | bytes]) -> Iterator[Judgement]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_Line)
        except (ValueError, RecursionError) as error:  # msgspec's errors and bad UTF-8 are ValueErrors
            raise BadLine(f'line {number}: {error}; expected one JSON object a line: {{"text": "…", "ended": true}}') from None
        yield verifier.judge([(ref, [Completion(read.text, read.ended)])])[0][0]


def _task(tasks: CurriculumTasks, specialty: str, n: int) -> Task:
    curriculum = tasks.curriculum
    if specialty not in curriculum.configs:
        raise NoSuchTask(f"{curriculum.name} has no specialty {specialty!r}; it has {', '.join(curriculum.specialties)}")
    task = tasks.task(TaskRef(specialty, n))
    if task is None and not 0 <= n < HELD_OUT_END:
        raise NoSuchTask(f"there is no task {n}; tasks are numbered from 0 to {HELD_OUT_END - 1}")
    if task is None:
        raise NoSuchTask(f"{specialty} {n} is left out of {curriculum.name}: it takes too long to make. Take another number")
    return task


def _first(tasks: CurriculumTasks, specialty: str) -> Task:
    return next(task for n in range(HELD_OUT_END) if (task := tasks.task(TaskRef(specialty, n))) is not None)


def _view(tasks: CurriculumTasks, task: Task) -> TaskView:
    curriculum, ref = tasks.curriculum, task.ref
    return TaskView(curriculum.name, ref.specialty, ref.n, task.question, solution(tasks, task), curriculum.configs[ref.specialty])
