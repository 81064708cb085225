"""The node that a trainer's rounds run on: built from the configuration, and what of it a checkpoint keeps.

The only place that builds a `round.Node`.
"""

import random
import time
from functools import partial
from pathlib import Path

from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.experience.batch import SharingSampler
from swarmd.experience.fitting import Fitting
from swarmd.experience.outliers import MEASURED_TO, Gate, Gated, GateState
from swarmd.experience.pool import Kept, Pool, PoolLimits
from swarmd.experience.replay_schedule import ReplaySchedule
from swarmd.experience.sampling import Replay
from swarmd.experience.strategies import Sharing
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.training.checkpoint import CheckpointDamaged
from swarmd.protocols import Limited, Policy, Remembering, Reward, Swarm
from swarmd.tasks.answers import answer_end
from swarmd.tasks.source import open_tasks
from swarmd.trainer.checkpoint import Checkpoints, RunState
from swarmd.trainer.round import Node


def build(config: NodeConfig, seed: int, me: PeerId, swarm: Swarm, policy: Policy, reward: Reward) -> Node:
    """What a round needs, from the configuration and the parts that hold resources. One seed, one run."""
    sharing = Sharing(config.sharing, logprobs=policy.logprobs if isinstance(policy, Remembering) else None)
    node = Node(
        me=me,
        tasks=open_tasks(curriculum_of(config), reward, config.tasks.specialties),
        policy=policy,
        reward=reward,
        swarm=swarm,
        sample=SharingSampler(sharing, config.round.local, config.round.external, swarm.author),
        sharing=sharing,
        pool=Pool(config.round.max_age, author_of=swarm.author),
        task_rng=random.Random(f"{seed} tasks"),
        batch_rng=random.Random(f"{seed} batch"),
        clock=time.perf_counter,
        questions=config.round.local,
        external=config.round.external,
        completions=config.round.completions,
        resample=config.round.resample,
        trains=config.round.train == "on",
    )
    if config.replay.mode == "on":
        _switch_on_replay(node, config)
    if isinstance(policy, Limited):
        node.sample = node.fitting = Fitting(node.sample, node.pool, me, policy.unfit)
    if config.gate.mode != "off":
        _put_up_gate(node, config)
    return node


def _switch_on_replay(node: Node, config: NodeConfig) -> None:
    """A pool that keeps our own too, batches drawn from it, several updates a round.

    Others' rollouts get as much of the pool as they would of the batch. They stay as long as our own only where the policy can remember
    the log-probabilities of their first use; else as long as without replay: text taken as on-policy must be fresh.
    """
    replay, mixed = config.replay, max(1, config.round.local + config.round.external)
    batch = replay.batch or mixed
    if isinstance(node.policy, Remembering):
        node.remember = node.policy.logprobs
    share = config.round.external / mixed
    limits = PoolLimits(node.me, replay.max_age, replay.positive_bias, share, replay.author_share)
    age = replay.max_age if node.remember else config.round.max_age
    node.pool = Pool(age, replay.size or 3 * batch, limits, node.swarm.author)
    node.schedule = ReplaySchedule(replay.updates_per_round, replay.max_clip_fraction, replay.max_kl)
    node.sample = Replay(node.pool, node.schedule, replay.strategy, batch, node.sample, config.round.max_age, node.swarm.author)


def _put_up_gate(node: Node, config: NodeConfig) -> None:
    """Filters samples; needs a policy that gives log-probabilities."""
    if isinstance(node.policy, Remembering):
        acts = config.gate.mode == "on" or (config.gate.mode == "auto" and node.policy.parameters <= MEASURED_TO)
        node.gate = Gate(config.gate.margin, answer_end, acts)
        remember = partial(node.pool.remember, logprobs=node.remember) if node.remember else None
        node.sample = Gated(node.sample, node.gate, node.pool, node.me, node.policy.logprobs, remember)


def run_state(rounds: int, seed: int, node: Node) -> RunState:
    """What the node's next rounds depend on, but for its policy. `resume` restores it."""
    kept = node.pool.kept()
    return RunState(
        rounds,
        seed,
        node.task_rng.getstate(),
        node.batch_rng.getstate(),
        tuple(k.scored for k in kept),
        tuple(k.uses for k in kept),
        last_uses=tuple(k.last_use for k in kept),
        updates=node.pool.updates,
        since=tuple(k.since for k in kept),
        before=dict(node.pool.before),
        used=tuple(node.pool.used),
        guard=node.schedule.state,
        gate=node.gate.state if node.gate else GateState(),
        success=node.sharing.success.copy(),
        others=node.sharing.others.copy(),
        useless=node.useless.state,
    )


def resume(checkpoints: Checkpoints, node: Node, policy: LanguagePolicy) -> tuple[int, list[str]]:
    """Resume from the newest whole checkpoint: rounds behind it, and notes for the operator. (0, []) where there is none."""
    found = checkpoints.newest(partial(_restore, node, policy))
    if found is None:
        return 0, []
    state, _, notes = found
    return state.round, [*notes, f"resumed after round {state.round}"]


def _restore(node: Node, policy: LanguagePolicy, state: RunState, folder: Path) -> None:
    """Restore the node. Where this raises, the node is half restored, until an older checkpoint restores it whole."""
    try:
        policy.restore(folder)
    except CheckpointDamaged as error:
        raise ValueError(str(error)) from error
    node.task_rng.setstate(state.task_rng)
    node.batch_rng.setstate(state.batch_rng)
    zeros = (0,) * len(state.pool)  # for what an older checkpoint does not say
    kept = map(Kept, state.pool, state.uses, state.last_uses or zeros, state.since or zeros)
    node.pool.restore(kept, state.updates, state.used, state.before)
    if node.schedule.configured > 1:
        node.schedule.state = state.guard
    if node.gate is not None:
        node.gate.state = state.gate
    node.sharing.success, node.sharing.others = state.success.copy(), state.others.copy()
    node.useless.state = state.useless
