"""`teneral pool run`: one machine's pool behind one port, until a signal ends it.

Reads the file and the repository again on SIGHUP, and with `watch` every few seconds: what cannot
be used changes nothing and is logged.

Sockets and KV snapshots lie in a named folder, or in one of the run's own, which is removed at its
end. That of a run that was killed is removed by the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from ...loader.errors import UsageError
from ...loader.memory.limits import available_bytes
from ...loader.process.scratch import ScratchFolder, owning, remove_abandoned
from ...loader.sources.open import scheme_of
from ...runtime.config import PREFIX, ServeConfig
from ..console.files import PATHS as CONSOLE_PATHS
from ..console.routes import PageRoutes
from ..http.admission import Bodies
from ..http.connections import Connections, app_runner
from ..http.edge import QUIET_PATHS, Edge, EdgeRules
from ..http.errors import ApiError
from ..http.key_limits import KeyLimits, make_key_limits
from ..http.keys import ApiKeys, parse_keys
from ..http.limits import Limits
from ..http.listening import OPEN_WARNING, is_loopback, listen, max_files, shown_address
from ..http.logs import write_json
from ..http.service import HttpCall
from ..http.web_pages import ANY, Hosts, Origins, parse_hosts, parse_origins
from ..platforms import shaped_response
from .admission import STANDBY_KEY
from .deployment import Deployment
from .file import read_pool
from .fitting import crowded_devices
from .front import Front, as_pool_error
from .memory import Budget
from .metrics import PoolMetrics
from .overview import OPEN_PATHS, Overview, audit
from .process import Machine, StandbyChild, inherited_environment, instance_config, standby_bytes
from .reload import Reloader
from .repository import Release, ReleaseRepository, models_in
from .supervisor import Supervisor
from .values import Code, Model, Pool
from .versions import ModelState

FOLDER_PREFIX = "teneral-pool-"


@contextmanager
def state_folder(given: str | None) -> Iterator[Path]:
    """The folder `given`, made where it does not exist; without one, a temporary folder, which is removed at the end.

    Raises `UsageError` where it cannot be made or used, or another pool uses it.
    """
    with ExitStack() as stack:
        try:
            if given is None:
                remove_abandoned(FOLDER_PREFIX)
                folder = stack.enter_context(ScratchFolder(FOLDER_PREFIX)).path
            else:
                folder = Path(given).absolute()
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                stack.enter_context(owning(folder))
        except BlockingIOError as error:
            raise UsageError(
                f"another pool keeps its state in {folder}",
                key="state-dir",
                hint="End that pool, or name another folder with --state-dir.",
            ) from error
        except OSError as error:
            raise UsageError(f"cannot use a folder for the pool's state: {error}", key="state-dir") from error
        yield folder


WATCH_S = 10.0
BACKLOG = 1024
MAX_BODIES_BYTES = 256 << 20  # of all requests at the same time
FILES_PER_INSTANCE = 4  # at most: while it starts, and its connection for probes
logger = logging.getLogger("teneral.pool")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command's flags. `state_folder` keeps KV snapshots between runs; None: a temporary one."""

    file: str = "pool.toml"
    repository: str | None = None  # a folder of models whose versions are folders
    host: str = "127.0.0.1"
    port: int = 8080
    is_hosted: bool = False  # on a platform, which decides who calls and by which name
    watch: bool = False
    watch_s: float = WATCH_S
    model_control: bool = False
    key_limits: str | None = None  # as in `http.key_limits`
    console: bool = True
    state_folder: str | None = None
    log_level: str = "info"
    log_format: str = "text"  # or json


def run_pool(options: RunOptions) -> int:
    """Blocks until SIGTERM or SIGINT. Returns 0; raises `TeneralError` for what cannot begin."""
    if sys.platform != "linux":
        raise UsageError("teneral pool run needs Linux", hint="Run it in a container.")
    pool = _read(options)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if options.log_format == "json":
        write_json()
    with state_folder(options.state_folder) as folder, listen(options.host, options.port) as sock:
        asyncio.run(PoolRunner(pool, options, folder, dict(os.environ)).serve(sock))
    return 0


def _read(options: RunOptions) -> Pool:
    """The pool file, and the models of the repository. Blocks. Raises `TeneralError`."""
    if options.repository is None:
        return read_pool(options.file)
    address = options.repository
    if not scheme_of(address):
        address = os.path.abspath(os.path.expanduser(address))
    found = models_in(address)
    if not found:
        raise UsageError(
            f"{address} holds no model",
            key="repository",
            hint="Lay models out as <model>/<version>/, versions being whole numbers.",
        )
    return read_pool(options.file, found=found)


class PoolRunner:
    """One run. Lives on one event loop."""

    def __init__(self, pool: Pool, options: RunOptions, folder: Path, environment: Mapping[str, str]) -> None:
        self._pool = pool
        self._options = options
        self._folder = folder
        self._environment = environment
        self._repository = ReleaseRepository(pool.folder)
        self._supervisor: Supervisor | None = None
        key = environment.get(f"{PREFIX}API_KEY")
        self._key = key or None
        self._keys = None if not key else ApiKeys(parse_keys(key))
        self._key_limits = make_key_limits(options.key_limits, self._keys)

    async def serve(self, sock: socket.socket) -> None:
        supervisor, reloader = await self._make_supervisor()
        self._supervisor = supervisor
        limits = _limits(supervisor)
        connections = Connections(limits)
        bodies = Bodies(limits, lambda request: connections.body_is_there(request.protocol))
        front = Front(supervisor, bodies, self._keys, self._key_limits)
        options = self._options
        app = PoolEdge(supervisor, front, connections, self._keys, options, self._key_limits).application()
        routes = list(
            Overview(
                supervisor, self._keys, may_control=options.model_control, key_limits=self._key_limits
            ).routes()
        )
        if options.console:
            routes += PageRoutes(mode="pool", needs_key=self._keys is not None).routes()
        app.add_routes([*routes, *front.routes()])
        runner = app_runner(app)
        await runner.setup()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(connections.guarding(runner.server), sock=sock, backlog=BACKLOG)
        lines = [f"pool of {len(supervisor.models)} models on http://{shown_address(sock)}"]
        if self._keys is None and not is_loopback(sock) and not self._options.is_hosted:
            lines.append(OPEN_WARNING)
        for line in lines:  # each in one write: other processes write there, too
            print(f"teneral: {line}\n", end="", file=sys.stderr, flush=True)
        tasks = [asyncio.create_task(supervisor.run())]
        if self._options.watch:
            tasks.append(asyncio.create_task(reloader.watch(self._options.watch_s)))
        try:
            with _signals(reloader) as stop:
                await stop.wait()
            logger.info("draining")
            supervisor.draining = True
            listener.close()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await supervisor.close()
            await front.close()
            listener.close()
            await runner.cleanup()

    # models

    async def _make_supervisor(self) -> tuple[Supervisor, Reloader]:
        node = self._pool.node
        limit_bytes = node.memory_bytes or available_bytes() or 1 << 60
        budget = Budget(limit_bytes)
        base = await asyncio.to_thread(self._repository.standby_base, node)
        budget.keep(STANDBY_KEY, standby_bytes(node, base))
        standby = StandbyChild(self._folder, self._pool) if node.standby else None
        states = {name: ModelState(model) for name, model in self._pool.models.items()}
        machine = Machine(standby, inherited_environment(self._environment))
        supervisor = Supervisor(self._pool, states, budget, PoolMetrics(), machine)
        reloader = Reloader(
            supervisor,
            self._repository,
            read=lambda: _read(self._options),
            configure=self._config,
            base=base,
        )
        await reloader.refresh_all()
        self._check_fits(supervisor, limit_bytes, standby_bytes(node, base))
        return supervisor, reloader

    def _config(self, pool: Pool, model: Model, release: Release) -> ServeConfig:
        config = instance_config(
            pool,
            model,
            release,
            self._folder,
            self._environment,
            log_format=self._options.log_format,
        )
        if self._key is not None and config.api_key is None:
            return config.replace(api_key=self._key)
        return config

    def _check_fits(self, supervisor: Supervisor, limit_bytes: int, kept_bytes: int) -> None:
        """Raises E10 where what is to be warm does not fit."""
        warm = [d for state in supervisor.models.values() for d in state.targets()]
        needed = sum(d.scaled.min_warm * d.need_bytes for d in warm) + kept_bytes
        if needed > limit_bytes:
            parts = [_shown(d) for d in warm if d.scaled.min_warm]
            if kept_bytes:
                parts.append(f"{kept_bytes >> 20:,} MiB of standby processes")
            raise self._pool.error(
                Code.E10,
                f"is {limit_bytes >> 20:,} MiB, but min_warm instances and standby processes need "
                f"{needed >> 20:,} MiB: " + ", ".join(parts),
                "node",
                "memory",
                hint="Lower min_warm or kv_bytes of a model, or standby_memory, or give [node] more memory.",
            )
        for trouble in crowded_devices((d.model, d.scaled.min_warm) for d in warm):
            raise self._pool.error(
                Code.E10, trouble, "models", hint="Lower min_warm or device_percent of a model."
            )


@contextmanager
def _signals(reloader: Reloader) -> Iterator[asyncio.Event]:
    """SIGTERM and SIGINT set the event, a second one ends the process at once; SIGHUP reloads."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    reloads: set[asyncio.Task[None]] = set()

    def end(number: int) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()

    def reload() -> None:
        task = asyncio.create_task(reloader.reload(is_asked=True))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield stop
    finally:
        with suppress(ValueError):
            loop.remove_signal_handler(signal.SIGHUP)


def _limits(supervisor: Supervisor) -> Limits:
    """The bounds of the front: connections for the places at all instances, and some to spare, as far as the limit of
    open files allows.
    """
    models = [state.model for state in supervisor.models.values()]
    places = sum(model.max_instances * model.max_concurrency for model in models)
    # Each request has a connection to its instance, too, and each instance has files of its own.
    num_files = max_files() - FILES_PER_INSTANCE * sum(model.max_instances for model in models)
    wanted = Limits(
        max_connections=max(1024, min(65_536, 2 * places)), max_body_bytes_in_flight=MAX_BODIES_BYTES
    )
    limits = wanted.within_files(num_files // 2)
    if limits.max_connections < wanted.max_connections:
        logger.info("%d connections at a time, because ulimit -n is %d", limits.max_connections, max_files())
    return limits


class PoolEdge(Edge):
    """The edge of a pool's port. Web pages may send requests from the pool's own address and from origins that a
    model's `cors_origin` names; the pool's names are those of any model's `allowed_hosts`.
    """

    is_front = True

    def __init__(
        self,
        supervisor: Supervisor,
        front: Front,
        connections: Connections,
        keys: ApiKeys | None,
        options: RunOptions,
        key_limits: KeyLimits | None,
    ) -> None:
        rules = EdgeRules(
            open_paths=OPEN_PATHS | (CONSOLE_PATHS if options.console else frozenset()),
            quiet_paths=QUIET_PATHS | {"/v1/pool"},  # which the console reads every second
            error_response=shaped_response,
        )
        super().__init__(connections, keys, rules, logger, key_limits=key_limits)
        self._supervisor = supervisor
        self._front = front
        self._any_host = frozenset({ANY}) if options.is_hosted else frozenset()
        self._pages = self._pages_of(supervisor.pool)

    @property
    def is_draining(self) -> bool:
        return self._supervisor.draining

    def pages(self) -> tuple[Hosts, Origins]:
        if self._pages[0] is not self._supervisor.pool:
            self._pages = self._pages_of(self._supervisor.pool)
        return self._pages[1:]

    def ended(self, request: web.Request, status: int, call: HttpCall) -> None:
        audit(request, status, self.keys)
        if call.model:
            self._supervisor.metrics.request_ended(call.model, status, call.age_s())

    def as_api_error(self, error: Exception) -> ApiError:
        return as_pool_error(error)

    def is_open(self, request: web.Request) -> bool:
        """The front checks keys itself: its models may have their own."""
        return request.match_info.handler == self._front.work or super().is_open(request)

    def _pages_of(self, pool: Pool) -> tuple[Pool, Hosts, Origins]:
        origins = _named(pool, "cors_origin", parse_origins)
        hosts = _named(pool, "allowed_hosts", parse_hosts)
        is_open = self.keys is None
        return (
            pool,
            Hosts(hosts or self._any_host, is_open=is_open, origins=origins),
            Origins(origins, hosts),
        )


def _named(pool: Pool, setting: str, parse: Callable[[str], frozenset[str]]) -> frozenset[str]:
    """The values of a setting in all models together."""
    return frozenset(
        name for model in pool if (text := model.serve.get(setting)) for name in parse(str(text))
    )


def _shown(deployment: Deployment) -> str:
    return f"{deployment.scaled.min_warm} × {deployment.need_bytes >> 20:,} MiB of {deployment.name}"
