"""The trainer reports the progress of a long round to the daemon."""

from swarmd.state.status import StageProgress
from swarmd.trainer.progress import RoundProgress
from tests.doubles import Clock


class Told:
    def __init__(self) -> None:
        self.clock, self.messages = Clock(0.0), list[StageProgress]()
        self.progress = RoundProgress(self.messages.append, self.clock)

    def after(self, seconds: float, done: int, share: float) -> None:
        self.clock.now += seconds
        self.progress.done(done, 32, share)


def test_progress_of_a_long_round_is_reported_once_per_second_with_the_time_left() -> None:
    told = Told()
    told.progress.begin()
    told.progress.enter("generate")
    for step in range(1, 101):
        told.after(0.125, step // 4, step / 100)
    assert len(told.messages) == 11, "not one report per second after the first two seconds"
    first, last = told.messages[0], told.messages[-1]
    assert first == StageProgress("generate", 4, 32, 10.5)
    assert last == StageProgress("generate", 24, 32, 0.5)

    told.progress.enter("")
    told.after(5.0, 1, 0.5)
    assert len(told.messages) == 11, "an answer outside of a stage, for example to the judge, was reported"
    told.progress.enter("train")
    assert told.messages[-1] == StageProgress("train", 0, 0, None), (
        "the stage after a long one was not reported at its start"
    )


def test_the_time_left_includes_later_stages_as_long_as_in_the_last_round() -> None:
    told = Told()
    told.progress.before = {"generate": 10.0, "score": 1.0, "train": 20.0}
    told.progress.begin()
    told.progress.enter("generate")
    told.after(4.0, 1, 0.01)
    assert told.messages[-1].left == 6.0 + 21.0, "the estimate uses the share of a stage that has just begun"
    told.after(4.0, 16, 0.5)
    assert told.messages[-1].left == 8.0 + 21.0
    told.progress.enter("score")
    assert told.messages[-1] == StageProgress("score", 0, 0, 21.0)


def test_short_rounds_report_no_progress() -> None:
    told = Told()
    for _ in range(100):
        told.progress.begin()
        for stage in ("generate", "score", "train"):
            told.progress.enter(stage)
            told.after(0.1, 32, 1.0)
            told.progress.enter("")
    assert told.messages == []
