"""Orders to standby processes: what they bring along, and how long they may take."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.load import patience_s
from tests.support.standby_processes import (
    WAIT_S,
)

from teneral.handlers.standby.handover import Channel, HandOver, HandoverError, hand_over
from teneral.handlers.standby.pool import listen_locally
from teneral.loader.load.launch import Task
from teneral.loader.load.options import LoadOptions
from teneral.loader.process.helper import ProcessContext, ProcessLimits
from teneral.loader.sources.base import SourceOptions
from teneral.loader.timeline import Timeline
from teneral.runtime.config import ServeConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are handed over as Linux does it")


def test_files_that_came_with_a_bad_order_are_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Channel(theirs)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(ours, [b"{}\n"], [0, 1, 2])
    with pytest.raises(HandoverError, match="invalid order"):
        channel.receive_order()
    assert len(os.listdir("/proc/self/fd")) == before
    channel.close()
    ours.close()


def test_an_order_brings_the_clients_umask_limits_niceness_and_cores() -> None:
    """Another process takes them over, like a standby."""
    client = """if True:
        import os, resource, socket, sys
        from teneral.handlers.standby.handover import Channel, HandOver
        from teneral.loader.process.helper import ProcessLimits, ProcessContext
        from teneral.runtime.config import ServeConfig

        os.umask(0o027)
        os.nice(5)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        resource.setrlimit(resource.RLIMIT_NOFILE, (77, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        context = ProcessContext({}, "/", ProcessLimits.current())
        ours, theirs = socket.socketpair()
        if os.fork():
            Channel(ours).send_order(HandOver(ServeConfig(model="m"), context, 0.0, (0, 1, 2), 0))
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        os.umask(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        Channel(theirs).receive_order().context.apply()
        assert os.umask(0) == 0o027
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 77
        assert len(os.sched_getaffinity(0)) == 1
        assert os.getpriority(os.PRIO_PROCESS, 0) == os.getpriority(os.PRIO_PROCESS, os.getppid())
        assert context.limits == ProcessLimits.current()._replace(umask=0o027)
    """
    done = subprocess.run(
        [sys.executable, "-c", client], capture_output=True, text=True, timeout=patience_s(60)
    )
    assert done.returncode == 0, done.stderr


def test_a_hard_limit_that_cannot_be_raised_stays_and_the_soft_one_keeps_below_it() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    before = resource.getrlimit(resource.RLIMIT_CORE)
    limits = ProcessLimits.current()
    limits._replace(
        resources={"CORE": (before[1] + 1 if before[1] >= 0 else 5, -1), "UNKNOWN": (1, 1)}
    ).take()
    try:
        soft, own = resource.getrlimit(resource.RLIMIT_CORE)
        assert own == -1 or 0 <= soft <= own
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (before[0], resource.getrlimit(resource.RLIMIT_CORE)[1]))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard


def test_an_orders_secrets_are_not_shown() -> None:
    context = ProcessContext({"AWS_SECRET_ACCESS_KEY": "hush"}, "/")
    order = HandOver(ServeConfig(model="m"), context, 0.0, (0, 1, 2), 3)
    assert "hush" not in repr(order)
    assert "hush" not in repr(Task("m", None, SourceOptions(), LoadOptions(), 0.0, context=context))


@pytest.mark.parametrize(("tasks_a_core", "is_taken"), [(0.5, False), (10.0, True)])
def test_where_tasks_wait_for_cores_a_standby_has_longer_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks_a_core: float, is_taken: bool
) -> None:
    load = tasks_a_core * (os.cpu_count() or 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    path = str(tmp_path / "standby.sock")

    def answer_late() -> None:
        channel = Channel(pool.accept()[0])
        order = channel.receive_order()
        assert order is not None
        order.close()
        time.sleep(0.6)
        with contextlib.suppress(HandoverError):
            channel.send({"process": os.getpid()})
            channel.receive()
            channel.send({"status": 7})
        channel.close()

    with listen_locally(path) as pool, socket.socket() as listener, ThreadPoolExecutor(1) as standby:
        answering = standby.submit(answer_late)
        config = ServeConfig(model="m", standby_socket=path)
        assert hand_over(config, listener, Timeline()) == (7 if is_taken else None)
        answering.result(WAIT_S)
