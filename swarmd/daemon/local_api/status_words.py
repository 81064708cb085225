"""The status in words, for `swarmd status`, the live view, the log and the node's page. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from p2p.types import Reason
from swarmd.state.status import (
    ExchangeFigures,
    JudgeStatus,
    KnownPeer,
    ModelDescription,
    NodeState,
    PauseCause,
    SharedRollouts,
    StageProgress,
    Status,
    Trouble,
    UsageRow,
)
from swarmd.terminal import duration_words, printable
from swarmd.types import AnswerFigures, RoundLine, ShownRollout, WorkerFigures

# The minimum width of a terminal.
MIN_COLUMNS = 80
# The width of the name of a fact in the status lines.
NAME_COLUMNS = 8
# Number of rounds that a displayed mean reward covers.
SMOOTH_ROUNDS = 10
# Refusals that occur in every swarm: late copies, and frames from before this node's start.
HARMLESS = frozenset((Reason.OLD.value, Reason.DUPLICATE.value))
# Said of a node that has left the swarm, instead of "it goes on" for a paused one.
COMES_BACK = "it comes back"
# Why the page's "Try it" cannot compare answers.
NO_FIRST = (
    "The first weights are not kept, so there is nothing to compare today's with: train.kl_every is 0, memory"
    " is short, or an engine of another package answers. `swarmd chat` talks to today's."
)


def who(status: Status) -> str:
    model = model_words(status.model)
    parts = [
        f"{status.name} {status.peer_id}",
        f"swarm {status.swarm.name}",
        f"model {model}" if model else "",
        f"engine {status.engine}" if status.engine else "",
    ]
    return ", ".join(filter(None, parts))


def model_words(model: ModelDescription) -> str:
    """Format the model's name, size, device and data type, and how it is prompted, as far as known."""
    count = model.parameters or 0
    size = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M" if count else ""
    lora = f"LoRA of rank {model.lora}" if model.lora else ""
    shown = f"+{many(model.examples, 'example')}" if model.examples else ""
    opened = f"+opening {model.opening}" if model.opening else ""
    return printable(
        " ".join(filter(None, (model.model, size, model.device, model.dtype, lora, shown, opened)))
    )


def state_sentence(status: Status) -> str:
    """Join state, cause and remedy: "paused: you paused it; swarmd resume"."""
    return ": ".join(filter(None, (status.state, sentence(status))))


def so_far(status: Status, now: float) -> str:
    """Say how long a node has been starting, or in its first round: ", for 12 s"; else ""."""
    starts = status.state in (NodeState.STARTING, NodeState.TRAINING) and status.cause
    return f", for {max(0.0, now - status.since):.0f} s" if status.since and starts else ""


def sentence(found: Trouble | JudgeStatus | Status | None) -> str:
    """Join cause and remedy on one line; "" for None."""
    return printable("; ".join(filter(None, (found.cause, found.remedy)))) if found else ""


def round_sentence(line: RoundLine) -> str:
    refused = refused_words(line.rejected)
    unfit, gated, odd = map(counts, (line.unfit, line.gated, line.gate_reported))
    parts = [
        f"round {line.round}: reward {number(line.reward_mean)}",
        learnt_from_words(line),
        answers_words(line.answers),
        f"{line.pool.size} in the pool",
        many(line.peers, "peer"),
        time_words(line.seconds),
        f"refused {refused}" if refused else "",
        f"not for our model: {unfit}" if unfit else "",
        f"not trained on: {gated}" if gated else "",
        f"odd, but trained on (of one round in ten): {odd}" if odd else "",
    ]
    return ", ".join(filter(None, parts))


def time_words(seconds: Mapping[str, float]) -> str:
    """Say how long a round and each of its stages took."""
    split = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items() if value >= 0.05)
    return f"{sum(seconds.values()):.1f} s" + f" ({split})" * bool(split)


def learnt_from_words(line: RoundLine) -> str:
    """Say how many rollouts of a round taught something, that is, had an advantage."""
    batch = f"{line.local + line.external} rollouts ({line.local} own, {line.external} of other nodes)"
    return f"{f'learnt from {line.useful} of' if line.useful else 'nothing learnt from'} {batch}"


def answers_words(answers: AnswerFigures | None) -> str:
    """Describe a round's own answers: mean length, and the shares that are cut and in the requested form."""
    if answers is None or not answers.made:
        return ""
    cut, in_form = 100 * (answers.cut or 0.0), 100 * (answers.in_form or 0.0)
    return (
        f"{answers.made} answers of {answers.length or 0.0:.0f} tokens ({cut:.0f} % cut,"
        f" {in_form:.0f} % in the asked form)"
    )


def levels_words(levels: Mapping[str, int]) -> str:
    """Name the level of each subject of a ladder; "" without levels."""
    return ", ".join(f"{subject} {level}" for subject, level in levels.items())


def progress_words(progress: StageProgress | None, core: float | None) -> str:
    """Say how far a long round has got: "answers 12 of 32, about 2 min left"; "" for a short one.

    core: the share of a core that other programs leave to this node, if it is known.
    """
    if progress is None:
        return ""
    stage, left = progress.stage, progress.left
    what = {"generate": "answers", "score": "scored answers", "train": "trained on answers"}.get(stage, stage)
    done = f"{what} {progress.done} of {progress.of}" if progress.of else f"stage: {stage}"
    crowded = "" if core is None else f"; other programs leave this node {100 * core:.0f} % of a core"
    return done + (f", about {duration_words(left)} left" if left else "") + crowded


def answer_lines(answers: Sequence[ShownRollout]) -> list[str]:
    """Format the newest questions with the model's answers and rewards, the newest last."""
    lines = list[str]()
    for shown in answers:
        lines += [f"round {shown.round}, {shown.specialty}:", *_indented(shown.question)]
        for text, reward, ended in shown.answers:
            lines += [f"  reward {reward:g}{'' if ended else ', cut'}:", *_indented(text)]
    return lines or ["no answers yet: a round has to end first"]


def _indented(text: str) -> list[str]:
    return ["    " + printable(line) for line in text.split("\n")]


def counts(refused: Mapping[str, int]) -> str:
    """Format counts by reason, most frequent first."""
    return printable(
        ", ".join(
            f"{count} {reason}"
            for reason, count in sorted(refused.items(), key=lambda item: (-item[1], item[0]))
            if count
        )
    )


def refused_words(refused: Mapping[str, int]) -> str:
    """Format the refused frames by reason, without the refusals that occur in every swarm."""
    return counts({reason: count for reason, count in refused.items() if reason not in HARMLESS})


def many(count: int, noun: str) -> str:
    """Format a count with its noun: "1 peer", "2 peers"."""
    return f"{count} {noun}" + "s" * (count != 1)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def status_lines(status: Status) -> list[str]:
    """Format the whole status as lines of text, one fact in each."""
    return [f"{name:<{NAME_COLUMNS}} {text}".rstrip() for name, text in status_facts(status)]


def status_facts(status: Status) -> list[tuple[str, str]]:
    """Return name and text of each fact of the status. A fact named "" continues the one before it."""
    last, swarm, restarts = status.last, status.swarm, status.trainer.restarts
    budget = status.usage.budget if status.usage else None
    facts = [
        ("state", state_sentence(status)),
        *(("paused", words) for words in other_pauses(status)),
        *(("away", pause_words(each, COMES_BACK)) for each in status.away),
        ("round", round_words(status)),
        ("now", progress_words(status.progress, status.left)),
        ("reward", mean_reward_words(status)),
        ("learning", sentence(status.learning)),
        ("trouble", sentence(status.trouble)),
        ("last", round_sentence(last).partition(": ")[2] if last else ""),
        ("levels", levels_words(last.levels) if last else ""),
        ("node", f"{status.name}  {status.peer_id}"),
        ("model", model_words(status.model)),
        ("swarm", f"{swarm.name}  {swarm.topic}  {status.engine}"),
        ("peers", peers_words(status)),
        ("exchange", exchange_words(status.exchange)),
        ("shared", shared_words(status.shared)),
        ("address", addresses_words(status.addresses)),
        ("refused", refused_words(status.rejected) or "nothing"),
        *(("", f"{reason}: {remedy}") for reason, remedy in status.advice.items()),
        ("judge", judge_words(status.judge) if status.judge else ""),
        ("trainer", f"restarts: {restarts}" if restarts else ""),
        ("workers", workers_words(last.workers) if last else ""),
        (
            "budget",
            f"{budget.used / 1e9:.2f} of {budget.bytes / 1e9:g} GB this month" if budget else "",
        ),
        ("cost", f"today {cost_words(status.usage.today)}" if status.usage else ""),
        ("folder", printable(status.state_dir)),
    ]
    return [(name, text) for name, text in facts if text]


def round_words(status: Status) -> str:
    """Format the number of rounds so far, and the planned number if there is one; "" for a bootstrap node."""
    planned = f" of {status.rounds:,}" if status.rounds else ""
    return "" if status.role == "bootstrap" else f"{status.round:,}{planned}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield each row's lines, in columns. A last cell beyond MIN_COLUMNS goes to a second line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, last in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False))
        fits = len(line) + 2 + len(last) <= MIN_COLUMNS
        yield [f"{line}  {last}"] if fits else [line.rstrip(), f"    {last}"]


def peer_lines(peers: Sequence[KnownPeer]) -> list[str]:
    """Format the known peers in columns, one peer in each line."""
    if not peers:
        return ["no peers yet; `swarmd doctor network` says whether other nodes can reach this one"]
    rows = [
        (
            peer.name,
            str(peer.frames),
            str(peer.rejected),
            peer.direction,
            (peer.address or "–").partition("/p2p/")[0],
        )
        for peer in peers
    ]
    first, *formatted = columns([("NAME", "FRAMES", "REFUSED", "DIRECTION", "ADDRESS"), *rows])
    lines = [*first]
    for peer, row in zip(peers, formatted, strict=True):
        learnt = learnt_words(peer)
        lines += [*row, *([f"    learnt from: {learnt}"] if learnt else [])]
    return [*map(printable, lines), "their peer ids: swarmd peers --json"]


def learnt_words(peer: KnownPeer) -> str:
    """Say on how many of a peer's rollouts this node trained, with the main specialties; "" for none."""
    learnt = Counter(peer.learnt)
    return many(learnt.total(), "rollout") + f": {counts(dict(learnt.most_common(3)))}" if learnt else ""


def peers_words(status: Status) -> str:
    """Say how many peers are heard and how many are connected; most are heard through other nodes."""
    return f"{status.peers} heard, {status.connected} connected"


def workers_words(workers: WorkerFigures | None) -> str:
    """Describe the worker processes and the age of the weights that they sample with; "" without workers."""
    if workers is None:
        return ""
    kinds = {"generators": workers.generators, "trainers": workers.trainers}
    parts = [
        *(f"{count.alive} of {count.of} {kind}" for kind, count in kinds.items()),
        f"{number(workers.tokens_per_second)} tokens/s",
        f"version {workers.version}",
        f"lag {number(workers.lag.mean)} versions, at most {workers.lag.max}",
    ]
    return printable(", ".join(parts))


def addresses_words(addresses: Sequence[str]) -> str:
    """Name the first address, which most nodes can reach, without its peer id; count the other addresses."""
    more = f" and {len(addresses) - 1} more" * (len(addresses) > 1)
    return printable(f"{str(addresses[0]).partition('/p2p/')[0]}{more}") if addresses else ""


def exchange_words(exchange: ExchangeFigures) -> str:
    """Describe offers and fetches; "" if there were none, because small rollout sets are sent whole."""
    if exchange == ExchangeFigures():
        return ""
    missed = f", {exchange.missed} that nobody had in time" if exchange.missed else ""
    moved = f"{exchange.bytes_in / 1024:.0f} KiB in, {exchange.bytes_out / 1024:.0f} KiB out"
    return f"{exchange.on_offer} rollouts on offer, {exchange.fetched} fetched{missed}; {moved}"


def pause_words(pause: PauseCause, goes_on: str = "it goes on") -> str:
    """Say why the node pauses or is away from the swarm, when that ends, and the remedy."""
    ends = f"{goes_on} {pause.ends}" if pause.ends else ""
    return printable("; ".join(filter(None, (pause.cause, ends, pause.remedy * (pause.remedy not in ends)))))


def other_pauses(status: Status) -> list[str]:
    """Describe each pause that is not the state's cause, for example if the disk is full as well."""
    return [pause_words(each) for each in status.pauses if not status.cause.startswith(each.cause)]


def shared_words(shared: SharedRollouts) -> str:
    """Say how many rollouts this node shared, and how often other nodes reported that they used them."""
    if not shared.rollouts:
        return ""
    used = (
        f"used {many(shared.used, 'time')}, by {many(shared.by, 'other node')}"
        if shared.used
        else "nobody has said yet that it used one"
    )
    return f"{many(shared.rollouts, 'rollout')} since this start; {used}"


def helped_words(shared: SharedRollouts) -> str:
    """Say how many other nodes trained on this machine's rollouts; "" before the first report."""
    return (
        f"Since this start your machine helped {many(shared.by, 'other node')}: they trained"
        f" {many(shared.used, 'time')} on its answers."
        if shared.used
        else ""
    )


def cost_words(row: UsageRow) -> str:
    """Describe the node's usage, without figures that cannot be measured on this machine."""
    cpu = row.cpu_seconds
    parts = [
        f"{cpu / 3600:.1f} CPU hours" if cpu >= 3600 else f"{cpu / 60:.1f} CPU minutes",
        "" if row.energy_wh is None else f"about {row.energy_wh / 1000:.2f} kWh",
        f"{row.bytes_up / 1e6:.1f} MB up",
        f"{row.bytes_down / 1e6:.1f} MB down",
        "" if row.bytes_written is None else f"{row.bytes_written / 1e9:.2f} GB written",
    ]
    return ", ".join(filter(None, parts))


def judge_words(judge: JudgeStatus) -> str:
    """Describe the judge's score, and the reason why there is no newer one."""
    interval = " (95 % interval {:.3f} to {:.3f})".format(*judge.interval) if judge.interval else ""
    grade = (
        "no score yet"
        if judge.score is None
        else f"score {judge.score:.3f}{interval} over {many(judge.n, 'question')}"
    )
    grade += ", before this start" * judge.earlier
    facts = printable(", ".join(filter(None, (grade, judge.url))))
    return ": ".join(filter(None, (facts, sentence(judge))))


def mean_reward_words(status: Status) -> str:
    """Format the mean reward of the last rounds; "" before the first round."""
    newest = recent(status.rewards)
    return f"{fmean(newest):.3f}, mean of the last {many(len(newest), 'round')}" if newest else ""


def recent(rewards: Sequence[float | None]) -> list[float]:
    """Return the mean rewards of the last SMOOTH_ROUNDS rounds, without rounds that asked no questions."""
    return [reward for reward in rewards[-SMOOTH_ROUNDS:] if reward is not None]
