"""`rille` and `python -m rille`: loads the command line so that Ctrl-C, in the middle of it too, ends in one line."""

import sys

from rille.interrupts import loading


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        with loading():
            from rille.cli import main as run
        return run()
    except KeyboardInterrupt:
        print("\nrille: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
