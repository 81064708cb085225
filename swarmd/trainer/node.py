"""Builds the parts of a trainer's rounds from the configuration, and saves and restores their state.

The only module that builds `RoundParts`, so every choice that a round's settings make is here:

    tasks, reward          questions by number; the contained verifier that scores local and external answers
    policy                 generates and trains; the model behind it is `policy/language_policy.py`
    swarm                  shares and collects; in a node the link to the daemon
    pool, schedule         rollouts by age; with `[replay]` local ones too, and how often they are drawn
    build_batch, gate      a sampler (`[sharing]` or replay), then the filters in the order listed here
    task_rng, batch_rng    two random streams from one seed, so a seed determines the run

The parts know each other only by the protocols of `swarmd/protocols.py`, and no part calls the round.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.config.own_strategy import load_take
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.experience.batch import BatchBuilder, Filter, Fitting, SharingSampler
from swarmd.experience.outliers import MEASURED_PARAMETERS, Gate, Gated, GateState
from swarmd.experience.pool import Pool, PoolLimits
from swarmd.experience.replay_schedule import ReplaySchedule
from swarmd.experience.sampling import Replay
from swarmd.experience.strategies import Sharing
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.protocols import LogprobPolicy, Policy, Reward, Sampler, SelectivePolicy, Swarm
from swarmd.tasks.source import open_tasks
from swarmd.trainer.answer_limits import AnswerLimits
from swarmd.trainer.checkpoint import Checkpoints, RunState
from swarmd.trainer.parts import RoundParts


def build(
    config: NodeConfig,
    seed: int,
    me: PeerId,
    swarm: Swarm,
    policy: Policy,
    reward: Reward,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundParts:
    """Build the parts of a round, from the configuration and the parts that hold resources.

    A seed determines the run.
    """
    load_take(config.sharing.take)
    remembering = policy if isinstance(policy, LogprobPolicy) else None
    sharing = Sharing(config.sharing)
    tasks = open_tasks(curriculum_of(config), reward, config.tasks.specialties)
    varied = len(tasks.curriculum.specialties) > 1
    sampler: Sampler = SharingSampler(sharing, config.round.local, config.round.external, varied)
    pool, schedule, remember = Pool(config.round.max_age), ReplaySchedule(), None
    if config.replay.mode == "on":
        remember = remembering.logprobs if remembering else None
        batch = config.replay.batch or max(1, config.round.local + config.round.external)
        pool, schedule = (
            _replay_pool(config, me, batch, remembers=remember is not None),
            ReplaySchedule(
                config.replay.updates_per_round, config.replay.max_clip_fraction, config.replay.max_kl
            ),
        )
        sampler = Replay(
            pool,
            schedule,
            batch,
            sampler,
            config.round.max_age,
            sharing,
            varied,
        )
    fitting = Fitting(policy.unfit) if isinstance(policy, SelectivePolicy) else None
    gate = (
        Gate(
            config.gate.margin,
            tasks.curriculum.answer_end,
            # Without "on", the gate only reports.
            acts=config.gate.mode == "on"
            or (config.gate.mode == "auto" and remembering.parameters <= MEASURED_PARAMETERS),
        )
        if remembering and config.gate.mode != "off"
        else None
    )
    # Filters of the drawn external rollouts, in this order: the gate needs log-probabilities, which the
    # policy cannot compute for rollouts that it cannot be trained on.
    filters: list[Filter] = [fitting] if fitting else []
    if gate and remembering:
        filters.append(
            Gated(gate, remembering.logprobs, partial(pool.remember, logprobs=remember) if remember else None)
        )
    return RoundParts(
        me=me,
        tasks=tasks,
        policy=policy,
        reward=reward,
        swarm=swarm,
        pool=pool,
        build_batch=BatchBuilder(sampler, pool, me, filters),
        task_rng=random.Random(f"{seed} tasks"),
        batch_rng=random.Random(f"{seed} batch"),
        clock=clock,
        questions=config.round.local,
        limits=AnswerLimits(adaptive=not config.generate.max_new_tokens),
        external=config.round.external,
        completions=config.round.completions,
        resample=config.round.resample,
        trains=config.round.train == "on",
        sharing=sharing,
        schedule=schedule,
        remember=remember,
        fitting=fitting,
        gate=gate,
    )


def _replay_pool(config: NodeConfig, me: PeerId, batch: int, *, remembers: bool) -> Pool:
    """Build a pool that keeps local rollouts too.

    External rollouts get the same share of the pool as of the batch. They stay as long as local ones only if
    the policy can remember the log-probabilities of their first use; otherwise as long as without replay,
    because text treated as on-policy must be fresh.
    """
    replay, share = config.replay, config.round.external / max(1, config.round.local + config.round.external)
    limits = PoolLimits(me, replay.max_age, replay.positive_bias, share, replay.author_share)
    age = replay.max_age if remembers else config.round.max_age
    return Pool(age, replay.size or 3 * batch, limits)


def run_state(rounds: int, seed: int, parts: RoundParts) -> RunState:
    """Return the state on which the next rounds depend, except for the policy; `resume` restores it.

    Write it before the next round, which changes parts of it in place.
    """
    return RunState(
        rounds,
        seed,
        parts.task_rng.getstate(),
        parts.batch_rng.getstate(),
        tuple(parts.pool.kept()),
        updates=parts.pool.updates,
        before=dict(parts.pool.before),
        used=tuple(parts.pool.used),
        guard=parts.schedule.state,
        gate=parts.gate.state if parts.gate else GateState(),
        levels=parts.tasks.staircase.levels,
        lengths=dict(parts.limits.lengths),
        success=parts.sharing.success,
    )


def resume(
    checkpoints: Checkpoints, parts: RoundParts, policy: LanguagePolicy, seed: int
) -> tuple[int, list[str]]:
    """Resume from the newest intact checkpoint; return its number of rounds, and notes for the operator.

    (0, []) without a checkpoint. seed: the configured one, which has no effect after a resume.
    """
    if (found := checkpoints.newest(partial(_restore, parts, policy))) is None:
        return 0, []
    state, _, notes = found
    if state.seed != seed:
        notes.append(
            f"seed {seed} has no effect: random choices continue from the checkpoint, as seed {state.seed}"
            " began them. Start over in another folder with --state-dir to use it"
        )
    return state.round, [*notes, f"resumed after round {state.round}"]


def _restore(parts: RoundParts, policy: LanguagePolicy, state: RunState, folder: Path) -> None:
    """Restore the parts.

    If this raises, the node is partly restored; restoring an older checkpoint then overwrites all of it.
    """
    changed = policy.restore(folder)
    kept = [replace(e, scored=replace(e.scored, tokens=None)) for e in state.pool] if changed else state.pool
    parts.task_rng.setstate(state.task_rng)
    parts.batch_rng.setstate(state.batch_rng)
    parts.pool.restore(kept, state.updates, state.used, state.before)
    if parts.schedule.configured > 1:
        parts.schedule.state = state.guard
    if parts.gate is not None:
        parts.gate.state = state.gate
    parts.tasks.staircase.restore(state.levels)
    parts.limits.lengths = dict(state.lengths)
    parts.sharing.success = state.success
