"""How keys and values can be stored. Imports nothing: a configuration names them."""

from __future__ import annotations

import enum


class KVKind(enum.StrEnum):
    """What a pool is made of."""

    MODEL = "model"  # the model's own dtype: `storage.py`
    INT8 = "int8"  # integers and a scale for each token and head: `int8_storage.py`
