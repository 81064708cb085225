"""What a peer says of itself when it asks. Signed with the request, kept with the question, and never proof of anything."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Attributes:
    round: int  # the peer's own
    model: str
    name: str | None = None  # of the node, for people
    sharing: str | None = None  # "swarm" or "solo"
    local: int | None = None  # I, rollouts of its own in a batch
    external: int | None = None  # J, rollouts of others
    strategy: str | None = None  # how it samples and weighs them
    version: str | None = None  # of its program
    hardware: str | None = None  # "cpu", "cuda", "mps" or "other"

    def said(self) -> dict[str, Any]:
        """Those that it said."""
        return {name: value for name, value in asdict(self).items() if value is not None}
