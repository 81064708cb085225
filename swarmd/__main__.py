"""The console entry point, and `python -m swarmd`."""

import sys


def main() -> int:
    try:
        # Imported inside the `try`: the import takes a while, and the user may press Ctrl-C meanwhile.
        from swarmd.cli.app import main as run
        from swarmd.terminal import run_program

        return run_program("swarmd", run)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
