"""One comparison at a time, and none that nobody answers."""

import pytest
import trio
import trio.testing

from swarmd import link
from swarmd.daemon.page.comparison import Comparison
from swarmd.errors import SwarmdError

ANSWER = link.ComparedAnswers("1 + 1?", 7, ("2", 1.0), ("3", 0.0))


async def test_who_asks_meanwhile_gets_the_same_answer() -> None:
    told: list[link.ToTrainer] = []
    comparison, found = Comparison(told.append, lambda: ""), list[str]()

    async def ask() -> None:
        found.append(dict(await comparison.on_compare({}))["question"])

    for count in (1, 2):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert told == [link.CompareRequest()] * count
            comparison.answer(ANSWER)
        assert found == ["1 + 1?"] * 2 * count
    # Of a trainer that was restarted: nobody waits
    comparison.ask_again()
    comparison.answer(ANSWER)
    assert len(told) == 2


async def test_a_trainer_that_was_restarted_is_asked_again(autojump_clock: trio.testing.MockClock) -> None:
    told: list[link.ToTrainer] = []
    comparison = Comparison(told.append, lambda: "")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(comparison.on_compare, {})
        await trio.testing.wait_all_tasks_blocked()
        comparison.ask_again()
        assert told == [link.CompareRequest()] * 2
        comparison.answer(ANSWER)
    with pytest.raises(SwarmdError, match="did not answer in time"):
        await comparison.on_compare({})
    with pytest.raises(SwarmdError, match="did not answer in time"):
        await comparison.on_compare({})
    assert len(told) == 4


async def test_the_reason_is_said_if_the_comparison_is_missing() -> None:
    told: list[link.ToTrainer] = []
    with pytest.raises(SwarmdError, match="paused"):
        await Comparison(told.append, lambda: "The node does not train now: paused.").on_compare({})
    assert told == []
