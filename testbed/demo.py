"""The demo (`scripts/demo`) compares a swarm on this machine with one node alone.

It runs real processes, real libp2p on loopback and a real judge, and kills one node halfway.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from typer.main import get_command

from swarmd.cli.options import AsJson
from swarmd.daemon.local_api.status_words import many
from swarmd.errors import ConfigError, SwarmdError
from swarmd.lab.local_judge import local_judge
from swarmd.lab.parent_watch import LabFailed
from swarmd.terminal import explained
from testbed.demo_figure import Curve, reward_figure
from testbed.local_swarm import LocalNode, checkpoints, local_swarm

app = typer.Typer()

MODEL = "tiny-latent"  # keeps learning for longer than tiny, so sharing has time to help
# Minimum seconds of a round, so that all nodes stay at about the same round and a killed node can catch up.
MIN_ROUND_S = 0.8
# Seconds between checkpoints: the most work that the killed node loses. The default, a minute, would be half
# of a two-minute demo.
CHECKPOINT_S = 5.0
# The demo fails after this many seconds without a finished round.
STALL_S = 300.0
TRAINS = "training"
REFRESH_S = 0.25
# Seconds until all nodes have finished a round, on two cores.
START_S = 30.0
# Seconds between two progress messages while the demo starts.
NEWS_S = 4.0


@dataclass(kw_only=True)
class Story(Curve):
    """One node of the demo, and the figures to show of it."""

    node: LocalNode
    rejoined: bool = False

    @property
    def reward(self) -> float:
        """The sum of the rewards of all rounds so far."""
        return sum(line.reward_mean or 0.0 for line in self.lines)

    def refresh(self) -> None:
        self.lines = self.node.lines()
        self.node.check()

    def summary(self) -> dict[str, Any]:
        rewards = [line.reward_mean or 0.0 for line in self.lines]
        window = max(1, min(10, len(rewards) // 3))
        return {
            "peer_id": self.node.peer_id,
            "alone": self.alone,
            "rounds": len(self.lines),
            "generated": sum(line.generated for line in self.lines),
            "external_trained": sum(line.external for line in self.lines),
            "rejoined": self.rejoined,
            "reward": self.reward,
            "reward_first": sum(rewards[:window]) / window,
            "reward_last": sum(rewards[-window:]) / window,
            "state_dir": str(self.node.folder),
        }


@app.command()
def demo(
    nodes: Annotated[
        int, typer.Option(help="Number of nodes that share; one more is alone.", min=2, max=16)
    ] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds each node trains.", min=2)] = 120,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the demo's files.", show_default="demo-<time>")
    ] = None,
) -> None:
    """Compare a swarm on this machine with one node alone; a judge scores them.

    One node is killed halfway and restarted. Ends with a table and a plot.
    """
    folder = (out or Path(f"demo-{datetime.now():%Y%m%d-%H%M%S}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("node-*")):
        raise SwarmdError(f"{folder} holds an earlier demo. Name another folder with --out, or remove it.")
    talk = Console(stderr=True)
    talk.print(
        f"This takes about {duration(rounds)} on two free cores.\n"
        f"{nodes} nodes that share, and one alone; {rounds} rounds each, and a judge"
    )
    talk.print(f"Everything is kept in {folder}", soft_wrap=True)
    talk.print("starting the judge …")
    with local_judge(folder) as judge_url:
        options = [
            "--model",
            MODEL,
            "--judge",
            judge_url,
            "--rounds",
            str(rounds),
            "--pace",
            str(MIN_ROUND_S),
        ]
        saves = checkpoints(CHECKPOINT_S)
        with (
            local_swarm(folder, nodes, options, saves) as swarm,
            # The seed is the same as node 1's, so the node alone gets the same questions as node 1.
            local_swarm(folder / "alone", 1, [*options, "--external", "0"], saves) as alone,
        ):
            stories = [Story(node.name, alone=node in alone, node=node) for node in (*swarm, *alone)]
            for story in stories:
                story.node.start()
            _watch(stories, rounds, talk)
        board = httpx2.get(f"{judge_url}/v1/leaderboard", timeout=60, trust_env=False).json()
    figure = folder / "rewards.png"
    title = f"{nodes} nodes that share, and one alone that answers as many questions"
    figures: list[str] = []
    try:
        reward_figure(stories, title).savefig(figure, dpi=120)
        figures.append(str(figure))
    except (ConfigError, OSError) as error:
        talk.print(f"No picture was drawn. {error}")
    if as_json:
        document = {
            "schema": 1,
            "nodes": [story.summary() for story in stories],
            "gain": gain(stories),
            "judge": {"url": judge_url, "evaluations": board["answers"]},
            "figures": figures,
        }
        print(json.dumps(document))
    else:
        asked = f"The judge asked {board['answers']} questions."
        Console().print(_table(stories), _verdict(stories), asked, sep="\n")
        for path in figures:
            Console().print(f"Picture: {path}", soft_wrap=True)


def duration(rounds: int) -> str:
    """Estimate how long a demo takes on two free cores, in words."""
    seconds = START_S + rounds * MIN_ROUND_S
    return f"{seconds // 60:.0f} to {seconds // 60 + 1:.0f} min" if seconds >= 60 else "1 min"


def gain(stories: Sequence[Story]) -> float:
    """Return the gain in reward of the swarm's nodes over the node alone, as a fraction.

    Rewards are summed over all rounds; the gain is the mean over the swarm's nodes.
    """
    (alone,) = (story.reward for story in stories if story.alone)
    return fmean(story.reward for story in stories if not story.alone) / max(alone, 1e-9) - 1


def _verdict(stories: Sequence[Story]) -> str:
    share = gain(stories)
    more = f"{100 * abs(share):.0f} % {'more' if share >= 0 else 'less'} reward than the node alone"
    asked = stories[-1].summary()["generated"]
    return (
        f"With {asked:,} questions each, a node that shared earned {more}. This is one run: `swarmd lab run"
        " best` measures it."
    )


def _watch(stories: Sequence[Story], rounds: int, talk: Console) -> None:
    """Watch until every node has finished its rounds; halfway, kill one node of the swarm and restart it."""
    victim = [story for story in stories if not story.alone][-1]
    begun = since = time.monotonic()
    done, next_news = -1, begun
    with Live(console=talk, auto_refresh=False, transient=True) as live:
        while any(story.node.running for story in stories):
            time.sleep(REFRESH_S)
            for story in stories:
                story.refresh()
            _lose_and_find(victim, rounds, talk)
            total = sum(len(story.lines) for story in stories)
            now = time.monotonic()
            if now >= next_news:
                steps = Counter(map(_step, stories))
                said = "; ".join(f"{many(count, 'node')}: {step}" for step, count in steps.items())
                talk.print(f"{now - begun:3.0f} s  {said}")
                next_news = math.inf if set(steps) == {TRAINS} else now + NEWS_S
            if total != done:
                _show(live, talk, stories, rounds, done, total)
                done, since = total, now
            elif now - since > STALL_S:
                raise LabFailed(
                    f"no node has finished a round for {STALL_S:.0f} s; see the logs in"
                    f" {victim.node.folder.parent}"
                )
        for story in stories:
            story.refresh()


def _step(story: Story) -> str:
    """Describe the node's current step until it has finished a round."""
    if story.lines:
        return TRAINS
    return (status.cause if (status := story.node.status()) else "") or "starting Python"


def _lose_and_find(victim: Story, rounds: int, talk: Console) -> None:
    behind = victim.lines[-1].round if victim.lines else 0
    if victim.lost_at is None and behind >= rounds // 2:
        victim.lost_at = behind
        victim.node.kill()
        victim.node.start()
        talk.print(f"{victim.name} was killed with SIGKILL after its round {behind}, and started again")
    elif victim.lost_at is not None and not victim.rejoined and behind > victim.lost_at:
        victim.rejoined = True
        talk.print(f"{victim.name} is back: the same peer, resumed from its last checkpoint")


def _show(live: Live, talk: Console, stories: Sequence[Story], rounds: int, before: int, now: int) -> None:
    """Update the table if the output is a terminal; otherwise print ten lines over the whole run."""
    if talk.is_terminal:
        live.update(_table(stories, rounds), refresh=True)
        return
    step = max(1, rounds * len(stories) // 10)
    if before // step < now // step and all(story.lines for story in stories):
        alone, shared = stories[-1], [story for story in stories if not story.alone]
        nodes = fmean(story.summary()["reward_last"] for story in shared)
        done = f"round {min(len(story.lines) for story in stories)} of {rounds}"
        talk.print(
            f"{done}: reward {nodes:.2f} of nodes that share, {alone.summary()['reward_last']:.2f} alone"
        )


def _table(stories: Sequence[Story], rounds: int | None = None) -> Table:
    table = Table(title="sharing, and alone", title_justify="left")
    table.add_column("node", no_wrap=True)
    # The headings keep the table within 80 columns.
    for heading in (
        "rounds",
        "external\nused",
        "reward\nfirst → last",
        "reward\nin all",
        "judge's\nscore",
        "killed\nafter",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for story in stories:
        summary = story.summary()
        judged = story.lines[-1].judge if story.lines else None
        if story.alone:
            table.add_section()
        table.add_row(
            "alone" if story.alone else story.name,
            str(summary["rounds"]) + (f"/{rounds}" if rounds else ""),
            str(summary["external_trained"]),
            f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}",
            f"{summary['reward']:.1f}",
            f"{judged.score:.2f}" if judged else "",
            "" if story.lost_at is None else f"{story.lost_at}" if story.rejoined else f"{story.lost_at} …",
        )
    return table


def main(arguments: Sequence[str]) -> int:
    """Run the demo with these arguments; return its exit status."""
    return explained("demo", lambda: get_command(app)(list(arguments), prog_name="scripts/demo"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
