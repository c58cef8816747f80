"""RunPod's side of a queue, as its SDK knows it: jobs are taken by long polls, results and streams are posted, jobs are
stopped by another long poll, and pings say that the worker lives.

Written from the SDK's source: the paths and parameters are those that it makes of the variables here.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

WORKER = "worker-1"
POLL_S = 100.0  # how long a poll is held: longer than any test waits for a worker to end


class RunPodService:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[dict[str, Any]] = deque()
        self._to_stop: list[str] = []
        self._closed = False
        self.outputs: dict[str, dict[str, Any]] = {}  # what ended each job
        self.progress: dict[str, list[Any]] = defaultdict(list)
        self.streams: dict[str, list[Any]] = defaultdict(list)
        self.batch_sizes: list[int] = []
        self.num_polls = 0
        self.pinged_jobs: list[str] = []

    # the test's

    def submit(self, job_id: str, event: Any) -> None:
        with self._changed:
            self._jobs.append({"id": job_id, "input": event})
            self._changed.notify_all()

    def stop(self, job_id: str) -> None:
        with self._changed:
            self._to_stop.append(job_id)
            self._changed.notify_all()

    def wait(self, condition: Any, timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "this did not happen"

    def output_of(self, job_id: str) -> dict[str, Any]:
        self.wait(lambda: job_id in self.outputs)
        return self.outputs[job_id]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # the worker's

    def take(self, batch_size: int | None) -> Any:
        with self._changed:
            self.num_polls += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._closed, POLL_S)
            if not self._jobs or self._closed:
                return None
            if batch_size is None:
                return self._jobs.popleft()
            self.batch_sizes.append(batch_size)
            return [self._jobs.popleft() for _ in range(min(batch_size, len(self._jobs)))]

    def to_stop(self) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: self._to_stop or self._closed, POLL_S)
            stopped, self._to_stop = self._to_stop, []
            return stopped

    def done(self, job_id: str, posted: dict[str, Any]) -> None:
        with self._changed:
            if posted.get("status") == "IN_PROGRESS":
                self.progress[job_id].append(posted["output"])
            else:
                self.outputs[job_id] = posted
            self._changed.notify_all()

    def streamed(self, job_id: str, posted: dict[str, Any]) -> None:
        with self._changed:
            self.streams[job_id].append(posted["output"])
            self._changed.notify_all()

    def pinged(self, job_ids: str) -> None:
        with self._changed:
            self.pinged_jobs.append(job_ids)
            self._changed.notify_all()


def environment(url: str) -> dict[str, str]:
    """What RunPod sets for a worker of the service at `url`."""
    base = f"{url}/v2/endpoint"
    return {
        "RUNPOD_WEBHOOK_GET_JOB": f"{base}/job-take/$ID?gpu=none",
        "RUNPOD_WEBHOOK_POST_OUTPUT": f"{base}/job-done/$RUNPOD_POD_ID/$ID?gpu=none",
        "RUNPOD_WEBHOOK_POST_STREAM": f"{base}/job-stream/$RUNPOD_POD_ID/$ID?gpu=none",
        "RUNPOD_WEBHOOK_PING": f"{base}/ping/$RUNPOD_POD_ID",
        "RUNPOD_PING_INTERVAL": "1000",
        "RUNPOD_AI_API_KEY": "key-of-the-worker",
        "RUNPOD_POD_ID": WORKER,
        "RUNPOD_ENDPOINT_ID": "endpoint",
        # The SDK looks at the machine before it works: at its disk, and at the network, which tests do not reach.
        "RUNPOD_SKIP_AUTO_SYSTEM_CHECKS": "true",
        "RUNPOD_SKIP_GPU_CHECK": "true",
    }


@contextmanager
def runpod_service() -> Iterator[tuple[RunPodService, str]]:
    service = RunPodService()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            action, query = parts.path.split("/")[3], parse_qs(parts.query)
            if action == "ping":
                service.pinged(query.get("job_id", [""])[0])
                return self._answer({})
            if self.headers["Authorization"] != "key-of-the-worker":
                return self.send_error(401)
            if action == "job-stop":
                return self._answer({"jobsToStop": service.to_stop()})
            return self._answer(
                service.take(int(query["batch_size"][0]) if action == "job-take-batch" else None)
            )

        def do_POST(self) -> None:
            _, _, _, action, worker, job_id = urlsplit(self.path).path.split("/")
            posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert worker == WORKER
            (service.done if action == "job-done" else service.streamed)(job_id, posted)
            self._answer({})

        def _answer(self, value: Any) -> None:
            body = b"" if value is None else json.dumps(value).encode()
            try:
                self.send_response(204 if value is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:
                pass  # the worker has ended

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield service, f"http://127.0.0.1:{server.server_port}"
    finally:
        service.close()
        server.shutdown()
        server.server_close()
        thread.join()
