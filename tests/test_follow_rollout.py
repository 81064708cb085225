"""The path of a received rollout through the code stays within the limits of `scripts/follow-rollout`."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "follow-rollout"


def test_the_path_of_a_received_rollout_stays_within_its_limits() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
