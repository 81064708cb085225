"""Whose rollouts proved useful to us: what standing is earned with (`p2p.reputation`). Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from p2p.types import PeerId
from swarmd.types import Rollout, Scored, TaskRef


def useful(theirs: Sequence[Scored], known: Iterable[Scored]) -> Counter[PeerId]:
    """For each author, how many of these rollouts have an advantage by our own verifier and are no copy of another author's.

    known: what we have besides, our own included. Who sends first what two have sent has made it: copying earns nothing.
    """
    made = {_text(scored.rollout): scored.rollout.author for scored in known}
    earned: Counter[PeerId] = Counter()
    for scored in theirs:
        author = scored.rollout.author
        if scored.informative and made.setdefault(_text(scored.rollout), author) == author:
            earned[author] += 1
    return earned


def _text(rollout: Rollout) -> tuple[TaskRef, frozenset[str]]:
    """The order of completions is not what makes them."""
    return rollout.ref, frozenset(completion.text.strip() for completion in rollout.completions)
