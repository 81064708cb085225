"""How workers are shown."""

from swarmd.cli.view import workers_words

WORKERS = {
    "generators": {"alive": 2, "of": 2, "restarts": 1, "pids": [1, 2]},
    "trainers": {"alive": 1, "of": 1, "restarts": 0, "pids": []},
    "version": 30,
    "lag": {"mean": 1.25, "max": 3},
    "tokens_per_second": None,
    "questions": {"in_flight": 8, "put_back": 0, "given_up": 0},
    "waiting": 0,
    "overtaken": 0,
}


def test_workers_in_words() -> None:
    assert workers_words({}) == ""
    assert workers_words(WORKERS) == (
        "2 of 2 generators, 1 of 1 trainers, – tokens/s, version 30, lag 1.25 versions, at most 3, restarts: 1"
    )
