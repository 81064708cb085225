"""Errors an operator can act on.

The command line prints the message without a traceback and exits with the class's `exit_code`. An error that
is raised without a message shows the docstring of its class.
"""


class OperatorError(Exception):
    """An error that the operator can fix."""

    exit_code = 2

    def __str__(self) -> str:
        return super().__str__() or (self.__doc__ or "").strip()


class NoKeyFile(OperatorError):
    """There is no key file."""


class KeyFileUnusable(OperatorError):
    """The key file cannot be read or written, is damaged, or other users can read it."""


class StateUnwritable(OperatorError):
    """A file of the node's state cannot be read or written."""


class BadAddress(OperatorError, ValueError):
    """An address is malformed."""


class CannotListen(OperatorError):
    """The node cannot listen at an address, or another program uses its port."""


class AddressMissing(CannotListen):
    """This machine does not have the listen address, or does not have it yet."""


class EngineMissing(OperatorError):
    """The p2p engine does not exist, or a package that it needs is not installed."""
