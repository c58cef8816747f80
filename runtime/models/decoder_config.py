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
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from .fields import ACTIVATIONS, MAX_HEAD_DIM, Fields, Norm, family_of, shape_of
from .rope_config import MAX_POSITIONS, RopeConfig

if TYPE_CHECKING:
    from .delta_nets_config import DeltaNets
    from .experts_config import Experts
    from .layer_inputs_config import LayerInputs, Streams
    from .mamba_config import Mamba
    from .quantization_config import QuantizationConfig
    from .speech_config import SpeechConfig
    from .vision_config import VisionConfig

# model_type → the module of its family, in `families/` or by its full name, and the architecture that it runs
FAMILY_MODULES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "llama4_text": ("llama4", "Llama4ForCausalLM"),
    "llama4": ("llama4", "Llama4ForConditionalGeneration"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "ministral": ("mistral", "MinistralForCausalLM"),
    "qwen2": ("qwen", "Qwen2ForCausalLM"),
    "qwen3": ("qwen", "Qwen3ForCausalLM"),
    "qwen2_moe": ("qwen", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("qwen", "Qwen3MoeForCausalLM"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("qwen3_5", "Qwen3NextForCausalLM"),
    "gemma2": ("gemma", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma", "Gemma3ForCausalLM"),
    "gemma3n_text": ("gemma3n", "Gemma3nForCausalLM"),
    "gemma3n": ("gemma3n", "Gemma3nForConditionalGeneration"),
    "gemma4_text": ("gemma4", "Gemma4ForCausalLM"),
    "gemma4_unified_text": ("gemma4", "Gemma4UnifiedForCausalLM"),
    "cohere": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere", "Cohere2ForCausalLM"),
    "glm": ("glm", "GlmForCausalLM"),
    "glm4": ("glm", "Glm4ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "granitemoehybrid": ("granite_hybrid", "GraniteMoeHybridForCausalLM"),
    "bamba": ("bamba", "BambaForCausalLM"),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmo3": ("olmo2", "Olmo3ForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "ernie4_5": ("ernie", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("ernie", "Ernie4_5_MoeForCausalLM"),
    "hunyuan_v1_dense": ("hunyuan", "HunYuanDenseV1ForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "bitnet": ("bitnet", "BitNetForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "phi": ("phi", "PhiForCausalLM"),
    "nemotron": ("nemotron", "NemotronForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2_moe": ("lfm2", "Lfm2MoeForCausalLM"),
    "glm4_moe": ("glm", "Glm4MoeForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "deepseek_v2": ("deepseek", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("deepseek", "DeepseekV3ForCausalLM"),
    "kimi_k2": ("deepseek", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": ("deepseek", "Glm4MoeLiteForCausalLM"),
}
_WITH_HEAD = "LMHeadModel"  # the end of old names of architectures that generate
# The same of decoders that also take images.
VISION_FAMILY_MODULES: dict[str, tuple[str, str]] = {
    "idefics3": ("idefics3", "Idefics3ForConditionalGeneration"),
    "smolvlm": ("idefics3", "SmolVLMForConditionalGeneration"),
    "llava": ("llava", "LlavaForConditionalGeneration"),
    "llava_next": ("llava", "LlavaNextForConditionalGeneration"),
    "llava_onevision": ("llava", "LlavaOnevisionForConditionalGeneration"),
    "gemma3": ("gemma", "Gemma3ForConditionalGeneration"),
    "gemma4": ("gemma4", "Gemma4ForConditionalGeneration"),
    "gemma4_unified": ("gemma4", "Gemma4UnifiedForConditionalGeneration"),
    "qwen2_5_vl": ("qwen_vl", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen_vl", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("qwen_vl", "Qwen3VLMoeForConditionalGeneration"),
    "qwen3_5": ("qwen_vl", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("qwen_vl", "Qwen3_5MoeForConditionalGeneration"),
}
# And of decoders that transcribe sound.
SPEECH_FAMILY_MODULES: dict[str, tuple[str, str]] = {
    "whisper": ("whisper", "WhisperForConditionalGeneration"),
}
_WITH_TOWERS = VISION_FAMILY_MODULES | SPEECH_FAMILY_MODULES


def decoder_architectures() -> dict[str, tuple[str, ...]]:
    """The architectures of each family: that which generates, the classifier, and the layers alone; next to a tower,
    that of the text model, too.
    """
    found: dict[str, tuple[str, ...]] = {}
    for family, (_, architecture) in FAMILY_MODULES.items():
        name = architecture.removesuffix("ForCausalLM").removesuffix(_WITH_HEAD)
        base = f"{name}Text" if family.endswith("_text") else name
        pooled = (f"{base}ForSequenceClassification", f"{base}Model")
        found[family] = (architecture, *(pooled if name != architecture else ()))
    for family, (_, architecture) in _WITH_TOWERS.items():
        found[family] = (architecture, *found.get(f"{family}_text", ())[:1])
    return found


def is_decoder(config: Mapping[str, Any]) -> bool:
    """True if a config.json is that of a decoder; False where `encoder_config.is_encoder` has to tell."""
    fields = Fields(config)
    supported = decoder_architectures().get(str(fields.get("model_type")), ())
    return not set(supported).isdisjoint(fields.texts("architectures") or supported)


def is_pooled(config: Mapping[str, Any], *, has_modules: bool = False) -> bool:
    """True if a decoder's config.json describes one that embeds or classifies; `has_modules`: there is a modules.json
    of sentence-transformers.
    """
    names = [name.removesuffix(_WITH_HEAD) for name in Fields(config).texts("architectures") or ()]
    return has_modules or any(name.endswith(("ForSequenceClassification", "Model")) for name in names)


class LayerRotary(enum.StrEnum):
    """The rotary table that turns a layer's queries and keys."""

    MAIN = "main"
    LOCAL = "local"
    NONE = "none"  # they are not turned


class Sublayers(enum.StrEnum):
    """The parts of a layer."""

    BOTH = "both"
    MIXER = "mixer"  # attention, or what is in its place, alone
    MLP = "mlp"  # an MLP or a mixture of experts alone


class QueryScaling(Struct, frozen=True):
    """Queries of the token at position p are multiplied with 1 + strength · ln(1 + floor((p + 1) / interval)), and
    rounded, so that attention to many keys stays sharp (arXiv 2501.19399).
    """

    interval: int  # tokens
    strength: float
    layers: tuple[bool, ...]  # whether each layer's are


class ShortConvolutions(Struct, frozen=True):
    """Gated convolutions in place of some layers' attention: output(c · convolution(b · x)) of a row's thirds b, c, x.

    Each channel sees its own last `size` tokens. Products and sums are rounded to the model's dtype.
    """

    size: int  # tokens, a row's own included
    layers: tuple[bool, ...]  # whether each layer has one; others attend
    has_bias: bool  # the convolution, and the projections before and after it


class LatentAttention(Struct, frozen=True):
    """Keys and values of all heads as products with one latent a token, and one turned key that all heads share
    (arXiv 2405.04434, section 2.1). The pool has the latent, normalised, and behind it that key: one head's `head_dim`.
    """

    rank: int  # numbers of a latent
    query_rank: int  # of the normalised row that queries are made of; 0: they are made of the layer's input
    plain_dim: int  # numbers of a query head that are not turned; `rope.rotary_dim` more are
    value_dim: int  # of a head's output
    norm_eps: float  # of both norms


class LayerShape(Struct, frozen=True):
    """The sizes of a layer that may differ from other layers'."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    keys_of: int  # the layer whose keys and values it attends to: itself, or an earlier one of the same sizes
    keys_are_values: bool = False  # before their norm


class LayerNames(Struct, frozen=True):
    """A layer's tensors in a checkpoint, after "model.layers.0.". None: the layer has no such norm."""

    attention_norm: str | None = "input_layernorm"
    attention_inner_norm: str | None = None  # of the output projection's input
    attention_output_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_inner_norm: str | None = None  # of the down projection's input
    mlp_output_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one for all
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    convolution: tuple[str, str, str] = ("conv.in_proj", "conv.conv", "conv.out_proj")
    delta_net: str = "linear_attn."
    mamba: str = "mamba."
    cross_norm: str = "encoder_attn_layer_norm"  # of attention over an encoder's rows
    cross_qkv: tuple[str, str, str] = ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj")
    cross_output: str = "encoder_attn.out_proj"
    delta_net_inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one for each, or one for both
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"  # of a mixture
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    expert_correction: str = "mlp.gate.e_score_correction_bias"
    shared_expert: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"
    stacked_experts: str | None = None  # all of a layer's in one tensor each: `stacked_experts.py`
    stacked_gate_up: str = "gate_up_proj"  # what their names end with
    stacked_down: str = "down_proj"
    stacked_alternating: bool = False  # gate and up are every second output of these, and there are biases


class ModelNames(Struct, frozen=True):
    """The same of what is in no layer, after "model.", and of all layers."""

    embeddings: str = "embed_tokens"
    positions: str | None = None  # learned rows of positions, which are added to the embeddings
    layers: str = "layers"
    final_norm: str = "norm"
    head: str = "lm_head"  # the whole name
    adapted_layers: str = "model.layers"  # likewise, in adapters


class DecoderConfig(Struct, frozen=True):
    """A decoder. Counts are at least 1; `num_kv_heads` divides `num_heads`. Defaults are those of the Llama family."""

    family: str  # a key of FAMILY_MODULES, or of those with towers
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
    is_bidirectional: bool = False  # of a model that embeds; windows are tokens to each side then
    qkv_bias: bool = False
    key_bias: bool = True  # False: with `qkv_bias`, keys have none
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    gated_mlp: bool = True  # otherwise down(activation(up(x))), where `names.gate_up` has `up` alone
    head_bias: bool = False
    norm_bias: bool = False  # of the norms before attention and MLP, and of the final one
    qk_norm: bool = False  # queries and keys are normalised, head by head
    joint_qk_norm: bool = False  # all heads of a row as one instead
    late_qk_norm: bool = False  # once they are turned; not with `joint_qk_norm`
    unit_qk_norm: bool = False  # of layers that turn, without weights; not with `qk_norm`
    unit_value_norm: bool = False  # values are normalised, head by head, without weights
    layer_shapes: tuple[LayerShape, ...] = ()  # of each; empty: all have the sizes above
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None
    # x becomes (x + attention(y) + y + norm(up(down(y)))) / sqrt(2), with this rank (LAuReL, arXiv 2411.07501); 0: not.
    laurel_rank: int = 0
    # Of each layer: gates less their mean and this number of deviations, and at least 0, take their place; None: not.
    gate_cuts: tuple[float | None, ...] = ()
    has_layer_scalars: bool = False  # a number that x is multiplied with at each layer's end
    gated_attention: bool = False  # outputs are times the sigmoid of a gate behind each head's query
    chunked_windows: bool = False  # windows begin at multiples of their size
    query_scaling: QueryScaling | None = None
    has_sinks: bool = False  # each head has one more score, of a key without a value
    norm: Norm = Norm.RMS
    names: LayerNames = LayerNames()
    model_names: ModelNames = ModelNames()
    # What may stand before all names; the first that fits counts. Text models saved out of others have the second one.
    roots: tuple[str, ...] = ("", "model.language_model.", "model.")
    vision: VisionConfig | None = None  # the tower whose rows take the places of image tokens
    speech: SpeechConfig | None = None  # the encoder whose rows are those of a sequence's first tokens
    local_rope: RopeConfig | None = None
    layer_rotary: tuple[LayerRotary, ...] = ()  # of each layer; empty: all are turned by `rope`
    wide_rotary: bool = False  # turned in fp32, rounded once
    interleaved_rotary: bool = False  # number 2 i turns with 2 i + 1
    rotary_axes: tuple[int, ...] = ()  # as `DecoderSpec` has them
    # Attention and MLP take the same input, normed by one norm unless `names` has two.
    is_parallel: bool = False
    inputs_first: bool = False  # float matrices of layers are stored (num_in, num_out)
    interleaved_qkv: bool = False  # each head's query, key and value lie one behind another in a row of `qkv`
    experts: Experts | None = None
    convolutions: ShortConvolutions | None = None
    latent: LatentAttention | None = None  # then `num_kv_heads` is 1
    delta_nets: DeltaNets | None = None
    mamba: Mamba | None = None
    sublayers: tuple[Sublayers, ...] = ()  # of each layer; empty: all have both
    attention_scale: float | None = None  # None: head_dim ** -0.5
    score_cap: float | None = None  # attention scores s become cap · tanh(s / cap)
    logit_cap: float | None = None  # likewise
    scales_embeddings: bool = False  # by sqrt(hidden_size), rounded to the model's dtype
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    mlp_output_scale: float = 1.0  # of what the MLP adds, before that
    gate_scale: float = 1.0  # of an MLP's gates, before the activation
    attention_output_scale: float = 1.0  # of attention with Mamba-2 parallel to it
    logits_scale: float = 1.0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecoderConfig:
        """Raises `ModelError` naming the key that is missing, wrong or not supported."""
        config = Fields(data)
        family = family_of(config, decoder_architectures())
        module, _ = (FAMILY_MODULES | _WITH_TOWERS)[family]
        place = module if "." in module else f".families.{module}"
        read: Callable[[Fields, str], DecoderConfig] = import_module(place, __package__).read
        return read(config, family)

    def shape_of(self, layer: int) -> LayerShape:
        if self.layer_shapes:
            return self.layer_shapes[layer]
        return LayerShape(self.num_kv_heads, self.head_dim, self.intermediate_size, layer)

    def qkv_sizes(self, layer: int) -> tuple[int, ...]:
        """How many numbers of a row are queries with their gates, keys and values: of those that the layer has."""
        shape = self.shape_of(layer)
        queries, keys = self.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        num_others = 0 if shape.keys_of != layer else 1 if shape.keys_are_values else 2
        return (2 * queries if self.gated_attention else queries, *(keys,) * num_others)

    @property
    def source_len(self) -> int:
        """The first tokens of each sequence, which are an encoder's rows; 0: there is none."""
        return 0 if self.speech is None else self.speech.num_places

    @property
    def is_stretched(self) -> bool:
        """True if rotary tables are stretched beyond the pretraining context."""
        return self.max_context - self.source_len > self.rope.max_context

    def convolves(self, layer: int) -> bool:
        """True if this layer has a convolution in place of attention."""
        return self.convolutions is not None and self.convolutions.layers[layer]

    def is_delta_net(self, layer: int) -> bool:
        """True if this layer is a gated delta net."""
        return self.delta_nets is not None and self.delta_nets.layers[layer]

    def is_mamba(self, layer: int) -> bool:
        """True if this is a Mamba-2 layer."""
        return self.mamba is not None and self.mamba.layers[layer]

    def has_mixer(self, layer: int) -> bool:
        """True if this layer has attention, or what is in its place."""
        return not self.sublayers or self.sublayers[layer] is not Sublayers.MLP

    def has_mlp(self, layer: int) -> bool:
        """True if this layer has an MLP or a mixture."""
        return not self.sublayers or self.sublayers[layer] is not Sublayers.MIXER

    def attends(self, layer: int) -> bool:
        """True if this layer has attention; a Mamba-2 layer may be parallel to it."""
        if self.mamba is not None and self.is_mamba(layer) and not self.mamba.is_parallel:
            return False
        return self.has_mixer(layer) and not self.convolves(layer) and not self.is_delta_net(layer)

    @property
    def has_states(self) -> bool:
        """True if some layers have a recurrent state of each sequence."""
        return self.delta_nets is not None or self.mamba is not None

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
    quantization: QuantizationConfig | None = None
    dtype: str | None = None
    if config.is_quantised:
        from .quantization_config import QuantizationConfig, compute_dtype  # of few models

        quantization, dtype = QuantizationConfig.from_fields(config), compute_dtype(config)
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
        dtype=dtype,
    )


def windows_by_type(
    config: Fields,
    num_layers: int,
    window: int | None,
    default: Sequence[int | None],
    *,
    kind: str = "sliding_attention",
) -> tuple[int | None, ...]:
    """Each layer's window by `layer_types`, where those of this kind have one; in files without, those of `default`."""
    kinds = config.texts("layer_types")
    if kinds is None:
        return tuple(default)
    if len(kinds) < num_layers or not set(kinds) <= {"full_attention", kind}:
        asked = f"full_attention or {kind} for each of {num_layers} layers"
        raise config.wrong("layer_types", f"but must say {asked}")
    if window is None and kind in kinds:
        missing = (
            "sliding_window (or use_sliding_window is not set)"
            if kind == "sliding_attention"
            else "attention_chunk_size"
        )
        raise config.wrong("layer_types", f"but there is no {missing}")
    return tuple(window if each == kind else None for each in kinds[:num_layers])


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


def has_names_of_llama(config: Fields) -> bool:
    """True of a model out of a GGUF file whose tensors, unlike those of its family, are named and stored as Llama's."""
    return config.choice("tensor_names", ("llama",), default="own") == "llama"


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
