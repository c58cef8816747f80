"""Private state of the product's parts that tests look at or change: its names are in this file alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def state_of(engine: Any) -> Any:
    """An engine's `SchedulerState`. Hold its `changed` while the engine runs."""
    return engine._state


def capacity_of(engine: Any) -> Any:
    """Its `Capacity`."""
    return engine._state._capacity


def kv_of(engine: Any) -> Any:
    """Its storage of keys and values; also of an executor on a device."""
    return engine._kv


def programs_of(executor: Any) -> Any:
    """Its programs, by the steps that they serve."""
    return executor._programs


def workspace_of(executor: Any) -> Any:
    """The memory that an executor on a device computes in."""
    return executor._workspace


def backend_of(engine: Any) -> Any:
    return engine._backend


def drafting_of(engine: Any) -> Any:
    """The members that its early phase would draft for now."""
    return engine._loop.early._who_drafts()


def connections_of(source: Any) -> Any:
    """The pool of connections of a source over HTTP."""
    return source._client._pool


def tiers_of(spill: Any) -> Any:
    """The tiers of spilled blocks."""
    return spill._tiers


def prefill_times_of(spill: Any) -> Any:
    """The recent times of computed tokens, by which a spill decides what is worth a fetch."""
    return spill._prefill._recent


def file_of(medium: Any) -> Any:
    """The file of a `DiskMedium`."""
    return medium._file


def followers_of(prefixes: Any) -> Any:
    """The blocks that may follow others, with their tokens."""
    return prefixes._followers


def model_of(engine: Any) -> Any:
    return engine._model


def draft_steps_of(engine: Any) -> int:
    """The number of draft steps of its early phase."""
    return int(engine._loop.early._num_draft_steps)


def record_copies(engine: Any, copied: list[int]) -> None:
    """Note the source of each copy of a block's tokens from now on."""
    blocks = state_of(engine).blocks
    copy_tokens = blocks._copy_tokens
    blocks._copy_tokens = lambda *block: (copied.append(block[0]), copy_tokens(*block))


def events_of(generation: Any) -> Any:
    """The events that no caller has taken yet."""
    return generation._events


def before_end(generation: Any, call: Callable[[], None]) -> None:
    """Call this between the end of a generation and the engine's notice of it."""
    tell_engine = generation._on_end
    generation._on_end = lambda *args: (call(), tell_engine(*args))


def text_backend_of(tokenizer: Any) -> Any:
    """The `TextBackend` of a tokenizer."""
    return tokenizer._backend


def lines_of(backend: Any) -> Any:
    """The connections of a tokenizer's process."""
    return backend._child._lines


def set_failure(instance: Any, error: Exception) -> None:
    """Let an instance have failed, without the reaction of its server."""
    instance._failure = error


def replace_result(future: Any, result: Any) -> None:
    """Let a future that is done have another result."""
    future._result = result


def fine_tunes_of(slot: Any) -> Any:
    """The instances of a slot's fine-tunes that live."""
    return slot._tuned


def idle_threads_of(threads: Any) -> Any:
    return threads._idle


def executable_of(runner: Any) -> Any:
    """The sessions by which an `OnnxRunner` computes now."""
    return runner._model


def slices_of(reader: Any) -> Any:
    """The parts of a prefetch, as it reads them."""
    return reader._slices


def slabs_of(base: Any) -> Any:
    """The memory of a base that is resident."""
    return base._slabs


def staging_of(work: Any) -> Any:
    """The staging memory of a load's queue."""
    return work._staging


def threads_of(load: Any) -> Any:
    return load._threads


def hooks_of(load: Any) -> Any:
    """The gates of a module's layers."""
    return load._hooks


def timeline_of(load: Any) -> Any:
    return load._timeline


def child_of(load: Any) -> Any:
    """The process of a `ProcessLoad`."""
    return load._child


def child_of_feed(load: Any) -> Any:
    """The process that feeds a `DeviceLoad`."""
    return load._feed._child


def placed_of(load: Any, group: int) -> Any:
    """The event of the last placement in a group of a `DeviceLoad`."""
    return load._placement._last[group]._done


def device_speed_of(load: Any) -> Any:
    """The speed of a `DeviceLoad`'s device, as measured."""
    return load._device_is.__self__._images._device


def replace_allocator(engine: Any, allocator: Any) -> None:
    """Let an engine that has not started allocate its blocks by this."""
    blocks = state_of(engine).blocks
    blocks.allocator = blocks.prefixes._allocator = allocator


def has_blocks_to_save(spill: Any) -> bool:
    return bool(spill._is_poked)


def after_save(service: Any, call: Callable[[], object]) -> None:
    """Call this at the end of each save of a `SnapshotService`, in the thread that saves."""
    save = service._save

    def save_and_call(*args: Any) -> Any:
        try:
            return save(*args)
        finally:
            call()

    service._save = save_and_call


def held_by(scanner: Any) -> Any:
    """The text that a scanner, splitter or chunker keeps until more arrives."""
    return scanner._held


def thread_of(part: Any) -> Any:
    return part._thread


def memory_of(reserve: Any) -> Any:
    return reserve._memory


def set_taken_bytes(reserve: Any, num_bytes: int) -> None:
    """Let a reserve have taken this much of its memory."""
    reserve._taken_bytes = num_bytes


def close_fd_of(locks: Any) -> None:
    """Close the file of `RefineLocks` under them."""
    os.close(locks._fd)


def set_fd(locks: Any, fd: int) -> None:
    locks._fd = fd


def steps_of(order: Any) -> Any:
    """The steps of a `FetchOrder`, by their numbers."""
    return order._steps


def authorized(store: Any, *request: Any) -> Any:
    """A request of an `AzStore`, signed."""
    return store._authorized(*request)


def kept_for_writing(store: Any) -> int:
    """The idle connections of a store's writing side."""
    kept: int = store._uploads._client._pool.statistics().idle
    return kept


def weights_of(load: Any) -> Any:
    """The `WeightLoad` of a `ModuleLoad`."""
    return load._weights


def lock_of(registry: Any) -> Any:
    """The lock of an `AdapterRegistry`."""
    return registry._changed


def replace_lock(lifetime: Any, lock: Any) -> None:
    """Have a `Lifetime` guard its callbacks by this lock."""
    lifetime._lock = lock


def note_freed(registry: Any, size_bytes: int) -> None:
    """Let a registry learn that this much of its adapters' memory is free."""
    registry._freed(size_bytes)


def before_failures(registry: Any, call: Callable[[Any], object]) -> None:
    """Call this with each adapter that a registry is about to fail."""
    fail = registry._fail
    registry._fail = lambda adapter, error: (call(adapter), fail(adapter, error))


def copies_of(shadows: Any) -> Any:
    """The tasks of the copies of a pool's requests."""
    return shadows._tasks


def forget(process: Any) -> None:
    """Let a pool's process have ended."""
    process._ended()


def meters_of(calibration: Any) -> Any:
    """The moments that a calibration still keeps, by layer and projection."""
    return calibration._meters


def piece_table_of(tokenizer: Any) -> Any:
    """The table by which a remote tokenizer decodes here; None before its process has sent it."""
    return tokenizer._table


def fill(embedder: Any) -> None:
    """Let an embedder's queue have no room."""
    embedder._max_queued = -1


def packer_of(engine: Any) -> Any:
    """The `StepPacker` of an engine on CUDA."""
    return engine._backend.backend._packer


def supervisor_of(runner: Any) -> Any:
    """The `Supervisor` of a pool that runs; None before it has one."""
    return runner._supervisor


def make_supervisor(runner: Any) -> Any:
    """A new supervisor and its `Reloader`, as a pool makes them at its start."""
    return runner._make_supervisor()


def memory_fd_of(loading: Any) -> int:
    """The memory file of a `SharedLoading`."""
    return int(loading._memory_fd)


def record_sends(packer: Any, sent: list[int]) -> None:
    """Note the size of each copy of a `StepPacker` to its device from now on."""
    send = packer._uplink.send
    packer._uplink.send = lambda parts, into=None: (sent.append(sum(map(len, parts))), send(parts, into))[1]


def is_reading_adapters(registry: Any) -> bool:
    """True while an adapter that was loaded by name is read from its address."""
    return bool(registry._own_sources)


def run_job_at(places: Any, spec: Any, host: Any, lifetime: Any, meter: Any) -> Any:
    """The coroutine of a batch job's run in stores of the test."""
    from teneral.handlers.batch import job

    return job._Job(spec, host, places, lifetime, meter).run()


def table_of(proposer: Any) -> Any:
    """The positions of an `NgramProposer`."""
    return proposer._table


def num_layers_of(executor: Any) -> int:
    """The layers of a native or numpy decoder."""
    return int(executor._spec.num_layers)


def tokenizer_child_of(tokenizer: Any) -> Any:
    """The client side of a `TokenizerProcess`'s child."""
    return tokenizer._child
