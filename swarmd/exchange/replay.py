"""Records the events of an exchange in a file of bounded size, and runs a recording again.

    python -m swarmd.exchange.replay FILE

A file has JSON lines. The first has the settings of the exchange, the seed of its random choices, and its
state. Each further line is [time, event, digest of the outputs]. A full file is renamed to `<name>.1`, and a
new one begins with the state at that time. So there are at most two files, and each can be replayed without
the other.

A recording has no text of a rollout unless the operator asks for it, only the lengths; no address; and
network groups under random names. None of these affects a decision of `Exchange`, because it decodes bytes
first.
"""

import json
import random
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

from p2p import durable
from p2p.identity import nickname
from p2p.types import Envelope, Reason
from swarmd.config.config import NodeConfig, RoundConfig
from swarmd.errors import SwarmdError
from swarmd.exchange import wire
from swarmd.exchange.events import Event, Output, Send
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.fetching import Asked, Fetch, Fetcher, HolderReply, State
from swarmd.exchange.market import Market
from swarmd.exchange.offers import Blob, Board, Offered
from swarmd.exchange.pacing import Heard, Outgoing, Pacing
from swarmd.exchange.serving import Serving, ServingRecord
from swarmd.experience.strategies import TAKES, SharingSettings, Take
from swarmd.state.logs import installed_version
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Author, Completion, Rollout, TaskRef

# Maximum bytes of events in a file. The state that precedes the events takes up to 2.4 MB after 2,000 rounds
# with few peers.
FILE_BYTES = 2 * 1024 * 1024
# The classes of recorded values, by name.
_VALUES: Mapping[str, Any] = {
    of.__name__: of
    for of in (
        *get_args(Event),
        *get_args(Output),
        *(Asked, Author, Blob, Completion, Envelope, Fetch, HolderReply, Offered, Reason),
        *(Rollout, ServingRecord, State, TaskRef, wire.RolloutSet),
    )
}
# Attributes that are parts of an exchange, or that its settings determine.
_BUILT = (Board, Curriculum, Fetcher, Heard, Market, Outgoing, Pacing, Serving, Take, random.Random)


def _parts(exchange: Exchange) -> Sequence[object]:
    """Return the objects that hold the state of an exchange."""
    market = exchange.market
    inner = (market.board, market.serving, market.fetcher, market.choice)
    return exchange, exchange.heard, exchange.pacing, exchange.outgoing, market, *inner


class Format:
    """The format of a recording. texts: whether it has the texts of rollouts."""

    def __init__(self, *, texts: bool) -> None:
        self.texts, self._key = texts, secrets.token_bytes(16)

    def line(self, value: object) -> bytes:
        return json.dumps(self._plain(value), separators=(",", ":")).encode() + b"\n"

    def digest(self, outputs: Sequence[Output]) -> str:
        """Return 12 hex digits over the outputs."""
        return blake2b(self.line(tuple(outputs)), digest_size=6).hexdigest()

    def _plain(self, value: object, name: str = "") -> object:
        """Return a value that JSON can hold, without private parts.

        name: of the field that holds the value.
        """
        match value:
            # Most values are completions, so this case comes first.
            case Completion(_, ended) if not self.texts:
                return {"Completion": [[[len(text), len(text.encode())] for text in value.texts], ended]}
            case str() if name == "group" and value[:1] not in ("", "~"):
                return f"~{blake2b(value.encode(), digest_size=4, key=self._key).hexdigest()}"
            case str() | bytes() if name in ("at", "data"):
                return self._plain(value[:0])
            case Enum():
                return {type(value).__name__: value.name}
            case None | int() | float() | str():
                return value
            case bytes():
                return {"bytes": value.hex()}
            case dict():
                inner = "group" if name == "_group" else ""
                return {"dict": [[self._plain(k), self._plain(v, inner or str(k))] for k, v in value.items()]}
            case (wire.KIND, bytes(body)):
                return [wire.KIND, self._plain(bytes(len(body)))]
            case Send(wire.KIND, body):
                return {"Send": [wire.KIND, self._plain(bytes(len(body)))]}
            case tuple():
                return [self._plain(each) for each in value]
            case list() | set() | deque():
                return {"list": [self._plain(each) for each in value]}
        names = getattr(value, "__struct_fields__", getattr(value, "__dataclass_fields__", ()))
        return {type(value).__name__: [self._plain(getattr(value, name), name) for name in names]}


class Recording(Format):
    """Records an exchange: its `record`.

    Args:
        path: the file. A file of the previous run is renamed to `<name>.1`.
        say: called once if the file cannot be written; the exchange goes on.
    """

    def __init__(
        self, exchange: Exchange, config: NodeConfig, path: Path, say: Callable[[str], None]
    ) -> None:
        super().__init__(texts=config.metrics.record_texts == "on")
        self._exchange, self._config, self._path, self._say = exchange, config, path, say
        self._room = 0  # bytes until the file is full

    def __call__(self, event: Event, now: float, outputs: Sequence[Output]) -> None:
        """Record an event that was handled. The first event is part of the state that a file begins with."""
        try:
            if self._room > 0:
                with self._path.open("ab") as file:
                    self._room -= file.write(self.line((now, event, self.digest(outputs))))
            if self._room <= 0:
                self._begin(now)
        except OSError as error:
            # After a failed write the recording would have a gap, so it ends here.
            self._exchange.record = lambda *_: None
            self._say(f"{self._path}: {error.strerror}; events are not recorded until the next start")

    def _begin(self, now: float) -> None:
        exchange = self._exchange
        seed = exchange.rng.getrandbits(64)
        # The full state of the random generator would take 625 numbers.
        exchange.rng.seed(seed)
        begun = {
            "versions": (installed_version(), sys.version),
            "epoch": time.time() - now,
            "texts": self.texts,
            "specialties": exchange.curriculum.specialties,
            "offers_a_second": exchange.curriculum.offers_a_second,
            "round": self._config.round.model_dump(),
            "sharing": self._config.sharing.model_dump(),
            "model": exchange.model,
            "whole": exchange.whole,
            "seed": seed,
            "state": tuple(
                {n: v for n, v in vars(part).items() if not (callable(v) or isinstance(v, _BUILT))}
                for part in _parts(exchange)
            ),
        }
        if self._path.exists():
            self._path.replace(f"{self._path}.1")
        durable.replace(self._path, self.line(begun), synced=False)
        self._room = FILE_BYTES


def replay(path: Path) -> Iterator[tuple[int, float, Event, Sequence[Output], bool]]:
    """Run a recording again.

    Yields line, seconds since the epoch, event, outputs, and whether these are the recorded ones. Raises
    SwarmdError, which names the line, if the file is damaged or no recording; RuntimeError if the exchange
    fails at an event.
    """
    number, begun, exchange, written = 1, {}, None, Format(texts=False)
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            read = _restored(json.loads(line))
            if exchange is None:
                begun, exchange, written.texts = read, _build(read), read["texts"]
                continue
            at, event, digest = read
            try:
                outputs = exchange.handle(event, at)
            except Exception as error:
                raise RuntimeError(f"{path}, line {number}: {words(event)}") from error
            yield number, at + begun["epoch"], event, outputs, written.digest(outputs) == digest
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SwarmdError(
            f"{path}, line {number}: damaged, cut off or not a recording: {error}. Name another recording."
        ) from None


def _build(begun: Mapping[str, Any]) -> Exchange:
    """Return the exchange that a file's first line describes."""
    sharing = SharingSettings(**begun["sharing"])
    if sharing.take not in TAKES:
        raise ValueError(f"sharing.take is a file of the node, {sharing.take}, which is not run here")
    exchange = Exchange(
        Curriculum(
            "recorded",
            {name: {} for name in begun["specialties"]},
            offers_a_second=begun["offers_a_second"],
        ),
        RoundConfig(**begun["round"]),
        sharing,
        begun["model"],
        random.Random(begun["seed"]),
        begun["whole"],
    )
    for part, state in zip(_parts(exchange), begun["state"], strict=True):
        for name, value in state.items():
            held = getattr(part, name)
            if hasattr(held, "clear"):
                # Fill the same collection: other parts refer to it, and it may be bounded.
                held.clear()
                (held.update if hasattr(held, "update") else held.extend)(value)
            else:
                setattr(part, name, value)
    return exchange


def _text_of(characters: int, size: int) -> str:
    """Return a text of this many characters and bytes."""
    # Some of its characters have 4 bytes, at most one has 2 or 3, and the rest have 1.
    text = "\U00010000" * ((size - characters) // 3) + ("", "é", "€")[(size - characters) % 3]
    return text.ljust(characters, "x")


def _restored(written: Any) -> Any:
    """Return a value that `Format` wrote. A missing text is replaced by one of the same lengths.

    Raises LookupError, TypeError or ValueError for anything else.
    """
    match written:
        case list():
            return tuple(map(_restored, written))
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"list": items}:
            return [*map(_restored, items)]
        case {"dict": items}:
            return {_restored(key): _restored(value) for key, value in items}
        case {"Completion": [sizes, ended]}:
            *earlier, text = (_text_of(*each) for each in sizes)
            return Completion(text, ended, tuple(earlier))
        case dict():
            ((name, fields),) = written.items()
            return (
                _VALUES[name][fields] if isinstance(fields, str) else _VALUES[name](*map(_restored, fields))
            )
    return written


def words(value: object) -> str:
    """Format a value for people: without long bytes and left-out texts, and peers by their nicknames."""
    short = re.sub(r"b'[^']{64,}'|b\"[^\"]{64,}\"|x{8,}", "…", repr(value))
    return re.sub(r"12D3Koo\w+", lambda found: nickname(found[0]), short)


def main(path: Path) -> str | None:
    """Print a replay; return a summary if outputs differ from the recorded ones."""
    different = []
    for number, at, event, outputs, same in replay(path):
        print(f"line {number}, {datetime.fromtimestamp(at, UTC):%T.%f}: {words(event)}")
        print(*(f"    -> {words(output)}\n" for output in outputs), sep="", end="")
        if not same:
            different.append(number)
            print("    !! other outputs than recorded")
    return (
        f"other outputs than recorded at {len(different)} events, first at line {different[0]}"
        if different
        else None
    )


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])) if len(sys.argv) == 2 else __doc__)
    except SwarmdError as error:
        sys.exit(str(error))
