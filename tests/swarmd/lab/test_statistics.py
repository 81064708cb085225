"""The figures of runs, compared with values computed by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from swarmd.lab.experiment import parse_experiment
from swarmd.lab.play import NOTHING, line_of
from swarmd.lab.report import groups, write_report
from swarmd.lab.results import Results
from swarmd.lab.statistics import Column, RunFigures, figures, gain, interval, roughness
from swarmd.types import TokenCounts

# Two nodes; the second is absent in the last round.
LINES = [
    {"round": 0, "evaluation": {"answers": 1, "right": [[0, 0], [1, 0]]}},
    {
        "round": 1,
        "reward": [1.0, 3.0],
        "generated": [2, 4],
        "informative": [1, 2],
        "useful": [2, 3],
        "local": [2, 3],
        "external": [1, 2],
        "gated": [1, 0],
        "updates": [0, 2],
        "hostile": [1, 0],
        "cpu": [3.0, 1.0],
        "entropy": [0.5, 0.75],
        "in_form": [0.25, 0.5],
    },
    {
        "round": 2,
        "reward": [4.0, None],
        "generated": [2, 0],
        "informative": [2, 0],
        "useful": [3, 0],
        "local": [2, 0],
        "external": [1, 0],
        "gated": [0, 0],
        "updates": [3, 0],
        "cpu": [5.0, 4.0],
        "entropy": [0.25, None],
        "in_form": [0.75, None],
        "evaluation": {"answers": 2, "right": [[1, 2], [0, 2]], "marked": [1, 2]},
    },
]


def of_lines() -> RunFigures:
    return figures(LINES, local=[2, 3], external=[1, 4], completions=[4, 8])


def test_the_figures_of_a_run_equal_values_computed_by_hand() -> None:
    found = of_lines()
    assert found.late_by_node[1] is None
    assert replace(
        found, late_by_node=found.late_by_node[:1], form_by_node=found.form_by_node[:1], predicted=0.0
    ) == RunFigures(
        cumulative=8.0,
        rewards=((1.0, 3.0), (4.0, None)),
        late=4.0,
        per_thousand=1000 * 8 / (2 * 4 + 4 * 8 + 2 * 4),
        mixed=5 / 8,
        useful=8 / 6,  # a node that is present but does not train counts as one update
        predicted=0.0,
        external=4 / 6,
        gated=1 / 5,
        roughness=None,
        cpu_seconds=9.0,
        entropy=0.25,
        before=0.25,
        passes={1: 0.625, 2: 0.75},
        hostile=1 / 4,
        marked=3 / 8,
        late_by_node=(4.0,),
        form_by_node=(0.75,),
        pass_1_by_node=(0.75, 0.5),
    )
    # m·I is 1 and 1.5 in the first round, 2 and 0 in the second.
    assert found.predicted == pytest.approx(((1 + 1) + (1.5 + 1) + (2 + 0)) / 3)
    assert figures(LINES[:2], [2, 3], [1, 4], [4, 8]).marked is None
    assert figures(LINES[1:2], [2, 3], [1, 4], [4, 8]).pass_1_by_node == ()
    late = figures(LINES[1:2] * 19 + LINES[2:], [2, 3], [1, 4], [4, 8])
    assert late.late == (2 + 4) / 2 and late.late_by_node == (2.5, 3.0)


def test_a_gain_uses_seeds_that_both_settings_have_with_a_positive_baseline() -> None:
    one = of_lines()
    column = Column("a", "a", dict.fromkeys((1, 2, 3), one))
    other = Column("b", "b", {1: replace(one, cumulative=0.5, passes={}), 2: replace(one, cumulative=0.0)})
    assert (gain(column, other).mean, gain(column, other).n) == (pytest.approx(1500.0), 1)
    assert other.over_seeds("cumulative").mean == 0.25
    assert column.over_seeds("roughness").n == 0
    last = other.pass_at(2)
    assert (last.mean, last.n) == (0.75, 1)  # at the end, from the only seed that has it
    assert other.pass_at(4).n == 0


def test_intervals_are_students_t() -> None:
    five = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert five.half == pytest.approx(1.963, abs=1e-3)  # 2.776 · √2.5 / √5
    assert five.mean == 3
    assert interval([2.0]).half is None
    assert math.isnan(interval([]).mean) and interval([0.0, 1.0]).half == pytest.approx(6.353)
    # The last entry of the table, and a size beyond it; scipy's values are 2.0395 and 1.9842.
    assert interval([0.0, *[1.0] * 30]).half == pytest.approx(2.042 / 31)
    assert interval([0.0, *[1.0] * 31]).half == pytest.approx(2.0395 / 32, rel=2e-3)
    assert interval([0.0, *[1.0] * 99]).half == pytest.approx(1.9842 / 100, rel=2e-3)


def test_roughness_is_the_deviation_from_local_trends() -> None:
    flat = [[0.5, 0.5]] * 400
    assert roughness(flat, [8, 8]) == 0 and roughness(flat[:40], [8, 8]) is None
    # A steady rise has no roughness.
    assert roughness([[round / 400] * 2 for round in range(400)], [8, 8]) == pytest.approx(0)
    # There are eight windows of one or two rounds. The inner four differ from their trends by -1/4, 1, -1/4
    # and -1/4.
    peak = [[reward] for reward in (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)]
    assert roughness(peak, [512]) == pytest.approx(0.625) and roughness(peak[:7], [512]) is None
    assert roughness([each for each in peak for _ in range(2)], [256]) == pytest.approx(0.625)


def test_figures_of_a_kind_of_node_are_means_over_the_present_nodes(tmp_path: Path) -> None:
    """With the first seed, no node of the second kind was present at the end."""
    kinds = [{"nodes": 1, "model": {"name": "tiny-latent"}}, {"nodes": 1}]
    settings = [{"name": "one", "group": kinds}, {"name": "not played yet", "group": kinds[1:]}]
    document = {"name": "kinds", "rounds": 2, "seeds": 3, "setting": settings}
    results = Results.create(tmp_path / "out", parse_experiment(document, "kinds.toml"))
    for run in results.runs[::2]:
        with results.writing(run) as append:
            append(LINES[1])
            append({**LINES[2], "reward": [0.5, None if run.seed == 1 else 0.25]})
    assert [row[3:5] for row in groups(results)[1:]] == [
        ("0.500 ± 0.000", "0.750 ± 0.000"),
        ("0.250 ± 0.000", "–"),
    ]
    page = write_report(results, {}).read_text()
    assert "3 of 6 runs: 2 settings, 3 seeds, 2 rounds, 1 or 2 nodes" in page
    assert "this decides nothing" not in page
    # A row for each figure, in a region that can be scrolled with the keyboard.
    assert '<tr><th scope="row">seeds</th><td>3</td></tr>' in page and page.count('tabindex="0"') == 2


def test_a_node_without_training_has_no_entropy() -> None:
    trained = structs.replace(NOTHING, tokens=TokenCounts(0, 8), entropy=0.5)
    assert line_of(1, [NOTHING, trained], set())["entropy"] == [None, 0.5]
