"""How sentence-transformers makes one embedding of many token states: modules.json, 1_Pooling/config.json.

Both spellings of the latter are read: a flag for each mode (`pooling_mode_mean_tokens`), and `pooling_mode`
by name.
"""

from __future__ import annotations

from typing import Any

from ..errors import ModelError
from .fields import Fields

POOLING_MODES = ("mean", "cls")

_HINT = f"Supported: {', '.join(POOLING_MODES)}."
_MODE_OF_FLAG = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")
_OTHER_FLAGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
    "pooling_mode_lasttoken",
)


def pooling_of(modules: Any, pooling: Any) -> tuple[str, bool]:
    """(one of POOLING_MODES, whether embeddings are scaled to unit length). Either file may be None.

    Without modules.json embeddings are normalised, which is what clients of an embeddings endpoint expect.
    Raises `ModelError` for a module or a mode that is not supported.
    """
    mode = "mean" if pooling is None else _mode(Fields(pooling, file="1_Pooling/config.json"))
    return mode, modules is None or "Normalize" in _module_kinds(modules)


def _module_kinds(modules: Any) -> list[str]:
    """What a text passes through, in order: the last word of each module's class name."""
    if not isinstance(modules, list):
        raise ModelError("modules.json must be a list of modules")
    kinds = []
    for position, module in enumerate(modules):
        fields = Fields(module, file="modules.json", where=f"[{position}].")
        name = fields.text("type")
        kinds.append(name.rsplit(".", 1)[-1])
        if kinds[-1] not in _MODULES:
            raise fields.wrong("type", "which is not supported", hint=f"Supported: {', '.join(_MODULES)}.")
    return kinds


def _mode(pooling: Fields) -> str:
    if "pooling_mode" in pooling:
        return pooling.choice("pooling_mode", POOLING_MODES)
    for flag in _OTHER_FLAGS:
        if pooling.boolean(flag, default=False):
            raise pooling.wrong(flag, "which is not supported", hint=_HINT)
    modes = [mode for flag, mode in _MODE_OF_FLAG.items() if pooling.boolean(flag, default=False)]
    if len(modes) != 1:
        raise ModelError(
            f"1_Pooling/config.json asks for {len(modes)} pooling modes, but must for one", hint=_HINT
        )
    return modes[0]
