"""Updates by several trainer processes are the same as by one process."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import environment
from swarmd.policy.parallel import data_parallel
from swarmd.policy.parallel.data_parallel import Trainers, combine, deal
from swarmd.policy.parallel.messages import Begin, UpdateShare, WorkerReady
from swarmd.policy.parallel.worker import ProcessLost, WorkerProcess
from swarmd.policy.training.learner import Sums
from swarmd.policy.training.packing import Row, packed_tokens
from swarmd.types import Scored, UpdateReport
from tests.swarmd.policy.conftest import external, local


def row(prompt: int, length: int) -> Row:
    return Row((prompt,) * 10, (7,) * length, 1.0, None, 0.1)


def test_rows_are_divided_by_whole_prompts_with_about_equal_tokens() -> None:
    rng = random.Random(1)
    for ranks in (1, 2, 3, 8):
        rows = [row(prompt, rng.randint(1, 40)) for prompt in range(12) for _ in range(rng.randint(1, 8))]
        shares = deal(rows, ranks)
        assert len(shares) == ranks and sorted(map(id, rows)) == sorted(
            id(r) for share in shares for r in share
        )
        holders: list[set[tuple[int, ...]]] = [{r.prompt for r in share} for share in shares]
        assert sum(map(len, holders)) == 12, "a prompt was given to two ranks"
        largest = max(packed_tokens([r for r in rows if r.prompt == p]) for p in {r.prompt for r in rows})
        loads = [packed_tokens(share) for share in shares]
        assert max(loads) - min(loads) <= largest


def test_there_may_be_fewer_prompts_than_ranks() -> None:
    assert [len(share) for share in deal([row(1, 3), row(1, 4)], 3)] == [2, 0, 0] and deal([], 2) == [[], []]


def test_the_timeout_of_an_update_is_set_by_its_public_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch 2.14 has a public name, and warns at each trainer's start if the old name is used."""
    told = list[object]()
    monkeypatch.setattr(data_parallel.c10d, "set_timeout", told.append, raising=False)
    monkeypatch.setattr(data_parallel.c10d._world, "group_count", 0)
    data_parallel.join(str(tmp_path / "meeting"), 0, 1)
    data_parallel.leave()
    assert told == [data_parallel.UPDATE_TIMEOUT]


def test_gradients_are_summed_without_waiting_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()

    class Sum:
        def wait(self) -> None:
            done.append("wait")

    def begun(tensor: Tensor, *, async_op: bool) -> Sum:
        done.append("begin")
        tensor.mul_(2)
        return Sum()

    monkeypatch.setattr(data_parallel.dist, "all_reduce", begun)
    weights, sums = [nn.Parameter(torch.ones(2)) for _ in range(3)], Sums(0.5, tokens=7)
    weights[0].grad = torch.ones(2)
    combine(weights, sums)
    assert done == ["begin"] * 4 + ["wait"] * 4 and sums == Sums(1.0, tokens=14)
    assert [w.grad.tolist() for w in weights if w.grad is not None] == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(("other", "alike"), [("RTX 3060", True), ("RTX 4090", False)])
def test_weights_are_compared_only_on_gpus_of_the_same_kind(
    other: str, alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[UpdateShare] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["RTX 3060", other].__getitem__)
    learner: Any = SimpleNamespace(updates=0, weights={}, step=lambda *_: UpdateReport())
    trainers = Trainers(
        2, learner, lambda _: SimpleNamespace(send=said.append, pid=1), tmp_path, check_every=1
    )  # type: ignore[arg-type,return-value]
    trainers._shared(learner, [row(1, 3), row(2, 3)])
    assert [share.check for share in said] == [alike]


def test_ranks_that_met_once_can_meet_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL, ranks meet again at their first sum; with a new file torch would wait for ever."""
    stores: list[Any] = []

    def join(meeting: str, *_: object) -> None:
        stores.extend(data_parallel.dist.FileStore(meeting, 2) for _ in range(2))  # type: ignore[attr-defined]

    monkeypatch.setattr(data_parallel, "join", join)
    child = SimpleNamespace(
        receive=WorkerReady, send=lambda _: None, kill=lambda: None, end=lambda: None, pid=1
    )
    policy: Any = SimpleNamespace(save=lambda _: None, device=torch.device("cpu"))
    with Trainers(2, policy, lambda _: child, tmp_path) as trainers:  # type: ignore[arg-type,return-value]
        trainers._meet()
        stores[0].set("id", "of NCCL")
        assert stores[1].check(["id"])
    assert list(tmp_path.iterdir()) == []


def batches(policy: LanguagePolicy, count: int) -> list[list[Scored]]:
    """Return batches of local and external answers with different lengths; one rollout has no gradient."""
    found = []
    for number in range(count):
        questions = [f"What is {n} + {number}?" for n in range(4)]
        rewards = [(1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (0.0,) * 4]
        own = [
            local(q, g, r) for q, g, r in zip(questions, policy.generate(questions, 4), rewards, strict=True)
        ]
        found.append(
            [*own, external("Is it?", [("yes <answer>1</answer>", True), ("no", False)], (1.0, 0.0))]
        )
    return found


def weights(policy: LanguagePolicy) -> Tensor:
    return torch.cat([w.detach().flatten() for w in policy.trained.values()])


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def test_two_trainers_make_the_same_steps_as_one_until_a_rank_is_lost(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of both ranks are compared bit for bit after every step (check_every=1).

    The test uses gloo, and NCCL with a device for each rank.
    """
    config = NodeConfig.model_validate({"model": {"name": "tiny", "device": device}})
    alone, shared = LanguagePolicy.open(config, 1), LanguagePolicy.open(config, 1)
    gradients: dict[str, Tensor] = {}

    def watch(name: str, parameters: Sequence[nn.Parameter]) -> None:
        gradients[name] = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def watched(parameters: Sequence[nn.Parameter], sums: Sums, alive: Callable[[], bool]) -> None:
        combine(parameters, sums, alive)
        watch("two", parameters)

    monkeypatch.setattr(data_parallel, "combine", watched)
    alone = alone.stepping(
        lambda learner, rows: learner.step(rows, lambda parameters, _: watch("one", parameters))
    )

    def start(rank: int) -> WorkerProcess:
        return WorkerProcess(
            "swarmd.policy.parallel.further_trainer",
            Begin(config.model_dump_json(), 1, str(tmp_path), 2),
            environment(config.model, rank),
        )

    def lost(policy: LanguagePolicy, batch: list[Scored]) -> None:
        with Trainers(2, policy, start, tmp_path, check_every=1) as trainers:
            policy = policy.stepping(trainers.step)
            policy.update(batch)
            os.kill(trainers.pids[0], signal.SIGKILL)
            with pytest.raises(ProcessLost):
                policy.update(batch)
        assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(data_parallel.c10d._world, "group_count", 0)
    with Trainers(2, shared, start, tmp_path, check_every=1) as trainers:
        shared = shared.stepping(trainers.step)
        for number, batch in enumerate(batches(alone, 3)):
            reports = alone.update(batch), shared.update(batch)
            assert trainers.alive == 2 and shared.version == alone.version == number + 1
            assert [r.tokens for r in reports] == [reports[0].tokens] * 2
            # After the first step the weights differ by rounding, about 2e-6 a step; other processors round
            # differently.
            assert reports[1].loss == pytest.approx(reports[0].loss, abs=1e-6 if number == 0 else 1e-5)
            assert reports[1].entropy == pytest.approx(reports[0].entropy, rel=1e-4)
            if number == 0:  # later steps start from weights that differ by rounding
                assert float((gradients["one"] - gradients["two"]).abs().max()) <= 1e-6 * max(
                    1.0, float(gradients["one"].norm())
                )
        assert shared.update([]) == UpdateReport() and shared.version == 3
        apart = (weights(shared) - weights(alone)).abs()
        next(iter(shared.trained.values())).data.mul_(1.01)
        first, second = batches(alone, 2)
        shared.update(first)
        with pytest.raises(ProcessLost, match="its weights differ from rank 0"):
            shared.update(second)
    monkeypatch.setattr(data_parallel.c10d._world, "group_count", 0)
    lost(alone, first)
    # For a gradient that is only rounding, Adam makes a step of nearly its rate, 3e-4, so a few weights may
    # differ by that much.
    assert float(apart.mean()) < 1e-7 and float(apart.max()) < 3e-4
    assert list(tmp_path.iterdir()) == []
