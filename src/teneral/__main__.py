"""`teneral` and `python -m teneral`."""

import sys


def main() -> int:
    """Run the command line; returns the process's exit code."""
    from .cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
