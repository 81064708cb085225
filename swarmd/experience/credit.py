"""Whose rollouts proved useful to us: what standing is earned with (`p2p.admission.reputation`), and who pays for useless ones. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from p2p.types import PeerId
from swarmd.types import Rollout, Scored, TaskRef

PATIENCE = 64  # rollouts in a row: what one body holds. An honest node shares those alone that have an advantage
AUTHORS = 4096  # remembered


class Useless:
    """Counts each author's rollouts that we scored since the last useful one."""

    def __init__(self) -> None:
        self._since: OrderedDict[PeerId, int] = OrderedDict()  # least recently heard first

    def saw(self, theirs: Sequence[Scored], earned: Mapping[PeerId, int]) -> list[PeerId]:
        """A round's rollouts were scored and these were useful. Returns who is to be charged: once for each PATIENCE in a row."""
        charged = []
        for author, count in Counter(scored.rollout.author for scored in theirs).items():
            since = self._since.pop(author, 0) + count
            if author in earned:
                continue
            charged += [author] * (since // PATIENCE)
            self._since[author] = since % PATIENCE
        while len(self._since) > AUTHORS:
            self._since.popitem(last=False)
        return charged


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
