"""Errors that the operator of a judge can act on."""

from p2p.errors import OperatorError


class JudgeError(OperatorError):
    """The judge cannot go on."""


class DatabaseUnusable(JudgeError):
    """The judge's database cannot be used."""


class DatabaseInUse(JudgeError):
    """Another judge is using the database."""

    exit_code = 5


class NotTogether(JudgeError):
    """A judge with --shared evaluates no uploads (--verified-bytes): they lie in a folder of its own. Leave one out."""


class NotAlone(JudgeError):
    """--verified-hub and --verified-model do nothing without --verified-bytes, which allows uploads of weights. Give it too."""


class JudgeCannotListen(JudgeError):
    """The judge cannot listen at its address."""
