"""Tiny models of many architectures, with what a user does with each: for showing that any module can be streamed into.

Importing this module imports transformers. All random numbers come from fixed seeds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import safetensors.torch
import torch
from tests.support.memory_store import MemoryStore
from torch import nn

from teneral.loader.tools.pack.pack import pack

with warnings.catch_warnings():
    # transformers' own deprecations while it is imported are not ours to answer for
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers
transformers.utils.logging.set_verbosity_error()

Use = Callable[[Any], list[torch.Tensor]]


@dataclass(frozen=True)
class Architecture:
    """`make` builds a module, `use` calls it in the way that its users do."""

    name: str
    make: Callable[[], nn.Module]
    use: Use
    dtype: torch.dtype = torch.float32

    def build(self) -> nn.Module:
        return self.make().to(self.dtype).eval()


def _tokens(*shape: int, below: int = 90, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, below, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "decoder_start_token_id": 2,
}  # fmt: skip


def _config(model_type: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, **settings)


def _causal(model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Architecture:
    def make() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(_config(model_type, **{**_SIZES, **settings}))

    def use(model: Any) -> list[torch.Tensor]:
        tokens = _tokens(2, 7)
        generated = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False
        )
        return [generated, model(tokens).logits]

    return Architecture(model_type, make, use, dtype)


def _encoder(model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Architecture:
    def make() -> nn.Module:
        return transformers.AutoModel.from_config(_config(model_type, **{**_SIZES, **settings}))

    def use(model: Any) -> list[torch.Tensor]:
        out = model(_tokens(2, 9), attention_mask=torch.tensor([[1] * 9, [1] * 5 + [0] * 4]))
        return [out.last_hidden_state, out.pooler_output]

    return Architecture(model_type, make, use, dtype)


def _seq2seq(
    model_type: str, inputs: Callable[[], torch.Tensor], dtype: torch.dtype, **settings: Any
) -> Architecture:
    def make() -> nn.Module:
        auto = (
            transformers.AutoModelForSpeechSeq2Seq
            if model_type == "whisper"
            else transformers.AutoModelForSeq2SeqLM
        )
        return auto.from_config(_config(model_type, **{**_SEQ2SEQ, **settings}))

    def use(model: Any) -> list[torch.Tensor]:
        given = inputs()
        given = given.to(dtype) if given.is_floating_point() else given
        start = torch.full((len(given), 1), 2)
        tokens = model.generate(
            given, decoder_input_ids=start, max_new_tokens=4, do_sample=False, num_beams=2
        )
        return [tokens, model(given, decoder_input_ids=_tokens(len(given), 3)).logits]

    return Architecture(model_type, make, use, dtype)


def _vision(model_type: str, **settings: Any) -> Architecture:
    def make() -> nn.Module:
        return transformers.AutoModelForImageClassification.from_config(
            _config(model_type, num_labels=5, **settings)
        )

    def use(model: Any) -> list[torch.Tensor]:
        return [model(_floats(2, 3, 32, 32)).logits]

    return Architecture(model_type, make, use)


def _clip() -> Architecture:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

    def make() -> nn.Module:
        text = {
            **sizes,
            "vocab_size": 96,
            "max_position_embeddings": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        vision = {**sizes, "image_size": 32, "patch_size": 8}
        return transformers.CLIPModel(
            transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
        )

    def use(model: Any) -> list[torch.Tensor]:
        out = model(input_ids=_tokens(2, 6), pixel_values=_floats(2, 3, 32, 32))
        return [out.logits_per_image, out.text_embeds]

    return Architecture("clip", make, use)


def _wav2vec2() -> Architecture:
    def make() -> nn.Module:
        config = _config(
            "wav2vec2", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=20,
            conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, feat_extract_norm="layer",
            do_stable_layer_norm=True,
        )  # fmt: skip
        return transformers.AutoModelForCTC.from_config(config)

    return Architecture("wav2vec2", make, lambda model: [model(_floats(2, 800)).logits])


class Convolutional(nn.Module):
    """Batch norms in the middle, a recurrent layer behind, a parameter of its own, and a dict of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        ])  # fmt: skip
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.rows = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.heads = nn.ModuleDict({"class": nn.Linear(24, 5), "place": nn.Linear(24, 2)})
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(2))])

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:  # (N, 3, H, W)
        features = self.blocks(self.stem(images)) * self.scale
        states, _ = self.rows(features.mean(3).transpose(1, 2))
        return [
            head(states[:, -1]) + shift for head, shift in zip(self.heads.values(), self.shifts, strict=True)
        ]


def _torch_transformer() -> Architecture:
    def make() -> nn.Module:
        return nn.Transformer(32, 4, 2, 2, 48, batch_first=True)

    return Architecture(
        "torch transformer", make, lambda model: [model(_floats(2, 6, 32), _floats(2, 4, 32, seed=1))]
    )


ARCHITECTURES = (
    _causal("llama", torch.bfloat16),
    _causal("qwen2", tie_word_embeddings=True),
    _causal("qwen3", torch.bfloat16, head_dim=8),
    _causal("gemma2", torch.bfloat16, head_dim=8, sliding_window=4),
    _causal("gpt2", n_embd=32, n_layer=3, n_head=4, n_positions=64),
    _causal("opt", word_embed_proj_dim=16, ffn_dim=48),
    _causal("gpt_neox"),
    _causal("mixtral", torch.bfloat16, num_local_experts=4, num_experts_per_tok=2),
    _causal("mamba", state_size=8, time_step_rank=4),
    _encoder("bert", torch.bfloat16),
    _encoder("xlm-roberta", max_position_embeddings=66),
    _seq2seq("t5", lambda: _tokens(2, 7), torch.bfloat16, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    _seq2seq("bart", lambda: _tokens(2, 7), torch.float32, max_position_embeddings=64),
    _seq2seq("whisper", lambda: _floats(2, 8, 32), torch.float32, num_mel_bins=8, max_source_positions=16,
             max_target_positions=32, suppress_tokens=None, begin_suppress_tokens=None),
    _vision("vit", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=32,
            patch_size=8),
    _vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"),
    _vision("convnext", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, image_size=32),
    _clip(),
    _wav2vec2(),
    _torch_transformer(),
    Architecture("convolutional", Convolutional, lambda model: model(_floats(2, 3, 16, 16))),
)  # fmt: skip
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


@dataclass(frozen=True)
class Original:
    """A model with weights, what it gives, and its weights as they are stored."""

    module: nn.Module
    outputs: list[torch.Tensor]
    plain: MemoryStore
    packed: MemoryStore


@cache
def original(architecture: Architecture) -> Original:
    """No weight is left at 0 or 1, so that none can be forgotten unseen."""
    module = architecture.build()
    randomize(module)
    with torch.no_grad():
        outputs = architecture.use(module)
    plain = MemoryStore({"model.safetensors": save(module)})
    packed = MemoryStore()
    pack(plain, packed, threads=1)
    return Original(module, outputs, plain, packed)


def randomize(module: nn.Module, *, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    computed = {
        id(owner._buffers[name]) for owner in module.modules() for name in owner._non_persistent_buffers_set
    }
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and id(tensor) not in computed:
                noise = torch.randn(tensor.shape, generator=generator)
                is_scale = tensor.ndim < 2 and not name.endswith("bias")
                tensor.copy_(1.0 + 0.1 * noise.clamp(-3, 3) if is_scale else 0.15 * noise)


def save(module: nn.Module, *, with_ties: bool = False) -> bytes:
    """A safetensors file as Hugging Face writes it: of tied tensors the first only, unless `with_ties`."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in module.state_dict().items():
        if with_ties or tensor.data_ptr() not in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return safetensors.torch.save(tensors, {"format": "pt"})
