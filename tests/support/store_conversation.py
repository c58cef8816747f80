"""One client's connection to the store server: its requests are answered, paced, spoiled and logged."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from tests.support import store_routes
from tests.support.store_faults import Fault, FaultHook
from tests.support.store_http import Answer, FileBody, Request, RequestStream, answer_head
from tests.support.store_objects import Objects
from tests.support.store_pacing import SLICE_BYTES, Pacer

MAX_LOG_ENTRIES = 100_000
UNPACED_SLICE_BYTES = 8 * 1024 * 1024
TLS_SLICE_BYTES = 1024 * 1024
TRICKLE_STEP_S = 0.02  # between two slices of a body that trickles


@dataclass
class LogEntry:
    """One request that is, or was, answered. `start` and `end` are the range it asked for, half-open."""

    method: str
    bucket: str
    key: str
    start: int | None
    end: int | None
    status: int  # 0: never answered
    connection: int
    received_s: float  # on time.monotonic()'s clock
    done_s: float | None = None  # None while the answer is being sent
    sent_bytes: int = 0


@dataclass
class Service:
    """What all conversations of one server share."""

    objects: Objects
    pacer: Pacer | None
    connection_rate_mb_s: float | None
    latency_s: float
    fault: FaultHook | None
    stopping: threading.Event = field(default_factory=threading.Event)
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=MAX_LOG_ENTRIES))
    serials: Iterator[int] = field(default_factory=count)


class Conversation:
    """Runs until the client closes, a fault cuts it, or the server stops. `number` counts the connections."""

    def __init__(self, service: Service, connection: socket.socket, number: int) -> None:
        self._service = service
        self._connection = connection
        self._number = number
        rate_mb_s = service.connection_rate_mb_s
        own = Pacer(rate_mb_s) if rate_mb_s else None
        self._pacers = [pacer for pacer in (service.pacer, own) if pacer]

    def run(self) -> None:
        stream = RequestStream(self._connection)
        while not self._service.stopping.is_set():
            request = stream.next_head(next(self._service.serials), self._number)
            if request is None or not self._answer(request, stream):
                return

    def _answer(self, request: Request, stream: RequestStream) -> bool:
        """True if the connection can be used again."""
        fault = (self._service.fault(request) if self._service.fault else None) or Fault()
        if fault.drop or not self._wait(fault.first_byte_s):
            self._note(request, status=0).done_s = time.monotonic()
            return False
        if fault.status is None:
            answer = store_routes.answer(self._service.objects, request, stream)
        else:
            answer = store_routes.error_answer(fault.status, fault.code, request)
        answer = self._spoiled(request, answer, fault)
        if self._service.latency_s:
            time.sleep(self._service.latency_s)
        return self._send(request, answer, fault)

    def _spoiled(self, request: Request, answer: Answer, fault: Fault) -> Answer:
        """The answer as the fault wants it, where that is about the content, not about how it is sent."""
        headers, body, status = dict(answer.headers), answer.body, answer.status
        if isinstance(body, FileBody) and status == 206:
            size_bytes = self._service.objects.find(request.bucket, request.key).size_bytes
            if fault.swap_range_bytes:
                last_start = size_bytes - body.count
                body = replace(body, start=min(max(0, body.start + fault.swap_range_bytes), last_start))
            elif fault.ignore_range:
                del headers["Content-Range"]
                status, body = 200, FileBody(body.path, 0, size_bytes)
            elif fault.shift_range_bytes:
                body = replace(body, start=body.start + fault.shift_range_bytes)
                last = body.start + body.count - 1
                headers["Content-Range"] = f"bytes {body.start}-{last}/{size_bytes}"
        return Answer(status, {**headers, **fault.headers}, body)

    def _send(self, request: Request, answer: Answer, fault: Fault) -> bool:
        entry = self._note(request, answer.status)
        length = 0 if request.method == "HEAD" else answer.length
        stops = {stop for stop in (fault.cut_after_bytes, fault.stall_after_bytes) if stop is not None}
        try:
            self._connection.sendall(answer_head(answer))
            for stop in [*sorted(stop for stop in stops if stop < length), length]:
                self._send_body(answer.body, entry, stop, fault)
                if stop == fault.stall_after_bytes and not self._wait(fault.stall_s):
                    return False
                if stop == fault.cut_after_bytes:
                    return False
        finally:
            entry.done_s = time.monotonic()
        return True

    def _wait(self, seconds: float) -> bool:
        """Do nothing for so long; False when the client closes, or the server stops, before that."""
        until_s = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        while (left_s := until_s - time.monotonic()) > 0:
            if self._service.stopping.is_set() or poll.poll(1000 * min(left_s, 0.05)):
                return False
        return True

    def _send_body(self, body: bytes | FileBody, entry: LogEntry, end: int, fault: Fault) -> None:
        """Send the body's bytes from where it stands up to `end`, one slice at a time, each when it is due."""
        if isinstance(body, bytes):
            self._connection.sendall(body[entry.sent_bytes : end])
            entry.sent_bytes = end
            return
        pacers, slice_bytes = self._pacers, SLICE_BYTES if self._pacers else UNPACED_SLICE_BYTES
        if fault.rate_bytes_s is not None:
            pacers = [*pacers, Pacer(fault.rate_bytes_s / 1e6)]
            slice_bytes = max(1, int(fault.rate_bytes_s * TRICKLE_STEP_S))
        with open(body.path, "rb") as file:
            while entry.sent_bytes < end:
                size = min(end - entry.sent_bytes, slice_bytes)
                for pacer in pacers:
                    pacer.wait(size)
                entry.sent_bytes += self._send_slice(file.fileno(), body, entry.sent_bytes, size, fault)

    def _send_slice(self, fd: int, body: FileBody, start: int, size: int, fault: Fault) -> int:
        """The number of bytes sent, at least one."""
        offset = body.start + start
        flip_at = None if fault.flip_bit is None else fault.flip_bit // 8 - start
        if flip_at is not None and 0 <= flip_at < size:
            data = bytearray(os.pread(fd, size, offset))
            data[flip_at] ^= 1 << fault.flip_bit % 8
            self._connection.sendall(data)
        elif isinstance(self._connection, ssl.SSLSocket):
            data = bytearray(os.pread(fd, min(size, TLS_SLICE_BYTES), offset))
            self._connection.sendall(data)
        else:
            sent = os.sendfile(self._connection.fileno(), fd, offset, size)
            if sent == 0:
                raise ConnectionError("the file became shorter")
            return sent
        return len(data)

    def _note(self, request: Request, status: int) -> LogEntry:
        start, end = request.range or (None, None)
        entry = LogEntry(
            method=request.method,
            bucket=request.bucket,
            key=request.key,
            start=start,
            end=end,
            status=status,
            connection=self._number,
            received_s=request.received_s,
        )
        self._service.log.append(entry)
        return entry
