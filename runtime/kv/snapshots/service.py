"""A server's snapshot: what is stored at an address comes into the pool at the start, and what was of use goes there at
the end.

A thread of its own reads, with few connections and beside the weights; what is verified by the time that the engine is
made is in its pool before the first request is, and the rest follows. Nothing here can hold up or fail an instance: a
snapshot that is missing, damaged or another model's costs a line in the log, a mark on the timeline and a count.

Saving writes a new generation (`generation.py`) within the time that it is given, or changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....loader.errors import (
    AlreadyExistsError,
    ChangedError,
    IntegrityError,
    NotFoundError,
    TeneralError,
)
from ....loader.pin import split_pin
from ....loader.sources.base import Remote, Source, SourceOptions, Store
from ....loader.sources.open import open_source, open_store, scheme_of
from ....loader.timeline import Timeline
from ...errors import SnapshotError, SnapshotMismatchError
from .snapshot import (
    EPOCH,
    Identity,
    Snapshot,
    SnapshotPart,
    SnapshotPrefix,
    require_same,
    require_same_model,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ....loader.format.manifest import Manifest
    from ..prefix_pool import PrefixPool

logger = logging.getLogger(__name__)

CONNECTIONS = 4  # a few megabytes, which need not hurry more than the weights do
MAX_ATTEMPTS = 3  # to be the one of several servers that end at once
FIGURES = (
    "prefixes",
    "loaded_blocks",
    "loaded_bytes",
    "refused_total",
    "failures_total",
    "saves_total",
    "saved_bytes_total",
)


@dataclass(eq=False, slots=True)
class _Fetched:
    """What has come of a snapshot, and is not in the pool yet."""

    snapshot: Snapshot
    prefixes: tuple[SnapshotPrefix, ...]  # those that are fetched
    contents: deque[tuple[SnapshotPart, NDArray[np.uint8]]] = field(default_factory=deque)
    has_ended: bool = False  # no more will come


class SnapshotService:
    """`start` it, `attach` the engine's pool, `save` at the end, and `close` it. Thread-safe."""

    def __init__(
        self,
        address: str,
        options: SourceOptions,
        *,
        limit_bytes: int,
        saves: bool,
        timeline: Timeline,
        saves_sessions: bool = False,
    ) -> None:
        """`limit_bytes` bounds what is fetched, and what is saved. Raises `UsageError` for an invalid
        address.
        """
        self._saves_sessions = saves_sessions
        self.address, self._pin = split_pin(address)
        self._options = options
        self._source = open_source(self.address, options._replace(max_connections=CONNECTIONS))
        self._limit_bytes = limit_bytes
        # A pinned snapshot cannot be replaced, and neither can what is read over HTTP.
        self._saves = saves and self._pin is None and scheme_of(self.address) not in ("http", "https")
        self._timeline = timeline
        self._turn = threading.Lock()  # of who puts blocks into the pool
        self._fetched: _Fetched | None = None
        self._pool: PrefixPool | None = None
        self._here: Identity | None = None
        self._is_refused = False
        self._is_closed = False
        self._figures = dict.fromkeys(FIGURES, 0)

    def start(self, opened: Future[tuple[Source, Manifest]]) -> None:
        """Begin to fetch; `opened` says for which model. Returns at once."""
        threading.Thread(target=self._run, args=(opened,), name="teneral-kv-snapshot", daemon=True).start()

    def attach(self, pool: PrefixPool, *, model: bytes | None) -> None:
        """The engine's pool, for the model whose manifest has this digest: what was fetched so far is put into it
        before this returns, and the rest as it comes.
        """
        if model is None:
            self._refuse(
                "plain safetensors have no digest that a KV snapshot could belong to: pack the model"
            )
            return
        with self._turn:
            self._pool, self._here = pool, identity_of(pool, model=model)
        self._advance()

    def save(self, timeout_s: float) -> bool:
        """Write what was of use, if there is anything new. Blocks for at most `timeout_s`; what is not published by
        then never is. True when there is a new generation. Raises nothing.
        """
        pool, here = self._pool, self._here
        if not self._saves or pool is None or here is None or timeout_s <= 0:
            return False
        deadline_s = time.monotonic() + timeout_s
        saved: Future[bool] = Future()

        def work() -> None:
            is_saved = False
            try:
                is_saved = self._save(pool, here, deadline_s)
            except (TeneralError, OSError) as error:  # TimeoutError is one, too
                self._fail(f"the KV snapshot {self.address} was not saved", error)
            except Exception:  # a defect of ours must not keep the process from ending
                logger.exception("saving the KV snapshot failed")
            finally:
                saved.set_result(is_saved)

        threading.Thread(target=work, name="teneral-kv-save", daemon=True).start()
        try:
            return saved.result(timeout_s)
        except TimeoutError:
            logger.warning("the KV snapshot %s was not saved within %.1f s", self.address, timeout_s)
            return False

    def statistics(self) -> dict[str, int]:
        """Totals count from the start; the rest is what came from the snapshot."""
        return dict(self._figures)

    def quiesce(self) -> None:
        """As `Remote.quiesce`."""
        if isinstance(self._source, Remote):
            self._source.quiesce()

    def close(self) -> None:
        """Give up what is being fetched. Idempotent."""
        self._is_closed = True
        self._source.close()

    # from the store into the pool

    def _run(self, opened: Future[tuple[Source, Manifest]]) -> None:
        try:
            _, manifest = opened.result()
        except TeneralError:
            return  # the instance has failed, and says so itself
        if manifest.digest is None:
            return  # `attach` says so
        try:
            self._fetch(manifest.digest)
        except SnapshotMismatchError as error:
            self._refuse(error.message)
        except (TeneralError, OSError) as error:
            if not self._is_closed:
                self._fail(f"the KV snapshot {self.address} is not used", error)
        except Exception as error:  # a defect of ours: the prefixes are computed, then
            logger.exception("fetching the KV snapshot failed")
            self._timeline.mark("model", "KV snapshot failed", error=type(error).__name__)

    def _fetch(self, model: bytes) -> None:
        from .parts import open_snapshot  # with numpy and codecs: the weights were asked for before

        try:
            snapshot, version = open_snapshot(self._source, digest=self._pin)
        except NotFoundError:
            self._timeline.mark("model", "no KV snapshot", address=self.address)
            logger.info("there is no KV snapshot at %s yet", self.address)
            return
        try:
            self._fetch_parts(snapshot, model)
        except (NotFoundError, IntegrityError, ChangedError):
            again, new_version = open_snapshot(self._source, digest=self._pin)
            if new_version == version:
                raise
            self._fetch_parts(again, model)  # a server that ended had just replaced it

    def _fetch_parts(self, snapshot: Snapshot, model: bytes) -> None:
        from ....loader.tools.part_reader import map_in_order
        from .parts import SnapshotReader

        require_same_model(snapshot.identity, model.hex(), where=self.address)
        prefixes = snapshot.within(self._limit_bytes)
        if len(prefixes) < len(snapshot.prefixes):
            left_out = len(snapshot.prefixes) - len(prefixes)
            logger.info("%d prefixes of the KV snapshot are left out: over the limit", left_out)
        parts = snapshot.parts_for(prefixes)
        reader = SnapshotReader(self._source, snapshot)
        fetched = _Fetched(snapshot, prefixes)
        with self._turn:
            self._fetched = fetched
        with self._timeline.span("model", "KV snapshot", address=self.address) as said:
            try:
                with closing(map_in_order(reader.read, parts, CONNECTIONS)) as contents:
                    for part, content in zip(parts, contents, strict=True):
                        fetched.contents.append((part, content))
                        self._advance()
                        if self._is_refused:
                            return
            finally:
                fetched.has_ended = True
                self._advance()
            said.update(prefixes=len(prefixes), bytes=sum(part.size_bytes for part in parts))

    def _advance(self) -> None:
        """Put what has come into the pool, once both are there."""
        with self._turn:
            fetched, pool, here = self._fetched, self._pool, self._here
            if fetched is None or pool is None or here is None or self._is_refused:
                return
            try:
                require_same(fetched.snapshot.identity, here, where=self.address)
            except SnapshotMismatchError as error:
                self._refuse(error.message)
                fetched.contents.clear()
                return
            while fetched.contents:
                part, content = fetched.contents.popleft()
                num_blocks = pool.put(part.hashes, content)
                self._figures["loaded_blocks"] += num_blocks
                self._figures["loaded_bytes"] += num_blocks * here.block_bytes
            if fetched.has_ended:
                for prefix in reversed(fetched.prefixes):  # the one of most worth is given up last
                    pool.hold(fetched.snapshot.chain(prefix))
                self._figures["prefixes"] = len(fetched.prefixes)

    # from the pool into the store

    def _save(self, pool: PrefixPool, here: Identity, deadline_s: float) -> bool:
        for _ in range(MAX_ATTEMPTS):
            try:
                with closing(
                    open_store(self.address, self._options._replace(max_attempts=2, outage_s=0))
                ) as store:
                    return self._save_once(store, pool, here, deadline_s)
            except AlreadyExistsError:  # another server has just saved: what it left is gone on with
                continue
        logger.info("others save the KV snapshot %s at the same time: theirs stay", self.address)
        return False

    def _save_once(self, store: Store, pool: PrefixPool, here: Identity, deadline_s: float) -> bool:
        # With numpy: at the end, and not on the way to the first token.
        from .generation import plan_generation, write_generation
        from .writer import find_published

        wanted = pool.most_wanted(self._limit_bytes, with_sessions=self._saves_sessions)
        if not wanted:
            return False
        replaced = find_published(store)
        base = replaced.snapshot if replaced is not None else None
        if replaced is not None and base is None:
            raise SnapshotError(
                f"what is at {self.address} is no KV snapshot that can be read, and is left alone"
            )
        if base is not None and base.identity != here:
            if not all(prefix.is_automatic for prefix in base.prefixes):
                require_same(base.identity, here, where=self.address)
            base = None  # nobody asked for what is in it, and nobody here can use it
        chains = plan_generation(base, wanted=wanted, max_blocks=self._limit_bytes // here.block_bytes)
        known = set(base.hashes) if base is not None else set()
        if all(each in known for chain in chains for each in chain.hashes):
            return False
        with self._timeline.span("model", "save KV snapshot", address=self.address) as said:
            _, written_bytes = write_generation(
                store,
                here,
                chains,
                pool.get,
                replaced=replaced,
                is_time_left=lambda: time.monotonic() < deadline_s and not self._is_closed,
            )
            said.update(prefixes=len(chains), bytes=written_bytes)
        self._figures["saves_total"] += 1
        self._figures["saved_bytes_total"] += written_bytes
        logger.info("saved %d prefixes in the KV snapshot %s", len(chains), self.address)
        return True

    # what went wrong

    def _refuse(self, message: str) -> None:
        self._is_refused = True
        self._figures["refused_total"] += 1
        self._timeline.mark("model", "KV snapshot refused", address=self.address, error=message)
        logger.warning("the KV snapshot is not used: %s", message)

    def _fail(self, what: str, error: Exception) -> None:
        self._figures["failures_total"] += 1
        self._timeline.mark("model", "KV snapshot failed", address=self.address, error=str(error))
        logger.warning("%s: %s", what, error)


def identity_of(pool: PrefixPool, *, model: bytes) -> Identity:
    """Whose the blocks of this pool are, for the model whose manifest has this digest."""
    from blake3 import blake3  # as in `_fetch`

    return Identity(
        model=model.hex(),
        dtype=pool.dtype,
        epoch=EPOCH,
        layout=pool.layout,
        block_size=pool.block_size,
        block_bytes=pool.block_bytes,
        element_bytes=pool.element_bytes,
        seed=blake3(pool.seed).hexdigest(),
    )
