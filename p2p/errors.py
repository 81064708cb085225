"""Errors an operator can act on.

The command line prints the message without a traceback and exits with the class's `exit_code`. An error that
is raised without a message shows the docstring of its class.
"""


class OperatorError(Exception):
    """Something went wrong that you can put right."""

    exit_code = 2

    def __str__(self) -> str:
        return super().__str__() or (self.__doc__ or "").strip()


class NoKeyFile(OperatorError):
    """There is no key file."""


class KeyFileUnusable(OperatorError):
    """The key file cannot be read or written, is damaged, or others can read it."""


class StateUnwritable(OperatorError):
    """A file of the node's state cannot be read or written."""


class BadAddress(OperatorError, ValueError):
    """An address is malformed."""


class CannotListen(OperatorError):
    """The node cannot listen at an address, or another program uses its port."""


class AddressMissing(CannotListen):
    """This machine does not have the address at which the node is to listen, or not yet."""


class EngineMissing(OperatorError):
    """There is no such p2p engine, or what it needs is not installed."""
