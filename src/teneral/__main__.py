"""`teneral` and `python -m teneral`."""

import gc
import os
import sys
import threading

EXIT_INTERRUPTED = 130  # as in `cli`, which may not be imported yet


def main() -> int:
    """Run the command line; returns the process's exit code."""
    if sys.argv[1:2] == ["serve"]:
        # What is made while importing stays: looking through it for garbage, again and again, takes a tenth of the
        # imports. The server has it looked for from when it can answer.
        gc.disable()
        # Where numpy brings OpenBLAS along, its threads wait for work by spinning: 60 ms of a core in each process that
        # imports it. They sleep at once instead.
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    try:
        from .cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before `run` could handle it
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if code:
        _keep_exit_code()
    return code


def _keep_exit_code() -> None:
    """Have no signal hide the exit code while the interpreter is taken apart, which gives all others their handlers of
    the beginning back: with torch in it that takes half a second.
    """
    import signal

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
