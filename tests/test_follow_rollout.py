"""The path of a received rollout is as short as it is said to be (`scripts/follow-rollout`)."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "follow-rollout"


def test_the_path_of_a_rollout() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
