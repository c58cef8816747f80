"""The kernels' parameters, as their sources declare them (`kernels/*.cuh`): one structure each."""

from __future__ import annotations

import ctypes

from .....loader.native.library import fields

_ADDRESS, _U32, _I64, _F32, _F64 = (
    ctypes.c_uint64,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_double,
)


class Embed(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "table table_scale tokens out counts"),
        *fields(_ADDRESS, "type_table types position_table positions"),
        *fields(_U32, "size group scale_kind table_kind first_position"),
        ("scale", _F32),
    )


class NormRows(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "x weight bias out rows counts"),
        *fields(_U32, "count size x_stride out_stride weight_kind bias_kind kind"),
        ("eps", _F32),
    )


class AddRows(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "x more weight counts"),
        *fields(_U32, "size weight_kind kind"),
        *fields(_F32, "eps scale"),
    )


class ScaleLogits(ctypes.Structure):
    _fields_ = (*fields(_ADDRESS, "logits counts"), ("size", _U32), *fields(_F32, "scale cap"))


class PlaceHeads(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "heads cos sin query_norm key_norm keys values"),
        *fields(_ADDRESS, "key_scales value_scales positions slots counts"),
        *fields(_U32, "num_heads num_kv_heads head_dim rotary_dim weight_kind kind interleaved wide_turns"),
        ("eps", _F32),
    )


class PlaceLatents(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "queries latents absorbed pool scales cos sin positions slots counts"),
        *fields(
            _U32,
            "num_heads plain_dim rotary_dim rank query_stride latent_stride interleaved wide_turns",
        ),
    )


class AbsorbQueries(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "weight queries out counts"),
        *fields(_U32, "num_heads head_rows rank plain_dim query_dim query_stride out_dim"),
    )


class Gate(ctypes.Structure):
    _fields_ = (*fields(_ADDRESS, "product out counts"), *fields(_U32, "count size kind is_open"))


class PoolRows(ctypes.Structure):
    _fields_ = (*fields(_ADDRESS, "x out starts lengths counts"), *fields(_U32, "size kind is_narrow"))


class Product(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "weight scale zero bias x out counts"),
        *fields(
            _U32,
            "count num_out num_in length group scale_rows zero_more out_stride scale_kind bias_kind mode",
        ),
    )


class MatrixPart(ctypes.Structure):
    """Addresses of some rows of a matrix, which have one layout."""

    _fields_ = fields(_ADDRESS, "weight scale zero bias")


class ExpertProduct(ctypes.Structure):
    _fields_ = (("each", Product), *fields(_ADDRESS, "parts tiles rows"), ("num_parts", _U32))


class HeadProduct(ctypes.Structure):
    _fields_ = (("each", Product), *fields(_U32, "head_rows x_stride"))


class TransposeMatrix(ctypes.Structure):
    _fields_ = fields(_ADDRESS, "source out") + fields(_U32, "num_in num_out")


class RouteExperts(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "scores correction chosen weights counts"),
        *fields(_U32, "num num_used correction_kind sigmoid wide_scores sum_to_1 rounds_weights"),
        *fields(_U32, "num_groups num_groups_used"),
        *fields(_F32, "sum_eps factor"),
    )


class GroupPairs(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "chosen rows places tiles counts"),
        *fields(_U32, "num num_used tile_rows num_tiles"),
    )


class AddExperts(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "out made places weights shared shared_gate counts"),
        *fields(_U32, "size num_used adds"),
    )


class DeviceAdapterSite(ctypes.Structure):
    """The share of an adapter in one projection of one layer."""

    _fields_ = (("a", _ADDRESS), *fields(_U32, "num_low num_parts a_kind b_kind"))


class DeviceAdapterPart(ctypes.Structure):
    """The share in some of its columns."""

    _fields_ = (("b", _ADDRESS), *fields(_U32, "first num_out rank"), ("factor", _F32))


class Adapt(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "sites parts slots x low out counts"),
        *fields(_U32, "num_sites site num_in num_out low_stride"),
    )


class Item(ctypes.Structure):
    """The share of one block of attention."""

    _fields_ = fields(_U32, "span first_pair first_split end_split slot")


class Merge(ctypes.Structure):
    """Splits that are folded."""

    _fields_ = fields(_U32, "span first_pair first_slot num_splits")


class Attention(ctypes.Structure):
    _fields_ = (
        *fields(
            _ADDRESS,
            "heads keys values key_scales value_scales out split_sums split_scales items merges",
        ),
        *fields(
            _ADDRESS,
            "starts lengths contexts table_starts blocks counts bias",
        ),
        *fields(_U32, "num_heads num_kv_heads row_heads head_dim value_dim block_size window ahead reach"),
        *fields(_F32, "scale cap"),
    )


class Request(ctypes.Structure):
    """The choice of one row's token."""

    _fields_ = (
        *fields(_I64, "seed index"),
        ("top_p", _F64),
        *fields(_F32, "temperature log_min_p repetition_penalty"),
        *fields(
            _U32,
            "top_k num_top first_word scores_row bias_end repeated_end penalised_end bias_begin unused",
        ),
    )


class Weighed(ctypes.Structure):
    _fields_ = (
        ("sum", _F64),
        *fields(_F32, "best highest"),
        *fields(_U32, "token threshold tie_end unused"),
    )


class Result(ctypes.Structure):
    """A row's token."""

    _fields_ = (("token", _U32), *fields(_F32, "best logprob"), ("num_top", _U32))


class Choose(ctypes.Structure):
    _fields_ = (
        *fields(
            _ADDRESS,
            "logits scores requests tokens values words weighed quotients winners results top_tokens top_logprobs",
        ),
        *fields(_U32, "vocab max_top"),
    )


class Adjust(ctypes.Structure):
    _fields_ = (("choose", Choose), ("rows", _ADDRESS))


class CopyBlocks(ctypes.Structure):
    _fields_ = (
        *fields(_ADDRESS, "pool stored blocks"),
        *fields(_U32, "pool_blocks block_size num_kv_heads head_dim stored_size is_in"),
    )


class CopyTokens(ctypes.Structure):
    _fields_ = (
        ("pool", _ADDRESS),
        *fields(_U32, "pool_blocks block_size row source target num_tokens"),
    )
