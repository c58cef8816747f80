"""The liveness of the server in this container: exit status 0 when `/livez` answers 200 within 4 seconds.

Runs on a bare interpreter (`python -IS`), so that asking costs 20 ms.
"""

import os
import socket
import sys

TIMEOUT_S = 4


def main() -> int:
    port = os.environ.get("TENERAL_PORT") or os.environ.get("PORT") or "8080"
    try:
        with socket.create_connection(("127.0.0.1", int(port)), TIMEOUT_S) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status = connection.makefile("rb").readline(256).split()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if status[1:2] == [b"200"] else 1


if __name__ == "__main__":
    sys.exit(main())
