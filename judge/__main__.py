"""The console entry point, and `python -m judge`."""

import sys


def main() -> int:
    try:
        from judge.cli import main as run  # here: it takes a while, and Ctrl-C may fall into it

        run()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
