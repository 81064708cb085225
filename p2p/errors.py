"""What an operator can act on. The command line prints the message, without a traceback, and exits with the class's code."""


class OperatorError(Exception):
    """Something went wrong that you can put right."""

    exit_code = 2

    def __str__(self) -> str:
        return super().__str__() or (self.__doc__ or "").strip()
