"""nomic-bert: BERT with rotary positions and a gated MLP.

Two dialects of config.json are read: that of the authors' code, with GPT-2's keys (`n_embd`), and that of transformers.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..encoder_config import EncoderConfig, EncoderNames, read_common, refuse_unless
from ..fields import MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Fields
from ..rope_config import MAX_POSITIONS

_NAMES = EncoderNames(
    roots=("", "nomic_bert.", "bert."),
    norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),  # the gate is the second one
    down="mlp.fc2",
    mlp_norm="norm2",
    dense="nomic_bert.pooler.dense",
    scores="classifier",
)
_THETA = 1_000.0  # where the file leaves it out
_TRAINED_POSITIONS = 2_048  # likewise
_LOW, _HIGH = 2.0, 1e12


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = _read_gpt(config, family) if "n_embd" in config else _read_own(config, family)
    return replace(
        common,
        max_positions=0,
        type_vocab_size=config.integer("type_vocab_size", low=0, high=1 << 16, default=2),
        activation="silu",
        is_gated=True,
    )


def _read_gpt(config: Fields, family: str) -> EncoderConfig:
    """The dialect of the authors' code."""
    refuse_unless(
        config,
        activation_function="swiglu",
        causal=False,
        expert_choice_router=False,
        moe_every_n_layers=0,
        num_experts=0,
        parallel_block=False,
        prenorm=False,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        use_rms_norm=False,
    )
    if "rotary_emb_scale_base" in config:
        raise config.wrong("rotary_emb_scale_base", "but rotations that decay are not supported")
    hidden_size = config.integer("n_embd", low=1, high=MAX_WIDTH)
    inner_size = config.optional_integer("n_inner", low=1, high=MAX_WIDTH)
    up_bias = config.boolean("mlp_fc1_bias", default=True)
    if up_bias != config.boolean("mlp_fc2_bias", default=True):
        raise config.wrong("mlp_fc1_bias", "but mlp_fc2_bias is another")
    return EncoderConfig(
        family=family,
        names=_NAMES,
        vocab_size=config.integer("vocab_size", low=1, high=MAX_VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size if inner_size is None else inner_size,
        num_layers=config.integer("n_layer", low=1, high=MAX_LAYERS),
        num_heads=config.integer("n_head", low=1, high=MAX_HEADS),
        activation="silu",
        norm_eps=config.number("layer_norm_epsilon", low=0.0, high=1.0, default=1e-5),
        max_tokens=_max_tokens(config),
        has_qkv_bias=config.boolean("qkv_proj_bias", default=True),
        has_output_bias=config.boolean("qkv_proj_bias", default=True),
        has_mlp_bias=up_bias,
        rope_theta=config.number("rotary_emb_base", low=_LOW, high=_HIGH, default=_THETA),
        pooling="cls",
    )


def _max_tokens(config: Fields) -> int:
    """Rotations that a file stretches are those of the training up to its length, and another model's beyond it."""
    positions = config.integer("n_positions", low=1, high=MAX_POSITIONS, default=_TRAINED_POSITIONS)
    if "rotary_scaling_factor" not in config:
        return positions
    trained = config.integer("max_trained_positions", low=1, high=MAX_POSITIONS, default=_TRAINED_POSITIONS)
    return min(positions, trained)


def _read_own(config: Fields, family: str) -> EncoderConfig:
    """The dialect of transformers."""
    common = read_common(config, family, _NAMES)
    refuse_unless(config, hidden_act="silu", head_dim=common.hidden_size // common.num_heads)
    rope = Fields(config.get("rope_parameters") or {}, where="rope_parameters.")
    rope.choice("rope_type", ("default",), default="default")
    return replace(
        common,
        max_tokens=config.integer("max_position_embeddings", low=1, high=MAX_POSITIONS, default=2_048),
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        rope_theta=rope.number("rope_theta", low=_LOW, high=_HIGH, default=_THETA),
    )
