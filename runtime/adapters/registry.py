"""The adapters of one served decoder: found by name, loaded when a request asks for one, kept within a budget of bytes.

Invariants: the bytes of all adapters in memory and of those under way never exceed the budget. An adapter that a
request holds is never given up; of the others, the one used longest ago goes first. A load that finds no room waits
until requests end: an adapter that has room needs no more of it, so some request always can. What failed is forgotten
at once, and tried again by the next request. Bytes count until the arrays are freed: a step may compute with those of a
request that has been cancelled. It knows no engine, no step and no HTTP.
"""

from __future__ import annotations

import gc
import logging
import queue
import re
import threading
import time
import traceback
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress

from msgspec import Struct

from ...loader.errors import TeneralError, UsageError
from ...loader.sources.base import Source, SourceOptions
from ...loader.sources.open import model_address, open_source, split_pin
from ..errors import AdapterError, AdapterNotFoundError, AdapterUnavailableError
from ..models.decoder_config import DecoderConfig
from .load import as_adapter_error, open_adapter
from .loaded import LoadedAdapter
from .packed import too_big

logger = logging.getLogger(__name__)

MAX_LOADED = 4096
MAX_REGISTERED = 16_384
MAX_LOADS = 4  # at the same time
FIELD = "{name}"
FREED_WITHIN_S = 1.0  # of the end of the last request that held an adapter
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class _UnwantedError(AdapterUnavailableError):
    """All requests for an adapter have ended before there was room for it, or it was unloaded."""


class AdapterStatistics(Struct, frozen=True):
    """A moment's view; totals count from the start."""

    loaded: int
    loaded_bytes: int  # with those under way
    max_bytes: int
    pinned: int
    loading: int  # queued or under way
    waiting_for_room: int  # of these
    hits_total: int  # requests whose adapter was there, or on its way
    misses_total: int  # requests that had it loaded
    loads_total: int
    load_seconds_total: float  # from a load's queueing to its last byte
    failures_total: int  # without those given up because their requests had ended
    evictions_total: int


class AdapterRegistry:
    """Thread-safe. `close` it."""

    def __init__(
        self,
        base: DecoderConfig,
        *,
        template: str | None,
        max_bytes: int,
        options: SourceOptions | None = None,
        base_digest: bytes | None = None,
    ) -> None:
        """`template` is the address of an adapter's folder with {name} in it; None: only what `load` names is there.
        `base_digest` is that of the base's artifact, None for one that is not packed: only packed adapters ask for it.
        Raises `UsageError` for another template. Does no I/O.
        """
        self._base = base
        self._base_digest = base_digest
        self._max_bytes = max_bytes
        self._options = options
        self._folder = ""  # of an adapter in the source, with {name} in it
        self._source: Source | None = None
        if template is not None:
            root, self._folder = split_template(template)
            self._source = open_source(root, options)
        self._template = template
        self._changed = threading.Condition()
        self._adapters: OrderedDict[str, LoadedAdapter] = OrderedDict()  # the one used longest ago first
        self._addresses: dict[str, str] = {}  # of what `load` named
        self._named_loads: dict[str, Future[None]] = {}  # those of `load` under way
        self._own_sources: dict[LoadedAdapter, Source] = {}  # of adapters under way, named by `load`
        self._used_bytes = 0
        self._freed_bytes: deque[int] = deque()  # not yet taken off `_used_bytes`
        self._queue: queue.SimpleQueue[LoadedAdapter | None] = queue.SimpleQueue()
        self._num_threads = self._num_pending = 0  # pending: queued or under way
        self._is_closed = False
        self._num_loads = self._num_failures = self._num_evictions = 0
        self._num_hits = self._num_misses = self._num_waiting = 0
        self._load_s = 0.0

    # -- for requests ------------------------------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Raises `AdapterNotFoundError` for a name that no adapter can have here. Does no I/O."""
        with self._changed:
            if name not in self._addresses:
                self._require_name(name)

    def _require_name(self, name: str) -> None:
        """Raises `AdapterNotFoundError` for a name that no adapter can have below the template."""
        if self._template is None or not _NAME.fullmatch(name):
            raise AdapterNotFoundError(
                f"there is no adapter {name[:200]!r} here",
                param="model",
                hint="Names have up to 128 letters, digits and characters of ._-"
                if self._template is not None
                else "",
            )

    def is_registered(self, name: str) -> bool:
        """True if `load` named it."""
        with self._changed:
            return name in self._addresses

    def acquire(self, name: str) -> LoadedAdapter:
        """The adapter, held until `release`; its load begins unless it is there. Does not block. Raises as `check`."""
        with self._changed:
            address = self._addresses.get(name)
            if address is None:
                self._require_name(name)
            self._require_open()
            adapter = self._adapters.get(name)
            if adapter is None:
                adapter = self._adapters[name] = LoadedAdapter(name, address)
                self._num_misses += 1
                self._queue.put(adapter)
                self._start_thread()
            else:
                self._num_hits += 1
            self._adapters.move_to_end(name)
            adapter.num_pins += 1
            return adapter

    def release(self, adapter: LoadedAdapter) -> None:
        with self._changed:
            adapter.num_pins -= 1
            assert adapter.num_pins >= 0, f"the adapter {adapter.name} was released too often"
            self._changed.notify_all()

    # -- for an operator ---------------------------------------------------------------------------------------

    def load(self, name: str, address: str) -> None:
        """The blocking form of `loading`: returns when the adapter is there."""
        with self.loading(name, address) as done:
            done.result()

    @contextmanager
    def loading(self, name: str, address: str) -> Iterator[Future[None]]:
        """Have the adapter at this address found by this name, until `unload`. The future is done when it is there, or
        has what its load failed with: wait for it, and raise that error inside the context. A context that ends by an
        error, a cancellation among them, cancels the load; then nothing has changed. Does not block.
        """
        done = self._name(name, address)
        is_there = False
        try:
            adapter = self.acquire(name)
            try:
                adapter.when_changed(lambda: _settle(done, adapter))
                yield done
                is_there = True
            finally:
                self._end_loading(name, done, is_there=is_there)
                self.release(adapter)
                self._cancel_unheld(adapter)
        finally:
            self._end_loading(name, done, is_there=is_there)

    def _name(self, name: str, address: str) -> Future[None]:
        if not 0 < len(name) <= 256 or not name.isprintable():
            raise AdapterError("an adapter's name must be 1 to 256 printable characters", param="lora_name")
        with self._changed:
            if name in self._named_loads:
                raise AdapterError(
                    f"the adapter {name!r} is being loaded",
                    param="lora_name",
                    hint="Wait for it, or unload it first: that cancels its load.",
                )
            if name in self._addresses:
                raise AdapterError(
                    f"the adapter {name!r} has already been loaded",
                    param="lora_name",
                    hint="Unload it first.",
                )
            if len(self._addresses) >= MAX_REGISTERED:
                raise AdapterError(f"there are {MAX_REGISTERED} adapters already", param="lora_name")
            self._drop(name)  # one of the template's
            self._addresses[name] = address
            done: Future[None] = Future()
            self._named_loads[name] = done
            return done

    def _end_loading(self, name: str, done: Future[None], *, is_there: bool) -> None:
        with self._changed:
            if self._named_loads.get(name) is done:  # not unloaded meanwhile
                del self._named_loads[name]
                if not is_there:
                    self._addresses.pop(name, None)
                    self._drop(name)

    def unload(self, name: str) -> None:
        """Forget the adapter. Requests that hold it go on; a load by `load` that is under way is cancelled. Raises
        `AdapterNotFoundError`.
        """
        with self._changed:
            if name not in self._addresses and name not in self._adapters:
                raise AdapterNotFoundError(f"the adapter {name[:200]!r} cannot be found", param="lora_name")
            self._addresses.pop(name, None)
            self._drop(name)
            done = self._named_loads.pop(name, None)
        if done is not None:
            _fail(
                done, AdapterUnavailableError(f"the adapter {name!r} was unloaded before its load was done")
            )

    def listed(self) -> list[tuple[LoadedAdapter, bool]]:
        """Those that are there, and whether each was named by `load`."""
        with self._changed:
            there = [each for each in self._adapters.values() if each.is_complete]
            return [(each, each.name in self._addresses) for each in there]

    def statistics(self) -> AdapterStatistics:
        with self._changed:
            self._gather_freed()
            there = [each for each in self._adapters.values() if each.is_complete]
            return AdapterStatistics(
                loaded=len(there),
                loaded_bytes=self._used_bytes,
                max_bytes=self._max_bytes,
                pinned=sum(each.num_pins > 0 for each in self._adapters.values()),
                loading=len(self._adapters) - len(there),
                waiting_for_room=self._num_waiting,
                hits_total=self._num_hits,
                misses_total=self._num_misses,
                loads_total=self._num_loads,
                load_seconds_total=self._load_s,
                failures_total=self._num_failures,
                evictions_total=self._num_evictions,
            )

    def close(self) -> None:
        """Cancel all loads. Adapters held by requests stay valid. Idempotent."""
        with self._changed:
            self._is_closed = True
            num_threads, self._num_threads = self._num_threads, 0
            self._changed.notify_all()
            own = list(self._own_sources.values())
        for each in own:
            each.close()
        for _ in range(num_threads):
            self._queue.put(None)
        if self._source is not None:
            self._source.close()

    def quiesce(self) -> None:
        """Quiesce the connections of the store that the template names."""
        quiesce = getattr(self._source, "quiesce", None)
        if quiesce is not None:
            quiesce()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree. For tests."""
        with self._changed:
            self._gather_freed()
            listed = sum(each.size_bytes for each in self._adapters.values())
            assert listed <= self._used_bytes <= self._max_bytes
            assert all(each.is_listed and each.num_pins >= 0 for each in self._adapters.values())

    # -- loads -------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._num_pending += 1
        if self._num_threads >= min(self._num_pending, MAX_LOADS):
            return
        self._num_threads += 1
        threading.Thread(target=self._run, name=f"teneral-adapter-{self._num_threads}", daemon=True).start()

    def _run(self) -> None:
        while (adapter := self._queue.get()) is not None:
            try:
                digest = self._load(adapter)
            except TeneralError as error:
                self._fail(adapter, as_adapter_error(adapter.name, error))
            except Exception:
                logger.exception("the adapter %s could not be loaded", adapter.name)
                self._fail(
                    adapter, AdapterUnavailableError(f"the adapter {adapter.name!r} could not be loaded")
                )
            else:
                with self._changed:
                    self._num_loads += 1
                    self._load_s += time.monotonic() - adapter.queued_s
                adapter.finish(digest, None)
            del adapter  # it may be given up while this waits
            with self._changed:
                self._num_pending -= 1

    def _load(self, adapter: LoadedAdapter) -> bytes:
        with self._changed:
            self._require_wanted(adapter)
        if adapter.address is None:
            assert self._source is not None
            return self._read(adapter, self._source, self._folder.replace(FIELD, adapter.name))
        address, digest = split_pin(model_address(adapter.address))
        own = open_source(address, self._options)
        try:
            with self._changed:
                self._require_wanted(adapter)
                self._require_open()
                self._own_sources[adapter] = own
            return self._read(adapter, own, "", digest)
        finally:
            with self._changed:
                self._own_sources.pop(adapter, None)
            own.close()

    def _read(
        self, adapter: LoadedAdapter, source: Source, folder: str, digest: bytes | None = None
    ) -> bytes:
        """Load it; with `digest`, the packed adapter that has it. Returns the digest of its content."""
        started_s = time.monotonic()
        opened = open_adapter(
            source,
            folder,
            self._base,
            max_bytes=self._max_bytes,
            base_digest=self._base_digest,
            digest=digest,
        )
        self._make_room(adapter, opened.plan.size_bytes)
        try:
            weights = opened.plan.allocate()
        except BaseException:
            self._freed(opened.plan.size_bytes)
            raise
        weakref.finalize(weights, self._freed, opened.plan.size_bytes).atexit = False
        adapter.begin(weights)
        digest = opened.read(weights, adapter.note_layer)
        logger.info(
            "adapter %s: %d bytes in %.3f s",
            adapter.name,
            opened.stored_bytes,
            time.monotonic() - started_s,
        )
        return digest

    def _make_room(self, adapter: LoadedAdapter, size_bytes: int) -> None:
        """Count these bytes for the adapter, once there is room for them. Waits for requests to end."""
        if size_bytes > self._max_bytes:
            raise too_big(size_bytes, self._max_bytes)
        is_late = False  # arrays of adapters that made way have not been freed in time
        with self._changed:
            while True:
                self._gather_freed()
                self._require_open()
                self._require_wanted(adapter)
                self._give_up(size_bytes, also_for_freed=is_late)
                if self._used_bytes + size_bytes <= self._max_bytes:
                    break
                self._num_waiting += 1
                is_late = not self._changed.wait(FREED_WITHIN_S)
                self._num_waiting -= 1
                if is_late and sum(each.num_pins > 0 for each in self._adapters.values()) == 1:
                    gc.collect()  # only this one is held: a cycle of references keeps the others' arrays
            adapter.size_bytes = size_bytes
            self._used_bytes += size_bytes

    def _fail(self, adapter: LoadedAdapter, error: TeneralError) -> None:
        is_unwanted = isinstance(error, _UnwantedError) or not (adapter.is_listed or adapter.num_pins)
        logger.log(logging.INFO if is_unwanted else logging.WARNING, "%s", error.message)
        _clear_frames(error)
        with self._changed:
            self._num_failures += not is_unwanted
            if self._adapters.get(adapter.name) is adapter:
                self._drop(adapter.name)
        adapter.finish(None, error)

    def _cancel_unheld(self, adapter: LoadedAdapter) -> None:
        """End the load of an adapter that no request can reach any more: its source's readers give up."""
        with self._changed:
            own = None if adapter.is_listed or adapter.num_pins else self._own_sources.get(adapter)
        if own is not None:
            own.close()

    def _freed(self, size_bytes: int) -> None:
        """Count arrays as freed. The collector calls it in any thread, whatever that thread holds, so it waits for no
        lock: where another thread has it, that one or the next counts them.
        """
        self._freed_bytes.append(size_bytes)
        if self._changed.acquire(blocking=False):
            try:
                self._gather_freed()
                self._changed.notify_all()
            finally:
                self._changed.release()

    # -- under the lock ----------------------------------------------------------------------------------------

    def _give_up(self, size_bytes: int, *, also_for_freed: bool) -> None:
        """Have idle adapters make way for that many bytes, those that were not used for longest first. The arrays of
        others that have made way are about to be freed, unless `also_for_freed`.
        """
        idle = [each.name for each in self._adapters.values() if each.is_complete and not each.num_pins]
        for name in idle:
            listed_bytes = sum(each.size_bytes for each in self._adapters.values())
            taken_bytes = self._used_bytes if also_for_freed else listed_bytes
            if taken_bytes + size_bytes <= self._max_bytes and len(self._adapters) <= MAX_LOADED:
                return
            self._num_evictions += 1
            self._drop(name)

    def _drop(self, name: str) -> None:
        """No longer found by its name; its bytes are counted until its arrays are freed."""
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            adapter.is_listed = False
            self._changed.notify_all()

    def _gather_freed(self) -> None:
        while self._freed_bytes:
            self._used_bytes -= self._freed_bytes.popleft()

    def _require_wanted(self, adapter: LoadedAdapter) -> None:
        if not adapter.is_listed and adapter.num_pins:
            raise _UnwantedError(f"the adapter {adapter.name!r} was unloaded before it was there")
        if not adapter.num_pins:
            if adapter.is_listed:
                self._drop(adapter.name)  # under this lock: no request can pin it before it fails
            raise _UnwantedError(f"nothing asks for the adapter {adapter.name!r} any more")

    def _require_open(self) -> None:
        if self._is_closed:
            raise AdapterUnavailableError("the instance is shutting down")


def _settle(done: Future[None], adapter: LoadedAdapter) -> None:
    """Tell the future how the adapter's load ended, once it has."""
    if adapter.failure is not None:
        _fail(done, adapter.failure)
    elif adapter.is_complete:
        with suppress(InvalidStateError):  # unloaded, or given up
            done.set_result(None)


def _fail(done: Future[None], error: TeneralError) -> None:
    with suppress(InvalidStateError):
        done.set_exception(error)


def _clear_frames(error: BaseException | None) -> None:
    """Drop what the frames of the tracebacks refer to: the error is kept, their arrays need not be."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def split_template(template: str) -> tuple[str, str]:
    """The address of the folder that holds all adapters, and an adapter's place in it: s3://bucket/lora/{name} gives
    s3://bucket/lora and {name}. Raises `UsageError`.
    """
    before, found, behind = template.partition(FIELD)
    if not found or set(before + behind.replace(FIELD, "")) & set("{}?#\0"):
        raise UsageError(
            f"{template!r} must have {FIELD} in its path, and no other braces",
            key="adapters",
            hint=f"Give an address such as s3://bucket/adapters/{FIELD}.",
        )
    root, slash, beginning = before.rpartition("/")
    if slash and (not root or root.endswith("/") or root.endswith(":")):
        if root:
            raise UsageError(
                f"{template!r}: {FIELD} may not be in place of a host or a bucket", key="adapters"
            )
        root = "/"
    folder = beginning + FIELD + behind.rstrip("/")
    if any(part in ("", ".", "..") for part in folder.split("/")):
        raise UsageError(f"{template!r} has an empty part behind {FIELD}", key="adapters")
    return root or ".", folder
