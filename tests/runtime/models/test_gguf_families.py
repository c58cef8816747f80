"""GGUF files of every family with a known form, computed as transformers computes the model that they were made of."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, oracle_logits, prompt_of
from tests.support.gemma4 import EQUAL, MIXTURE
from tests.support.models import DictWeights, build_model
from tests.support.paced import PacedSource
from tests.support.tiny_models import (
    DECODERS,
    DISTINCT_NATIVE,
    LATENT_YARN,
    NATIVE_ONLY,
    tensors_of,
    tiny_model,
    with_tensors,
)

from teneral.loader.artifact import open_artifact, open_model, read_file
from teneral.loader.errors import CheckpointError
from teneral.loader.format.gguf.families import model_types
from teneral.loader.load.load import WeightLoad
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.unpack import unpack
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.weights import StreamedWeights

pytest.importorskip("gguf")

from tests.support.gguf_models import ARCHITECTURES, tensors_and_config, write_gguf

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
}
# llama.cpp's constants of Llama 4
CONSTANT_CHUNKS: dict[str, Any] = {
    "num_hidden_layers": 5,
    "moe_layers": [0, 1, 2, 3, 4],
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8_192,
    "floor_scale": 8_192,
    "attn_scale": 0.1,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ARCHITECTURES},
    # llama.cpp scales scores by the size of a head, and has four layers of five with a window
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3_text": (
        "gemma3_text",
        {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    ),
    "gemma3, stretched": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 32,
            "sliding_window_pattern": 6,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE}),
    "phi3, window": ("phi3", {"sliding_window": 12}),
    # llama.cpp knows no other numbers
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "granite, biases": ("granite", {"attention_bias": True}),
    # llama.cpp knows no window of it, and none of the other of every fourth layer
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "cohere2": ("cohere2", {"sliding_window_pattern": 4, "num_hidden_layers": 5}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "stablelm, no biases": ("stablelm", {"use_qkv_bias": False}),
    "glm4_moe, biases and no norms of heads": ("glm4_moe", {"attention_bias": True, "use_qk_norm": False}),
    "deepseek_v2": (
        "deepseek_v2",
        {"rope_parameters": {**LATENT_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3": ("deepseek_v3", {"kv_lora_rank": 64, "qk_nope_head_dim": 32}),
    "glm4_moe_lite": ("glm4_moe_lite", {"rope_interleave": True, "q_lora_rank": None}),
    # nor other factors of LFM2's weights
    "lfm2_moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}),
    "qwen3_next, older": ("qwen3_next", {}),
    "granitemoehybrid": ("granitemoehybrid", {"position_embedding_type": "nope", "mamba_n_groups": 2}),
    "granitemoehybrid, no experts": (
        "granitemoehybrid",
        {"position_embedding_type": "nope", "num_local_experts": 0, "mamba_conv_bias": False},
    ),
    "bamba": ("bamba", {"mamba_n_groups": 2}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1, norms": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
    "nemotron_h": (
        "nemotron_h",
        {"layer_types": ["linear_attention", "full_attention", "moe", "linear_attention"]},
    ),
    "nemotron_h, MLPs": (
        "nemotron_h",
        {"layer_types": ["linear_attention", "mlp", "full_attention", "mlp"], "use_conv_bias": False},
    ),
    "llama4_text": ("llama4_text", CONSTANT_CHUNKS),
    "llama4_text, some experts": (
        "llama4_text",
        CONSTANT_CHUNKS | {"moe_layers": [1, 3], "interleave_moe_layer_step": 2},
    ),
    "gemma3n_text": ("gemma3n_text", {}),
    "gemma3n_text, two streams, keys of all layers": (
        "gemma3n_text",
        {
            "altup_num_inputs": 2,
            "altup_active_idx": 1,
            "num_kv_shared_layers": 0,
            "intermediate_size": [96, 64, 160, 96, 32],
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_text": ("gemma4_text", {}),
    "gemma4_text, keys that are values": ("gemma4_text", {**EQUAL, "final_logit_softcapping": None}),
    "gemma4_text, a mixture": ("gemma4_text", {**MIXTURE, "moe_intermediate_size": 64}),
    "gemma4_text, inputs alone": ("gemma4_text", {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}),
    "qwen3_moe, of a tower": ("qwen3_moe", {"moe_intermediate_size": 64}),
    "qwen3, of a tower": ("qwen3", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 64}),
}
ARCHITECTURES_OF = {
    "nemotron_h, MLPs": "NEMOTRON_H",
    "qwen3_moe, of a tower": "QWEN3VLMOE",
    "qwen3, of a tower": "QWEN3VL",
}
# Families whose GGUF files are refused, by gguf-py's name of the architecture
REFUSED = {
    "ministral": "mistral3",
    "bitnet": "bitnet-b1.58",
}


def test_every_family_is_read_or_refused():
    assert {*ARCHITECTURES, *REFUSED} == {*DECODERS, *DISTINCT_NATIVE}
    assert model_types() == ARCHITECTURES.keys()


# Whose rows fill blocks of 256.
WIDE = {"hidden_size": 256, "intermediate_size": 256}
WIDE_VARIANTS = {
    "llama": WIDE | {"tie_word_embeddings": True},
    "qwen2": WIDE,
    "qwen3_moe": WIDE | {"moe_intermediate_size": 256},
    "gemma2": WIDE | {"query_pre_attn_scalar": 32},
    "gemma4_text": WIDE | {"hidden_size_per_layer_input": 256},
}
# Those whose rows are reordered, shifted, split or stacked; blocks of other types are taken apart likewise
RESHAPED = ("llama", "gemma2", "mixtral", "gpt_oss", "granite, biases", "glm", "gemma4_text, a mixture")
CASES = [
    *((variant, kind) for variant in VARIANTS for kind in ("F32", "Q8_0")),
    *((variant, kind) for variant in RESHAPED for kind in ("Q4_0", "Q5_1", "MXFP4")),
    *((variant, kind) for variant in WIDE_VARIANTS for kind in ("Q4_K", "Q5_K", "Q6_K")),
]


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_a_file_computes_what_the_model_does(variant: str, kind: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    if kind.endswith("_K"):
        overrides = overrides | WIDE_VARIANTS[variant]
    plain = tiny_model(family, **overrides)
    rounded = {name: each.bfloat16().float() for name, each in tensors_of(plain).items()}
    model = with_tensors(plain, rounded)  # what is not quantised becomes bf16
    architecture = ARCHITECTURES_OF.get(variant, "")
    path, is_older = tmp_path / "model.gguf", "older" in variant
    meant = write_gguf(path, model, kind, is_older=is_older, architecture=architecture)
    oracle = with_tensors(model, meant)
    source = open_model(str(tmp_path / "model.gguf"))
    tensors, config = tensors_and_config(source)
    prompt = prompt_of(60)
    expected = oracle_logits(oracle, prompt)
    if kind == "F32":
        torch.testing.assert_close(expected, oracle_logits(model, prompt), atol=1e-4, rtol=1e-4)
    else:
        config["dtype"] = config["torch_dtype"] = "float32"
        tensors = {
            name: each.float() if each.dtype == torch.bfloat16 else each for name, each in tensors.items()
        }

    backends: list[Any] = [] if family in NATIVE_ONLY else [TorchBackend()]
    for backend in [*backends, *([NativeBackend("float32")] if library() is not None else [])]:
        decoder = build_model(config, DictWeights(tensors), backends=[backend])
        ours = Stepper(decoder).step({"a": prompt})["a"]
        atol = 1e-5 * max(100.0, float(expected.abs().max()))  # random scales of blocks make logits of 1,000
        torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-3)


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "granitemoehybrid",
        "falcon_h1, norms",
        "nemotron_h",
        "gemma3n_text",
    ],
)
def test_a_packed_file_has_the_tensors_of_the_file(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_gguf(tmp_path / "model.gguf", tiny_model(*VARIANTS[family][:1], **VARIANTS[family][1]), "Q8_0")
    source = open_model(str(tmp_path / "model.gguf"))
    tensors, _ = tensors_and_config(source)
    result = pack(open_model(str(tmp_path / "model.gguf")), open_store(str(tmp_path / "packed")))
    unpack(open_store(str(tmp_path / "packed")), tmp_path / "out")
    again = {
        name: each
        for path in (tmp_path / "out").glob("*.safetensors")
        for name, each in load_file(path).items()
    }

    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert "Q8_0: " in result.render()


@pytest.mark.skipif(library() is None, reason="the native libraries are not built here")
def test_experts_of_gpt_oss_arrive_one_by_one_from_a_file(tmp_path: Path) -> None:
    family, overrides = VARIANTS["gpt_oss"]
    write_gguf(tmp_path / "model.gguf", tiny_model(family, **overrides), "MXFP4")
    pack(open_model(str(tmp_path / "model.gguf")), open_store(str(tmp_path / "packed")))
    rows = []
    for is_early in (True, False):
        source = PacedSource(open_source(str(tmp_path / "packed")))
        source.delay(seed=1, max_s=0.003)
        with closing(source), WeightLoad(source, open_artifact(source)) as load:
            assert "layers.1.experts.3" in {group.name for group in load.manifest.groups}
            for group in load.manifest.groups:
                load.slab(group.index)[:] = 0xFF
            config = json.loads(read_file(source, load.manifest, "config.json"))
            decoder = build_model(config, StreamedWeights(load), backends=[NativeBackend()])
            load.start()
            if not is_early:
                load.join()
            rows.append(Stepper(decoder).step({"a": prompt_of(20)})["a"])

    assert torch.equal(*rows)
    assert rows[0].isfinite().all()


def test_decays_that_have_no_logarithms_are_refused(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_model("qwen3_5_text"))
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ssm_a").data[1] = 0.0

    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a has numbers that are not below 0"):
        tensors_and_config(open_model(str(path)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention.sliding_window_pattern": None}, "has no gemma3n.attention.sliding_window_pattern"),
        ({"attention.shared_kv_layers": None}, "has no gemma3n.attention.shared_kv_layers"),
        ({"altup.num_inputs": 3}, r"altup_proj.weight of shape \(3, 64, 64\) does not hold 2 matrices"),
        ({"altup.num_inputs": 17}, "altup.num_inputs is '17', but must be a whole number from 2 to 16"),
        ({"altup.active_idx": 4}, "altup.active_idx is '4', but must be a whole number from 0 to 3"),
        (
            {"activation_sparsity_scale": [1.0]},
            "activation_sparsity_scale is '.*', but must be an array of 5",
        ),
        ({"feed_forward_length": [96, 96]}, "a whole number from 1 to 1048576, or one for each layer"),
    ],
)
def test_keys_of_gemma3n_that_cannot_be_used_are_named(
    changed: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    with monkeypatch.context() as patch:
        change_keys(patch, {f"gemma3n.{key}": value for key, value in changed.items()})
        write_gguf(path, tiny_model("gemma3n_text"))
    with pytest.raises(CheckpointError, match=message):
        tensors_and_config(open_model(str(path)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention.sliding_window_pattern": None}, "has no gemma4.attention.sliding_window_pattern"),
        ({"attention.sliding_window_pattern": [True]}, "must say true or false for each layer"),
        (
            {"attention.shared_kv_layers": 6},
            "shared_kv_layers is '6', but must be a whole number from 0 to 5",
        ),
        ({"attention.shared_kv_layers": 1}, "feed_forward_length may be doubled in layers that share keys"),
        ({"attention.value_length": 16}, "attention.value_length differs from the 32 columns of a head"),
        ({"attention.value_length_swa": 8}, "attention.value_length_swa differs from the 16 columns"),
        ({"attention.head_count_kv": [2, 1, 2, 4, 1]}, "must be the same of all layers with a window"),
        ({"attention.head_count_kv": [2, 1, 2, 2, 1]}, "but values of their own, are not supported"),
        ({"attention.head_count_kv": [2, 2]}, "a whole number from 1 to 4, or one for each layer"),
        ({"rope.scaling.type": "yarn"}, "is stretched by 'yarn'"),
        ({"expert_count": 3, "expert_used_count": 4}, "expert_used_count is '4'"),
    ],
)
def test_keys_of_gemma4_that_mean_another_model_are_named(
    changed: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    with monkeypatch.context() as patch:
        change_keys(patch, {f"gemma4.{key}": value for key, value in changed.items()})
        write_gguf(path, tiny_model("gemma4_text"))
    with pytest.raises(CheckpointError, match=message):
        tensors_and_config(open_model(str(path)))


def change_keys(patch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    """Files are written with these values; None: without the key."""
    import gguf

    write = gguf.GGUFWriter.write_header_to_file

    def write_changed(writer: Any) -> None:
        for key, value in changed.items():
            writer.kv_data[0].pop(key, None)
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
        write(writer)

    patch.setattr(gguf.GGUFWriter, "write_header_to_file", write_changed)


@pytest.mark.parametrize("divisors", [[1.0, 1e30, 1.0], [2.0, 1e30, 1e30], [1.0, 4.0, 1e30]])
def test_frequencies_that_are_not_gemma4s_are_refused(
    divisors: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf
    import numpy as np

    add = gguf.GGUFWriter.add_tensor

    def add_others(writer: Any, name: str, data: Any, **more: Any) -> None:
        own = np.array([*divisors, *[1e30] * (len(data) - 3)], np.float32) if "rope" in name else data
        add(writer, name, own, **more)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_others)
        write_gguf(tmp_path / "model.gguf", tiny_model("gemma4_text"))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not what Gemma 4 has"):
        tensors_and_config(open_model(str(tmp_path / "model.gguf")))


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_name(family: str, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", REFUSED[family])
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(CheckpointError, match=f"'{REFUSED[family]}' is not supported"):
        open_model(str(tmp_path / "model.gguf")).conversions()
