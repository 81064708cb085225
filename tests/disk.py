"""A disk that fails at a chosen step, so that a test can let each step of its writes fail in turn."""

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
    """Fail the step with this number, counted from 1. Yield the names of the steps begun so far."""
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
    """Yield the file names that would survive a power cut: the names in a folder at its last sync."""
    names, real = set[str](), os.fsync

    def call(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            names.update(os.listdir(descriptor))
        real(descriptor)

    with mock.patch.object(os, "fsync", call):
        yield names
