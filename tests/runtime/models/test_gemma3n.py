"""Gemma 3n: streams of x, low-rank products next to attention, cut gates, a short table of layers' inputs. Logits are
those of transformers, and bit for bit the same in chunks, company and threads.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.adapters import load_adapter, save_adapter
from tests.support.decoding import Stepper, oracle_behind, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.paced import PacedSource
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import AdapterError, ModelError
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.spec import DecoderSpec, KVPlace
from teneral.runtime.tensors import DType
from teneral.runtime.weights import StreamedWeights

NOT_CUT = {"activation_sparsity_pattern": [0.0] * 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published, but small": {},
    "two streams, the second active": {"altup_num_inputs": 2, "altup_active_idx": 1},
    "three streams, the last active, no scales": {
        "altup_num_inputs": 3,
        "altup_active_idx": 2,
        "altup_correct_scale": False,
    },
    "gates as they are, all keys, one head for them": {
        **NOT_CUT,
        "num_kv_shared_layers": 0,
        "num_key_value_heads": 1,
    },
    "MLPs of several sizes, biases, a head": {
        "intermediate_size": [96, 64, 160, 96, 32],
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "odd sizes": {
        "hidden_size": 52,
        "laurel_rank": 7,
        "hidden_size_per_layer_input": 19,
        "intermediate_size": 75,
    },
}
needs_core = pytest.mark.skipif(library() is None, reason="such layers are the native core's")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def oracle_of(variant: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return tiny_model("gemma3n_text", dtype=dtype, **VARIANTS[variant], **more)


def decoder_of(oracle: Any, **config: Any) -> Any:
    given = {**config_json(oracle), **config}
    return build_model(given, DictWeights(tensors_of(oracle)), backends=[NativeBackend()])


@needs_core
@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_tokens_are_those_of_transformers(variant: str, dtype: torch.dtype) -> None:
    oracle = oracle_of(variant, dtype)
    decoder = decoder_of(oracle)
    long, short = prompt_of(75), prompt_of(7, seed=1)

    whole = Stepper(decoder).step({"a": long, "b": short})
    stepper = Stepper(decoder)
    chunks = [
        stepper.step({"a": long[begin:end], f"b{end}": short})["a"]
        for begin, end in ((0, 1), (1, 3), (3, 43), (43, 44), (44, 75))
    ]

    assert torch.equal(torch.cat(chunks), whole["a"])
    if dtype is torch.bfloat16:
        return
    torch.testing.assert_close(whole["a"], oracle_logits(oracle, long), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole["b"], oracle_logits(oracle, short), atol=1e-4, rtol=1e-4)
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

    assert torch.cat(ours).quantile(0.5) < 1.1 * torch.cat(theirs).quantile(0.5)


@needs_core
def test_tokens_behind_the_table_of_inputs_take_its_first_row() -> None:
    oracle = oracle_of("as published, but small")
    prompt = [319, 3, 300, 299, 5]
    ours = Stepper(decoder_of(oracle)).step({"a": prompt})["a"]
    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@needs_core
@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_the_text_model_of_files_with_towers_is_computed(root: str) -> None:
    text, prompt = oracle_of("as published, but small"), prompt_of(40)
    config = {
        "model_type": "gemma3n",
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": config_json(text),
        "vision_config": {"model_type": "gemma3n_vision"},
        "audio_config": {"model_type": "gemma3n_audio"},
    }
    tensors = {name.replace("model.", root, 1): each for name, each in tensors_of(text).items()}
    tensors |= {"model.vision_tower.x.weight": torch.ones(4), "model.audio_tower.x.weight": torch.ones(4)}
    decoder: Any = build_model(config, DictWeights(tensors), backends=[NativeBackend()])

    assert decoder.vision is None
    assert torch.equal(
        Stepper(decoder).step({"a": prompt})["a"], Stepper(decoder_of(text)).step({"a": prompt})["a"]
    )


@needs_core
@pytest.mark.parametrize("kind", ["packed", "int8", "int4"])
def test_a_model_whose_weights_arrive_computes_what_one_with_all_of_them_does(
    tmp_path: Path, kind: str
) -> None:
    plain = save_tiny("gemma3n_text", tmp_path / "plain", dtype=torch.bfloat16)
    quantize = None if kind == "packed" else QuantizeOptions(int(kind[3:]))
    pack(open_source(str(plain)), open_store(str(tmp_path / kind)), quantize=quantize)
    rows, prompt = [], [*prompt_of(40), 310]
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
            rows.append(Stepper(decoder).step({"a": prompt})["a"])

    assert torch.equal(*rows)
    assert rows[0].isfinite().all()


@needs_core
def test_adapters_of_what_streams_and_low_rank_products_go_through_are_refused(
    tmp_path: Path,
) -> None:
    base = oracle_of("as published, but small")
    config = DecoderConfig.from_json(config_json(base))
    for module in ("linear_left", "modality_router", "altup_projections.0", "per_layer_projection"):
        folder = save_adapter(tmp_path / module, base, target_modules=[module], size=0.15)
        with pytest.raises(AdapterError, match=module.partition(".")[0]):
            load_adapter(folder, config)


def test_layers_that_share_keys_have_one_place_in_the_pool() -> None:
    config = DecoderConfig.from_json(config_json(oracle_of("as published, but small")))
    spec = DecoderSpec.of(config, DType.BF16)

    # Window, whole, window; then window and whole, of the last ones before.
    assert spec.kv_places() == tuple(KVPlace(0, layer) for layer in (0, 1, 2, 2, 1))
    assert spec.kv_shape(num_blocks=1, block_size=1).groups[0].num_layers == 3


def test_what_files_leave_out_is_what_transformers_assumes() -> None:
    config = DecoderConfig.from_json({"model_type": "gemma3n_text"})
    theirs = transformers.Gemma3nTextConfig()

    assert (config.num_layers, config.vocab_size) == (theirs.num_hidden_layers, theirs.vocab_size)
    assert [shape.intermediate_size for shape in config.layer_shapes] == theirs.intermediate_size
    assert [window is None for window in config.windows] == [
        kind == "full_attention" for kind in theirs.layer_types
    ]
    first_shared = theirs.num_hidden_layers - theirs.num_kv_shared_layers
    assert [shape.keys_of for shape in config.layer_shapes[first_shared:]] == [*[18] * 4, 19] * 3
    assert (config.logit_cap, config.laurel_rank) == (theirs.final_logit_softcapping, theirs.laurel_rank)
    assert config.layer_inputs is not None
    assert config.layer_inputs.vocab_size == theirs.vocab_size_per_layer_input
    assert config.streams is not None
    assert (config.streams.num, config.streams.active) == (theirs.altup_num_inputs, theirs.altup_active_idx)
    assert config.gate_cuts == (*[NormalDist().inv_cdf(0.95)] * 10, *[None] * 25)
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)


def test_bases_of_rotation_of_older_files_are_read() -> None:
    older = {
        "model_type": "gemma3n_text",
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": None,
    }
    config = DecoderConfig.from_json(older)
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (5e5, 2e4)


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_other_backends_refuse_them_by_name(backend: Any) -> None:
    oracle = oracle_of("gates as they are, all keys, one head for them")
    with pytest.raises(ModelError, match=r"layer_(shapes|inputs)"):
        build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend])


@needs_core
def test_more_streams_than_the_core_computes_are_refused_by_name() -> None:
    oracle = tiny_model("gemma3n_text", altup_num_inputs=5)
    with pytest.raises(ModelError, match=r"streams\.num"):
        decoder_of(oracle)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"layer_types": ["linear_attention"] * 5}, "layer_types"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, but no layer of full_attention has keys"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
        ({"intermediate_size": [96] * 4}, "intermediate_size"),
        ({"intermediate_size": [96] * 4 + [0.5]}, "intermediate_size"),
        ({"intermediate_size": [96] * 4 + [1 << 40]}, "intermediate_size"),
        ({"intermediate_size": [96.0] * 5}, "intermediate_size"),
        ({"intermediate_size": "96"}, "intermediate_size"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input"),
        ({"altup_num_inputs": 1}, "altup_num_inputs"),
        ({"altup_num_inputs": 1 << 20}, "altup_num_inputs"),
        ({"altup_active_idx": 4}, "altup_active_idx"),
        ({"altup_active_idx": -1}, "altup_active_idx"),
        ({"altup_correct_scale": 1}, "altup_correct_scale"),
        ({"laurel_rank": 0}, "laurel_rank"),
        ({"activation_sparsity_pattern": [0.5] * 4}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [1.0] * 5}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [-0.1] * 5}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"hidden_activation": "prelu"}, "hidden_activation"),
        ({"rope_parameters": {"full_attention": {"rope_type": "spiral"}}}, "rope_type"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], named: str) -> None:
    config = config_json(tiny_model("gemma3n_text"))
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_json({**config, **changed})


@needs_core
def test_infinite_and_tiny_streams_do_not_break_others() -> None:
    """A row of zeros has no size, and one of NaN gives NaN to its own sequence alone."""
    oracle = oracle_of("as published, but small")
    with torch.no_grad():
        oracle.model.embed_tokens.weight[7] = 0.0
        oracle.model.embed_tokens.weight[8] = torch.nan
        oracle.lm_head.weight = torch.nn.Parameter(torch.randn(320, 64) * 0.1)
    oracle.config.tie_word_embeddings = False
    decoder = decoder_of(oracle)

    together = Stepper(decoder).step({"zero": [7, 7], "nan": [8, 8], "plain": [5, 6]})

    torch.testing.assert_close(together["zero"], oracle_logits(oracle, [7, 7]), atol=1e-4, rtol=1e-4)
    assert np.isnan(together["nan"].numpy()).all()
    assert torch.equal(together["plain"], Stepper(decoder).step({"plain": [5, 6]})["plain"])
