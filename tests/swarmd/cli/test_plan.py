"""`swarmd plan replay`: real measurements of the tiny model, and plans from given figures."""

import json
import tomllib
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from swarmd.cli.app import main
from swarmd.cli.replay_plan import Measured, lines, measure, plan, plan_replay
from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError, SwarmdError
from swarmd.experience.replay_theory import best_reuse
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.types import Completion, Generation, Task, TaskRef, Tokens, UpdateReport

RHO, ALPHA = 0.1, 0.15  # the command's defaults


def measured(mu: float) -> Measured:
    return Measured(mu * 0.01, 0.01, mu, 0.9 * mu, 1.1 * mu, 5)


@pytest.mark.parametrize("mu", [0.6, 1.0, 4.9])
def test_with_cheap_generation_the_advice_is_to_leave_replay_off(mu: float) -> None:
    made = plan(measured(mu), 4, 4, 8, RHO, ALPHA)
    assert not made.pays
    assert any("cannot pay" in line and "off" in line for line in lines(made))
    assert not any("mode =" in line for line in lines(made))


def test_with_expensive_generation_the_plan_follows_the_theorem() -> None:
    made = plan(measured(6.84), 8, 0, 8, RHO, ALPHA)
    best = best_reuse(6.84, RHO, ALPHA)
    assert made.pays and made.new == 8
    assert made.size == pytest.approx(best.kept * 8, abs=1) and made.batch * made.updates == pytest.approx(
        best.trained * 8, abs=4
    )
    assert 0 < made.gamma < 1 and 0 < made.same_progress < 1
    text = "\n".join(lines(made))
    configured = tomllib.loads(text[text.index("    [replay]") : text.index("Assumed")])
    NodeConfig.model_validate(configured)  # every key of the plan is a valid setting
    replay = {"mode": "on", "size": made.size, "batch": 8, "updates_per_round": made.updates}
    assert configured == {"replay": replay}
    assert "Assumed: rho = 0.1, alpha = 0.15" in text


def test_external_rollouts_cost_no_generation() -> None:
    """With I = J = 4, a new rollout costs half as much as generating one."""
    made = plan(measured(6.0), 4, 4, 8, RHO, ALPHA)
    assert (made.own, made.new, made.mu, made.pays) == (4, 8, 3.0, False)
    assert made.theorem == best_reuse(3.0, RHO, ALPHA)
    assert "other nodes generate 4: for each of them mu is 3.00" in "\n".join(lines(made))
    twice = plan(measured(12.0), 4, 4, 8, RHO, ALPHA)
    assert twice.pays and (twice.size, twice.updates, twice.gamma) == (
        (alone := plan(measured(6.0), 8, 0, 8, RHO, ALPHA)).size, alone.updates, alone.gamma,
    )  # fmt: skip


def test_a_node_that_generates_nothing_gets_no_plan() -> None:
    config = NodeConfig.model_validate({"round": {"local": 0, "external": 8}})
    with pytest.raises(ConfigError, match=r"round\.local is 0: .* Set round\.local above 0"):
        plan_replay(config, 1, RHO, ALPHA)


def test_every_plan_has_room_for_a_batch_and_at_least_one_update_a_round() -> None:
    made = plan(measured(5.0), 1, 0, 32, RHO, ALPHA)
    assert made.size >= made.batch == 32 and made.updates == 1


def test_an_update_skipped_in_float16_is_repeated() -> None:
    """The first loss scale may be too large, and is reduced over a step or two."""
    reports = iter([UpdateReport(skipped=1)] * 2 + [UpdateReport(tokens=4)] * 2 + [UpdateReport()])
    said = Generation((Completion("a", ended=True),) * 2, Tokens(((1,),) * 2, ((0.0,),) * 2))
    policy: Any = SimpleNamespace(generate=lambda *_, **__: [said], update=lambda *_: next(reports))
    tasks: Any = SimpleNamespace(
        draw=lambda *_: [Task(TaskRef("sum", 1), "1+1?", {})], observer=lambda _: None
    )
    clock = count(step=2).__next__
    found = measure(policy, tasks, 1, 2, 1, 0, clock)
    assert (found.generate, found.train) == (2, 2)
    with pytest.raises(SwarmdError, match=r"no answer has a token\. Choose a model with a longer context"):
        measure(policy, tasks, 1, 2, 1, 0, clock)


@pytest.mark.slow
def test_the_plan_uses_measurements_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "replay", "--model", "tiny", "--device", "cpu", "--rounds", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1 and told["assumed"] == {"rho": RHO, "alpha": ALPHA}
    assert len(told["assumptions"]) == 4 and told["plan"]["R"] > 0
    assert (
        0.05 < told["measured"]["mu"] < 50
        and told["measured"]["low"] <= told["measured"]["mu"] <= told["measured"]["high"]
    )
    assert told["pays"] == (told["measured"]["mu"] >= told["pays_from"])


def test_the_measuring_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a plug-in engine would leave a server and a copy of the weights behind."""
    closed, close = list[LanguagePolicy](), LanguagePolicy.close

    def noted(policy: LanguagePolicy) -> None:
        closed.append(policy)
        close(policy)

    monkeypatch.setattr(LanguagePolicy, "close", noted)
    config = NodeConfig.model_validate({"model": {"device": "cpu"}, "round": {"local": 1, "external": 0}})
    assert plan_replay(config, 1, RHO, ALPHA).new == len(closed) == 1
