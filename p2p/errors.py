"""Errors an operator can act on.

The command line prints the message, without a traceback, and exits with the class's code.

The message says what to do; a class raised without one is told by its docstring.
"""


class OperatorError(Exception):
    """Something went wrong that you can put right."""

    exit_code = 2

    def __str__(self) -> str:
        return super().__str__() or (self.__doc__ or "").strip()


class NoKeyFile(OperatorError):
    """There is no key file."""


class KeyFileTooOpen(OperatorError):
    """Others on this machine can read the key file."""


class KeyFileCorrupt(OperatorError):
    """The key file is damaged."""


class KeyFileUnusable(OperatorError):
    """The key file cannot be read or written."""


class StateUnwritable(OperatorError):
    """A file of the node's state cannot be read or written."""


class BadAddress(OperatorError):
    """An address is malformed."""


class PortInUse(OperatorError):
    """Another program is using the listen port."""


class CannotListen(OperatorError):
    """The node cannot listen at an address."""


class NoSuchEngine(OperatorError):
    """No engine has this name."""


class EngineMissing(OperatorError):
    """What the p2p engine needs is not installed."""
