"""The gate: which rollouts are odd, compared with which ones, and their handling.

No policy here: its log-probabilities are given.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from p2p.types import PeerId
from swarmd.experience.advantages import shifted, within_group
from swarmd.experience.batch import MAX_DRAWS, BatchBuilder, SharingSampler
from swarmd.experience.outliers import (
    FLOORS,
    KEPT_COMPLETIONS,
    MAX_AUTHORS,
    MIN_PASS_RATE,
    NAMES,
    ONE_LOOK,
    WARM_UP_COMPLETIONS,
    Gate,
    Gated,
    Traits,
    part,
    traits,
)
from swarmd.experience.pool import Pool, PoolLimits
from swarmd.types import Completion, Rollout, Scored, TaskRef, Tokens

ME, OTHER = PeerId("me"), PeerId("other")
LIKELY, UNLIKELY = (-0.1,) * 5, (-0.1, -0.1, -30.0, -0.1, -0.1)


def own(
    round_number: int, count: int = 8, logprobs: tuple[float, ...] = LIKELY, text: str = "a" * 20
) -> Scored:
    return rollout(round_number, ME, [text] * count, tokens=[logprobs] * count, round_number=round_number)


def rollout(
    n: int, author: PeerId, texts: Sequence[str], rewards: Sequence[float] = (), *,
    tokens: Sequence[tuple[float, ...]] = (), round_number: int = 1,
) -> Scored:  # fmt: skip
    kept = Tokens(tuple(tuple(range(len(p))) for p in tokens), tuple(tokens)) if tokens else None
    completions = tuple(Completion(text, True) for text in texts)
    return Scored(
        Rollout(TaskRef("bf", n), completions, author),
        "?",
        tuple(rewards) or (1.0,) * len(texts),
        round_number,
        kept,
    )


def passes(gate: Gate, scored: Scored) -> bool:
    return gate.admitted(scored, dict(gate.traits_of(scored))) is scored


def warm(margin: float = 1.5, logprobs: tuple[float, ...] = LIKELY, text: str = "a" * 20) -> Gate:
    gate = Gate(margin)
    gate.learn([own(1, WARM_UP_COMPLETIONS, logprobs, text)])
    return gate


def test_the_traits_of_a_completion() -> None:
    assert traits("abc", (-1.0, -2.0, -3.0, -6.0, 0.0)) == Traits(3, 6.0, 3.0, 2.4)
    assert traits("", (-1.0, -3.0)) == Traits(0, 3.0, 2.0, 2.0), "a completion shorter than a stretch is one"


def test_a_few_tokens_do_not_hide_in_the_mean() -> None:
    long = traits("x", (-0.1,) * 96 + (-7.0,) * 4)
    assert long.mean < FLOORS.mean and long.token < FLOORS.token and long.stretch > FLOORS.stretch


def test_nothing_is_judged_before_enough_local_completions_were_seen() -> None:
    gate, odd = Gate(), rollout(1, OTHER, ["x" * 9999], tokens=[UNLIKELY])
    gate.learn([own(1, WARM_UP_COMPLETIONS - 1)])
    assert gate.limits is None and passes(gate, odd) and gate.take_refused() == {}
    gate.learn([own(2, 1)])
    assert gate.limits is not None and not passes(gate, odd)


def test_a_round_is_learnt_from_once() -> None:
    gate = Gate()
    for _ in range(3):
        gate.learn([own(1, WARM_UP_COMPLETIONS // 2), own(1, 1)])
    assert len(gate.state.own) == WARM_UP_COMPLETIONS // 2 + 1


def test_limits_are_the_local_figures_with_a_margin_and_never_below_the_floors() -> None:
    assert warm().limits == FLOORS, "a policy that is very sure of itself does not reject the rest"
    high = warm(1.5, (-10.0, -6.0, -6.0, -6.0), "a" * 100).limits
    assert high == Traits(150.0, 15.0, 10.5, 10.5)
    wider = warm(3.0, (-10.0, -6.0, -6.0, -6.0), "a" * 100).limits
    assert wider == Traits(300.0, 30.0, 21.0, 21.0)


def test_one_odd_local_completion_sets_no_limit() -> None:
    gate = Gate()
    gate.learn([own(1, 3 * WARM_UP_COMPLETIONS), own(1, 1, (-50.0,), "x" * 5000)])
    assert gate.limits == FLOORS
    gate.learn([own(2, WARM_UP_COMPLETIONS, (-50.0,), "x" * 5000)])
    assert gate.limits == Traits(7500.0, 75.0, 75.0, 75.0), "but many do"


def test_old_local_completions_are_forgotten() -> None:
    gate = Gate()
    gate.learn([own(1, KEPT_COMPLETIONS, (-10.0,) * 4, "a" * 500)])
    gate.learn([own(2, KEPT_COMPLETIONS)])
    assert gate.limits == FLOORS and len(gate.state.own) == KEPT_COMPLETIONS


@pytest.mark.parametrize(
    "name, text, logprobs",
    [
        (NAMES[0], "x" * 65, LIKELY),
        (NAMES[1], "x", (*LIKELY * 4, -8.1)),
        (NAMES[2], "x", (*LIKELY * 4, -4.1, -4.1, -4.1, -4.1)),
        (NAMES[3], "x", (-2.1,) * 9),
    ],
)
def test_each_trait_is_held_against_its_limit(name: str, text: str, logprobs: tuple[float, ...]) -> None:
    gate = warm()
    assert not passes(gate, rollout(1, OTHER, ["fine", text], tokens=[LIKELY, logprobs]))
    assert gate.take_refused() == {name: 1} and gate.take_refused() == {}
    assert passes(gate, rollout(1, OTHER, ["x" * 64], tokens=[(-8.0, -2.0, *LIKELY, -2.0, -2.0)])), (
        "at a limit is within it"
    )


def test_an_empty_answer_is_not_odd() -> None:
    """It has no token to look at, and anybody may send one."""
    assert passes(warm(), rollout(1, OTHER, ["", "fine"], (0.0, 1.0), tokens=[(), LIKELY]))


class Asked:
    """Log-probabilities by the text, and how often they were asked for."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, batch: Sequence[Scored]) -> Sequence[Tokens]:
        texts = [[c.text for c in s.rollout.completions] for s in batch]
        self.texts += [text for row in texts for text in row]
        found = [tuple(UNLIKELY if "odd" in text else LIKELY for text in row) for row in texts]
        return [Tokens(tuple(tuple(range(len(p))) for p in row), row) for row in found]


def gated(pool: Pool, asked: Asked, gate: Gate | None = None) -> BatchBuilder:
    return BatchBuilder(SharingSampler(), pool, ME, [Gated(gate or warm(), asked)])


def stocked(texts: Sequence[str]) -> Pool:
    """A pool of rollouts, each with one right and one wrong completion."""
    pool = Pool(2)
    pool.add(rollout(n, OTHER, [text, "wrong"], (1.0, 0.0)) for n, text in enumerate(texts))
    return pool


def test_odd_rollouts_leave_the_pool_and_further_ones_take_their_place() -> None:
    pool, asked, gate = stocked(["odd"] * 4 + ["fine"] * 8), Asked(), warm()
    sampler = gated(pool, asked, gate)
    for seed in range(20):
        batch = sampler([own(2)], random.Random(seed))
        assert [s.rollout.completions[0].text for s in batch if s.rollout.author == OTHER] == ["fine"] * 4
        assert all(s.tokens is None for s in batch if s.rollout.author == OTHER), (
            "the update takes it as on-policy, as ever"
        )
    assert len(pool) == 8 and gate.take_refused() == {NAMES[1]: 4}


def test_the_gate_leaves_ordinary_rollouts_unchanged() -> None:
    pool, asked = stocked(["fine"] * 12), Asked()
    plain = SharingSampler()([own(2)], pool.snapshot(), random.Random(5))
    assert gated(pool, asked)([own(2)], random.Random(5)) == plain
    assert asked.texts == ["fine", "wrong"] * 4, "neither rejected nor local rollouts"


def test_how_often_an_authors_rollouts_pass_is_remembered_the_newest_counting_most() -> None:
    gate = warm()
    gated(stocked(["odd"] * 4), Asked(), gate)([own(2)], random.Random(0))
    refused = (1 - ONE_LOOK) ** 4
    assert gate.pass_rates == {OTHER: pytest.approx(refused)}
    gated(stocked(["fine"] * 4), Asked(), gate)([own(2)], random.Random(0))
    assert gate.pass_rates == {OTHER: pytest.approx(1 - (1 - refused) * refused)}
    gated(stocked(["fine"] * 4), Asked(), fresh := warm())([own(2)], random.Random(0))
    assert fresh.pass_rates == {}, "only who was refused"
    for _ in range(99):
        gate.saw(OTHER, passed=False)
    assert gate.pass_rates == {OTHER: MIN_PASS_RATE}
    again = warm()
    again.state = gate.state
    assert again.pass_rates == gate.pass_rates
    for n in range(MAX_AUTHORS):
        gate.saw(PeerId(f"{n}"), passed=False)
    assert OTHER not in gate.pass_rates and len(gate.pass_rates) == MAX_AUTHORS


def test_a_rollout_that_is_replayed_counts_once_for_its_author() -> None:
    pool, asked, gate = Pool(32, 16, PoolLimits(ME, 32)), Asked(), warm()
    pool.add(rollout(n, OTHER, [text, "wrong"], (1.0, 0.0)) for n, text in enumerate(["odd", "fine"]))
    filters = [Gated(gate, asked, partial(pool.remember, logprobs=asked))]
    builder = BatchBuilder(SharingSampler(), pool, ME, filters)
    for seed in range(9):
        assert len(builder([], random.Random(seed))) == 1
    assert gate.pass_rates[OTHER] <= 1 - ONE_LOOK * (1 - ONE_LOOK)


def test_our_own_rollouts_are_not_judged() -> None:
    """Replay draws it from the pool like an external one."""
    pool = Pool(32, 16, PoolLimits(ME, 32))
    mine = rollout(1, ME, ["odd", "wrong"], (1.0, 0.0), tokens=[UNLIKELY, UNLIKELY])
    pool.add_own([mine])
    assert gated(pool, Asked())([], random.Random(0)) == [mine]


def test_the_same_text_is_looked_at_once() -> None:
    pool, asked = Pool(2), Asked()
    pool.add([rollout(1, OTHER, ["fine", "fine", "wrong", "fine", "fine too"], (1.0, 1.0, 0.0, 1.0, 1.0))])
    assert len(gated(pool, asked)([], random.Random(0))) == 1
    assert asked.texts == ["fine", "wrong", "fine too"]


@pytest.mark.parametrize(
    "texts, rewards, left",
    [
        (["fine", "odd", "wrong", "odd too"], (1.0, 0.0, 0.0, 0.0), ["fine", "wrong"]),
        (["fine", "odd", "odd", "odd"], (1.0, 0.0, 0.0, 0.0), ["fine"]),
        (["fine", "odd", "wrong"], (1.0, 1.0, 0.0), None),
    ],
)
def test_odd_wrong_answers_are_left_out_and_an_odd_right_one_costs_the_rollout(
    texts: list[str], rewards: tuple[float, ...], left: list[str] | None
) -> None:
    """Pushing away a completion that is far away already does harm by itself, and is no reason to do without
    the rest."""
    pool = Pool(2)
    pool.add([whole := rollout(1, OTHER, texts, rewards)])
    gate = warm()
    batch = gated(pool, Asked(), gate)([], random.Random(0))
    assert [[c.text for c in s.rollout.completions] for s in batch] == ([] if left is None else [left])
    for scored in batch:
        assert scored.rewards == rewards[:1] + (0.0,) * (len(left or ()) - 1) and scored.informative
        assert within_group(scored)[0] == within_group(whole)[0]
        assert len(pool.use([scored])) == 1 and gate.take_refused() == {}


def test_the_rest_of_a_group_keeps_its_advantages() -> None:
    """1 right of 8 has 2.65; with five of the wrong ones left out it would have 1.41 by itself."""
    pool, whole = Pool(2), rollout(1, OTHER, ["fine", *["odd"] * 5, "wrong", "wrong"], (1.0, *[0.0] * 7))
    pool.add([whole])
    (scored,) = gated(pool, Asked())([], random.Random(0))
    before = within_group(whole)
    assert within_group(scored) == (before[0], *before[6:]) and before[0] == pytest.approx(2.645, abs=1e-3)
    again = part(scored, [0, 1])
    assert within_group(again) == before[:1] + before[6:7], "also of a part of a part"
    assert shifted(again, -0.1) == pytest.approx((0.975, -0.025))


def end(text: str) -> int | None:
    """Return the position of the answer's end: at its last full stop."""
    return text.rfind(".") + 1 or None


def test_text_behind_a_local_answer_does_not_count_as_its_length() -> None:
    gate = Gate(answer_end=end)
    gate.learn([own(1, WARM_UP_COMPLETIONS, text="a." + "b" * 500)])
    assert gate.limits == FLOORS


def test_an_ending_answer_is_never_odd() -> None:
    """A policy that has unlearnt to end may learn it again. An end without an answer is looked at."""
    gate = warm()
    gate.answer_end = end
    stops = rollout(1, OTHER, ["fine.", "fine."], (1.0, 0.0), tokens=[(*LIKELY, -30.0)] * 2)
    assert passes(gate, stops)
    assert not passes(gate, rollout(1, OTHER, ["nothing", "fine."], tokens=[(*LIKELY, -30.0)] * 2))
    assert not passes(gate, rollout(1, OTHER, ["fine."], tokens=[(*LIKELY, -30.0, -0.1)])), "the end alone"


def test_a_gate_that_does_not_act_reports() -> None:
    """It reports on the batch once, in one round of ten; nothing is changed and nothing leaves the pool."""
    pool, asked = stocked(["odd"] * 3 + ["fine."]), Asked()
    gate = replace(warm(), acts=False, answer_end=end, round=19)
    assert len(gated(pool, asked, gate)([own(2)], random.Random(5))) == 5
    assert not asked.texts and not gate.take_refused()
    gate.round = 20
    plain = SharingSampler()([own(2)], pool.snapshot(), random.Random(5))
    assert gated(pool, asked, gate)([own(2)], random.Random(5)) == plain
    assert len(pool) == 4 and gate.take_refused() == {NAMES[1]: 3} and len(asked.texts) == 8
    assert gate.pass_rates == {}


def test_a_pool_full_of_poison_does_not_take_up_the_round() -> None:
    pool, asked = stocked(["odd"] * 200 + ["fine"]), Asked()
    batch = gated(pool, asked)([own(2)], random.Random(1))
    assert all(s.rollout.author == ME for s in batch) and len(asked.texts) == 2 * MAX_DRAWS * 4


def test_a_rollout_is_looked_at_once_a_batch() -> None:
    pool, asked = stocked(["odd"] + ["fine"] * 4), Asked()
    for seed in range(10):
        before = len(asked.texts)
        gated(pool, asked)([], random.Random(seed))
        assert len(asked.texts) - before <= 2 * 5
    assert len(pool) == 4


def test_while_warming_up_nothing_is_computed() -> None:
    pool, asked = stocked(["odd"] * 4), Asked()
    assert len(gated(pool, asked, Gate())([own(1)], random.Random(0))) == 5 and asked.texts == []
