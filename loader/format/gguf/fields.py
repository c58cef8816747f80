"""GGUF metadata as checked values: each getter refuses another type or range by the key's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CheckpointError


class GgufFields:
    """The metadata of the file `where`."""

    def __init__(self, where: str, metadata: Mapping[str, Any]) -> None:
        self.where = where
        self._metadata = metadata

    def wrong(self, what: str, *, hint: str = "") -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}", where=self.where, hint=hint)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def get(self, key: str) -> Any:
        return self._metadata.get(key)

    def integer(
        self, key: str, low: int, high: int, default: int | None = None, *, may_lack: bool = False
    ) -> int:
        """Without a default the key must be there. Some writers state one number a layer, all
        alike: that one. With `may_lack` it is 0 in layers that have none.
        """
        value = self._metadata.get(key, default)
        if hasattr(value, "tolist"):
            value = [each for each in value.tolist() if each or not may_lack]
            value = value[0] if value and all(each == value[0] for each in value) else value
        if type(value) is not int or not low <= value <= high:
            raise self._not(key, value, f"a whole number from {low} to {high}")
        return value

    def integers(self, key: str, low: int, high: int, *, num_layers: int) -> list[int]:
        """A whole number for each layer; a key may have one for all."""
        value: Any = self._metadata.get(key)
        found: Any = value.tolist() if hasattr(value, "tolist") else [value] * num_layers
        if len(found) != num_layers or any(
            type(each) is not int or not low <= each <= high for each in found
        ):
            raise self._not(key, value, f"a whole number from {low} to {high}, or one for each layer")
        return list(found)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._metadata.get(key, default)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN compares as false
            raise self._not(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def shortest(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Likewise; of all numbers that are the same in fp32 that with the fewest digits: 1e-5 in place of
        9.99999974e-06.
        """
        return float(str(np.float32(self.number(key, low, high, default))))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if type(value) is not bool:
            raise self._not(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            raise self._not(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._not(key, value, "an array of texts")
        return value

    def numbers(self, key: str, length: int) -> Sequence[float]:
        value: Any = self._metadata.get(key)
        if not hasattr(value, "tolist") or len(value) != length:
            raise self._not(key, value, f"an array of {length} numbers")
        numbers: list[float] = value.tolist()
        return numbers

    def _not(self, key: str, value: Any, needed: str) -> CheckpointError:
        if key not in self._metadata:
            return self.wrong(f"has no {key}", hint="The file is incomplete: convert the model again.")
        return self.wrong(f"{key} is {str(value)[:60]!r}, but must be {needed}")
