"""The storage formats of keys and values. Imports nothing, because configurations name them."""

from __future__ import annotations

import enum


class KVKind(enum.StrEnum):
    """The storage format of a pool."""

    MODEL = "model"  # the model's own dtype: `storage.py`
    INT8 = "int8"  # integers and a scale for each token and head: `storage.py`
