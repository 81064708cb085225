"""Why a node learns nothing, or its answers do not end: cause and remedy, from the last rounds' lines. Pure.

The first row of `CAUSES` that fits is shown.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from swarmd.daemon.local_api.status_words import many
from swarmd.state.status import ModelDescription, Trouble
from swarmd.types import RoundLine

# The minimum of rounds, and of seconds that they took together, for a diagnosis.
ROUNDS, SECONDS = 2, 2.0
# Maximum number of lines to look at, if rounds are too short to fill SECONDS.
KEPT_LINES = 100
# From this share of cut answers on, they are reported even if something is learnt.
MANY_CUT = 0.5
# If a smaller share of answers is in the asked form, the form is the cause.
FEW_IN_FORM = 0.05
# Length of the sample answer, in characters.
SAMPLE_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Lately:
    """The sums over the last rounds."""

    rounds: int
    trained: int  # tokens that had a gradient
    skipped: int  # updates that were left out
    made: int  # the node's own answers
    cut: int
    in_form: int
    limit: int  # mean limit on an answer's tokens, if the node chose it; 0: the configured limit
    tokens: int  # in the node's own answers
    rewards: float
    environment: bool = False  # whether tasks have several turns


def lately(lines: Sequence[RoundLine]) -> Lately | None:
    """Sum up the newest rounds that reach both ROUNDS and SECONDS; None if there are too few."""
    seconds, chosen = 0.0, list[RoundLine]()
    for line in reversed(lines):
        chosen.append(line)
        seconds += sum(line.seconds.values())
        if len(chosen) >= ROUNDS and (seconds >= SECONDS or len(chosen) == KEPT_LINES):
            break
    else:
        return None
    answers = [line.answers for line in chosen if line.answers and line.answers.made]
    return Lately(
        len(chosen),
        trained=sum(line.tokens.trained for line in chosen),
        skipped=sum(line.skipped for line in chosen),
        made=sum(each.made for each in answers),
        cut=round(sum((each.cut or 0.0) * each.made for each in answers)),
        in_form=round(sum((each.in_form or 0.0) * each.made for each in answers)),
        limit=round(max((each.limit or 0.0 for each in answers), default=0.0)),
        tokens=sum(line.tokens.generated for line in chosen),
        rewards=sum(line.reward_sum for line in chosen),
        environment=any(each.turns is not None for each in answers),
    )


# Rows (cause, remedy, condition) for rounds in which no token had a gradient. The {names} are filled in.
CAUSES: Sequence[tuple[str, str, Callable[[Lately], bool]]] = (
    (
        "{skipped} updates were skipped, because their loss or gradient was not finite",
        "set a lower train.learning_rate, or model.dtype = 'float32'",
        lambda seen: seen.skipped > 0,
    ),
    (
        "no external rollout had an advantage, and round.local = 0 makes no local ones",
        "wait for other nodes, or set round.local above 0",
        lambda seen: not seen.made,
    ),
    (
        "the questions fill the model's context of {context:,} tokens, so there is no room for answers",
        "choose a model with a longer context, or a shorter model.system_prompt or model.examples",
        lambda seen: not seen.tokens,
    ),
    (
        "{cut} of {made} answers are cut at {limit:,} tokens, and {in_form} {formed}",
        "raise generate.max_new_tokens, or {shows}; see `swarmd doctor model`",
        lambda seen: _mostly_cut(seen) and _formless(seen),
    ),
    (
        "{in_form} of {made} answers {formed}",
        "{shows}; or wait for other nodes, whose answers teach the form",
        lambda seen: _formless(seen),
    ),
    (
        "all {made} answers are wrong",
        "wait for other nodes' right answers; or choose easier questions (swarm.curriculum,"
        " tasks.specialties) or a larger model",
        lambda seen: seen.rewards == 0,
    ),
    (
        "all {made} answers are right",
        "choose harder questions: swarm.curriculum, tasks.specialties",
        lambda seen: seen.rewards >= seen.made,
    ),
    (
        "the answers to each question earned the same reward, so none had an advantage",
        "raise round.completions or generate.temperature",
        lambda _: True,
    ),
)
# The same for rounds in which something was learnt.
STILL: Sequence[tuple[str, str, Callable[[Lately], bool]]] = (
    (
        "none of {made} answers ends within {limit:,} tokens",
        "raise generate.max_new_tokens; if answers still never end, choose an instruct model (see `swarmd"
        " doctor model`)",
        lambda seen: 0 < seen.made == seen.cut,
    ),
    (
        "{cut} of {made} answers are cut at {limit:,} tokens",
        "raise generate.max_new_tokens if answers need more room; if they never end, see `swarmd doctor"
        " model`",
        # If the node chose the limit, the cut answers are those that rarely get into the required form.
        lambda seen: _mostly_cut(seen) and not seen.limit,
    ),
    (
        "all {made} answers are right, so this node learns from external rollouts only",
        "choose harder questions: swarm.curriculum, tasks.specialties",
        lambda seen: 0 < seen.made <= seen.rewards,
    ),
)
# Shown instead of a cause for a node with `round.train = "off"`.
FROZEN = Trouble(
    "this node's model is frozen (--no-train): it answers and shares, but does not learn",
    "join with --train to let it learn",
)


def _mostly_cut(seen: Lately) -> bool:
    return seen.made > 0 and seen.cut >= MANY_CUT * seen.made


def _formless(seen: Lately) -> bool:
    return seen.in_form < FEW_IN_FORM * seen.made


def trouble_of(lines: Sequence[RoundLine], model: ModelDescription, sample: str = "") -> Trouble | None:
    """Return why the last rounds taught nothing, or less than they could; None if all is well.

    lines: of metrics.jsonl. sample: one of the answers.
    """
    if (seen := lately(lines)) is None:
        return None
    rows = STILL if seen.trained else CAUSES
    if (found := next((row for row in rows if row[2](seen)), None)) is None:
        return None
    says, remedy, _ = found
    formed = (
        "got a reply from their environment"
        if seen.environment
        else "are in the asked form, <answer>…</answer>"
    )
    blanks = {
        **asdict(seen),
        "limit": seen.limit or model.new_tokens,
        "context": model.context,
        "formed": formed,
    }
    lead = "" if seen.trained else f"nothing was learnt in the last {many(seen.rounds, 'round')}: "
    shown = f", such as “{' '.join(sample.split())[:SAMPLE_CHARACTERS]}”" if sample.strip() else ""
    return Trouble(
        lead + says.format(**blanks) + shown, remedy.format(shows=_shows_form(model, seen.environment))
    )


def _shows_form(model: ModelDescription, environment: bool) -> str:
    """Return a remedy: the next setting that would show the model the asked form."""
    if not model.examples:
        return (
            'set model.examples = "on"' + ", or to pairs that you write if the tasks have none" * environment
        )
    if not model.opening and not environment:
        return 'set model.opening = "<answer>"'
    return "choose another instruct model (`swarmd models`), or model.examples of your own"
