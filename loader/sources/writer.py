"""The base of all object writers: committed once, or aborted. Does not know how bytes are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from .base import ObjectInfo


class Writer(ABC):
    """The life of an `ObjectWriter`: open, then committed or aborted for good. Used by one thread.

    When a subclass fails in `_append` or `_finish`, what was written is discarded here, so that a
    failed write leaves nothing behind even where its caller does not clean up.
    """

    def __init__(self) -> None:
        self._info: ObjectInfo | None = None
        self._is_open = True

    @abstractmethod
    def _append(self, data: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def _finish(self) -> ObjectInfo: ...

    @abstractmethod
    def _discard(self) -> None:
        """Remove what was written. Called at most once, and never after `_finish` returned."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. The data may be reused as soon as this returns."""
        self._check_open()
        try:
            self._append(data)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> ObjectInfo:
        """Make the object appear. A second call returns the same value again."""
        if self._info is not None:
            return self._info
        self._check_open()
        try:
            self._info = self._finish()
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        return self._info

    def abort(self) -> None:
        """Remove what was written. Idempotent; does nothing after `commit`."""
        if self._is_open:
            self._is_open = False
            self._discard()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("this writer was committed or aborted already")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        elif self._is_open:
            self.commit()
