"""The encoder of prompts' images, or of their sound: one thread that runs the tower, in the order of the requests.

A sequence waits in the engine's queue until its images have rows; others are computed meanwhile. Rows are kept by the
images' digests, the least recently used ones are dropped: a conversation sends its images again with each turn. This
module knows nothing of files, prompts or scheduling.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...loader.memory.limits import MIB, available
from ...loader.timeline import Timeline
from ..errors import RequestError, as_teneral_error
from ..images.processor import TileLayout
from ..step.images import PromptImage
from ..step.requests import GenerationRequest
from .generation import Generation
from .sequence import error_event

if TYPE_CHECKING:
    from ..models.speech_config import SpeechConfig
    from ..models.vision_config import VisionConfig

MAX_KEPT_BYTES = 64 << 20  # of rows whose requests have ended
# Images on the timeline, which shows the beginning of an instance's life.
NUM_TIMED_IMAGES = 8

logger = logging.getLogger(__name__)


class TowerLike(Protocol):
    """The part of `VisionTower` and `SpeechTower` that is needed here."""

    @property
    def config(self) -> VisionConfig | SpeechConfig: ...

    def working_bytes(self, height: int, width: int) -> int: ...

    def encode(self, tiles: Any, levels: Any, is_over: Callable[[], bool]) -> Iterator[Any]: ...

    def join(self, parts: Sequence[Any], layout: TileLayout | None) -> Any: ...


class ImageEncoder:
    """The encoder of one engine. Thread-safe."""

    def __init__(
        self, tower: TowerLike, changed: threading.Condition, timeline: Timeline | None = None
    ) -> None:
        """`changed` is notified when a request's images have rows."""
        self._tower = tower
        self._changed = changed
        self._timeline = timeline
        self._queue: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of starting the thread
        self._is_stopping = False
        self._kept: OrderedDict[bytes, Any] = OrderedDict()  # rows by digest; the thread's own
        self._num_encoded = 0

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError for images that do not fit the model, whose places in the prompt are not theirs, or which
        take more memory while they are encoded, one tile at a time, than there is.
        """
        config = self._tower.config
        if config.needs_images and len(request.images) != 1:
            raise RequestError(
                "this model transcribes speech, and takes no prompts of text alone",
                param="prompt",
                hint="Send sound to /v1/audio/transcriptions.",
            )
        for image in request.images:
            is_fitting = config.fits(image.tiles, image.places, image.layout) or image.rows is not None
            tokens = {request.prompt_tokens[place] for place in image.places.tolist()}
            if not is_fitting or tokens - {config.image_token}:
                raise RequestError("an image does not fit its places in the prompt", param="messages")
            if image.tiles is not None:
                self._check_memory(*image.tiles.shape[-2:])

    def _check_memory(self, height: int, width: int) -> None:
        needed_bytes, left = self._tower.working_bytes(height, width), available()
        if left is not None and needed_bytes > left.size_bytes:
            raise RequestError(
                f"an image of {width} x {height} pixels as the model sees it takes {needed_bytes / MIB:,.0f} MiB of "
                f"memory while it is encoded, but {left.size_bytes / MIB:,.0f} MiB are available ({left.limit})",
                param="messages",
                hint="Send a smaller image, or give the server more memory.",
            )

    def follow(self, generation: Generation) -> None:
        """Encode the request's images, and end it if that fails. Returns at once."""
        if all(image.rows is not None for image in generation.request.images):
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="teneral-images", daemon=True)
                self._thread.start()
        self._queue.put(generation)

    def stop(self) -> None:
        """End the thread after its tile. Does not wait."""
        self._is_stopping = True
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. Returns False if it is still running."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while (generation := self._queue.get()) is not None and not self._is_stopping:
            try:
                for image in generation.request.images:
                    if image.rows is None:
                        self._encode(image, lambda own=generation: self._is_stopping or own.ended)  # type: ignore[misc]
            except Exception as error:  # of the model's code, its weights, or memory
                failure = as_teneral_error(error)
                logger.error("images could not be encoded: %s", failure.message, exc_info=error)
                generation.emit(error_event(failure))
            with self._changed:
                self._changed.notify_all()

    def _encode(self, image: PromptImage, is_over: Callable[[], bool]) -> None:
        """Set the image's rows, unless it is over before."""
        rows = self._kept.pop(image.digest, None)
        if rows is None:
            rows = self._compute(image, is_over)
        if rows is None:
            return
        self._kept[image.digest] = rows
        while sum(each.nbytes for each in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        if self._tower.config.is_whole:
            image.runs = image.find_runs()
        if self._tower.config.has_grid and image.tiles is not None:
            image.grid = self._tower.config.grid_of(*image.tiles.shape[2:])
        with self._changed:  # a plan asks more than once which sequences wait for images
            image.rows, image.tiles = rows, None

    def _compute(self, image: PromptImage, is_over: Callable[[], bool]) -> Any:
        """The image's rows; None if it is over before."""
        start_s = time.monotonic()
        parts: list[Any] = []
        for part in self._tower.encode(image.tiles, image.levels, is_over):
            parts.append(part)
            if is_over():
                return None
        if is_over():
            return None
        self._note(start_s, len(parts))
        return self._tower.join(parts, image.layout)

    def _note(self, start_s: float, num_tiles: int) -> None:
        self._num_encoded += 1
        if self._timeline is not None and self._num_encoded <= NUM_TIMED_IMAGES:
            origin_s = self._timeline.started_at
            span = (start_s - origin_s, time.monotonic() - origin_s)
            self._timeline.add("execute", f"image {self._num_encoded}", *span, tiles=num_tiles)
