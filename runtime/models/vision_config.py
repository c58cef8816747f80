"""A vision tower and its connector as validated values of config.json.

The tower is an encoder of square patches of square tiles, each of which attends to those of its own tile (SigLIP,
arXiv 2303.15343). The connector makes one row of the decoder's embeddings of each square of patches (pixel shuffle,
arXiv 2408.12637, section 3). Nothing here imports numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from .fields import ACTIVATIONS, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TILE_PIXELS = 4_096  # of a tile's side
MAX_PATCHES = 1 << 14  # of a tile


class VisionConfig(Struct, frozen=True):
    """A vision tower. Counts are at least 1; `num_heads` divides `hidden_size`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float
    tile_size: int  # pixels of a tile's side
    patch_size: int  # pixels of a patch's side
    shuffle: int  # patches of a square of this side become one token
    image_token: int  # the token that stands for each row of an image
    root: str = "model.vision_model."  # the prefix of the tower's tensors
    connector: str = "model.connector.modality_projection.proj"  # the connector's matrix

    @property
    def patches_per_side(self) -> int:
        return self.tile_size // self.patch_size

    @property
    def patches_per_tile(self) -> int:
        return self.patches_per_side**2

    @property
    def tokens_per_tile(self) -> int:
        return (self.patches_per_side // self.shuffle) ** 2

    @classmethod
    def of_idefics3(cls, config: Fields, vocab_size: int) -> VisionConfig:
        """Missing keys of `vision_config` have transformers' defaults. Raises `ModelError`."""
        given: Mapping[str, object] = config.get("vision_config") or {}
        own = Fields(given, where="vision_config.")
        own.integer("num_channels", low=3, high=3, default=3)
        hidden_size = own.integer("hidden_size", low=1, high=MAX_WIDTH, default=1_152)
        num_heads = own.integer("num_attention_heads", low=1, high=MAX_HEADS, default=16)
        if hidden_size % num_heads:
            raise own.wrong("hidden_size", f"but must be a multiple of num_attention_heads, {num_heads}")
        tile_size = own.integer("image_size", low=1, high=MAX_TILE_PIXELS, default=224)
        patch_size = own.integer("patch_size", low=1, high=tile_size, default=32)
        shuffle = config.integer("scale_factor", low=1, high=64, default=2)
        made = cls(
            hidden_size=hidden_size,
            intermediate_size=own.integer("intermediate_size", low=1, high=MAX_WIDTH, default=3_072),
            num_layers=own.integer("num_hidden_layers", low=1, high=MAX_LAYERS, default=12),
            num_heads=num_heads,
            activation=own.choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh"),
            norm_eps=own.number("layer_norm_eps", low=0.0, high=1.0, default=1e-6),
            tile_size=tile_size,
            patch_size=patch_size,
            shuffle=shuffle,
            image_token=config.integer("image_token_id", low=0, high=vocab_size - 1, default=128_257),
        )
        if made.patches_per_tile > MAX_PATCHES:
            raise own.wrong("patch_size", f"but a tile may have {MAX_PATCHES} patches")
        if made.patches_per_side % shuffle:
            raise config.wrong(
                "scale_factor", f"but must divide the {made.patches_per_side} patches of a side"
            )
        return made
