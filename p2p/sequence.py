"""Numbers on disk that survive a crash or a power cut, and the sequence numbers of our frames."""

from collections.abc import Callable
from pathlib import Path

from p2p import durable
from p2p.errors import StateUnwritable


class NumberFile:
    """One number on disk. It is 0 if the file is missing or damaged; a damaged file is set aside."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.value = durable.load(path, _number, "numbers continue from the clock", 32) or 0

    def write(self, value: int, *, synced: bool = True) -> None:
        """Replace the number. If `synced`, it is on disk when this returns. Raises StateUnwritable."""
        try:
            durable.replace(self._path, b"%d\n" % value, synced=synced)
        except OSError as error:
            raise StateUnwritable(
                f"cannot write {self._path}: {error.strerror}. Check the folder's permissions and the free"
                " space."
            ) from None
        self.value = value


def _number(text: bytes) -> int:
    """Parse a line written by `NumberFile.write`. Raises ValueError on any other content."""
    if not (text.endswith(b"\n") and text[:-1].isdigit() and len(text) <= 20):
        raise ValueError("no number")
    return int(text)


class SequenceFile:
    """An iterator of rising numbers that never repeat, even after a crash.

    Before it uses a block of numbers, it reserves the block on disk. If the file is lost or damaged, numbers
    continue from the clock in milliseconds. These are unused if the node used fewer than 1,000 a second.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, block: int = 1000) -> None:
        self._reserved, self._block = NumberFile(path), block
        self._next = max(self._reserved.value, int(clock() * 1000))

    def __iter__(self) -> "SequenceFile":
        return self

    def __next__(self) -> int:
        """Return the next number.

        Raises StateUnwritable if a new block cannot be reserved; then nothing may be published.
        """
        if self._next >= self._reserved.value:
            self._reserved.write(self._next + self._block)
        self._next += 1
        return self._next - 1
