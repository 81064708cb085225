"""The console entry point, and `python -m judge`."""

import sys


def main() -> int:
    try:
        # Imported inside the `try`: the import takes a while, and the user may press Ctrl-C meanwhile.
        from judge.cli import main as run

        run()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
