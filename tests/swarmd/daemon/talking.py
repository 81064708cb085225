"""A child process that writes more than a log may hold and, once the log was truncated, one last line.

Run it as `python -m tests.swarmd.daemon.talking FD`.
"""

import os
import sys
import time

from swarmd.state.logs import LOG_BYTES

if __name__ == "__main__":
    print("x" * LOG_BYTES, file=sys.stderr, flush=True)
    while os.fstat(2).st_size:
        time.sleep(0.05)
    sys.exit("the last word")
