"""Checks whether tests that need p2pd can run on this machine."""

from importlib.util import find_spec


def p2pd_missing() -> str | None:
    """Return the reason why p2pd cannot run here; None if it can."""
    if find_spec("swarmd_engine_hivemind") is None:
        return "swarmd-engine-hivemind is not installed: run scripts/setup"
    from swarmd_engine_hivemind.p2pd import missing

    return missing()
