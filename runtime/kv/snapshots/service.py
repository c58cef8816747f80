"""A server's snapshot: fetched into the pool at the start, saved at the end.

A thread of its own reads, with few connections and in parallel to the weights; everything verified
by the time the engine is made is in its pool before the first request, and the rest follows. The
snapshot never delays or fails an instance: a missing or damaged one, or one of another model, costs
a log line, a mark on the timeline and a count.

Saving writes a new generation (`writer.py`) within its time limit, or changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ....loader.errors import (
    AlreadyExistsError,
    ChangedError,
    IntegrityError,
    NotFoundError,
    TeneralError,
    UsageError,
)
from ....loader.sources.base import Remote, Source, SourceOptions, Store
from ....loader.sources.open import is_read_only, open_source, open_store, split_pin
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
    from ...config import ServeConfig
    from ..prefix_pool import PrefixPool

logger = logging.getLogger(__name__)

# A few megabytes, no more urgent than the weights.
CONNECTIONS = 4
# Attempts to save when several servers end at once.
MAX_ATTEMPTS = 3
FIGURES = (
    "prefixes",
    "loaded_blocks",
    "loaded_bytes",
    "refused_total",
    "failures_total",
    "saves_total",
    "saved_bytes_total",
)


class _Fetched(Struct, eq=False):
    """The fetched part of a snapshot that is not in the pool yet."""

    snapshot: Snapshot
    prefixes: tuple[SnapshotPrefix, ...]  # those being fetched
    contents: deque[tuple[SnapshotPart, NDArray[np.uint8]]] = field(default_factory=deque)
    has_ended: bool = False  # the fetch is over


class SnapshotService:
    """The snapshot of one server: `start`, `attach` the engine's pool, `save` at the end, and
    `close`. Thread-safe.
    """

    @classmethod
    def of(cls, config: ServeConfig, timeline: Timeline) -> SnapshotService:
        """The service of a server that has `kv_snapshot`. Raises `UsageError` where it cannot be used."""
        assert config.kv_snapshot is not None
        if not config.prefix_cache:
            raise UsageError(
                "a KV snapshot needs the prefix cache, which is turned off",
                key="kv_snapshot",
                hint="Leave it out, or turn the prefix cache on.",
            )
        return cls(
            config.kv_snapshot,
            config.source_options,
            limit_bytes=min(config.kv_snapshot_bytes, config.kv_bytes or config.kv_snapshot_bytes),
            saves=config.kv_snapshot_save,
            saves_sessions=config.kv_snapshot_sessions,
            timeline=timeline,
        )

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
        """`limit_bytes` bounds the bytes fetched and saved. Raises `UsageError` for an invalid
        address.
        """
        self._saves_sessions = saves_sessions
        self.address, self._pin = split_pin(address)
        self._options = options
        self._source = open_source(self.address, options._replace(max_connections=CONNECTIONS))
        self._limit_bytes = limit_bytes
        # Neither a pinned snapshot nor one read over HTTP can be replaced.
        self._saves = saves and self._pin is None and not is_read_only(self.address)
        self._timeline = timeline
        self._turn = threading.Lock()  # held while putting blocks into the pool
        self._fetched: _Fetched | None = None
        self._pool: PrefixPool | None = None
        self._here: Identity | None = None
        self._is_refused = False
        self._is_closed = False
        self._figures = dict.fromkeys(FIGURES, 0)

    def start(self, opened: Future[tuple[Source, Manifest]]) -> None:
        """Begin to fetch; `opened` gives the model. Returns at once."""
        threading.Thread(target=self._run, args=(opened,), name="teneral-kv-snapshot", daemon=True).start()

    def attach(self, pool: PrefixPool, *, model: bytes | None) -> None:
        """Attach the engine's pool, for the model with this digest of its manifest.

        Blocks fetched so far are put into it before this returns, the rest as they arrive.
        """
        if model is None:
            self._refuse(
                "plain safetensors have no digest that a KV snapshot could belong to: pack the model"
            )
            return
        if pool.has_states:
            self._refuse(NO_STATES)
            return
        with self._turn:
            self._pool, self._here = pool, identity_of(pool, model=model)
        self._advance()

    def save(self, timeout_s: float) -> bool:
        """Write the useful prefixes, if there are new ones. Blocks for at most `timeout_s`, and
        publishes nothing later.

        Returns True for a new generation. Raises nothing.
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
            except (TeneralError, OSError) as error:  # TimeoutError is an OSError
                self._fail(f"the KV snapshot {self.address} was not saved", error)
            except Exception:  # a bug must not keep the process from ending
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
        """The counters: totals from the start, and figures of the fetched snapshot."""
        return dict(self._figures)

    def quiesce(self) -> None:
        """Wait for the fetch, like `Remote.quiesce`."""
        if isinstance(self._source, Remote):
            self._source.quiesce()

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._is_closed = True
        self._source.close()

    # from the store into the pool

    def _run(self, opened: Future[tuple[Source, Manifest]]) -> None:
        try:
            _, manifest = opened.result()
        except TeneralError:
            return  # the instance has failed, and reports it
        if manifest.digest is None:
            return  # `attach` reports it
        try:
            self._fetch(manifest.digest)
        except SnapshotMismatchError as error:
            self._refuse(error.message)
        except (TeneralError, OSError) as error:
            if not self._is_closed:
                self._fail(f"the KV snapshot {self.address} is not used", error)
        except Exception as error:  # a bug: the prefixes are computed instead
            logger.exception("fetching the KV snapshot failed")
            self._timeline.mark("model", "KV snapshot failed", error=type(error).__name__)

    def _fetch(self, model: bytes) -> None:
        # Imports numpy and codecs: the weights' reads were started before.
        from .parts import open_snapshot

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
            self._fetch_parts(again, model)  # a server that ended has just replaced it

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
        with self._timeline.span("model", "KV snapshot", address=self.address) as details:
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
            details.update(prefixes=len(prefixes), bytes=sum(part.size_bytes for part in parts))

    def _advance(self) -> None:
        """Put the fetched blocks into the pool, once both exist."""
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
                for prefix in reversed(fetched.prefixes):  # the most valuable one is evicted last
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
            except AlreadyExistsError:  # another server has just saved: continue from its generation
                continue
        logger.info("other servers are saving the KV snapshot %s: their generations stay", self.address)
        return False

    def _save_once(self, store: Store, pool: PrefixPool, here: Identity, deadline_s: float) -> bool:
        # Imports numpy: at the end, not on the way to the first token.
        from .writer import find_published, plan_generation, write_generation

        wanted = pool.most_wanted(self._limit_bytes, with_sessions=self._saves_sessions)
        if not wanted:
            return False
        replaced = find_published(store)
        base = replaced.snapshot if replaced is not None else None
        if replaced is not None and base is None:
            raise SnapshotError(
                f"the object at {self.address} is not a readable KV snapshot, and is not replaced"
            )
        if base is not None and base.identity != here:
            if not all(prefix.is_automatic for prefix in base.prefixes):
                require_same(base.identity, here, where=self.address)
            # It has no named prefixes, and none that this server can use.
            base = None
        chains = plan_generation(base, wanted=wanted, max_blocks=self._limit_bytes // here.block_bytes)
        known = set(base.hashes) if base is not None else set()
        if all(each in known for chain in chains for each in chain.hashes):
            return False
        with self._timeline.span("model", "save KV snapshot", address=self.address) as details:
            _, written_bytes = write_generation(
                store,
                here,
                chains,
                pool.get,
                replaced=replaced,
                is_time_left=lambda: time.monotonic() < deadline_s and not self._is_closed,
            )
            details.update(prefixes=len(chains), bytes=written_bytes)
        self._figures["saves_total"] += 1
        self._figures["saved_bytes_total"] += written_bytes
        logger.info("saved %d prefixes in the KV snapshot %s", len(chains), self.address)
        return True

    # errors

    def _refuse(self, message: str) -> None:
        self._is_refused = True
        self._figures["refused_total"] += 1
        self._timeline.mark("model", "KV snapshot refused", address=self.address, error=message)
        logger.warning("the KV snapshot is not used: %s", message)

    def _fail(self, what: str, error: Exception) -> None:
        self._figures["failures_total"] += 1
        self._timeline.mark("model", "KV snapshot failed", address=self.address, error=str(error))
        logger.warning("%s: %s", what, error)


NO_STATES = "this model has recurrent states in addition to keys and values, which a KV snapshot cannot hold"


def identity_of(pool: PrefixPool, *, model: bytes) -> Identity:
    """The identity of this pool's blocks, for the model with this digest of its manifest."""
    # Imported here as in `_fetch`.
    from blake3 import blake3

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
