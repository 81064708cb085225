"""Output to a terminal, or to a file or pipe instead."""

import errno
import io
import os
import signal
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import IO, NoReturn, TextIO

from p2p.errors import OperatorError

# Errors that mean that a path given by the operator cannot be used.
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def printable(text: str) -> str:
    """Escape control and direction characters, so that foreign text cannot control the terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def ago(seconds: float) -> str:
    """Format an age coarsely, so that its text changes rarely: "now", "3 min ago"."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "now"


def duration_words(seconds: float) -> str:
    """Format a duration: "40 s", "2 min", "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def bytes_words(count: float) -> str:
    """Format a number of bytes: "0.3 MB", "0.12 GB"."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def tell(text: str, stream: IO[str] | None = None, indent: str = "") -> None:
    """Print a message for people, by default on standard error, and flush it.

    Each line is made `printable`, because it may be foreign text, such as a question of a data set. On a
    terminal, lines are wrapped between words only, so that an address can be copied whole. Continuation lines
    begin with `indent`.
    """
    stream = stream or sys.stderr
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        # Not a terminal: programs and files get whole lines.
        columns = 0
    for line in map(printable, text.split("\n")):
        pieces = (
            textwrap.wrap(
                line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            if columns > 0
            else []
        )
        print("\n".join(pieces or [line]), file=stream)
    stream.flush()


def shows_pages(stream: TextIO) -> bool:
    """Return whether the live page can be drawn there: on a terminal that can move its cursor, in UTF-8."""
    return (
        stream.isatty()
        and os.environ.get("TERM") not in (None, "dumb")
        and stream.encoding.lower().replace("-", "") == "utf8"
    )


def hang_up() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, so that a closed terminal stops the node cleanly; nothing if nohup ignores it."""
    return () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)


async def interruptible(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` in trio; SIGTERM, and SIGHUP of a closed terminal, interrupt it like Ctrl-C."""
    import trio  # imported here: it takes a while, and most commands do not need it

    async def interrupt() -> None:
        await anext(aiter(signals))
        raise KeyboardInterrupt

    with trio.open_signal_receiver(signal.SIGTERM, *hang_up()) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupt)
            await main()
            nursery.cancel_scope.cancel()


@contextmanager
def ended_by_signals(code: int = 0) -> Iterator[None]:
    """End the block by SystemExit, with this code, on SIGTERM and on SIGHUP of a closed terminal."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(code)

    with _handled_by(leave, signal.SIGTERM, *hang_up()):
        yield


@contextmanager
def _handled_by(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


@contextmanager
def interrupted_at_once(stays: str = "downloads are kept") -> Iterator[None]:
    """Let a signal end the process at once, in a block without partial effects, such as loading a model.

    Otherwise the hub's library waits for every request that its threads have begun: a minute if none is
    answered.
    """

    def leave(*_: object) -> None:
        os.write(2, f"stopped; {printable(stays)}\n".encode())
        os._exit(130)

    # If Ctrl-C is ignored, as in the background of a script, it stays ignored.
    asked = [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    with _handled_by(leave, signal.SIGTERM, *hang_up(), *asked):
        yield


def explained(name: str, command: Callable[[], object]) -> int:
    """Run a command line and return its exit code.

    An OperatorError prints its message; any other exception is a bug and keeps its traceback.
    """
    try:
        command()
    except OperatorError as error:
        text = str(error)
        tell(text if "\n" in text else f"{name}: {text}")
        return error.exit_code
    except OSError as error:
        if error.filename is None or error.errno not in _UNUSABLE:
            raise
        tell(
            printable(
                f"{name}: {error.filename}: {error.strerror}. Correct its permissions, or name another path."
            )
        )
        return OperatorError.exit_code
    except RuntimeError as error:
        # Raised by pathlib for "~", and by platformdirs for the default folders.
        if "home directory" not in str(error):
            raise
        tell(
            f"{name}: there is no home folder for a path that begins with ~, or for the default folders. Set"
            " HOME, or write all paths in full (--state-dir, --config; a judge's --database)."
        )
        return OperatorError.exit_code
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    return 0


def run_program(name: str, program: Callable[[], int]) -> int:
    """Run a command line until all of its output is written, and return its exit code.

    If the reader of the output is gone, or the disk is full or broken, it ends without a traceback. On
    SIGTERM the program removes its partial files.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            with ended_by_signals(130):
                return program()
        finally:
            if sys.stdout is not None:
                # Otherwise the interpreter flushes at exit, and prints another message.
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone, as with `| head`.
        code = 1
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        what = ": ".join(str(each) for each in (error.filename, error.strerror) if each)
        print(
            f"{name}: {what}: the output is incomplete. Free some space, or write elsewhere.",
            file=sys.stderr,
        )
        code = OperatorError.exit_code
    # Do not retry to write the buffered output.
    sys.stdout = None
    return code
