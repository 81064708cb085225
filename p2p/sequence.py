"""Numbers on disk that outlive a crash or a power cut, and the sequence numbers of our own frames."""

from collections.abc import Callable
from pathlib import Path

from p2p import durable
from p2p.errors import StateUnwritable


class NumberFile:
    """One number on disk. A lost file counts as 0, and one that cannot be read, which is set aside."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.value = durable.load(path, _number, "the clock takes its place", 32) or 0

    def write(self, value: int, *, synced: bool = True) -> None:
        """Replace the number; with `synced` it is on disk when this returns. Raises StateUnwritable."""
        try:
            durable.replace(self._path, b"%d\n" % value, synced=synced)
        except OSError as error:
            raise StateUnwritable(
                f"cannot write {self._path}: {error.strerror}; check the folder's permissions and the free"
                " space"
            ) from None
        self.value = value


def _number(text: bytes) -> int:
    """Parse what `write` writes. Raises ValueError on anything else."""
    if not (text.endswith(b"\n") and text[:-1].isdigit() and len(text) <= 20):
        raise ValueError("no number")
    return int(text)


class SequenceFile:
    """An iterator of rising numbers, none used twice. Reserves a block of them on disk before the first.

    A lost or damaged file does no harm: numbers then go on from the clock, in milliseconds. A node that uses
    fewer than a thousand a second can never have reached those.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, block: int = 1000) -> None:
        self._reserved, self._block = NumberFile(path), block
        self._next = max(self._reserved.value, int(clock() * 1000))

    def __iter__(self) -> "SequenceFile":
        return self

    def __next__(self) -> int:
        """Return the next number.

        Raises StateUnwritable when a new block cannot be reserved; then nothing may be published.
        """
        if self._next >= self._reserved.value:
            self._reserved.write(self._next + self._block)
        self._next += 1
        return self._next - 1
