"""A fast S3-like server for tests and benchmarks: buckets are folders, ranges leave through sendfile.

    python -m tests.support.store_server --root DIR [--rate-mb-s 200] [--latency-ms 5] …

prints its address on standard output, serves until it is ended. Every
field of `store_fault_mix.FaultMix` is a flag too (--stall-share 0.01 --seed 7). In a test, `StoreServer` is a context
manager. Path-style addressing only; signatures are not verified. What it can do wrong on demand is in
`store_faults.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Self

from tests.support.store_conversation import Conversation, LogEntry, Service
from tests.support.store_fault_mix import FaultMix, RandomFaults
from tests.support.store_faults import FaultHook
from tests.support.store_http import RequestError
from tests.support.store_objects import Objects
from tests.support.store_pacing import Pacer

LOG_WAIT_S = 2.0


class StoreServer:
    """Serves the folders below `root` as buckets, a thread a connection. Rates: 10**6 bytes a second."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        rate_mb_s: float | None = None,
        connection_rate_mb_s: float | None = None,
        latency_ms: float = 0.0,
        fault: FaultHook | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._service = Service(
            objects=Objects(Path(root)),
            pacer=Pacer(rate_mb_s) if rate_mb_s else None,
            connection_rate_mb_s=connection_rate_mb_s,
            latency_s=latency_ms / 1000,
            fault=fault,
        )
        self._tls = tls
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._num_connections = 0
        self._listener = socket.create_server((host, port), backlog=512)
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://{host}:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="store-accept", daemon=True)

    @property
    def objects(self) -> Objects:
        return self._service.objects

    @property
    def num_connections(self) -> int:
        """Connections accepted so far."""
        return self._num_connections

    def set_fault(self, fault: FaultHook | None) -> None:
        """From now on, ask this about every request."""
        self._service.fault = fault

    def log(self) -> list[LogEntry]:
        """Every request, in the order in which the answers began. Waits until those being sent are: a client
        has the last byte a moment before the server has noted it.
        """
        entries = list(self._service.log)
        until_s = time.monotonic() + LOG_WAIT_S
        while any(entry.done_s is None for entry in entries) and time.monotonic() < until_s:
            time.sleep(0.001)
        return entries

    def sent_bytes(self) -> int:
        """Bytes of bodies that were given to the network, of answers under way too, as far as the log goes."""
        return sum(entry.sent_bytes for entry in list(self._service.log))

    def clear_log(self) -> None:
        self._service.log.clear()

    def start(self) -> Self:
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """Close everything; answers in flight are cut off."""
        self._service.stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.drop_connections()
        with self._lock:
            threads = list(self._connections)
        for thread in threads:
            thread.join()

    def drop_connections(self) -> None:
        """Close all connections, as a server does that is restarted."""
        with self._lock:
            for connection in self._connections.values():
                with suppress(OSError):
                    # Not `connection.shutdown`: an SSLSocket's makes its thread go on in the clear.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self) -> None:
        while not self._service.stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._num_connections += 1
            thread = threading.Thread(
                target=self._serve, args=(connection, self._num_connections), name="store-serve", daemon=True
            )
            with self._lock:
                self._connections[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        thread = threading.current_thread()
        try:
            if self._tls:
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                with self._lock:
                    self._connections[thread] = connection
                connection.do_handshake()
            Conversation(self._service, connection, number).run()
        except (OSError, RequestError):
            pass  # the client went away, was cut off, or does not speak HTTP
        finally:
            with self._lock:
                del self._connections[thread]
            connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve folders as S3 buckets.")
    parser.add_argument("--root", required=True, help="the folder whose sub-folders are buckets")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to make (may be repeated)")
    parser.add_argument("--rate-mb-s", type=float, help="over all connections, in 10**6 bytes a second")
    parser.add_argument("--connection-rate-mb-s", type=float, help="of each connection")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before the first byte of each answer")
    parser.add_argument("--tls-certificate", help="a PEM file with certificate and key: serve https")
    parser.add_argument("--totals", action="store_true", help="in the end print as JSON what was asked for")
    parser.add_argument(
        "--tell-sent",
        action="store_true",
        help="for each byte on standard input, print how many it has sent",
    )
    for each in fields(FaultMix):
        flag = f"--{each.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(each.default), default=each.default, help="a fault")
    arguments = parser.parse_args()
    mix = FaultMix(**{each.name: getattr(arguments, each.name) for each in fields(FaultMix)})
    tls = None
    if arguments.tls_certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(arguments.tls_certificate)
    server = StoreServer(
        arguments.root,
        host=arguments.host,
        port=arguments.port,
        rate_mb_s=arguments.rate_mb_s,
        connection_rate_mb_s=arguments.connection_rate_mb_s,
        latency_ms=arguments.latency_ms,
        fault=None if mix == FaultMix() else RandomFaults(mix),
        tls=tls,
    )
    for bucket in arguments.bucket:
        server.objects.make_bucket(bucket)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with server, suppress(KeyboardInterrupt):
        print(server.url, flush=True)
        if arguments.tell_sent:
            threading.Thread(target=_tell_sent, args=(server,), name="store-tell-sent", daemon=True).start()
        ended.wait()
        if arguments.totals:
            print(json.dumps(_totals(server)), flush=True)


def _tell_sent(server: StoreServer) -> None:
    """One answer a byte that is sent, until the other end closes. Not through `sys.stdin`: its lock, held by a
    thread that waits for ever, would keep the interpreter from ending.
    """
    while os.read(sys.stdin.fileno(), 1):
        print(server.sent_bytes(), flush=True)


def _totals(server: StoreServer) -> dict[str, int]:
    """What it was asked for, and sent, of ranges."""
    ranges = [entry for entry in server.log() if entry.start is not None]
    return {"requests": len(ranges), "sent_bytes": sum(entry.sent_bytes for entry in ranges)}


if __name__ == "__main__":
    main()
