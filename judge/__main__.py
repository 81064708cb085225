"""The console entry point, and `python -m judge`."""

import sys


def main() -> int:
    try:
        # Imported inside the `try`: the import takes a while, and the user may press Ctrl-C meanwhile.
        from judge.cli import app
        from swarmd.terminal import explained, run_program

        return run_program("swarmd-judge", lambda: explained("swarmd-judge", app))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
