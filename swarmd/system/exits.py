"""How child processes end: their time limit, and their exit status in words. Pure."""

# A child that has not exited this many seconds after its connection was closed is killed.
EXIT_TIMEOUT_S = 10.0


def exit_words(status: int) -> str:
    """Describe an exit status of `subprocess` in words."""
    memory = " (out of memory, perhaps)" if status == -9 else ""
    return f"exit {status}" if status >= 0 else f"killed by signal {-status}{memory}"
