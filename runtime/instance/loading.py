"""The first step of a start, and the choice of its load: the manifest is requested and the load started, in a thread of
their own, before an instance's other modules are imported.

Imports what the first request needs, and nothing of the engine. It does not know the use of the weights.
"""

from __future__ import annotations

import enum
import threading
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from ...loader.artifact import open_artifact, open_model
from ...loader.device.detect import CPU
from ...loader.errors import UnavailableError
from ...loader.load.options import Order
from ...loader.sources.base import Mappable, Remote
from ...loader.sources.open import split_pin
from .helpers import opener, refuse_weights_bytes

if TYPE_CHECKING:
    from ...loader.format.manifest import Blob, Manifest, Part
    from ...loader.load.base import AnyLoad, HostLoad
    from ...loader.load.device_load import DeviceLoad
    from ...loader.load.load import WeightLoad
    from ...loader.load.options import LoadOptions
    from ...loader.load.prefetch import Prefetch
    from ...loader.load.resident import ResidentBase
    from ...loader.load.targets.shared import SharedBase
    from ...loader.memory.arena import Reserve
    from ...loader.sources.base import Source
    from ...loader.timeline import Timeline
    from ..config import ServeConfig
    from .helpers import LaunchedHelpers


# Needed between a remote manifest and the first ranges.
AHEAD = ("blake3", "...loader.format.manifest_json", "...loader.load.prefetch")


class StartedLoad(NamedTuple):
    """A load that was started."""

    load: AnyLoad
    # The shared base, if that has its weights, or those that it adds differences to.
    shared: SharedBase | None = None
    base: HostLoad | None = None  # in the latter case, the load of that base


class Opening:
    """A model's source, and its load once the manifest is there. The instance that takes it closes both."""

    def __init__(
        self,
        config: ServeConfig,
        timeline: Timeline,
        *,
        source: Source | None = None,
        launched: LaunchedHelpers | None = None,
        base: ResidentBase | None = None,
        full_speed: threading.Event | None = None,
    ) -> None:
        """Start the thread; return at once. The load uses the memory of `launched`, if it has some;
        the others are as `Startup` has them. Raises nothing: `take` does.
        """
        self.full_speed = full_speed or threading.Event()
        self.source = source
        self._config = config
        self._timeline = timeline
        self._memory = (launched and launched.reserve, launched and launched.shared, base)
        self._ended = threading.Event()
        self._started: StartedLoad | None = None
        self._error: BaseException | None = None
        self._address, self._digest = split_pin(config.model)
        try:
            if self.source is None:
                self.source = open_model(self._address, config.source_options, timeline=timeline)
        except Exception as error:  # noqa: BLE001 - raised by `take`
            self._error = error
            self._ended.set()
            return
        threading.Thread(target=self._run, args=(self.source,), name="teneral-manifest", daemon=True).start()

    def import_ahead(self) -> None:
        """Import what the first ranges of a store need, while the manifest is on its way."""
        if isinstance(self.source, Remote):
            for name in AHEAD:
                import_module(name, __package__)

    def take(self) -> StartedLoad:
        """The load, which is the caller's from now on. Blocks until the manifest was read; raises the
        errors of `load_here`, and `UsageError` for an unusable address.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        started, self._started = self._started, None  # holds none of its memory any more
        assert started is not None
        return started

    def _run(self, source: Source) -> None:
        reserve, shared, base = self._memory
        self._memory = (None, None, None)
        try:
            self._started = load_here(
                source,
                self._digest,
                self._config,
                self._timeline,
                reserve=reserve,
                base=base,
                full_speed=self.full_speed,
                shared=shared,
            )
            if shared is not None and self._started.shared is None:
                shared.close()  # else its memory would stay as long as this process does
        except BaseException as error:  # noqa: BLE001 - raised by `take`
            self._error = error
        self._ended.set()


def wire_share_of(source: Source, timeline: Timeline) -> float:
    """Bytes that cross the network for one of a load's: fewer where the source makes more of what it reads, as of GGUF.
    The timeline has it, too.
    """
    share = float(getattr(source, "wire_share", 1.0))
    if share != 1.0:
        timeline.mark("manifest", "made of fewer bytes", wire_share=round(share, 6))
    return share


class Way(enum.StrEnum):
    """The ways of weights to where they are used."""

    SHARED = "shared"  # they are in memory already, in the base of a standby pool
    MAPPED = "mapped"  # plain files of this machine, used where they lie
    DEVICE = "device"  # another device's memory
    PAGED = "paged"  # this process's memory, experts while they are used
    HOST = "host"  # this process's memory


def choose_way(
    *, device: str, is_shared: bool, can_map: bool, weights_bytes: int | None, fits: bool, has_base: bool
) -> Way:
    """The way of one load. `is_shared`: the shared base holds this very model; `can_map`: its
    weights are plain files of this machine that may be mapped; `fits`: they take no more than
    `weights_bytes`; `has_base`: only differences to weights in memory are read.
    """
    if is_shared:
        return Way.SHARED
    if device != CPU:
        return Way.DEVICE
    if can_map and weights_bytes is None:
        return Way.MAPPED
    if weights_bytes is not None and not fits and not has_base:
        return Way.PAGED
    return Way.HOST


def load_here(
    source: Source,
    digest: bytes | None,
    config: ServeConfig,
    timeline: Timeline,
    reserve: Reserve | None = None,
    base: ResidentBase | None = None,
    full_speed: threading.Event | None = None,
    shared: SharedBase | None = None,
) -> StartedLoad:
    """Start a load in this process's own threads. It uses the memory of `reserve`, which is
    returned to the system if weights lie elsewhere. Of a fine-tune whose `base` is in memory, or whose
    base is the `shared` one, only the differences are read, and of the shared base nothing. Until
    `full_speed` is set, decoding leaves two cores alone. Raises `UsageError` for less memory than a
    step needs (`config.weights_bytes`).
    """
    options, device = config.load_options, config.chosen_device
    may_map = config.mmap and device == CPU and config.weights_bytes is None
    prefetcher = _Prefetcher(source, options, timeline, device, 0 if reserve is None else reserve.taken_bytes)
    if device != CPU or options.weights_bytes is not None:
        shared = None
    with timeline.span("manifest", "open"):
        manifest = open_artifact(
            source,
            digest=digest,
            look=prefetcher.look,
            in_place=may_map and isinstance(source, Mappable),
            without_base=base is not None,
            held=None if shared is None else shared.manifest,
        )
    shared_load = None if shared is None else _map_shared(shared, manifest, timeline)
    is_shared = shared_load is not None and manifest.digest == shared_load.manifest.digest
    if shared_load is not None and not is_shared:
        from ...loader.load.resident import ResidentBase  # few servers have one

        base = ResidentBase.of(shared_load.manifest, shared_load.slab)
    if base is not None:
        manifest = base.join(manifest, source.url)
        # The base drafts, and layers follow one another.
        options = type(options)(**{**options._asdict(), "order": Order.EXACT})
    from ..files import is_onnx  # the manifest was requested without it

    if is_onnx(manifest):  # ONNX Runtime's own providers copy to devices
        device = CPU
        # No rows of an embedding are asked for: the order of the file is that of the segments.
        options = type(options)(**{**options._asdict(), "on_demand": False})
    way = choose_way(
        device=device,
        is_shared=is_shared,
        can_map=may_map and isinstance(source, Mappable) and base is None and _is_plain(manifest),
        weights_bytes=options.weights_bytes,
        fits=options.weights_bytes is None or manifest.weight_bytes <= options.weights_bytes,
        has_base=base is not None,
    )
    load: AnyLoad | None = None
    if way is Way.SHARED:
        load = shared_load
    elif way is Way.DEVICE:
        load = _load_device(source, manifest, config, device, options, timeline)
    elif way is Way.MAPPED:
        load = _map(cast("Mappable", source), manifest, options, timeline)  # if the file system supports it
    if reserve is not None and (load is not None or way is Way.PAGED):
        reserve.release()
        reserve = None
    if load is None:
        load = _load_host(
            source,
            manifest,
            options,
            timeline,
            reserve=reserve,
            prefetch=prefetcher.found,
            base=base,
            is_paged=way is Way.PAGED,
            full_speed=full_speed,
        )
    base_load = None if is_shared else shared_load
    return StartedLoad(load, None if shared_load is None else shared, base_load)


def _is_plain(manifest: Manifest) -> bool:
    return all(part.digest is None for part in manifest.parts)


def _map_shared(shared: SharedBase, manifest: Manifest, timeline: Timeline) -> WeightLoad | None:
    """Start the load of the shared base; None if it is neither the model of `manifest` nor its base."""
    if shared.digest not in (manifest.digest, manifest.base):
        return None
    # Few servers are taken from a pool with a base.
    from ...loader.load.load import WeightLoad
    from ...loader.load.targets.shared import NothingToRead, SharedTarget

    manifest = manifest if manifest.digest == shared.digest else shared.manifest
    target = SharedTarget(shared, manifest)
    load = WeightLoad(NothingToRead(shared.address), manifest, target=target, timeline=timeline)
    load.start()
    timeline.mark("process", "base in memory", bytes=manifest.weight_bytes)
    return load


def _map(source: Mappable, manifest: Manifest, options: LoadOptions, timeline: Timeline) -> WeightLoad | None:
    """Start a load of mapped files; None if the file system does not support it."""
    # Artifacts do not need it.
    from ...loader.load.load import WeightLoad
    from ...loader.load.targets.mapped import MappedFiles, MappedTarget, NotInPlaceError

    files = MappedFiles(source)
    try:
        target = MappedTarget(manifest, files)
        load = WeightLoad(files, manifest, target=target, options=options, timeline=timeline)
    except (NotInPlaceError, UnavailableError):
        return None  # reading finds any other error
    load.start()
    return load


def _load_device(
    source: Source,
    manifest: Manifest,
    config: ServeConfig,
    device: str,
    options: LoadOptions,
    timeline: Timeline,
) -> DeviceLoad:
    from ...loader.load.device_load import DeviceLoad  # the manifest was requested without it

    refuse_weights_bytes(config)
    open_device = opener(device, config.kernel_dir, timeline, config.device_percent)
    return DeviceLoad.in_threads(source, manifest, open_device, options=options, timeline=timeline)


def _load_host(
    source: Source,
    manifest: Manifest,
    options: LoadOptions,
    timeline: Timeline,
    *,
    reserve: Reserve | None,
    prefetch: Prefetch | None,
    base: ResidentBase | None,
    is_paged: bool,
    full_speed: threading.Event | None,
) -> WeightLoad:
    """Start a load into this process's memory. Raises `UsageError` where that is less than a step needs."""
    from ...loader.load.load import WeightLoad  # the manifest was requested without it
    from ...loader.load.targets.base import HostTarget

    if not isinstance(source, Remote):
        # Decoding is all that such a load waits for: what it imports comes before the web server.
        from ...loader.format import fill  # noqa: F401

        full_speed = None
    paging = None
    if is_paged:
        # Few servers have less memory than their model takes.
        from ...loader.load.pages import plan_paging

        assert options.weights_bytes is not None
        paging = plan_paging(manifest, options.weights_bytes)
        options = options._replace(order=Order.EXACT)
    load = WeightLoad(
        source,
        manifest,
        target=HostTarget(manifest, reserve=reserve, base=base, paging=paging),
        options=options,
        timeline=timeline,
        prefetch=prefetch,
        base=base,
        paging=paging,
        full_speed=full_speed,
    )
    load.start()
    return load


class _Prefetcher:
    """Reads of a remote artifact that start while its manifest is still being parsed."""

    def __init__(
        self, source: Source, options: LoadOptions, timeline: Timeline, device: str, held_bytes: int
    ) -> None:
        self._source = source
        self._held_bytes = held_bytes
        self._options = options
        self._timeline = timeline
        self._is_here = device == CPU
        self.found: Prefetch | None = None

    def look(self, weight_bytes: int, blob: Blob, part: Part) -> bool:
        if not isinstance(self._source, Remote):
            return True
        if self.found is None:
            # The manifest was requested without it.
            from ...loader.load.prefetch import Prefetch

            self.found = Prefetch(
                self._source,
                self._options,
                timeline=self._timeline,
                weights_are_here=self._is_here,
                held_bytes=self._held_bytes,
            )
        return self.found.look(weight_bytes, blob, part)
