"""A disk that fails at one step: a test makes a sequence of writes fail at each possible step in turn."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

STEPS = ("rename", "replace", "link", "mkdir", "fsync", "unlink")


@contextmanager
def failing_at(step: int) -> Iterator[list[str]]:
    """Fail the step of this number, from 1. Yields the names of the steps begun so far."""
    begun: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            begun.append(name)
            if len(begun) == step:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **options)

        return mock.patch.object(os, name, call)

    patches = [counted(name) for name in STEPS]
    for patch in patches:
        patch.start()
    try:
        yield begun
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def on_disk() -> Iterator[set[str]]:
    """Yield the names that a power cut would leave: those in a folder when it is synced."""
    names, real = set[str](), os.fsync

    def call(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            names.update(os.listdir(descriptor))
        real(descriptor)

    with mock.patch.object(os, "fsync", call):
        yield names
