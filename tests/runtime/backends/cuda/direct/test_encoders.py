"""Encoders, classifiers and decoders that embed, on the direct path: transformers' results, the same in any company."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.direct_engine import DirectModel
from tests.support.direct_kernels import cuda, needs_double, needs_kernels
from tests.support.encoder_families import LONG, TinyEncoder, save_encoder, tiny_encoder
from tests.support.inspection import kv_of, programs_of, workspace_of
from tests.support.load import patience_s
from tests.support.models import arrays_of
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.errors import InsufficientMemoryError
from teneral.runtime.backends.cuda.direct import encoder, tables
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.build import build_model
from teneral.runtime.models.pooling_config import POOLING_MODES
from teneral.runtime.weights import DictWeights

pytestmark = needs_kernels

MODULES = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")]
NORMALIZE = {"type": "sentence_transformers.models.Normalize"}
VARIANTS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "mpnet", "nomic_bert"),
    *("modernbert", "modernbert-biased", "xlm-roberta-xl", "albert"),
)


def tiny(variant: str, dtype: torch.dtype = torch.float32, *, labels: int = 0) -> TinyEncoder:
    if variant not in ("bert", "roberta", "xlm-roberta"):
        return tiny_encoder(variant, dtype, labels=labels)
    oracle = tiny_model(variant, dtype=dtype)
    return TinyEncoder(oracle, config_json(oracle), tensors_of(oracle))


@contextmanager
def on_device(model: TinyEncoder, mode: str = "mean", **files: Any) -> Iterator[DirectModel]:
    sentence = {"modules": MODULES, "pooling": {"pooling_mode": mode}} | files
    made = DirectModel(model.config, arrays_of(model.tensors), **sentence)
    yield made
    made.close()


def texts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Without the padding tokens, which some families' positions would skip."""
    random = np.random.default_rng(seed)
    return [random.integers(5, 256, length).tolist() for length in lengths]


@torch.no_grad()
def means_of(oracle: Any, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """By transformers, in fp32."""
    wide = oracle.float()
    return np.array([wide(input_ids=torch.tensor([text])).last_hidden_state[0].mean(0) for text in texts])


def cosines(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    both = np.linalg.norm(found, axis=1) * np.linalg.norm(right, axis=1)
    return (found * right).sum(1) / both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_embeddings_are_those_of_transformers(variant: str, dtype: torch.dtype) -> None:
    """Weights in fp32 are computed with in fp16."""
    own, texts = tiny(variant, dtype), texts_of(1, 70, 17, 2)
    with on_device(own) as model:
        found = model.model.embed(texts)
    is_rough = dtype is torch.bfloat16
    assert cosines(found, means_of(tiny(variant).oracle, texts)).min() > (0.999 if is_rough else 0.999995)
    if not is_rough:
        np.testing.assert_allclose(found, means_of(tiny(variant).oracle, texts), atol=0.01)


@pytest.mark.parametrize("variant", ["bert", "modernbert"])
def test_embeddings_in_bf16_are_near_the_native_cores(variant: str) -> None:
    own, texts = tiny(variant, torch.bfloat16), texts_of(3, 40)
    with on_device(own) as model:
        found = model.model.embed(texts)
    files: dict[str, Any] = {"modules": MODULES, "pooling": {"pooling_mode": "mean"}}
    native: Any = build_model(own.config, DictWeights(arrays_of(own.tensors)), [NativeBackend()], **files)
    assert cosines(found, native.embed(texts)).min() > 0.9995


@pytest.mark.slow
def test_long_texts_and_windows_are_those_of_transformers() -> None:
    own, texts = tiny("modernbert"), texts_of(LONG)
    with on_device(own) as model:
        found = model.model.embed(texts)
    np.testing.assert_allclose(found, means_of(own.oracle, texts), atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["bert", "mpnet", "modernbert", "nomic_bert"])
def test_a_text_alone_and_in_company_has_the_same_bits(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among few and many, short and long texts, in batches of their own and in larger ones."""
    monkeypatch.setattr(encoder, "_FIRST_ROWS", 32)
    texts = texts_of(1, 5, 16, 17, 65, 3)
    if variant == "modernbert" and dtype is torch.bfloat16:
        texts += texts_of(257)  # keys in two splits
    with on_device(tiny(variant, dtype)) as model:
        embed = model.model.embed
        alone = np.concatenate([embed([text]) for text in texts])
        np.testing.assert_array_equal(embed(texts), alone)
        np.testing.assert_array_equal(embed(texts[::-1])[::-1], alone)
        np.testing.assert_array_equal(embed(texts[:3]), alone[:3])  # none of them has many pairs
        many = [*texts, *texts_of(*[30] * 8, seed=1)]
        np.testing.assert_array_equal(embed(many)[: len(texts)], alone)
        assert workspace_of(model.executor).arrays.num_rows > 128  # it grew


@pytest.mark.parametrize(
    "variant", ["distilbert", "xlm-roberta-xl", "electra", "nomic_bert", "mpnet", "modernbert-biased"]
)
def test_scores_are_those_of_transformers_and_the_same_in_company(variant: str) -> None:
    own, texts = tiny(variant, labels=3), texts_of(3, 50, 90)
    with on_device(own) as model:
        found = model.model.embed(texts)
        alone = np.concatenate([model.model.embed([text]) for text in texts])
    with torch.no_grad():
        right = [own.oracle(input_ids=torch.tensor([text])).logits[0].numpy() for text in texts]
    np.testing.assert_allclose(found, right, atol=0.03)
    np.testing.assert_array_equal(found, alone)


def test_pairs_have_types() -> None:
    own, [text] = tiny("bert"), texts_of(20)
    types = [0] * 12 + [1] * 8
    with on_device(own) as model:
        found = model.model.embed([text, text, text], [None, types, [0] * 20])
    with torch.no_grad():
        states = own.oracle(input_ids=torch.tensor([text]), token_type_ids=torch.tensor([types]))
    np.testing.assert_allclose(found[1], states.last_hidden_state[0].mean(0), atol=0.01)
    np.testing.assert_array_equal(found[0], found[2])
    assert np.abs(found[1] - found[0]).max() > 0.05


def test_batches_that_come_often_become_graphs_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MIN_GRAPH_STEPS", 3)
    monkeypatch.setattr(encoder, "_FIRST_ROWS", 32)
    with on_device(tiny("bert")) as model:
        rows = [model.model.embed(texts_of(3, 9, seed=seed)) for seed in (0, 0, 0, 1, 0)]
        (program,) = workspace_of(model.executor).programs.values()
        assert program.graph is not None
        for row in (*rows[1:3], rows[4]):
            np.testing.assert_array_equal(row, rows[0])
        assert (rows[3] != rows[0]).any()


def test_layers_may_be_computed_one_by_one_as_they_arrive() -> None:
    with on_device(tiny("bert")) as model:
        together = model.model.embed(texts_of(3, 9))
        model.executor.runs_layers_together = False
        np.testing.assert_array_equal(model.model.embed(texts_of(3, 9)), together)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_every_pooling_is_the_native_cores(mode: str) -> None:
    own, texts = tiny("bert"), texts_of(3, 40, 1)
    files: dict[str, Any] = {"modules": [*MODULES, NORMALIZE], "pooling": {"pooling_mode": mode}}
    with on_device(own, **files) as model:
        found = model.model.embed(texts)
    native: Any = build_model(own.config, DictWeights(arrays_of(own.tensors)), [NativeBackend()], **files)
    np.testing.assert_allclose(found, native.embed(texts), atol=0.002)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Tanh", "ReLU", "GELU"])
def test_layers_behind_embeddings_are_the_hosts_or_refused(kind: str) -> None:
    own, texts = tiny("bert"), texts_of(3, 40)
    random = np.random.default_rng(0)
    weight, bias = (random.standard_normal(shape).astype(np.float32) / 8 for shape in ((24, 64), (24,)))
    dense = {"in_features": 64, "out_features": 24, "activation_function": f"torch.nn.{kind}"}
    files: dict[str, Any] = {
        "modules": [*MODULES, {"type": "a.Dense", "path": "2_Dense"}],
        "dense": {"2_Dense": dense},
        "dense_weights": {"2_Dense": DictWeights(arrays_of({
            "linear.weight": torch.from_numpy(weight), "linear.bias": torch.from_numpy(bias),
        }))},
    }  # fmt: skip
    if kind == "GELU":
        with pytest.raises(ModelError, match="does not implement dense"), on_device(own, **files):
            pass
        return
    with on_device(own) as plain, on_device(own, **files) as model:
        found, before = model.model.embed(texts), plain.model.embed(texts)
    expected = before @ weight.T + bias
    right = np.tanh(expected) if kind == "Tanh" else np.maximum(expected, 0)
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "match"),
    [
        ("deberta", "does not know disentangled.span"),
        ("electra-small", r"does not multiply with a DenseMatrix \[64, 40\] in float32"),
        ("relu2", "does not implement activation = relu2"),
        ("narrow", "does not implement head_dim = 4"),
    ],
)
def test_what_kernels_lack_is_refused_by_name(variant: str, match: str) -> None:
    own = tiny("bert" if variant in ("relu2", "narrow") else variant)
    config = own.config | {"relu2": {"hidden_act": "relu2"}, "narrow": {"num_attention_heads": 16}}.get(
        variant, {}
    )
    with pytest.raises(ModelError, match=match), on_device(own._replace(config=config)):
        pass


def test_tables_of_several_dtypes_are_refused() -> None:
    own = tiny("bert")
    name = "embeddings.position_embeddings.weight"
    tensors = own.tensors | {name: own.tensors[name].to(torch.bfloat16)}
    with pytest.raises(ModelError, match="in several dtypes"), on_device(own._replace(tensors=tensors)):
        pass


def test_numbers_that_fp16_does_not_hold_are_an_error_that_says_what_to_do() -> None:
    own = tiny("xlm-roberta-xl")
    tensors = {name: 300 * t if "dense.weight" in name else t for name, t in own.tensors.items()}
    with (
        on_device(own._replace(tensors=tensors)) as model,
        pytest.raises(ModelError, match="too large for fp16"),
    ):
        model.model.embed(texts_of(5))
    with on_device(own._replace(tensors=tensors), dtype="bfloat16") as model:
        assert np.isfinite(model.model.embed(texts_of(5))).all()


@needs_double
def test_memory_that_runs_out_ends_one_batch() -> None:
    with on_device(tiny("bert")) as model:
        cuda().fail_next("cuMemAlloc_v2", 2)
        with pytest.raises(InsufficientMemoryError):
            model.model.embed(texts_of(5))
        first = model.model.embed(texts_of(5))
        cuda().fail_next("cuMemcpyHtoDAsync_v2", 2)
        with pytest.raises(InsufficientMemoryError):
            model.model.embed(texts_of(5))
        np.testing.assert_array_equal(model.model.embed(texts_of(5)), first)


@needs_double
def test_what_a_long_text_takes_is_counted_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_FIRST_ROWS", 32)
    monkeypatch.setattr(encoder, "_KEPT_ROWS", 64)
    monkeypatch.setattr(encoder, "MAX_BATCH_TOKENS", 64)
    memory = cuda().library.memory_in_use
    with on_device(tiny("bert")) as model:
        executor, before = model.executor, memory()
        first = model.model.embed(texts_of(5))
        assert memory() - before <= executor.batch_bytes(1)
        model.model.embed(texts_of(60))
        kept = memory() - before
        counted = executor.batch_bytes(64)
        assert counted <= kept < 1.1 * counted  # and on the host, where tables are written
        assert executor.batch_bytes(65) > counted
        model.model.embed(texts_of(90))
        assert memory() == before
        np.testing.assert_array_equal(model.model.embed(texts_of(5)), first)


@needs_double
def test_an_embedding_needs_no_torch(tmp_path: Path) -> None:
    save_encoder("modernbert", tmp_path, torch.bfloat16)
    texts = texts_of(3, 40)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.direct_program", str(tmp_path), "0"],
        input=json.dumps(texts), capture_output=True, text=True, timeout=patience_s(100),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    imported = {name.partition(".")[0] for name in answer["modules"]}
    assert not imported & {"torch", "triton", "cupy", "cupy_backends", "transformers"}
    right = means_of(tiny("modernbert", torch.bfloat16).oracle, texts)
    assert cosines(np.array(answer["answers"]), right).min() > 0.999


DECODERS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma3_text": {},
    "embeddinggemma": {"use_bidirectional_attention": True, "sliding_window": 9},
}


def decoder_on_device(family: str, dtype: torch.dtype, mode: str) -> tuple[DirectModel, Any]:
    options = DECODERS[family]
    oracle = tiny_model("gemma3_text" if options else family, dtype=dtype, **options)
    tensors = {name.removeprefix("model."): tensor for name, tensor in oracle.state_dict().items()}
    tensors.pop("lm_head.weight", None)
    inner = oracle.model
    config = json.loads(inner.config.to_json_string(use_diff=False))
    config["architectures"] = [type(inner).__name__]
    files: dict[str, Any] = {"modules": [*MODULES, NORMALIZE], "pooling": {"pooling_mode": mode}}
    return DirectModel(config, arrays_of(tensors), **files), inner


@pytest.mark.parametrize(
    ("family", "dtype", "mode"),
    [
        ("qwen3", torch.bfloat16, "lasttoken"),
        ("qwen3", torch.float32, "mean"),
        ("llama", torch.bfloat16, "mean"),
        ("gemma3_text", torch.bfloat16, "lasttoken"),
        ("embeddinggemma", torch.bfloat16, "mean"),
        ("embeddinggemma", torch.float32, "lasttoken"),
    ],
    ids=str,
)
def test_decoders_embed_as_transformers_does_and_the_same_in_company(
    family: str, dtype: torch.dtype, mode: str
) -> None:
    """Weights in fp32 are computed with in bf16."""
    model, oracle = decoder_on_device(family, dtype, mode)
    texts = texts_of(1, 70, 17, 2)
    found = model.model.embed(texts)
    alone = np.concatenate([model.model.embed([text]) for text in texts])
    np.testing.assert_array_equal(found, alone)
    with torch.no_grad():
        states = [oracle.float()(input_ids=torch.tensor([text])).last_hidden_state[0] for text in texts]
    right = np.array([each[-1] if mode == "lasttoken" else each.mean(0) for each in states])
    assert cosines(found, right).min() > 0.999
    held = kv_of(model.executor)
    model.model.embed(texts[2:])
    assert kv_of(model.executor) is held  # which the device's memory is not taken for again
    model.close()


@pytest.mark.slow
def test_long_texts_see_both_ways_in_splits_of_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few rows of a text's last item are cut by keys where processors are to spare."""
    model, oracle = decoder_on_device("embeddinggemma", torch.bfloat16, "mean")
    texts = texts_of(485)
    found = model.model.embed(texts)
    monkeypatch.setattr(tables, "BLOCKS_PER_PROCESSOR", 64)
    np.testing.assert_array_equal(model.model.embed(texts), found)
    assert any("slots=64" in str(key) for key in programs_of(model.executor))
    with torch.no_grad():
        states = oracle.float()(input_ids=torch.tensor(texts[:1])).last_hidden_state[0]
    assert cosines(found[:1], states.mean(0, keepdim=True).numpy()).min() > 0.999
    model.close()
