"""Attention's launches."""

from __future__ import annotations

from .....loader.device.driver.base import KernelLaunch
from .arguments import Attention
from .program import Kernels
from .sources import LATENT_DIM, attention_module, padded_dim
from .tables import FEW_PAIRS, MANY_PAIRS

_THREADS, _LATENT_THREADS = 128, 256
_TILE_KEYS = 64


def attention_launches(
    kernels: Kernels,
    arguments: Attention,
    *,
    many: bool,
    num_items: int,
    num_merges: int,
    of_latents: bool = False,
) -> list[KernelLaunch]:
    """Attention of one layer over the block table, for steps of at most `num_items`, and `num_merges` whose splits are
    folded by a launch of its own.
    """
    module = attention_module(arguments.head_dim, of_int8=bool(arguments.key_scales), of_latents=of_latents)
    dim = LATENT_DIM if of_latents else padded_dim(arguments.head_dim)
    num_pairs = MANY_PAIRS if many else FEW_PAIRS
    num_kv_heads = arguments.num_kv_heads
    launches = [
        kernels.launch(
            module,
            f"{module}_{num_pairs}",
            (num_items, num_kv_heads),
            _LATENT_THREADS if of_latents else _THREADS,
            arguments,
            shared_bytes=shared_bytes(dim, num_pairs),
        )
    ]
    if num_merges:
        launches.append(
            kernels.launch(module, "merge_splits", (num_merges, num_kv_heads), _THREADS, arguments)
        )
    return launches


def shared_bytes(dim: int, num_pairs: int) -> int:
    """The size of `Room` in the source: rows are padded by 16 bytes."""
    rows = (num_pairs + _TILE_KEYS) * (dim + 8) * 2  # queries, values
    weights = num_pairs * (_TILE_KEYS + 8) * 2
    scores = num_pairs * (_TILE_KEYS + 4) * 4
    return rows + weights + scores + num_pairs * 7 * 4
