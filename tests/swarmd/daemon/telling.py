"""A child process that prints how its OpenMP threads wait: `python -m tests.swarmd.daemon.telling FD`."""

import os
import sys

if __name__ == "__main__":
    sys.exit(f"OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}")
