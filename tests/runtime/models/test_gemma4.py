"""Gemma 4: layers of different heads, shared keys, inputs of layers, mixtures that join MLPs. Logits are those of
transformers, and bit for bit the same in chunks and company.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.adapters import load_adapter, merged, save_adapter
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.gemma4 import EQUAL, MIXTURE, PLAIN
from tests.support.gptq_awq_checkpoints import foreign_checkpoint
from tests.support.models import DictWeights, build_model
from tests.support.native_decoder import NativeStepper, new_pool
from tests.support.paced import PacedSource
from tests.support.quantized import GPTQ
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model, with_tensors

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.decoder import Work
from teneral.runtime.models.decoder_config import DecoderConfig, LayerRotary
from teneral.runtime.models.rotary import frequencies_of
from teneral.runtime.models.spec import DecoderSpec, KVPlace
from teneral.runtime.tensors import DType
from teneral.runtime.weights import StreamedWeights

VARIANTS: dict[str, dict[str, Any]] = {
    "inputs of layers, shared keys, wide MLPs": {},
    "as the smallest, one key head": {
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "layer_types": None,
    },
    "inputs of layers alone": {**PLAIN, "hidden_size_per_layer_input": 24},
    "plain, no cap": {**PLAIN, "final_logit_softcapping": None, "tie_word_embeddings": False},
    "keys are values, biases": {**EQUAL, "attention_bias": True, "num_attention_heads": 8},
    "a mixture": MIXTURE,
    "a mixture, inputs of layers, shared keys, wide MLPs": {
        **MIXTURE,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "heads as published": {"head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 1},
}
needs_core = pytest.mark.skipif(library() is None, reason="such layers are the native core's")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def oracle_of(variant: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    overrides = dict(VARIANTS[variant])
    if "layer_types" in overrides:  # every sixth layer has no window
        overrides |= {
            "num_hidden_layers": 9,
            "layer_types": [
                "full_attention" if number % 3 == 2 else "sliding_attention" for number in range(9)
            ],
        }
    return tiny_model("gemma4_text", dtype=dtype, **overrides, **more)


def decoder_of(oracle: Any, **config: Any) -> Any:
    given = {**config_json(oracle), **config}
    return build_model(given, DictWeights(tensors_of(oracle)), backends=[NativeBackend()])


@needs_core
@each_variant
def test_logits_and_tokens_are_those_of_transformers(variant: str) -> None:
    oracle = oracle_of(variant)
    decoder = decoder_of(oracle)
    long, short = prompt_of(75), prompt_of(7, seed=1)

    whole = Stepper(decoder).step({"a": long, "b": short})
    stepper = Stepper(decoder)
    chunks = [
        stepper.step({"a": long[begin:end], f"b{end}": short})["a"]
        for begin, end in ((0, 1), (1, 3), (3, 43), (43, 44), (44, 75))
    ]

    torch.testing.assert_close(whole["a"], oracle_logits(oracle, long), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole["b"], oracle_logits(oracle, short), atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.cat(chunks), whole["a"])
    tokens = Stepper(decoder).greedy({"a": long}, 20)["a"]
    assert tokens == oracle_behind(oracle, long, tokens)


@needs_core
@each_variant
def test_bf16_is_as_close_to_exact_as_transformers_is(variant: str) -> None:
    ours, theirs = [], []
    for seed in range(4):
        oracle, exact = oracle_of(variant, torch.bfloat16, seed=seed), oracle_of(variant, seed=seed)
        exact.load_state_dict(oracle.state_dict())
        prompt = prompt_of(75, seed=seed)
        truth = oracle_logits(exact, prompt)
        for errors, logits in (
            (ours, Stepper(decoder_of(oracle)).step({"a": prompt})["a"]),
            (theirs, oracle_logits(oracle, prompt)),
        ):
            errors.append((logits - truth).pow(2).mean(-1).sqrt())

    # A row for which rounding chooses another expert is far off.
    share = 0.25 if "mixture" in variant else 0.5
    assert torch.cat(ours).quantile(share) < 1.1 * torch.cat(theirs).quantile(share)


@needs_core
@each_variant
def test_keys_and_values_in_8_bits_stay_close_and_blocks_are_copied_whole(variant: str) -> None:
    decoder, prompt = decoder_of(oracle_of(variant)), prompt_of(40)
    exact = Stepper(decoder).step({"a": prompt})["a"]

    for kind in (KVKind.MODEL, KVKind.INT8):
        stepper = Stepper(decoder)
        stepper.kv = decoder.new_kv(16, 8, kind=kind)
        batch = stepper.batch({"a": prompt})
        ours = torch.from_numpy(decoder.forward(batch, stepper.kv))
        content = np.empty((16, decoder.kv_block_bytes(8, kind=kind)), np.uint8)
        stepper.kv.copy_out(range(16), content)
        other = decoder.new_kv(16, 8, kind=kind)
        other.copy_in(range(16), content)
        back = np.empty_like(content)
        other.copy_out(range(16), back)

        assert stepper.kv.size_bytes == content.size
        np.testing.assert_array_equal(back, content)
        # Scores are not scaled, so codes of random keys show.
        distance = (ours - exact[batch.logit_rows]).abs().mean()
        assert distance <= (0.0 if kind is KVKind.MODEL else 0.15 * exact.abs().mean())


def with_towers(text: Any) -> Any:
    """The model with an image tower of which this is the text model."""
    tower = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Gemma4Config(
        text_config={**text.config.to_dict(), "use_bidirectional_attention": "vision"},
        vision_config=tower,
        audio_config=None,
        image_token_id=319,
    )
    whole = transformers.Gemma4ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    return whole


@needs_core
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "no cap" not in name])
def test_the_text_model_of_files_with_towers_is_computed(variant: str) -> None:
    text = oracle_of(variant)
    whole, prompt = with_towers(text), prompt_of(40)
    tensors = {name: each for name, each in whole.state_dict().items() if name != "lm_head.weight"}
    decoder: Any = build_model(config_json(whole), DictWeights(tensors), backends=[NativeBackend()])

    ours = Stepper(decoder).step({"a": prompt})["a"]

    assert any(".vision_tower." in name for name in tensors)
    assert decoder.vision is not None
    torch.testing.assert_close(ours, oracle_logits(text, prompt), atol=1e-4, rtol=1e-4)


@needs_core
def test_adapters_of_files_with_towers_change_the_text_model(tmp_path: Path) -> None:
    base = oracle_of("keys are values, biases")
    whole, prompt = with_towers(base), prompt_of(40)
    targets = r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
    folder = save_adapter(tmp_path / "a", whole, target_modules=targets, size=0.15)
    expected = oracle_logits(merged(whole, folder), prompt)
    assert (expected - oracle_logits(whole, prompt)).abs().max() > 0.05
    tensors = {name: each for name, each in whole.state_dict().items() if name != "lm_head.weight"}
    decoder: Any = build_model(config_json(whole), DictWeights(tensors), backends=[NativeBackend()])

    adapter = load_adapter(folder, decoder.config)
    stepper = NativeStepper(decoder.executor, new_pool(decoder.spec, 16, 4), adapters={"a": adapter})

    np.testing.assert_allclose(stepper.step({"a": prompt})["a"], expected, atol=1e-3, rtol=1e-3)


@needs_core
@pytest.mark.parametrize("more", [{}, {"num_kv_shared_layers": 1, "use_double_wide_mlp": True}])
def test_the_text_of_unified_models_is_the_same_without_inputs_of_layers(more: dict[str, Any]) -> None:
    oracle, prompt = tiny_model("gemma4_unified_text", **more), prompt_of(75)
    config, tensors = config_json(oracle), tensors_of(oracle)
    whole = {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": config,
    }
    with_root = {
        name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()
    } | {"model.vision_embedder.x.weight": torch.ones(4)}
    of_text, of_whole = (
        Stepper(build_model(given, DictWeights(each), backends=[NativeBackend()])).step({"a": prompt})["a"]
        for given, each in ((config, tensors), (whole, with_root))
    )

    torch.testing.assert_close(of_text, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)
    assert torch.equal(of_text, of_whole)


def test_what_files_of_unified_models_leave_out_is_what_transformers_assumes() -> None:
    config = DecoderConfig.from_json({"model_type": "gemma4_unified_text"})
    theirs = transformers.Gemma4UnifiedTextConfig()

    assert config.max_context == theirs.max_position_embeddings
    assert config.windows[0] == theirs.sliding_window
    assert (config.layer_inputs, config.experts) == (None, None)
    assert config.layer_shapes[5].head_dim == theirs.per_layer_config[5].head_dim


@needs_core
@pytest.mark.parametrize("kind", ["packed", "int8", "int4"])
@pytest.mark.parametrize("variant", ["inputs of layers, shared keys, wide MLPs", "a mixture"])
def test_a_model_whose_weights_arrive_computes_what_one_with_all_of_them_does(
    tmp_path: Path, variant: str, kind: str
) -> None:
    plain = save_tiny("gemma4_text", tmp_path / "plain", dtype=torch.bfloat16, **VARIANTS[variant])
    quantize = None if kind == "packed" else QuantizeOptions(int(kind[3:]))
    pack(open_source(str(plain)), open_store(str(tmp_path / kind)), quantize=quantize)
    rows, stages = [], []
    for waits in (False, True):
        source = PacedSource(open_source(str(tmp_path / kind)))
        source.delay(seed=1, max_s=0.003)
        options = LoadOptions(on_demand=True, connections=64)
        with closing(source), WeightLoad(source, open_artifact(source), options=options) as load:
            for group in load.manifest.groups:
                load.slab(group.index)[:] = 0xFF
            config = json.loads(read_file(source, load.manifest, "config.json"))
            decoder: Any = build_model(config, StreamedWeights(load), backends=[NativeBackend()])
            load.start()
            if waits:
                load.join()
            rows.append(Stepper(decoder).step({"a": prompt_of(40)})["a"])
            stages.append(any(stage.work is Work.EXPERTS for stage in decoder.stages))

    assert torch.equal(*rows)
    assert rows[0].isfinite().all()
    assert stages == [variant == "a mixture"] * 2, "experts are asked for by themselves"


@needs_core
def test_gptq_files_may_have_keys_of_layers_that_read_others_and_nothing_else_in_vain() -> None:
    config, tensors, meant = foreign_checkpoint(oracle_of("inputs of layers, shared keys, wide MLPs"), GPTQ)
    prefix, prompt = "model.layers.4.self_attn.", prompt_of(20)
    for name in [name for name in tensors if name.startswith("model.layers.1.self_attn.")]:
        tail = name.removeprefix("model.layers.1.self_attn.")
        if tail.startswith(("k_proj.", "v_proj.", "k_norm.")):
            assert prefix + tail not in tensors
            tensors[prefix + tail] = tensors[name]
    oracle = with_tensors(oracle_of("inputs of layers, shared keys, wide MLPs"), meant)

    def build() -> Any:
        return build_model(config, DictWeights(tensors), backends=[NativeBackend("float32")])

    ours = Stepper(build()).step({"a": prompt})["a"]
    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-3, rtol=1e-3)
    tensors[f"{prefix}q_proj.scale"] = torch.zeros(1)
    with pytest.raises(ModelError, match=r"q_proj\.scale, which is of no known use"):
        build()


@needs_core
def test_only_the_asked_rows_of_the_table_of_inputs_are_waited_for(tmp_path: Path) -> None:
    """The table is most of a small model: the rest of it comes last."""
    more = {"vocab_size_per_layer_input": 1 << 16, "hidden_size_per_layer_input": 64}
    plain = save_tiny("gemma4_text", tmp_path / "plain", dtype=torch.bfloat16, **more)
    source = open_source(str(plain))
    manifest = open_artifact(source)
    table = manifest.by_name["model.embed_tokens_per_layer.weight"]
    names = [tensor.name for tensor in manifest.tensors if tensor.group == table.group]

    assert manifest.groups[table.group].name == "embed"
    assert "model.per_layer_model_projection.weight" in names
    assert "model.per_layer_projection_norm.weight" in names
    held = [part for part in manifest.parts if part.group == table.group]
    assert len(held) > 8


def test_layers_that_share_keys_have_one_place_in_the_pool() -> None:
    config = DecoderConfig.from_json(config_json(oracle_of("inputs of layers, shared keys, wide MLPs")))
    spec = DecoderSpec.of(config, DType.BF16)
    shape = spec.kv_shape(num_blocks=1, block_size=1)

    # Window, whole, window; then window and whole, of the last ones before.
    assert spec.kv_places() == (
        *(KVPlace(0, 0), KVPlace(1, 0), KVPlace(0, 1)),
        *(KVPlace(0, 1), KVPlace(1, 0)),
    )
    assert [(each.num_layers, each.num_kv_heads, each.head_dim) for each in shape.groups] == [
        (2, 2, 16),
        (1, 2, 32),
    ]
    assert [each.intermediate_size for each in spec.layer_shapes] == [96, 96, 96, 192, 192]
    assert spec.rotary.dim == 32
    assert spec.local_rotary is not None
    assert spec.local_rotary.dim == 16


def test_files_with_keys_of_older_versions_say_the_same() -> None:
    """`global_head_dim` and `num_global_key_value_heads`, as published, and `per_layer_config` of transformers 5."""
    given = config_json(oracle_of("keys are values, biases"))
    older = {key: value for key, value in given.items() if key != "per_layer_config"}
    older |= {"global_head_dim": 32, "num_global_key_value_heads": 1}

    assert DecoderConfig.from_json(older) == DecoderConfig.from_json(given)
    without = {**older, "attention_k_eq_v": False}
    assert DecoderConfig.from_json(without).layer_shapes[1].num_kv_heads == 2, "as transformers has it"


def test_what_files_leave_out_is_what_transformers_assumes() -> None:
    config = DecoderConfig.from_json({"model_type": "gemma4_text"})
    theirs = transformers.Gemma4TextConfig()

    assert config.num_layers == theirs.num_hidden_layers
    assert [shape.head_dim for shape in config.layer_shapes] == [
        theirs.per_layer_config[layer].head_dim for layer in range(config.num_layers)
    ]
    assert [window is None for window in config.windows] == [
        kind == "full_attention" for kind in theirs.layer_types
    ]
    assert config.layer_inputs is not None
    assert (config.layer_inputs.size, config.experts, config.logit_cap) == (256, None, None)
    assert config.layer_rotary[5] is LayerRotary.MAIN


def test_frequencies_are_those_of_transformers() -> None:
    theirs = transformers.models.gemma4.modeling_gemma4.Gemma4TextRotaryEmbedding(
        transformers.Gemma4TextConfig()
    )
    config = DecoderConfig.from_json({"model_type": "gemma4_text"})
    assert config.local_rope is not None

    np.testing.assert_allclose(
        frequencies_of(config.rope, 100), theirs.full_attention_inv_freq.numpy(), rtol=1e-6
    )
    np.testing.assert_allclose(
        frequencies_of(config.local_rope, 100), theirs.sliding_attention_inv_freq.numpy(), rtol=1e-6
    )


@pytest.mark.parametrize("variant", ["plain, no cap", "a mixture"])
@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_other_backends_refuse_them_by_name(backend: Any, variant: str) -> None:
    oracle = oracle_of(variant)
    with pytest.raises(ModelError, match=r"layer_(shapes|scalars)"):
        build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend])


SHARED = {"num_kv_shared_layers": 4}
OF_LAYERS = {"1": {"head_dim": 32}, "4": {"head_dim": 32}}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"layer_types": ["linear_attention"] * 5}, "layer_types"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        (SHARED, "num_kv_shared_layers is 4, but no layer of full_attention has keys and values then"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5, but no layer of sliding_attention"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"use_bidirectional_attention": "audio"}, "use_bidirectional_attention"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        ({"vocab_size_per_layer_input": 319}, "vocab_size_per_layer_input"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"hidden_activation": "prelu"}, "hidden_activation"),
        ({"enable_moe_block": True}, "num_experts"),
        ({**MIXTURE, "top_k_experts": 7}, "top_k_experts"),
        ({**MIXTURE, "num_experts": 1 << 20}, "num_experts"),
        ({"attention_k_eq_v": "yes"}, "attention_k_eq_v"),
        ({"per_layer_config": []}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {"01": {"head_dim": 32}, "1": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {**OF_LAYERS, "2": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {**OF_LAYERS, "x": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {**OF_LAYERS, "4": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"skip": []}, "4": {"skip": []}}}, "per_layer_config.1.skip"),
        ({"per_layer_config": {"1": {"head_dim": 2}, "4": {"head_dim": 2}}}, "head_dim"),
        ({"per_layer_config": None, "global_head_dim": 1 << 20}, "global_head_dim"),
        (
            {"per_layer_config": None, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads is 3, but must divide",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "spiral"}}}, "rope_type"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}
                }
            },
            "partial_rotary_factor",
        ),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], named: str) -> None:
    config = config_json(tiny_model("gemma4_text"))
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_json({**config, **changed})
