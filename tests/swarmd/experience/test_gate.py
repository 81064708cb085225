"""The gate finds rollouts that are unusual compared with other rollouts, and leaves them out or reports them.

There is no policy; its log-probabilities are given.
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


def test_the_traits_of_a_completion_are_computed() -> None:
    assert traits("abc", (-1.0, -2.0, -3.0, -6.0, 0.0)) == Traits(3, 6.0, 3.0, 2.4)
    assert traits("", (-1.0, -3.0)) == Traits(0, 3.0, 2.0, 2.0), (
        "a completion shorter than a stretch was not treated as one stretch"
    )


def test_a_few_odd_tokens_are_not_hidden_by_the_mean() -> None:
    long = traits("x", (-0.1,) * 96 + (-7.0,) * 4)
    assert long.mean < FLOORS.mean and long.token < FLOORS.token and long.stretch > FLOORS.stretch


def test_no_rollout_is_judged_before_enough_local_completions() -> None:
    gate, odd = Gate(), rollout(1, OTHER, ["x" * 9999], tokens=[UNLIKELY])
    gate.learn([own(1, WARM_UP_COMPLETIONS - 1)])
    assert gate.limits is None and passes(gate, odd) and gate.take_refused() == {}
    gate.learn([own(2, 1)])
    assert gate.limits is not None and not passes(gate, odd)


def test_the_limits_learn_from_each_round_only_once() -> None:
    gate = Gate()
    for _ in range(3):
        gate.learn([own(1, WARM_UP_COMPLETIONS // 2), own(1, 1)])
    assert len(gate.state.own) == WARM_UP_COMPLETIONS // 2 + 1


def test_limits_are_the_local_figures_plus_a_margin_but_at_least_the_floors() -> None:
    assert warm().limits == FLOORS, "a very confident policy would reject all other text"
    high = warm(1.5, (-10.0, -6.0, -6.0, -6.0), "a" * 100).limits
    assert high == Traits(150.0, 15.0, 10.5, 10.5)
    wider = warm(3.0, (-10.0, -6.0, -6.0, -6.0), "a" * 100).limits
    assert wider == Traits(300.0, 30.0, 21.0, 21.0)


def test_one_odd_local_completion_does_not_set_the_limit() -> None:
    gate = Gate()
    gate.learn([own(1, 3 * WARM_UP_COMPLETIONS), own(1, 1, (-50.0,), "x" * 5000)])
    assert gate.limits == FLOORS
    gate.learn([own(2, WARM_UP_COMPLETIONS, (-50.0,), "x" * 5000)])
    assert gate.limits == Traits(7500.0, 75.0, 75.0, 75.0), (
        "many odd local completions did not raise the limit"
    )


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
def test_each_trait_is_compared_with_its_limit(name: str, text: str, logprobs: tuple[float, ...]) -> None:
    gate = warm()
    assert not passes(gate, rollout(1, OTHER, ["fine", text], tokens=[LIKELY, logprobs]))
    assert gate.take_refused() == {name: 1} and gate.take_refused() == {}
    assert passes(gate, rollout(1, OTHER, ["x" * 64], tokens=[(-8.0, -2.0, *LIKELY, -2.0, -2.0)])), (
        "a completion at a limit was rejected"
    )


def test_an_empty_answer_is_not_odd() -> None:
    """An empty answer has no token to judge, and any node may send one."""
    assert passes(warm(), rollout(1, OTHER, ["", "fine"], (0.0, 1.0), tokens=[(), LIKELY]))


class Asked:
    """Returns log-probabilities that depend on the text, and counts the calls."""

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
    """Return a pool of rollouts with one right and one wrong completion each."""
    pool = Pool(2)
    pool.add(rollout(n, OTHER, [text, "wrong"], (1.0, 0.0)) for n, text in enumerate(texts))
    return pool


def test_odd_rollouts_leave_the_pool_and_other_rollouts_take_their_places() -> None:
    pool, asked, gate = stocked(["odd"] * 4 + ["fine"] * 8), Asked(), warm()
    sampler = gated(pool, asked, gate)
    for seed in range(20):
        batch = sampler([own(2)], random.Random(seed))
        assert [s.rollout.completions[0].text for s in batch if s.rollout.author == OTHER] == ["fine"] * 4
        assert all(s.tokens is None for s in batch if s.rollout.author == OTHER), (
            "an external rollout kept log-probabilities, so the update does not treat it as on-policy"
        )
    assert len(pool) == 8 and gate.take_refused() == {NAMES[1]: 4}


def test_the_gate_leaves_ordinary_rollouts_unchanged() -> None:
    pool, asked = stocked(["fine"] * 12), Asked()
    plain = SharingSampler()([own(2)], pool.snapshot(), random.Random(5))
    assert gated(pool, asked)([own(2)], random.Random(5)) == plain
    assert asked.texts == ["fine", "wrong"] * 4, (
        "log-probabilities of rejected or local rollouts were computed"
    )


def test_an_authors_pass_rate_is_remembered_with_more_weight_on_recent_rollouts() -> None:
    gate = warm()
    gated(stocked(["odd"] * 4), Asked(), gate)([own(2)], random.Random(0))
    refused = (1 - ONE_LOOK) ** 4
    assert gate.pass_rates == {OTHER: pytest.approx(refused)}
    gated(stocked(["fine"] * 4), Asked(), gate)([own(2)], random.Random(0))
    assert gate.pass_rates == {OTHER: pytest.approx(1 - (1 - refused) * refused)}
    gated(stocked(["fine"] * 4), Asked(), fresh := warm())([own(2)], random.Random(0))
    assert fresh.pass_rates == {}, "an author without rejected rollouts was listed"
    for _ in range(99):
        gate.saw(OTHER, passed=False)
    assert gate.pass_rates == {OTHER: MIN_PASS_RATE}
    again = warm()
    again.state = gate.state
    assert again.pass_rates == gate.pass_rates
    for n in range(MAX_AUTHORS):
        gate.saw(PeerId(f"{n}"), passed=False)
    assert OTHER not in gate.pass_rates and len(gate.pass_rates) == MAX_AUTHORS


def test_a_replayed_rollout_counts_only_once_for_its_author() -> None:
    pool, asked, gate = Pool(32, 16, PoolLimits(ME, 32)), Asked(), warm()
    pool.add(rollout(n, OTHER, [text, "wrong"], (1.0, 0.0)) for n, text in enumerate(["odd", "fine"]))
    filters = [Gated(gate, asked, partial(pool.remember, logprobs=asked))]
    builder = BatchBuilder(SharingSampler(), pool, ME, filters)
    for seed in range(9):
        assert len(builder([], random.Random(seed))) == 1
    assert gate.pass_rates[OTHER] <= 1 - ONE_LOOK * (1 - ONE_LOOK)


def test_local_rollouts_are_not_judged() -> None:
    """Replay draws local rollouts from the pool like external ones."""
    pool = Pool(32, 16, PoolLimits(ME, 32))
    mine = rollout(1, ME, ["odd", "wrong"], (1.0, 0.0), tokens=[UNLIKELY, UNLIKELY])
    pool.add_own([mine])
    assert gated(pool, Asked())([], random.Random(0)) == [mine]


def test_the_log_probabilities_of_the_same_text_are_computed_once() -> None:
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
def test_odd_wrong_answers_are_dropped_and_an_odd_right_answer_rejects_the_rollout(
    texts: list[str], rewards: tuple[float, ...], left: list[str] | None
) -> None:
    """Training away from a completion that is already very unlikely does harm.

    But this is no reason to drop the rest of the rollout.
    """
    pool = Pool(2)
    pool.add([whole := rollout(1, OTHER, texts, rewards)])
    gate = warm()
    batch = gated(pool, Asked(), gate)([], random.Random(0))
    assert [[c.text for c in s.rollout.completions] for s in batch] == ([] if left is None else [left])
    for scored in batch:
        assert scored.rewards == rewards[:1] + (0.0,) * (len(left or ()) - 1) and scored.informative
        assert within_group(scored)[0] == within_group(whole)[0]
        assert len(pool.use([scored])) == 1 and gate.take_refused() == {}


def test_after_drops_the_rest_of_a_group_keeps_its_advantages() -> None:
    """One right answer of 8 has advantage 2.65; recomputed without five wrong ones, it would have 1.41."""
    pool, whole = Pool(2), rollout(1, OTHER, ["fine", *["odd"] * 5, "wrong", "wrong"], (1.0, *[0.0] * 7))
    pool.add([whole])
    (scored,) = gated(pool, Asked())([], random.Random(0))
    before = within_group(whole)
    assert within_group(scored) == (before[0], *before[6:]) and before[0] == pytest.approx(2.645, abs=1e-3)
    again = part(scored, [0, 1])
    assert within_group(again) == before[:1] + before[6:7], "a part of a part did not keep its advantages"
    assert shifted(again, -0.1) == pytest.approx((0.975, -0.025))


def end(text: str) -> int | None:
    """Return the position at which the answer ends: the last full stop."""
    return text.rfind(".") + 1 or None


def test_text_after_a_local_answer_does_not_count_towards_its_length() -> None:
    gate = Gate(answer_end=end)
    gate.learn([own(1, WARM_UP_COMPLETIONS, text="a." + "b" * 500)])
    assert gate.limits == FLOORS


def test_the_end_of_an_answer_is_never_odd() -> None:
    """So a policy that no longer ends its answers can relearn this. An end without an answer is judged."""
    gate = warm()
    gate.answer_end = end
    stops = rollout(1, OTHER, ["fine.", "fine."], (1.0, 0.0), tokens=[(*LIKELY, -30.0)] * 2)
    assert passes(gate, stops)
    assert not passes(gate, rollout(1, OTHER, ["nothing", "fine."], tokens=[(*LIKELY, -30.0)] * 2))
    assert not passes(gate, rollout(1, OTHER, ["fine."], tokens=[(*LIKELY, -30.0, -0.1)])), (
        "an end without an answer was not judged"
    )


def test_a_gate_in_report_mode_only_reports() -> None:
    """In one round of ten it reports on the batch, once; the batch and the pool do not change."""
    pool, asked = stocked(["odd"] * 3 + ["fine."]), Asked()
    gate = replace(warm(), acts=False, answer_end=end, round=19)
    assert len(gated(pool, asked, gate)([own(2)], random.Random(5))) == 5
    assert not asked.texts and not gate.take_refused()
    gate.round = 20
    plain = SharingSampler()([own(2)], pool.snapshot(), random.Random(5))
    assert gated(pool, asked, gate)([own(2)], random.Random(5)) == plain
    assert len(pool) == 4 and gate.take_refused() == {NAMES[1]: 3} and len(asked.texts) == 8
    assert gate.pass_rates == {}


def test_a_pool_full_of_poison_does_not_use_up_the_rounds_time() -> None:
    pool, asked = stocked(["odd"] * 200 + ["fine"]), Asked()
    batch = gated(pool, asked)([own(2)], random.Random(1))
    assert all(s.rollout.author == ME for s in batch) and len(asked.texts) == 2 * MAX_DRAWS * 4


def test_a_rollout_is_judged_only_once_per_batch() -> None:
    pool, asked = stocked(["odd"] + ["fine"] * 4), Asked()
    for seed in range(10):
        before = len(asked.texts)
        gated(pool, asked)([], random.Random(seed))
        assert len(asked.texts) - before <= 2 * 5
    assert len(pool) == 4


def test_during_the_warm_up_nothing_is_computed() -> None:
    pool, asked = stocked(["odd"] * 4), Asked()
    assert len(gated(pool, asked, Gate())([own(1)], random.Random(0))) == 5 and asked.texts == []
