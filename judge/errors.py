"""Errors that the operator of a judge can act on."""

from p2p.errors import OperatorError


class JudgeError(OperatorError):
    """The judge cannot go on."""


class DatabaseUnusable(JudgeError):
    """The judge's database cannot be used. Give another file with --database."""


class DatabaseInUse(JudgeError):
    """Another judge is using this database. Stop it, or give this one another file with --database."""

    exit_code = 5


class CannotListen(JudgeError):
    """The judge cannot listen there. Give another address with --host or another port with --port; port 0 takes any free one."""
