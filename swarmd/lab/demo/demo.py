"""`swarmd demo`: a whole swarm on this machine. Real processes, real libp2p on loopback, a real judge, and one node killed halfway."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.live import Live
from rich.table import Table

from swarmd.errors import SwarmdError
from swarmd.lab.demo.figures import Curve, draw_rewards
from swarmd.lab.demo.processes import LabFailed, LocalNode, checkpoints, local_judge, local_swarm

PACE = 2.5  # seconds a round takes at least, so that the others are still there when the killed node is back
CHECKPOINT = 5.0  # seconds: what the killed node loses at most; by default a minute, of a demo of two
PATIENCE = 120.0  # seconds without any node finishing a round before the demo gives up
LOOK = 0.25  # seconds between two refreshes


@dataclass
class Story:
    """One node of the demo and its figures."""

    node: LocalNode
    lost_at: int | None = None  # the round after which it was killed
    rejoined: bool = False
    lines: Sequence[Mapping[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.node.name

    def refresh(self) -> None:
        self.lines = self.node.lines()
        self.node.check()

    def summary(self) -> dict[str, Any]:
        rewards = [line["reward_mean"] for line in self.lines]
        window = max(1, min(10, len(rewards) // 3))
        return {
            "peer_id": self.node.peer_id,
            "rounds": len(self.lines),
            "external_trained": sum(line["external"] for line in self.lines),
            "rejoined": self.rejoined,
            "reward_first": sum(rewards[:window]) / window,
            "reward_last": sum(rewards[-window:]) / window,
            "state_dir": str(self.node.folder),
        }


def run(nodes: int = 3, rounds: int = 30, out: Path | None = None, json_output: bool = False) -> int:
    """Run it, and print the table (or with `json_output` one JSON object on the last line of standard output)."""
    if nodes < 1 or rounds < 2:
        raise SwarmdError("a demo needs at least 1 node and 2 rounds")
    folder = (out or Path(f"demo-{datetime.now():%Y%m%d-%H%M%S}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("node-*")):
        raise SwarmdError(f"{folder} holds an earlier demo. Name another folder with --out, or remove it.")
    talk = Console(stderr=True)
    talk.print(f"{nodes} nodes and a judge on this machine, {rounds} rounds each; everything is kept in {folder}", soft_wrap=True)
    with local_judge(folder) as judge_url:
        options = ["--model", "tiny", "--judge", judge_url, "--rounds", str(rounds), "--pace", str(PACE)]
        with local_swarm(folder, nodes, options, checkpoints(CHECKPOINT)) as swarm:
            stories = [Story(node) for node in swarm]
            for node in swarm:
                node.start()
            _watch(stories, rounds, talk)
        evaluations = _evaluations(judge_url)
    figure = folder / "rewards.png"
    title = f"{nodes} nodes sharing experience: tiny model, tiny-9"
    draw_rewards([Curve(story.name, story.lines, story.lost_at) for story in stories], figure, title)
    summaries = [story.summary() for story in stories]
    if json_output:
        document = {"schema": 1, "nodes": summaries, "judge": {"url": judge_url, "evaluations": evaluations}, "figures": [str(figure)]}
        print(json.dumps(document))
    else:
        Console().print(_table(stories, summaries))
        Console().print(f"The judge asked {evaluations} questions. Reward curves: {figure}", soft_wrap=True)
    return 0


def _watch(stories: list[Story], rounds: int, talk: Console) -> None:
    """Until every node has done its rounds. Halfway, one is killed and started again."""
    victim = stories[-1]
    done, since = -1, time.monotonic()
    with Live(console=talk, auto_refresh=False, transient=True) as live:
        while any(story.node.running for story in stories):
            time.sleep(LOOK)
            for story in stories:
                story.refresh()
            _lose_and_find(victim, rounds, talk)
            total = sum(len(story.lines) for story in stories)
            if total != done:
                done, since = total, time.monotonic()
                _show(live, talk, stories, rounds)
            elif time.monotonic() - since > PATIENCE:
                raise LabFailed(f"no node has finished a round for {PATIENCE:.0f} s; see the logs in {victim.node.folder.parent}")
        for story in stories:
            story.refresh()


def _lose_and_find(victim: Story, rounds: int, talk: Console) -> None:
    behind = victim.lines[-1]["round"] if victim.lines else 0
    if victim.lost_at is None and behind >= rounds // 2:
        victim.lost_at = behind
        victim.node.kill()
        victim.node.start()
        talk.print(f"{victim.name} was killed with SIGKILL after its round {behind}, and started again", soft_wrap=True)
    elif victim.lost_at is not None and not victim.rejoined and behind > victim.lost_at:
        victim.rejoined = True
        talk.print(f"{victim.name} is back: the same peer, resumed after its last whole checkpoint", soft_wrap=True)


def _show(live: Live, talk: Console, stories: list[Story], rounds: int) -> None:
    if talk.is_terminal:
        live.update(_table(stories, [story.summary() for story in stories], rounds), refresh=True)
    elif sum(len(story.lines) for story in stories) % (5 * len(stories)) == 0 and all(story.lines for story in stories):
        said = (f"{s.name} {len(s.lines)}/{rounds} reward {s.lines[-1]['reward_mean']:.2f}" for s in stories)
        talk.print("   ".join(said), soft_wrap=True)


def _table(stories: list[Story], summaries: Sequence[Mapping[str, Any]], rounds: int | None = None) -> Table:
    table = Table(title="the demo swarm", title_justify="left")
    table.add_column("node", no_wrap=True)
    for heading in ("rounds", "external\ntrained", "reward\nfirst → last", "judge\nscore (n)"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("killed")
    for story, summary in zip(stories, summaries, strict=True):
        judged = story.lines[-1].get("judge") if story.lines else None
        table.add_row(
            story.name,
            str(summary["rounds"]) + (f"/{rounds}" if rounds else ""),
            str(summary["external_trained"]),
            f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}",
            f"{judged['score']:.2f} ({judged['n']})" if judged else "",
            "" if story.lost_at is None else f"after {story.lost_at}, {'rejoined' if story.rejoined else 'starting again'}",
        )
    return table


def _evaluations(judge_url: str) -> int:
    board = httpx2.get(f"{judge_url}/v1/leaderboard", timeout=10, trust_env=False).json()
    return int(board["answers"])
