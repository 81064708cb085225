"""The levels of ladder-9, and the staircase that chooses a level for each subject."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.types import PeerId
from swarmd.errors import ConfigError
from swarmd.tasks.answers import MAX_ANSWER_CHARACTERS
from swarmd.tasks.curriculum import (
    HELD_OUT_END,
    LADDER_9,
    SAPO_9,
    TINY_9,
    Staircase,
    level_of,
    subject_of,
)
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks, tasks_of
from swarmd.types import Completion, Rollout, Scored, Task, TaskRef

LADDERS = {
    subject: [name for name in LADDER_9.specialties if subject_of(name) == subject]
    for subject in SAPO_9.specialties
}


def sampled(specialty: str, count: int) -> list[Task]:
    tasks = tasks_of("ladder-9")
    made = (tasks.task(TaskRef(specialty, n)) for n in range(0, HELD_OUT_END, HELD_OUT_END // count))
    return [task for task in made if task is not None]


def group(specialty: str, *rewards: float) -> Scored:
    rollout = Rollout(TaskRef(specialty, 1), (Completion("", True),) * len(rewards), PeerId("me"))
    return Scored(rollout, "?", rewards, 1)


def test_the_levels_of_each_subject_range_from_tiny_9_to_above_sapo_9() -> None:
    assert set(map(subject_of, LADDER_9.specialties)) == set(SAPO_9.specialties)
    for subject, names in LADDERS.items():
        assert list(map(level_of, names)) == list(range(1, len(names) + 1))
        assert TINY_9.configs[subject] in [LADDER_9.configs[name] for name in names[:2]]
        if subject != "bf":  # bf has one level
            assert LADDER_9.configs[names[-2]] == SAPO_9.configs[subject]


@pytest.mark.parametrize("subject", sorted(set(LADDERS) - {"calendar_arithmetic"}))
def test_questions_and_answers_become_longer_with_the_level(subject: str) -> None:
    tasks, names = tasks_of("ladder-9"), LADDERS[subject]
    # Level 1 of propositional_logic is left out: each of its premises has an operator, so its texts are
    # longer.
    sizes = [
        fmean(len(task.question) + len(solution(tasks, task)) for task in sampled(name, 64))
        for name in (names[1:] if subject == "propositional_logic" else names)
    ]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes), sizes


def test_higher_levels_of_calendar_questions_have_more_kinds_and_longer_spans() -> None:
    datasets = [tasks_of("ladder-9").dataset(name) for name in LADDERS["calendar_arithmetic"]]
    spans = [dataset.config.offset_upper_bound for dataset in datasets]
    kinds = [len(dataset.config.tasks) for dataset in datasets]
    assert spans == sorted(set(spans)) and kinds == sorted(kinds) and kinds[0] < kinds[-1]


@pytest.mark.parametrize("specialty", LADDER_9.specialties)
def test_right_answers_fit_the_length_limit_and_questions_are_made_quickly(specialty: str) -> None:
    tasks, longest = tasks_of("ladder-9"), MAX_ANSWER_CHARACTERS[subject_of(specialty)]
    begun = time.process_time()
    made = sampled(specialty, 128)
    assert (time.process_time() - begun) / 128 < 0.2
    assert len(made) > 100
    assert all(0 < len(solution(tasks, task)) <= longest for task in made)


def test_levels_start_at_one_and_move_after_groups_all_right_or_all_wrong() -> None:
    stairs = Staircase(LADDER_9.specialties)
    assert stairs.asked == [names[0] for names in LADDERS.values()]
    stairs.saw([group("binary_matrix.1", 0, 0), group("arc_1d.1", 1, 1), group("basic_arithmetic.1", 1, 0)])
    assert Counter(stairs.levels.values()) == {1: 8, 2: 1} and stairs.levels["arc_1d"] == 2
    # Late groups of the previous level, and a second group in the same round, cause no further step.
    stairs.saw([group("arc_1d.1", 1, 1), group("arc_1d.2", 0, 0), group("arc_1d.2", 0, 0)])
    assert stairs.levels["arc_1d"] == 1
    # A group in which each answer is partly right is not all right.
    stairs.saw([group("arc_1d.1", 1, 1), group("arc_1d.2", 0.5, 0.5)])
    assert stairs.levels["arc_1d"] == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*LADDER_9.specialties, "no such.3"]),
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4),
        ),
        max_size=60,
    ),
    st.sets(st.sampled_from(LADDER_9.specialties), min_size=1),
)
def test_the_staircase_stays_in_range_and_moves_one_level_at_a_time(
    seen: Sequence[tuple[str, list[float]]], asked: set[str]
) -> None:
    stairs, again = Staircase(asked), Staircase(asked)
    for specialty, rewards in seen:
        before = stairs.asked
        stairs.saw([group(specialty, *rewards)])
        moved = set(stairs.asked) ^ set(before)
        assert set(stairs.asked) <= asked
        assert len(stairs.asked) == len(before) == len(set(map(subject_of, asked)))
        assert not moved or (specialty in moved and len(moved) == 2 and len(set(rewards)) == 1)
    again.restore(stairs.levels)
    assert again.asked == stairs.asked


def test_levels_in_a_checkpoint_that_the_node_does_not_ask_are_ignored() -> None:
    stairs = Staircase(["binary_matrix.1", "binary_matrix.2", "arc_1d.3"])
    stairs.restore({"binary_matrix": 2, "arc_1d": 1, "gone": 4})
    assert stairs.asked == ["arc_1d.3", "binary_matrix.2"]


def test_a_curriculum_without_levels_has_an_empty_staircase() -> None:
    stairs = Staircase(TINY_9.specialties)
    stairs.saw([group("bf", 1, 1)])
    assert stairs.levels == {} and tuple(stairs.asked) == TINY_9.specialties


def test_a_configured_subject_means_all_its_levels_and_a_specialty_only_itself() -> None:
    assert LADDER_9.asked(["bf", "arc_1d.2", "binary_matrix"]) == (
        "arc_1d.2",
        "bf.1",
        *LADDERS["binary_matrix"],
    )
    assert LADDER_9.asked([]) == LADDER_9.specialties
    with pytest.raises(
        ConfigError, match=r"bf\.9 is not in ladder-9\. Choose from arc_1d, base_conversion, "
    ):
        LADDER_9.asked(["bf.9"])


def test_a_node_draws_at_its_current_levels_and_knows_all_levels() -> None:
    tasks = CurriculumTasks(LADDER_9, ["binary_matrix", "arc_1d"])
    tasks.staircase.saw([group("binary_matrix.1", 1, 1)])
    drawn = [task.ref for task in tasks.draw(40, random.Random(1))]
    assert {ref.specialty for ref in drawn} == {"binary_matrix.2", "arc_1d.1"}
    assert [task.ref for task in tasks.draw(40, random.Random(1))] == drawn
    every = {task.ref.specialty for task in tasks.draw(200, random.Random(1), all_levels=True)}
    assert every == {*LADDERS["binary_matrix"], *LADDERS["arc_1d"]}
    # Other nodes' questions of every level are known, and the judge asks all levels.
    assert all(tasks.task(TaskRef(name, 1)) for name in LADDER_9.specialties)
    held_out = tasks.draw_held_out(600, random.Random(1))
    assert {task.ref.specialty for task in held_out} == set(LADDER_9.specialties)
