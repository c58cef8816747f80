"""The kernels' parameters, as their sources declare them (`kernels/*.cuh`): one structure each."""

from __future__ import annotations

import ctypes
from typing import Any

_ADDRESS, _U32, _I64, _F32, _F64 = (
    ctypes.c_uint64,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_double,
)


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class Embed(ctypes.Structure):
    _fields_ = (
        *_fields(_ADDRESS, "table table_scale tokens out counts"),
        *_fields(_U32, "size group scale_kind"),
        ("scale", _F32),
    )


class NormRows(ctypes.Structure):
    _fields_ = (
        *_fields(_ADDRESS, "x weight out rows counts"),
        *_fields(_U32, "count size x_stride out_stride weight_kind kind"),
        ("eps", _F32),
    )


class AddRows(ctypes.Structure):
    _fields_ = (
        *_fields(_ADDRESS, "x more weight counts"),
        *_fields(_U32, "size weight_kind kind"),
        *_fields(_F32, "eps scale"),
    )


class ScaleLogits(ctypes.Structure):
    _fields_ = (*_fields(_ADDRESS, "logits counts"), ("size", _U32), *_fields(_F32, "scale cap"))


class PlaceHeads(ctypes.Structure):
    _fields_ = (
        *_fields(_ADDRESS, "heads cos sin query_norm key_norm keys values positions slots counts"),
        *_fields(_U32, "num_heads num_kv_heads head_dim rotary_dim weight_kind kind interleaved wide_turns"),
        ("eps", _F32),
    )


class Gate(ctypes.Structure):
    _fields_ = (*_fields(_ADDRESS, "product out counts"), *_fields(_U32, "size kind"))


class Product(ctypes.Structure):
    _fields_ = (
        *_fields(_ADDRESS, "weight scale zero bias x out counts"),
        *_fields(_U32, "count num_out num_in length group scale_rows out_stride scale_kind bias_kind mode"),
    )


class Item(ctypes.Structure):
    """The share of one block of attention."""

    _fields_ = _fields(_U32, "span first_pair first_split end_split slot")


class Merge(ctypes.Structure):
    """Splits that are folded."""

    _fields_ = _fields(_U32, "span first_pair first_slot num_splits")


class Attention(ctypes.Structure):
    _fields_ = (
        *_fields(
            _ADDRESS,
            "heads keys values out split_sums split_scales items merges",
        ),
        *_fields(
            _ADDRESS,
            "starts lengths contexts table_starts blocks counts",
        ),
        *_fields(_U32, "num_heads num_kv_heads head_dim block_size window"),
        *_fields(_F32, "scale cap"),
    )


class Request(ctypes.Structure):
    """The choice of one row's token."""

    _fields_ = (
        *_fields(_I64, "seed index"),
        ("top_p", _F64),
        *_fields(_F32, "temperature log_min_p repetition_penalty"),
        *_fields(
            _U32,
            "top_k num_top first_word scores_row bias_end repeated_end penalised_end bias_begin unused",
        ),
    )


class Weighed(ctypes.Structure):
    _fields_ = (
        ("sum", _F64),
        *_fields(_F32, "best highest"),
        *_fields(_U32, "token threshold tie_end unused"),
    )


class Result(ctypes.Structure):
    """A row's token."""

    _fields_ = (("token", _U32), *_fields(_F32, "best logprob"), ("num_top", _U32))


class Choose(ctypes.Structure):
    _fields_ = (
        *_fields(
            _ADDRESS,
            "logits scores requests tokens values words weighed quotients winners results top_tokens top_logprobs",
        ),
        *_fields(_U32, "vocab max_top"),
    )


class Adjust(ctypes.Structure):
    _fields_ = (("choose", Choose), ("rows", _ADDRESS))


class CopyBlocks(ctypes.Structure):
    _fields_ = (
        *_fields(_ADDRESS, "pool stored blocks"),
        *_fields(_U32, "num_layers pool_blocks block_size num_kv_heads head_dim is_in"),
    )


class CopyTokens(ctypes.Structure):
    _fields_ = (
        ("pool", _ADDRESS),
        *_fields(_U32, "pool_blocks block_size row source target num_tokens"),
    )
