"""A vision tower and its connector as validated values of config.json.

The tower is an encoder of square patches. SigLIP's (arXiv 2303.15343) takes square tiles, whose patches all see one
another; CLIP's (arXiv 2103.00020) a row of its own with them. Qwen2.5-VL's (arXiv 2502.13923, section 2.1) takes images
of any size: patches turn by their rows and columns, and see those of their window in most layers. Qwen3-VL's has a
table of positions, too, and no windows; the states of some of its layers also become rows. Qwen3.5's is the same
without these. Gemma 4's tower has no windows either; a table of columns and one of rows are its positions, by which
halves of heads turn, too. Its unified models have these tables, and no layers: a tower of none. The connector makes one
row of the decoder's embeddings of each square of patches: side by side (pixel shuffle, arXiv 2408.12637, section 3), or
of their mean. Nothing here imports numpy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from .fields import ACTIVATIONS, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields, Norm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    import numpy.typing as npt

    from ..images.processor import TileLayout
    from ..step.batch import Int64s

MAX_TILE_PIXELS = 4_096  # of a tile's side
MAX_PATCHES = 1 << 14  # of a tile
_DEFAULTS: dict[str, object] = {
    "image_size": 224,
    "intermediate_size": 3_072,
    "num_hidden_layers": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
SIGLIP_DEFAULTS: dict[str, object] = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
_QWEN_DEFAULTS: dict[str, object] = {
    "hidden_size": 3_584,
    "intermediate_size": 3_420,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "patch_size": 14,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


_QWEN3_DEFAULTS: dict[str, object] = {
    "hidden_size": 1_152,
    "intermediate_size": 4_304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 16,
}


class TowerNames(Struct, frozen=True):
    """A tower's tensors in a checkpoint, behind its root; those of a layer behind `layer`."""

    patches: str = "embeddings.patch_embedding"
    class_row: str | None = None  # before the patches; these have no biases then
    positions: str | None = "embeddings.position_embedding.weight"  # None: there is no table of positions
    # Of patches, of their products, and of the sums of these and their positions, each may be ""; or none.
    entry_norms: tuple[str, ...] = ()
    layer: str = "encoder.layers.{}."
    matrix: str = ""  # behind the names of a layer's matrices, before ".weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one for all
    output: str = "self_attn.out_proj"
    attention_norm: str = "layer_norm1"
    up: tuple[str, ...] = ("mlp.fc1",)  # or gate, then up
    down: str = "mlp.fc2"
    mlp_norm: str = "layer_norm2"
    # Of what attention and the MLP add, and of queries and keys. None: there are none, nor one of values.
    output_norms: tuple[str, str] | None = None
    head_norms: tuple[str, str] | None = None
    final_norm: str | None = "post_layernorm"
    # Of a connector of two matrices, behind its prefix; and the prefix of each one that follows a layer, by number.
    connector: tuple[str, ...] = ()
    deep: str = ""


_QWEN_NAMES = TowerNames(
    patches="patch_embed.proj",
    positions=None,
    layer="blocks.{}.",
    qkv=("attn.qkv",),
    output="attn.proj",
    attention_norm="norm1",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    mlp_norm="norm2",
    final_norm="merger.ln_q",
    connector=("mlp.0", "mlp.2"),
)
_QWEN3_NAMES = replace(
    _QWEN_NAMES,
    positions="pos_embed.weight",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    final_norm="merger.norm",
    connector=("linear_fc1", "linear_fc2"),
    deep="deepstack_merger_list.{}.",
)


_GEMMA4_DEFAULTS: dict[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "patch_size": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA4_NAMES = TowerNames(
    patches="patch_embedder.input_proj",
    matrix=".linear",
    positions="patch_embedder.position_embedding_table",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    attention_norm="input_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    mlp_norm="pre_feedforward_layernorm",
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    final_norm=None,
)


_UNIFIED_NAMES = TowerNames(
    patches="patch_dense",
    positions="pos_embedding",
    entry_norms=("patch_ln1", "patch_ln2", "pos_norm"),
    final_norm=None,
)


class VisionConfig(Struct, frozen=True):
    """A vision tower. Counts are at least 1, but for layers; `num_heads` divides `hidden_size`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float
    tile_size: int  # pixels of a tile's side; 0: a tile is one image, of any number of whole squares
    patch_size: int  # pixels of a patch's side
    square: int  # patches of a square of this side become one token
    image_token: int  # the token that stands for each row of an image
    roots: tuple[
        str, ...
    ]  # what may stand before the names of the tower's tensors; the first that fits counts
    connectors: tuple[str, ...]  # likewise, of the connector's
    # Likewise, of the row behind each row of an image's tokens; none: the image's rows are those of its tiles.
    marks: tuple[str, ...] = ()
    names: TowerNames = TowerNames()
    # Of a connector of two matrices: what the first one makes; 0: as many numbers as it takes.
    connector_width: int = 0
    connector_bias: bool = True
    connector_activation: str = "gelu"
    # A token's row is made of the normalised mean of its patches; otherwise of its patches side by side.
    averages: bool = False
    # The mean is times this, and normalised without weights. None: the norm has weights, and the connector's matrix is
    # stored inputs first.
    mean_scale: float | None = None
    standardizes: bool = False  # means are then times a number of each column, once another one is subtracted
    is_whole: bool = False  # the tokens of an image see one another in the decoder, and are computed at once
    is_whole_in_windows: bool = False  # but in layers without a window they see those before them only
    most_tokens: int = MAX_PATCHES  # of an image
    entry_norm_eps: float = 1e-5
    gives_class: bool = False  # the row before the patches becomes a token, too
    norm: Norm = Norm.LAYER  # others have no biases, and patches have none then
    has_biases: bool = True  # of layers' products
    is_bounded: bool = False  # inputs and outputs of layers' products are clipped to bounds that the file has
    attention_scale: float | None = None  # None: head_dim ** -0.5
    channels_last: bool = False  # of a patch's numbers; otherwise they are first
    centres_pixels: bool = False  # pixels p become 2 (p - 1/2)
    num_frames: int = 1  # a patch is given so often, as if frames of a video were equal
    rope_theta: float | None = None  # patches turn by their rows and columns
    window: int = 0  # tokens of the side of the windows that patches see; 0: they see all of their tile
    full_layers: tuple[int, ...] = ()  # those without windows
    positions_side: int = 0  # of a square table of positions that fits any size; 0: of a tile's patches
    # Rows of each of two tables: a patch's position is the sum of one for its column and one for its row, and half of a
    # head turns by the one, and half by the other. 0: otherwise.
    axis_positions: int = 0
    axes_alternate: bool = (
        False  # the rows of the two tables are next to one another; otherwise the tables are
    )
    # The layers whose states also become rows, which are added to those of the decoder's first layers.
    deep_layers: tuple[int, ...] = ()
    has_grid: bool = False  # the decoder turns an image's tokens by their rows and columns

    needs_images = False  # prompts may be of text alone

    @property
    def patches_per_side(self) -> int:
        return self.tile_size // self.patch_size

    @property
    def patches_per_tile(self) -> int:
        return self.patches_per_side**2

    @property
    def most_patches(self) -> int:
        """The patches of the largest tile."""
        if self.tile_size:
            return self.patches_per_tile
        most = (2 * MAX_TILE_PIXELS // self.patch_size) ** 2  # of an image that a processor makes
        return min(most, self.most_tokens * self.square**2, MAX_PATCHES)

    @property
    def num_positions(self) -> int:
        """Of the table of positions."""
        if self.names.positions is None:
            return 0
        has_class = self.names.class_row is not None
        return 2 * self.axis_positions or self.positions_side**2 or self.patches_per_tile + has_class

    def grid_of(self, height: int, width: int) -> tuple[int, int] | None:
        """Rows and columns of the tokens of a tile of these pixels; None: the tower does not take it."""
        side = self.patch_size * self.square
        if self.tile_size:
            num = self.patches_per_side // self.square
            return (num, num) if height == width == self.tile_size else None
        rows, columns = height // side, width // side
        is_whole = (rows * side, columns * side) == (height, width)
        if self.axis_positions and max(height, width) > self.axis_positions * self.patch_size:
            return None
        most = min(self.most_tokens, MAX_PATCHES // self.square**2)
        return (rows, columns) if is_whole and 0 < rows * columns <= most else None

    def fits(self, tiles: npt.NDArray[np.uint8] | None, places: Int64s, layout: TileLayout | None) -> bool:
        """True if the tower makes as many rows of these tiles as there are places. Tokens with rows and columns are
        those of one tile, and adjacent.
        """
        if tiles is None or tiles.ndim != 4 or tiles.shape[1] != 3:
            return False
        rows, columns = self.grid_of(*tiles.shape[2:]) or (0, 0)
        if layout is not None:
            is_laid_out = bool(self.marks) and rows > 0 and layout.fits(len(tiles), rows)
            return is_laid_out and len(places) == layout.num_tokens(rows * columns)
        num_tokens = rows * columns + self.gives_class if rows else 0
        if self.marks or not len(places) == len(tiles) * num_tokens > 0:
            return False
        is_run = int(places[-1] - places[0]) == len(places) - 1
        return not self.has_grid or (len(tiles) == 1 and is_run)

    def is_among(self, names: Iterable[str]) -> bool:
        """True if some of these names are those of the tower's tensors."""
        return any(name.startswith(self.roots) for name in names)

    @classmethod
    def of_idefics3(cls, config: Fields, vocab_size: int) -> VisionConfig:
        """Missing keys of `vision_config` have transformers' defaults. Raises `ModelError`."""
        defaults = {"hidden_size": 1_152, "num_attention_heads": 16, "patch_size": 32}
        made = read_tower(vision_fields(config, defaults))
        square = config.integer("scale_factor", low=1, high=64, default=2)
        if made.patches_per_side % square:
            raise config.wrong(
                "scale_factor", f"but must divide the {made.patches_per_side} patches of a side"
            )
        return replace(
            made,
            square=square,
            image_token=config.integer("image_token_id", low=0, high=vocab_size - 1, default=128_257),
            roots=("model.vision_model.",),
            connectors=("model.connector.modality_projection.proj",),
        )

    @classmethod
    def of_gemma3(cls, config: Fields, vocab_size: int) -> VisionConfig:
        """Likewise."""
        made = read_tower(vision_fields(config, SIGLIP_DEFAULTS))
        num_tokens = config.integer("mm_tokens_per_image", low=1, high=MAX_PATCHES, default=256)
        per_side = math.isqrt(num_tokens)
        if per_side**2 != num_tokens or made.patches_per_side % per_side:
            raise config.wrong(
                "mm_tokens_per_image",
                f"but must be the square of a number that divides the {made.patches_per_side} patches of a side",
            )
        # The latter is transformers' other name of it.
        key = "image_token_index" if "image_token_index" in config else "image_token_id"
        towers = ("vision_tower.vision_model.", "vision_tower.")
        return replace(
            made,
            square=made.patches_per_side // per_side,
            image_token=config.integer(key, low=0, high=vocab_size - 1, default=262_144),
            roots=(*towers, *(f"model.{root}" for root in towers)),
            connectors=("multi_modal_projector.", "model.multi_modal_projector."),
            averages=True,
            is_whole=True,
        )

    @classmethod
    def of_gemma4(cls, config: Fields, vocab_size: int, *, is_whole: bool) -> VisionConfig:
        """Likewise; `is_whole` is the decoder's."""
        own = vision_fields(config, _GEMMA4_DEFAULTS)
        made = replace(read_tower(own, activation_key="hidden_activation"), tile_size=0)
        own.integer("num_key_value_heads", low=made.num_heads, high=made.num_heads, default=made.num_heads)
        head_dim = made.hidden_size // made.num_heads
        own.integer("head_dim", low=head_dim, high=head_dim, default=64)
        if head_dim % 4:
            raise own.wrong("hidden_size", f"but must be a multiple of 4 for each of {made.num_heads} heads")
        rope = Fields(own.get("rope_parameters") or {}, where="vision_config.rope_parameters.")
        rope.choice("rope_type", ("axial", "default"), default="axial")
        token = config.integer("image_token_id", low=0, high=vocab_size - 1, default=258_880)
        return replace(
            made,
            square=own.integer("pooling_kernel_size", low=2, high=64, default=3),
            image_token=token,
            roots=("model.vision_tower.", "vision_tower."),
            connectors=("model.embed_vision.embedding_projection", "embed_vision.embedding_projection"),
            names=_GEMMA4_NAMES,
            averages=True,
            mean_scale=made.hidden_size**0.5,
            standardizes=own.boolean("standardize", default=False),
            is_whole=is_whole,
            is_whole_in_windows=is_whole,
            norm=Norm.RMS_WIDE,
            norm_eps=own.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6),
            has_biases=False,
            is_bounded=own.boolean("use_clipped_linears", default=False),
            attention_scale=1.0,
            channels_last=True,
            centres_pixels=True,
            axis_positions=own.integer("position_embedding_size", low=1, high=MAX_PATCHES, default=10_240),
            rope_theta=rope.number("rope_theta", low=2.0, high=1e12, default=100.0),
        )

    @classmethod
    def of_gemma4_unified(
        cls, config: Fields, vocab_size: int, *, is_whole: bool, window: int
    ) -> VisionConfig:
        """Likewise: a tower without layers, of one patch a token. Images are bounded by the decoder's window, beyond
        which their tokens would see one another, too.
        """
        own = Fields(config.get("vision_config") or {}, where="vision_config.")
        width = own.integer("mm_embed_dim", low=1, high=MAX_WIDTH, default=3_840)
        own.integer("output_proj_dims", low=width, high=width, default=3_840)
        square = own.integer("pooling_kernel_size", low=1, high=64, default=3)
        size = square * own.integer("patch_size", low=1, high=MAX_TILE_PIXELS // square, default=16)
        return VisionConfig(
            hidden_size=width,
            intermediate_size=1,
            num_layers=0,
            num_heads=1,
            activation="gelu_pytorch_tanh",
            norm_eps=own.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6),
            tile_size=0,
            patch_size=size,
            square=1,
            image_token=config.integer("image_token_id", low=0, high=vocab_size - 1, default=258_880),
            # As files have them, and as transformers calls them.
            roots=("model.vision_embedder.", "vision_embedder.", "model.embed_vision."),
            connectors=(
                "model.embed_vision.embedding_projection",
                "embed_vision.embedding_projection",
                "model.embed_vision.multimodal_embedder.embedding_projection",
            ),
            names=_UNIFIED_NAMES,
            averages=True,
            mean_scale=1.0,
            is_whole=is_whole,
            most_tokens=window if is_whole else MAX_PATCHES,
            channels_last=True,
            axis_positions=own.integer("mm_posemb_size", low=1, high=MAX_PATCHES, default=1_120),
            axes_alternate=True,
        )

    @classmethod
    def of_qwen2_5_vl(cls, config: Fields, vocab_size: int, hidden_size: int) -> VisionConfig:
        """Likewise, for a decoder with rows of `hidden_size`."""
        own = vision_fields(config, _QWEN_DEFAULTS)
        made = replace(_read_qwen(config, own, vocab_size, hidden_size), names=_QWEN_NAMES, norm=Norm.RMS)
        side = made.patch_size * made.square
        window = own.integer("window_size", low=side, high=MAX_TILE_PIXELS, default=112) // side
        return replace(made, window=window, full_layers=_layers(own, "fullatt_block_indexes"))

    @classmethod
    def of_qwen3_5(cls, config: Fields, vocab_size: int, hidden_size: int) -> VisionConfig:
        """Likewise."""
        whole = config.filled({"image_token_id": 248_056})
        return cls.of_qwen3_vl(whole, vocab_size, hidden_size, deep_layers=())

    @classmethod
    def of_qwen3_vl(
        cls,
        config: Fields,
        vocab_size: int,
        hidden_size: int,
        *,
        deep_layers: tuple[int, ...] = (8, 16, 24),
    ) -> VisionConfig:
        """Likewise; `deep_layers` are those of files that do not name any."""
        own = vision_fields(config, {**_QWEN3_DEFAULTS, "deepstack_visual_indexes": deep_layers})
        made = _read_qwen(config, own, vocab_size, hidden_size)
        num = own.integer("num_position_embeddings", low=1, high=MAX_PATCHES, default=2_304)
        if math.isqrt(num) ** 2 != num:
            raise own.wrong("num_position_embeddings", "but must be the square of a whole number")
        deep_layers = _layers(own, "deepstack_visual_indexes")
        if list(deep_layers) != sorted({*deep_layers} & {*range(made.num_layers)}):
            raise own.wrong(
                "deepstack_visual_indexes", f"but must name some of {made.num_layers} layers, ascending"
            )
        return replace(made, names=_QWEN3_NAMES, positions_side=math.isqrt(num), deep_layers=deep_layers)


def _read_qwen(config: Fields, own: Fields, vocab_size: int, hidden_size: int) -> VisionConfig:
    """The fields that towers of Qwen's models have in common, which are those of `own`."""
    own.integer("out_hidden_size", low=hidden_size, high=hidden_size, default=3_584)
    made = replace(read_tower(own), tile_size=0, norm_eps=1e-6)
    if made.hidden_size // made.num_heads % 4:
        raise own.wrong("hidden_size", f"but must be a multiple of 4 for each of {made.num_heads} heads")
    rope = Fields(own.get("rope_parameters") or {}, where="vision_config.rope_parameters.")
    roots = ("model.visual.", "visual.")
    return replace(
        made,
        square=own.integer("spatial_merge_size", low=1, high=64, default=2),
        image_token=config.integer("image_token_id", low=0, high=vocab_size - 1, default=151_655),
        roots=roots,
        connectors=tuple(f"{root}merger." for root in roots),
        num_frames=own.integer("temporal_patch_size", low=1, high=16, default=2),
        rope_theta=rope.number("rope_theta", low=2.0, high=1e12, default=1e4),
        has_grid=True,
    )


def _layers(own: Fields, key: str) -> tuple[int, ...]:
    layers = own.get(key)
    if not isinstance(layers, list | tuple) or any(type(index) is not int for index in layers):
        raise own.wrong(key, "but must be a list of layers")
    return tuple(layers)


def vision_fields(config: Fields, defaults: Mapping[str, object]) -> Fields:
    """Of `vision_config`, with these defaults of keys that are absent or null."""
    given = Fields(config.get("vision_config") or {}, where="vision_config.")
    return given.renamed({"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}).filled(
        {**_DEFAULTS, **defaults}
    )


def read_tower(own: Fields, *, activation_key: str = "hidden_act") -> VisionConfig:
    """A tower by the fields of `vision_config`, and what the family has still to fill in."""
    for key in ("num_channels", "in_channels", "in_chans"):
        own.integer(key, low=3, high=3, default=3)
    hidden_size = own.integer("hidden_size", low=1, high=MAX_WIDTH)
    num_heads = own.integer("num_attention_heads", low=1, high=MAX_HEADS)
    if hidden_size % num_heads:
        raise own.wrong("hidden_size", f"but must be a multiple of num_attention_heads, {num_heads}")
    tile_size = own.integer("image_size", low=1, high=MAX_TILE_PIXELS)
    made = VisionConfig(
        hidden_size=hidden_size,
        intermediate_size=own.integer("intermediate_size", low=1, high=MAX_WIDTH),
        num_layers=own.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        num_heads=num_heads,
        activation=own.choice(activation_key, ACTIVATIONS),
        norm_eps=own.number("layer_norm_eps", low=0.0, high=1.0),
        tile_size=tile_size,
        patch_size=own.integer("patch_size", low=1, high=tile_size),
        square=1,
        image_token=0,
        roots=(),
        connectors=(),
    )
    if made.patches_per_tile > MAX_PATCHES:
        raise own.wrong("patch_size", f"but a tile may have {MAX_PATCHES} patches")
    return made
