"""A reference gives the same task in every process and under every hash seed, locale and Decimal context.

A reference whose task takes minutes to make gives no task.
"""

import decimal
import hashlib
import locale
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from swarmd.errors import ConfigError
from swarmd.tasks.curriculum import CURRICULA, HELD_OUT, HELD_OUT_END, TRAINING_TASKS, subject_of
from swarmd.tasks.gym import basic_arithmetic, bf_optimizer, reasoning_gym
from swarmd.tasks.source import CurriculumTasks, TaskRef, tasks_of
from tests import ROOT
from tests.doubles import TIMEOUT_S

COSTLY = TaskRef("basic_arithmetic", 2434)  # in sapo-9; upstream loops up to the root of a very large number

SAMPLED = range(0, HELD_OUT_END, HELD_OUT_END // 32)

FINGERPRINT = """
import hashlib, json, sys
from swarmd.tasks.source import CurriculumTasks, TaskRef
from swarmd.tasks.curriculum import CURRICULA
order = sys.argv[1]
for name, c in sorted(CURRICULA.items()):
    tasks = CurriculumTasks(c)
    numbers = (0, 1, 7, 977, 899_999_999, 1_000_000_007, 2**31 - 1)
    refs = [TaskRef(s, n) for s in c.specialties for n in numbers]
    entries = {r: tasks.task(r) for r in (reversed(refs) if order == "backwards" else refs)}
    told = [entries[r] and [entries[r].question, entries[r].entry] for r in refs]
    document = json.dumps(told, sort_keys=True, default=repr)
    print(name, c.digest, hashlib.sha256(document.encode()).hexdigest())
"""


def digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def fingerprint(hash_seed: str, order: str, **extra: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), **extra}
    command = [sys.executable, "-c", FINGERPRINT, order]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.net
def test_other_processes_make_the_same_tasks() -> None:
    first = fingerprint("0", "forwards")
    assert len(first.splitlines()) == len(CURRICULA)
    assert fingerprint("42", "backwards", LC_ALL="C.UTF-8", TZ="Asia/Tokyo") == first
    assert fingerprint("random", "forwards", LANG="de_DE.UTF-8") == first


@pytest.mark.parametrize("name", ["ladder-9", "sapo-9", "tiny-9"])
def test_reasoning_gym_still_makes_the_same_questions_and_answers(name: str) -> None:
    """If questions differ, change the curriculum's `sample`, so that old and new nodes never meet.

    If only answers differ, raise SCORING_VERSION.
    """
    tasks = tasks_of(name)
    refs = [TaskRef(specialty, n) for specialty in tasks.curriculum.specialties for n in SAMPLED]
    made = [task for task in map(tasks.task, refs) if task is not None]
    answers = {
        "ladder-9": "28b8fe23a2db3acc",
        "sapo-9": "5b8758b9e9306666",
        "tiny-9": "0ba2e4cb42882b2a",
    }
    assert digest(task.question for task in made) == tasks.curriculum.sample
    assert digest(str(task.entry["answer"]) for task in made) == answers[name]


def test_the_digests_have_not_changed() -> None:
    """Another first digest means another swarm.

    So a change of TASKS, of the configurations or of the sample splits the swarm. The second digest is for
    judges and changes with SCORING as well.
    """
    assert {name: (c.questions, c.digest) for name, c in CURRICULA.items()} == {
        "ladder-9": ("6d0f416ba472c682", "1285ca33175ed042"),
        "sapo-9": ("3541b25d59826e8c", "86507d2136b005d5"),
        "tiny-9": ("da8ff5a97660a718", "644c079777f1e3f6"),
        "ladder-9-strict": ("6d0f416ba472c682", "5f9cf928fab1dac5"),
        "sapo-9-strict": ("3541b25d59826e8c", "fbab07273bb2713a"),
        "tiny-9-strict": ("da8ff5a97660a718", "e93700488c4becc2"),
    }


@pytest.mark.parametrize("name", sorted(CURRICULA))
def test_examples_are_right_and_never_asked(name: str) -> None:
    curriculum, tasks = CURRICULA[name], tasks_of(name)
    answers = [curriculum.read("basic_arithmetic", answer) for _, answer in curriculum.examples]
    assert answers == ["8", "Wednesday"]
    for question, _ in curriculum.examples:
        words = question.partition("2 days")[0]
        asked = [tasks.task(TaskRef(s, n)) for s in curriculum.specialties for n in range(0, 2**31, 2**25)]
        assert not any(task.question.startswith(words) for task in asked if task)


@pytest.mark.parametrize("name", sorted(CURRICULA))
def test_questions_and_answers_equal_reasoning_gyms(name: str) -> None:
    tasks = tasks_of(name)
    for specialty, config in tasks.curriculum.configs.items():
        for n in (0, 3, 12_345):
            task = tasks.task(TaskRef(specialty, n))
            theirs = reasoning_gym.create_dataset(subject_of(specialty), seed=n, size=1, **config)[0]
            assert (task.question, task.entry["answer"]) == (theirs["question"], theirs["answer"])


@pytest.mark.parametrize(
    "specialty, n", [("no such", 1), ("", 0), ("bf", -1), ("bf", HELD_OUT_END), ("bf", 2**70), ("bf", True)]
)
def test_references_with_an_unknown_specialty_or_number_have_no_task(specialty: str, n: int) -> None:
    assert tasks_of("sapo-9").task(TaskRef(specialty, n)) is None


def test_a_too_costly_reference_has_no_task_and_upstreams_function_is_restored() -> None:
    before = basic_arithmetic.find_common_divisors
    assert tasks_of("sapo-9").task(COSTLY) is None
    assert basic_arithmetic.find_common_divisors is before


def test_making_tasks_changes_no_global_state(capsys: pytest.CaptureFixture[str]) -> None:
    with decimal.localcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP)):
        for name in CURRICULA:
            tasks = CurriculumTasks(CURRICULA[name])
            for specialty in tasks.curriculum.specialties:
                tasks.task(TaskRef(specialty, 5))
        assert (decimal.getcontext().prec, decimal.getcontext().rounding) == (3, decimal.ROUND_UP)
    assert capsys.readouterr().out == ""
    assert not hasattr(bf_optimizer, "print")


class WritesMeanwhile:
    """A substitute for a data set; another thread prints while it makes its question."""

    def __getitem__(self, n: int) -> dict[str, str]:
        writer = threading.Thread(target=print, args=("ready",))
        writer.start()
        writer.join()
        return {"question": "?"}


def test_output_of_another_thread_is_still_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The judge prints "ready" while it makes its first questions.

    Without this behaviour, one start in 26 lost that line when five judges started at once.
    """
    tasks = CurriculumTasks(CURRICULA["tiny-9"])
    tasks._datasets["bf"] = WritesMeanwhile()
    tasks.task(TaskRef("bf", 1))
    assert capsys.readouterr().out == "ready\n"


def test_the_decimal_context_does_not_matter() -> None:
    def entries() -> list[object]:
        made = [tasks_of("sapo-9").task(TaskRef("decimal_arithmetic", n)) for n in range(200)]
        return [task and task.entry["answer"] for task in made]

    plain = entries()
    with decimal.localcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP)):
        assert entries() == plain


class SeesTheLocale:
    """A substitute for a data set; its question is the current locale."""

    def __getitem__(self, n: int) -> dict[str, str]:
        return {"question": locale.setlocale(locale.LC_TIME)}


def test_the_locale_does_not_matter() -> None:
    others = [name for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "ja_JP.UTF-8", "C.UTF-8") if _has(name)]
    if not others:
        pytest.skip("no other locale is installed")
    plain = [tasks_of("sapo-9").task(TaskRef("calendar_arithmetic", n)) for n in range(100)]
    spied = CurriculumTasks(CURRICULA["sapo-9"])
    spied._datasets["calendar_arithmetic"] = SeesTheLocale()
    try:
        locale.setlocale(locale.LC_TIME, others[0])
        assert [tasks_of("sapo-9").task(TaskRef("calendar_arithmetic", n)) for n in range(100)] == plain
        assert spied.task(TaskRef("calendar_arithmetic", 1)).question == "C"
        assert locale.setlocale(locale.LC_TIME) == others[0]
    finally:
        locale.setlocale(locale.LC_TIME, "C")


def _has(name: str) -> bool:
    try:
        locale.setlocale(locale.LC_TIME, name)
    except locale.Error:
        return False
    locale.setlocale(locale.LC_TIME, "C")
    return True


def test_a_node_draws_only_its_specialties_and_knows_all() -> None:
    tasks = CurriculumTasks(CURRICULA["tiny-9"], ["bf", "arc_1d"])
    assert {task.ref.specialty for task in tasks.draw(40, random.Random(1))} == {"bf", "arc_1d"}
    assert tasks.task(TaskRef("binary_matrix", 1)) is not None
    # The judge asks the whole curriculum.
    assert len({task.ref.specialty for task in tasks.draw_held_out(40, random.Random(1))}) > 2
    with pytest.raises(ConfigError, match=r"bff is not in tiny-9\. Choose from arc_1d"):
        CurriculumTasks(CURRICULA["tiny-9"], ["bff"])


def test_drawing_is_uniform_over_specialties() -> None:
    tasks = tasks_of("tiny-9")
    drawn, held_out = tasks.draw(400, random.Random(1)), tasks.draw_held_out(400, random.Random(1))
    assert (
        {t.ref.specialty for t in drawn}
        == {t.ref.specialty for t in held_out}
        == set(tasks.curriculum.specialties)
    )
    assert all(0 <= t.ref.n < TRAINING_TASKS for t in drawn)
    assert all(HELD_OUT <= t.ref.n < HELD_OUT_END for t in held_out)
    assert [t.ref for t in tasks.draw(400, random.Random(1))] == [t.ref for t in drawn]
    assert all(tasks.task(t.ref) == t for t in drawn[:50])


def test_drawing_skips_references_without_a_task() -> None:
    numbers = iter([COSTLY.n, 7])
    rng = SimpleNamespace(choice=lambda _: COSTLY.specialty, randrange=lambda *_: next(numbers))
    assert tasks_of("sapo-9").draw(1, rng)[0].ref == TaskRef(COSTLY.specialty, 7)


def test_deferred_imports_of_reasoning_gym_are_loaded_on_first_use() -> None:
    """So an installation may lack these packages (overrides.txt), and those that it has are found."""
    code = (
        "import sys; from swarmd.tasks.gym import Deferred, reasoning_gym\n"
        "assert 'matplotlib' not in sys.modules and type(sys.modules['pycosat']) is Deferred\n"
        "sys.modules['colorsys'] = late = Deferred('colorsys')\n"
        "print(late.rgb_to_hsv(0, 0, 1)[2], sys.modules['colorsys'] is late)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    assert found.stdout == "1 False\n"
