"""An instance's own process, for when no standby process takes it over: serves at a socket that it inherits, and ends
with the supervisor, also where that is killed.

The configuration comes as JSON on standard input, so that neither its secrets nor its address are in the command line.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys


def main(listener: int, owner: int) -> int:
    """Serve at the inherited socket `listener` until a signal, unless the process `owner` is gone."""
    from ..standby.beside import end_with_parent

    end_with_parent()
    if os.getppid() != owner:
        return 0
    gc.disable()  # as `teneral serve` does: the server has it enabled when it can answer
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))  # until the server has handlers of its own
    import json

    from ...loader.errors import TeneralError
    from ...loader.timeline import Timeline
    from ...runtime.config import ServeConfig
    from ...runtime.start import send_for
    from ..serve import serve_on

    config = ServeConfig(**json.load(sys.stdin))
    timeline = Timeline()
    timeline.add("process", "start interpreter", 0.0, timeline.now_s())
    try:
        sent = send_for(config, timeline, fork=True)
        serve_on(socket.socket(fileno=listener), config, timeline, sent)
    except TeneralError as error:
        print(f"teneral: {config.served_name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
