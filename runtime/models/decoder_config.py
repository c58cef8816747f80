"""A decoder's config.json as validated values, and the table of the families that are read.

Each family is a module of `families/`, named here by string and imported when a model of it is read: its `read` makes
the `DecoderConfig` out of the fields, most of it by `read_common`. What is read is bounded and checked against itself,
so that the model code can rely on it. Options that would change the result and are not implemented are refused by name,
never ignored. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from .fields import ACTIVATIONS, MAX_EXPERTS, MAX_HEAD_DIM, MAX_WIDTH, Fields, family_of, shape_of
from .quantization_config import QuantizationConfig, compute_dtype
from .rope_config import MAX_POSITIONS, RopeConfig
from .vision_config import VisionConfig

# model_type → the module of its family, in `families/` or by its full name, and the architecture
# whose weights this code can run.
FAMILY_MODULES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "ministral": ("mistral", "MinistralForCausalLM"),
    "qwen2": ("qwen", "Qwen2ForCausalLM"),
    "qwen3": ("qwen", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma", "Gemma3ForCausalLM"),
    "cohere": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere", "Cohere2ForCausalLM"),
    "glm": ("glm", "GlmForCausalLM"),
    "glm4": ("glm", "Glm4ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmo3": ("olmo2", "Olmo3ForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "ernie4_5": ("ernie", "Ernie4_5ForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2_moe": ("lfm2", "Lfm2MoeForCausalLM"),
    "glm4_moe": ("glm", "Glm4MoeForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
}
# The same of decoders that also take images.
VISION_FAMILY_MODULES: dict[str, tuple[str, str]] = {
    "idefics3": ("idefics3", "Idefics3ForConditionalGeneration"),
    "smolvlm": ("idefics3", "SmolVLMForConditionalGeneration"),
}


def decoder_architectures() -> dict[str, tuple[str, ...]]:
    """The architectures of each family: that which generates, the classifier, and the layers alone."""
    found: dict[str, tuple[str, ...]] = {}
    for family, (_, architecture) in FAMILY_MODULES.items():
        name = "Gemma3Text" if family == "gemma3_text" else architecture.removesuffix("ForCausalLM")
        found[family] = (architecture, f"{name}ForSequenceClassification", f"{name}Model")
    return found | {family: (name,) for family, (_, name) in VISION_FAMILY_MODULES.items()}


def is_pooled(config: Mapping[str, Any], *, has_modules: bool) -> bool:
    """True if a decoder's config.json describes one that embeds or classifies; `has_modules`: there is a modules.json
    of sentence-transformers.
    """
    names = Fields(config).texts("architectures") or ()
    return has_modules or any(name.endswith(("ForSequenceClassification", "Model")) for name in names)


class Norm(enum.StrEnum):
    """Kinds of norms over rows, without biases; sums are fp32."""

    RMS = "rms"  # x / rms(x), rounded to the model's dtype, times the weight
    RMS_WIDE = "rms_wide"  # x / rms(x) times the weight, rounded once
    RMS_PLUS_ONE = "rms_plus_one"  # x / rms(x) times (1 + weight), rounded once
    LAYER = "layer"  # (x - mean(x)) / deviation(x) times the weight, rounded once


class LayerRotary(enum.StrEnum):
    """The rotary table that turns a layer's queries and keys."""

    MAIN = "main"
    LOCAL = "local"
    NONE = "none"  # they are not turned


class ClampedSwiglu(Struct, frozen=True):
    """g / (1 + exp(-alpha · g)) · (u + 1), rounded once, of g = min(gate, limit) and u = up clipped to ±limit."""

    alpha: float
    limit: float


class ExpertShares(enum.StrEnum):
    """The functions that make shares of a router's scores, in fp32."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # of each score by itself


class Experts(Struct, frozen=True):
    """A mixture of experts in place of a layer's MLP: each token goes through those few whose shares are highest.

    Shares are made of the router's scores, and weights of the shares. Outputs are rounded once they are weighted, and
    added in the order of the experts; then that of the shared expert, if there is one.
    """

    num: int
    num_used: int  # by each token
    size: int  # intermediate size of each
    layers: tuple[bool, ...]  # whether each layer has them; others have an MLP
    sum_to_1: bool  # the weights of those that are used; otherwise they are shares of all
    rounds_weights: bool  # to the model's dtype
    has_bias: bool = False  # the router and each expert's gate, up and down
    swiglu: ClampedSwiglu | None = None  # in place of activation(gate) · up
    shares: ExpertShares = ExpertShares.SOFTMAX
    wide_scores: bool = False  # scores are fp32; otherwise rounded to the model's dtype
    has_correction: bool = (
        False  # a number for each expert is added to its share to choose, and not to its weight
    )
    num_groups: int = 1  # equal runs of experts; those of other groups than the used ones are not chosen
    num_groups_used: int = 1  # with the highest share, or two highest corrected ones together
    sum_eps: float = 0.0  # added to the sum of shares that weights are divided by, with `sum_to_1`
    factor: float = 1.0  # of weights, behind that
    shared_size: int = (
        0  # intermediate size of the shared expert, which all tokens go through; 0: there is none
    )


class ShortConvolutions(Struct, frozen=True):
    """Gated convolutions in place of some layers' attention: output(c · convolution(b · x)) of a row's thirds b, c, x.

    Each channel sees its own last `size` tokens. Products and sums are rounded to the model's dtype.
    """

    size: int  # tokens, a row's own included
    layers: tuple[bool, ...]  # whether each layer has one; others attend
    has_bias: bool  # the convolution, and the projections before and after it


class LayerNames(Struct, frozen=True):
    """A layer's tensors in a checkpoint, after "model.layers.0.". None: the layer has no such norm."""

    attention_norm: str | None = "input_layernorm"
    attention_output_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one for all
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    convolution: tuple[str, str, str] = ("conv.in_proj", "conv.conv", "conv.out_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one for each, or one for both
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"  # of a mixture
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    expert_correction: str = "mlp.gate.e_score_correction_bias"
    shared_expert: str = "mlp.shared_experts."
    stacked_experts: str | None = None  # all of a layer's in one tensor each: `stacked_experts.py`


class DecoderConfig(Struct, frozen=True):
    """A decoder. Counts are at least 1; `num_kv_heads` divides `num_heads`. Defaults are those of the Llama family."""

    family: str  # a key of FAMILY_MODULES or VISION_FAMILY_MODULES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float
    max_context: int  # tokens of prompt and answer together
    rope: RopeConfig
    windows: tuple[int | None, ...]  # a layer: how many tokens back a token sees, itself included; None: all
    tie_word_embeddings: bool
    quantization: QuantizationConfig | None
    dtype: str | None  # to compute in, where the model is quantised: embeddings do not always tell it
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised, head by head
    joint_qk_norm: bool = False  # all heads of a row as one instead
    has_sinks: bool = False  # each head has one more score, of a key without a value
    norm: Norm = Norm.RMS
    names: LayerNames = LayerNames()
    final_norm: str = "norm"  # its name in a checkpoint, after "model."
    roots: tuple[str, ...] = ("", "model.")  # what may stand before all names; the first that fits counts
    vision: VisionConfig | None = None  # the tower whose rows take the places of image tokens
    local_rope: RopeConfig | None = None
    layer_rotary: tuple[LayerRotary, ...] = ()  # of each layer; empty: all are turned by `rope`
    wide_rotary: bool = False  # turned in fp32, rounded once
    interleaved_rotary: bool = False  # number 2 i turns with 2 i + 1
    is_parallel: bool = False  # attention and MLP take the same norm
    experts: Experts | None = None
    convolutions: ShortConvolutions | None = None
    attention_scale: float | None = None  # None: head_dim ** -0.5
    score_cap: float | None = None  # attention scores s become cap · tanh(s / cap)
    logit_cap: float | None = None  # likewise
    scales_embeddings: bool = False  # by sqrt(hidden_size), rounded to the model's dtype
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecoderConfig:
        """Raises `ModelError` naming the key that is missing, wrong or not supported."""
        config = Fields(data)
        family = family_of(config, decoder_architectures())
        module, _ = (FAMILY_MODULES | VISION_FAMILY_MODULES)[family]
        place = module if "." in module else f".families.{module}"
        read: Callable[[Fields, str], DecoderConfig] = import_module(place, __package__).read
        return read(config, family)

    @property
    def is_stretched(self) -> bool:
        """True if rotary tables are stretched beyond the pretraining context."""
        return self.max_context > self.rope.max_context

    def convolves(self, layer: int) -> bool:
        """True if this layer has a convolution in place of attention."""
        return self.convolutions is not None and self.convolutions.layers[layer]

    def admitting(self, max_context: int) -> DecoderConfig:
        """This config for contexts of `max_context` tokens, up to the limit of its rotary scaling; never shorter."""
        longest = self.rope.longest_context if self.rope.longest_context > self.rope.max_context else 0
        return replace(self, max_context=max(self.max_context, min(max_context, longest)))


def read_common(
    config: Fields,
    family: str,
    *,
    rope: Callable[..., RopeConfig] = RopeConfig.from_fields,
    default_head_dim: int | None = None,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
    norm_eps_key: str = "rms_norm_eps",
    norm_eps: float = 1e-6,
    is_tied: bool = False,
) -> DecoderConfig:
    """The fields that nearly all families have, with these defaults where they are absent: no biases, full attention in
    all layers. `rope` takes the fields, `head_dim` and `max_positions`.
    """
    quantization = QuantizationConfig.from_fields(config)
    shape = shape_of(config)
    hidden_size, num_heads = shape["hidden_size"], shape["num_heads"]
    num_kv_heads = config.integer("num_key_value_heads", low=1, high=num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"but must divide num_attention_heads, {num_heads}")
    head_dim = config.optional_integer("head_dim", low=4, high=MAX_HEAD_DIM)
    if head_dim is None:
        head_dim = default_head_dim or _even_share(config, hidden_size, num_heads)
    max_positions = config.integer("max_position_embeddings", low=1, high=MAX_POSITIONS)
    rotary = rope(config, head_dim=head_dim, max_positions=max_positions)
    return DecoderConfig(
        family=family,
        vocab_size=shape["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=shape["intermediate_size"],
        num_layers=shape["num_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=config.choice(activation_key, ACTIVATIONS, default=default_activation),
        norm_eps=config.number(norm_eps_key, low=0.0, high=1.0, default=norm_eps),
        max_context=rotary.max_context,
        rope=rotary,
        windows=(None,) * shape["num_layers"],
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=is_tied),
        quantization=quantization,
        dtype=compute_dtype(config) if quantization is not None else None,
    )


def windows_by_type(
    config: Fields, num_layers: int, window: int | None, default: Sequence[int | None]
) -> tuple[int | None, ...]:
    """Each layer's window by `layer_types`; where the file has none, those of `default`."""
    kinds = config.texts("layer_types")
    if kinds is None:
        return tuple(default)
    if len(kinds) < num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.wrong(
            "layer_types", f"but must say full_attention or sliding_attention for each of {num_layers} layers"
        )
    if window is None and "sliding_attention" in kinds:
        raise config.wrong("layer_types", "but there is no sliding_window (or use_sliding_window is not set)")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])


def read_windows(
    config: Fields, num_layers: int, *, interval: int, interval_key: str | None = "sliding_window_pattern"
) -> tuple[int | None, ...]:
    """Of each layer, by default 4,096 tokens. In files without `layer_types` each `interval`-th sees all, or as many as
    `interval_key` says.
    """
    stated = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    window = stated if config.states("sliding_window") else 4_096
    if interval_key is not None and "layer_types" not in config:
        interval = config.integer(interval_key, low=1, high=1 << 16, default=interval)
    by_place = [None if (index + 1) % interval == 0 else window for index in range(num_layers)]
    return windows_by_type(config, num_layers, window, by_place)


def read_experts(
    config: Fields,
    *,
    size_key: str,
    layers: Sequence[bool],
    sum_to_1: bool,
    rounds_weights: bool,
    has_bias: bool = False,
    swiglu: ClampedSwiglu | None = None,
) -> Experts:
    """A mixture in these layers. Files of transformers 5 say `num_local_experts`, others mostly `num_experts`."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    num = config.integer(next((key for key in keys if key in config), keys[-1]), low=1, high=MAX_EXPERTS)
    return Experts(
        num,
        config.integer("num_experts_per_tok", low=1, high=num),
        config.integer(size_key, low=1, high=MAX_WIDTH),
        tuple(layers),
        sum_to_1,
        rounds_weights,
        has_bias,
        swiglu,
    )


def read_sigmoid_experts(config: Fields, layers: Sequence[bool], *, sum_to_1: bool, factor: float) -> Experts:
    """DeepSeek V3's kind of mixture in these layers, with these defaults: sigmoids as shares, corrections, groups of
    experts, shared ones. Raises `ModelError`.
    """
    common = read_experts(
        config,
        size_key="moe_intermediate_size",
        layers=layers,
        sum_to_1=config.boolean("norm_topk_prob", default=sum_to_1),
        rounds_weights=False,
    )
    num_groups = config.integer("n_group", low=1, high=common.num, default=1)
    if common.num % num_groups:
        raise config.wrong("n_group", f"but must divide the number of experts, {common.num}")
    used = config.integer("topk_group", low=1, high=num_groups, default=1)
    if common.num_used > common.num // num_groups * used:
        raise config.wrong(
            "topk_group", f"but {common.num_used} experts are chosen, more than their groups have"
        )
    num_shared = config.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    return replace(
        common,
        shares=ExpertShares.SIGMOID,
        wide_scores=True,
        has_correction=True,
        num_groups=num_groups,
        num_groups_used=used,
        sum_eps=1e-20,
        factor=config.number("routed_scaling_factor", low=1e-6, high=1e6, default=factor),
        shared_size=num_shared * common.size,
    )


def refuse_set(config: Fields, *keys: str) -> None:
    """Raises `ModelError` where one of these switches, which would change the result, is on."""
    for key in keys:
        if config.boolean(key, default=False):
            raise config.wrong(key, "which is not supported")


def _even_share(config: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim, rest = divmod(hidden_size, num_heads)
    if rest or not 4 <= head_dim <= MAX_HEAD_DIM:
        raise config.wrong(
            "hidden_size",
            f"but without a head_dim it must be num_attention_heads, {num_heads}, times 4 to {MAX_HEAD_DIM}",
        )
    return head_dim
