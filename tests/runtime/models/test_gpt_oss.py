"""gpt-oss: experts in MXFP4, as transformers expands them, by each backend and from an artifact."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.gpt_oss import checkpoint, saved
from tests.support.models import DictWeights, build_model
from tests.support.paced import PacedSource
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, tensors_of, tiny_model, with_tensors

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.errors import UsageError
from teneral.loader.load.load import WeightLoad
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.loader.tools.unpack import unpack
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.decoder_tensors import take_decoder
from teneral.runtime.models.matrices import Mxfp4Matrix
from teneral.runtime.models.parameters import Parameters
from teneral.runtime.models.projections import take_linear
from teneral.runtime.models.spec import DecoderSpec
from teneral.runtime.tensors import DType
from teneral.runtime.weights import StreamedWeights

BACKENDS: list[Any] = [TorchBackend(), ReferenceBackend()]
if library() is not None:
    BACKENDS.append(NativeBackend())

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

# As published, in the spelling of transformers 4
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def in_fp32(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same numbers, stored so that everything is computed in fp32."""
    return {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}


def decoder_of(config: dict[str, Any], tensors: dict[str, torch.Tensor], backend: Any) -> Decoder:
    decoder = build_model(config, DictWeights(tensors), backends=[backend])
    assert isinstance(decoder, Decoder)
    return decoder


@each_backend
def test_blocks_and_scales_mean_what_transformers_expands_them_to(backend):
    config, tensors, oracle = checkpoint()
    prompts = {"a": prompt_of(75), "b": prompt_of(9, seed=1)}

    ours = Stepper(decoder_of(config, in_fp32(tensors), backend)).step(prompts)

    for name, prompt in prompts.items():
        torch.testing.assert_close(ours[name], oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@each_backend
def test_greedy_tokens_of_a_batch_are_the_oracles(backend):
    config, tensors, oracle = checkpoint()
    prompts = {"short": prompt_of(3), "middle": prompt_of(17), "long": prompt_of(41)}

    ours = Stepper(decoder_of(config, in_fp32(tensors), backend)).greedy(prompts, 12)

    assert ours == {name: oracle_behind(oracle, prompt, ours[name]) for name, prompt in prompts.items()}


@pytest.mark.skipif(library() is None, reason="the native libraries are not built here")
@pytest.mark.parametrize("wide", [False, True])
def test_chunks_in_company_have_the_bits_of_a_whole_prefill(wide):
    config, tensors, _ = checkpoint()
    decoder = decoder_of(config, in_fp32(tensors) if wide else tensors, NativeBackend())
    assert decoder.dtype is (DType.F32 if wide else DType.BF16)
    prompt, other = prompt_of(75), prompt_of(70, seed=1)
    whole = Stepper(decoder).step({"a": prompt})["a"]
    stepper = Stepper(decoder)
    stepper.step({"b": other[:25]})

    rows = [
        stepper.step({"b": other[25 + at // 2 : 30 + at // 2], "a": prompt[at : at + 10]})["a"]
        for at in range(0, len(prompt), 10)
    ]

    assert torch.equal(torch.cat(rows), whole)


@each_backend
def test_bf16_is_as_close_to_exact_as_the_oracle_is(backend):
    config, tensors, oracle = checkpoint()
    prompt = prompt_of(75)
    truth = oracle_logits(oracle, prompt)
    rounded = with_tensors(oracle, tensors_of(oracle)).to(torch.bfloat16)
    oracle_error = (oracle_logits(rounded, prompt) - truth).pow(2).mean(-1).sqrt()

    decoder = decoder_of(config, tensors, backend)
    own_error = (Stepper(decoder).step({"a": prompt})["a"] - truth).pow(2).mean(-1).sqrt()

    assert decoder.dtype is DType.BF16
    assert own_error.quantile(0.25) < 1.25 * oracle_error.quantile(0.25)


def test_experts_are_used_where_the_loader_put_them():
    config, tensors, _ = checkpoint()
    weights = DictWeights(tensors)
    taken, _ = take_decoder(DecoderConfig.from_json(config), weights)

    blocks = weights.tensor("model.layers.1.mlp.experts.gate_up_proj_blocks").array
    for number, expert in enumerate(taken.layers[1].experts):
        gate, up = expert.gate_up.matrices()
        assert isinstance(gate, Mxfp4Matrix)
        assert isinstance(up, Mxfp4Matrix)
        assert gate.weight.array.ctypes.data == blocks[number].ctypes.data
        assert up.weight.array.ctypes.data == blocks[number, 1].ctypes.data
        assert expert.gate_up.is_settled


@each_backend
def test_an_artifact_keeps_every_bit_and_computes_while_it_arrives(tmp_path, backend):
    config, tensors, _ = checkpoint()
    plain = saved(tmp_path / "plain", config, tensors)
    pack(open_source(str(plain)), open_store(str(tmp_path / "packed")))
    unpack(open_source(str(tmp_path / "packed")), tmp_path / "out")
    again = {
        name: tensor
        for path in (tmp_path / "out").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    source = PacedSource(open_source(str(tmp_path / "packed")))
    source.delay(seed=1, max_s=0.003)

    with closing(source), WeightLoad(source, open_artifact(source)) as load:
        for group in load.manifest.groups:
            load.slab(group.index)[:] = 0xFF
        read = json.loads(read_file(source, load.manifest, "config.json"))
        decoder = build_model(read, StreamedWeights(load), backends=[backend])
        load.start()
        ours = Stepper(decoder).step({"a": prompt_of(30)})["a"]

    expected = Stepper(decoder_of(config, tensors, backend)).step({"a": prompt_of(30)})["a"]
    assert torch.equal(ours, expected)


def test_gpt_oss_as_published():
    config = DecoderConfig.from_json(GPT_OSS_20B)
    spec = DecoderSpec.of(config, DType.BF16)

    assert config.max_context == 131072
    assert config.windows[:4] == (128, None, 128, None)
    assert config.quantization is not None
    assert config.quantization.method == "mxfp4"
    assert (spec.sinks, spec.qkv_bias, spec.output_bias) == (True, True, True)
    assert spec.experts is not None
    assert (spec.experts.num, spec.experts.num_used, spec.experts.size) == (32, 4, 2880)
    assert spec.experts.swiglu is not None
    assert (spec.experts.swiglu.alpha, spec.experts.swiglu.limit) == (1.702, 7.0)
    assert not config.rope.truncate
    assert config.rope.theta == 150_000.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"swiglu_alpha": "1"}, "swiglu_alpha"),
        ({"num_local_experts": 3}, "num_experts_per_tok"),
        ({"rope_scaling": None}, "neither rope_scaling nor rope_parameters"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"quantization_config": {"quant_method": "mxfp8"}}, "quant_method"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(change, named):
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_json({**GPT_OSS_20B, **change})


LAYER = "model.layers.1."
HOSTILE: dict[str, tuple[str, torch.Tensor | None]] = {
    "no scales": ("mlp.experts.gate_up_proj_scales", None),
    "scales of another number of groups": (
        "mlp.experts.down_proj_scales",
        torch.zeros(4, 64, 2, dtype=torch.uint8),
    ),
    "blocks of floats": ("mlp.experts.down_proj_blocks", torch.zeros(4, 64, 3, 16)),
    "blocks of other groups": (
        "mlp.experts.gate_up_proj_blocks",
        torch.zeros(4, 192, 4, 8, dtype=torch.uint8),
    ),
    "a bias for each expert alone": ("mlp.experts.down_proj_bias", torch.zeros(4).bfloat16()),
    "no bias of the router": ("mlp.router.bias", None),
    "sinks of other heads": ("self_attn.sinks", torch.zeros(5).bfloat16()),
    "no sinks": ("self_attn.sinks", None),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_tensors_that_do_not_fit_are_refused_by_name(kind):
    config, tensors, _ = checkpoint()
    name, tensor = HOSTILE[kind]
    tensors.pop(LAYER + name)
    if tensor is not None:
        tensors[LAYER + name] = tensor

    with pytest.raises(ModelError, match=(LAYER + name).replace(".", r"\.")):
        decoder_of(config, tensors, TorchBackend())


def test_blocks_that_leave_a_rest_are_refused():
    config, tensors, _ = checkpoint()
    kept = {name: each for name, each in tensors.items() if "gate_up_proj" not in name}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        kept |= {prefix: torch.zeros(4, 64, 96).bfloat16(), f"{prefix}_bias": torch.zeros(4, 96).bfloat16()}

    with pytest.raises(ModelError, match="48 columns, which are no multiple of MXFP4's 32"):
        decoder_of({**config, "intermediate_size": 48}, kept, TorchBackend())


def one_matrix(weight: tuple[int, int], scale: tuple[int, int]) -> Parameters:
    tensors = {
        "x.weight": torch.zeros(weight, dtype=torch.uint8),
        "x.weight_scale": torch.zeros(scale, dtype=torch.uint8),
    }
    return Parameters(DictWeights(tensors), "")


def test_any_matrix_may_be_in_mxfp4():
    (found,) = take_linear(one_matrix((8, 48), (8, 3)), "x", 96, 8, bias=False).matrices()

    assert isinstance(found, Mxfp4Matrix)
    assert (found.num_in, found.num_out) == (96, 8)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [((8, 48), (8, 1)), ((8, 48), (8, 6)), ((8, 48), (4, 3)), ((8, 96), (8, 3)), ((8, 48), (8, 0))],
)
def test_scales_that_do_not_fit_their_blocks_are_refused(weight, scale):
    with pytest.raises(ModelError, match="x"):
        take_linear(one_matrix(weight, scale), "x", 96, 8, bias=False)


def test_experts_in_one_tensor_are_not_quantised_again(tmp_path):
    model = tiny_model("gpt_oss")
    plain = saved(tmp_path / "plain", config_json(model), tensors_of(model))

    with pytest.raises(UsageError, match="all experts of a layer in one tensor"):
        pack(open_source(str(plain)), open_store(str(tmp_path / "x")), quantize=QuantizeOptions(4))
