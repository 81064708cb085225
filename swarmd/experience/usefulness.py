"""Credit for useful rollouts and blame for useless ones, by author. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.types import Scored, TaskRef

# Useless rollouts in a row that cost an author one charge; as many as one body holds. An honest node shares
# only rollouts that have an advantage.
USELESS_IN_A_ROW = 64
# Maximum number of authors that are remembered.
MAX_AUTHORS = 4096


class UselessRollouts:
    """Counts each author's rollouts since its last useful one; a restart resets the counts."""

    def __init__(self) -> None:
        self._since: Latest[PeerId, int] = Latest(MAX_AUTHORS)  # least recently heard first

    def charge(self, theirs: Sequence[Scored], earned: Mapping[PeerId, int]) -> list[PeerId]:
        """Return the authors to charge for a round's rollouts, once for each USELESS_IN_A_ROW in a row.

        earned: the authors of useful rollouts.
        """
        charged = []
        for author, count in Counter(scored.rollout.author for scored in theirs).items():
            since = self._since.pop(author, 0) + count
            if author in earned:
                continue
            charged += [author] * (since // USELESS_IN_A_ROW)
            self._since[author] = since % USELESS_IN_A_ROW
        return charged


def useful(theirs: Sequence[Scored], known: Iterable[Scored]) -> Counter[PeerId]:
    """Count each author's rollouts that have an advantage and do not copy other authors' text.

    The advantage is by this node's verifier.

    known: other rollouts that this node has, its own included. A text about a task belongs to its first
    sender. A rollout that contains only texts of other authors is a copy: copying earns nothing.
    """
    said: dict[tuple[TaskRef, str], PeerId] = {}

    def adds_to(scored: Scored) -> bool:
        author = scored.rollout.author
        return author in {
            said.setdefault((scored.rollout.ref, completion.whole.strip()), author)
            for completion in scored.rollout.completions
        }

    for scored in known:
        adds_to(scored)
    return Counter(scored.rollout.author for scored in theirs if adds_to(scored) and scored.informative)
