"""Encoders of every newer family are those of transformers, computed by each backend; and a text's result on the
native core is the same bits in any company.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.encoder_families import LONG, VARIANTS, TinyEncoder, tiny_encoder
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend

from teneral.loader.format.layout import group_tensors
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import RequestError

BACKENDS = {"native": NativeBackend, "numpy": ReferenceBackend, "torch": TorchBackend}
MEAN = {"pooling_mode_mean_tokens": True}
MODULES = [
    {"type": "sentence_transformers.models.Transformer"},
    {"type": "sentence_transformers.models.Pooling"},
]

each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def build(tiny: TinyEncoder, backend: str = "native", **files: Any) -> Any:
    sentence = {"modules": MODULES, "pooling": MEAN} | files
    return build_model(tiny.config, DictWeights(tiny.tensors), backends=[BACKENDS[backend]()], **sentence)


def texts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Without the padding tokens, which some families' positions would skip."""
    random = np.random.default_rng(seed)
    return [random.integers(5, 256, length).tolist() for length in lengths]


@torch.no_grad()
def states_of(oracle: Any, text: list[int]) -> Any:
    """(L, hidden_size) fp32."""
    return oracle(input_ids=torch.tensor([text])).last_hidden_state[0].float()


@torch.no_grad()
def scores_of(oracle: Any, text: list[int]) -> Any:
    return oracle(input_ids=torch.tensor([text])).logits[0].float().numpy()


@each_variant
@each_backend
def test_embeddings_are_those_of_transformers(variant, backend):
    tiny = tiny_encoder(variant)
    texts = texts_of(1, 96, 17, 64, 2)

    ours = build(tiny, backend).embed(texts)

    right = np.array([states_of(tiny.oracle, text).mean(0).numpy() for text in texts])
    np.testing.assert_allclose(ours, right, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", [name for name, (_, keys) in VARIANTS.items() if LONG in keys.values()])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_long_texts_are_those_of_transformers(variant, backend):
    tiny = tiny_encoder(variant)
    texts = texts_of(300, LONG, 9)

    ours = build(tiny, backend).embed(texts)

    right = np.array([states_of(tiny.oracle, text).mean(0).numpy() for text in texts])
    np.testing.assert_allclose(ours, right, atol=3e-5, rtol=1e-4)


@each_variant
@each_backend
def test_scores_are_those_of_transformers(variant, backend):
    tiny = tiny_encoder(variant, labels=3)
    texts = texts_of(3, 50, 96)

    model = build(tiny, backend)

    assert model.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    right = [scores_of(tiny.oracle, text) for text in texts]
    np.testing.assert_allclose(model.embed(texts), right, atol=3e-5, rtol=1e-4)


@functools.cache
def embeddings_in_bf16(variant: str, seed: int) -> tuple[TinyEncoder, list[list[int]], Any, Any]:
    """A model in bf16, texts, and what transformers says of them in fp32 and in bf16."""
    tiny = tiny_encoder(variant, torch.bfloat16, seed=seed)
    exact = tiny_encoder(variant, seed=seed).oracle
    exact.load_state_dict({name: value.float() for name, value in tiny.oracle.state_dict().items()})
    texts = texts_of(*range(1, 97, 8), seed=seed)
    right, theirs = (
        np.array([states_of(oracle, text).mean(0).numpy() for text in texts])
        for oracle in (exact, tiny.oracle)
    )
    return tiny, texts, right, theirs


@each_variant
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_in_bf16_embeddings_are_no_further_from_fp32_than_those_of_transformers(variant, backend):
    ours, of_transformers = 0.0, 0.0
    for seed in range(3):
        tiny, texts, right, theirs = embeddings_in_bf16(variant, seed)
        ours += np.abs(build(tiny, backend).embed(texts) - right).mean()
        of_transformers += np.abs(theirs - right).mean()
    # Both round at nearly the same places; how these errors add up is chance.
    assert 0.1 * of_transformers < ours <= 1.1 * of_transformers


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_text_has_the_same_bits_in_any_company(variant, dtype, data):
    model = build(tiny_encoder(variant, dtype))
    texts = texts_of(*data.draw(st.lists(st.integers(1, 96), min_size=1, max_size=6)))

    together = model.embed(texts)
    alone = np.concatenate([model.embed([text]) for text in texts])

    assert (together.view(np.uint32) == alone.view(np.uint32)).all()


@each_variant
def test_a_layer_needs_nothing_that_comes_after_it(variant):
    tiny = tiny_encoder(variant, labels=3)
    groups = group_tensors({name: tuple(tensor.shape) for name, tensor in tiny.tensors.items()})
    arrives = {name: number for number, (_, names) in enumerate(groups) for name in names}
    gates: list[list[str]] = []

    class Recording(DictWeights):
        def gate(self, names):
            gates.append(list(names))
            return super().gate(gates[-1])

    build_model(tiny.config, Recording(tiny.tensors), backends=[NativeBackend()])

    if variant != "albert":  # few weights, which arrive as one group
        num_layers = len([label for label, _ in groups if label.startswith("layers")])
        assert len(gates) == len(groups) == 2 + num_layers
    for number, names in enumerate(gates):
        assert names
        assert max(arrives[name] for name in names) <= number, names


POOLINGS = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.max(0).values,
    "lasttoken": lambda states: states[-1],
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": lambda states: (
        (states * torch.arange(1.0, len(states) + 1)[:, None]).sum(0) / sum(range(1, len(states) + 1))
    ),
}


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("variant", ["mpnet", "modernbert"])
@each_backend
def test_every_way_to_pool_is_that_of_sentence_transformers(mode, variant, backend):
    tiny = tiny_encoder(variant)
    texts = texts_of(1, 40, 7)

    ours = build(tiny, backend, pooling={"pooling_mode": mode}).embed(texts)

    right = np.array([POOLINGS[mode](states_of(tiny.oracle, text)).numpy() for text in texts])
    np.testing.assert_allclose(ours, right, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "GELU", "SiLU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_backend
@torch.no_grad()
def test_dense_modules_are_those_of_torch(activation, dtype, backend):
    tiny = tiny_encoder("mpnet")
    texts = texts_of(1, 40, 7)
    torch.manual_seed(7)
    width = tiny.oracle.config.hidden_size
    layers = {"2_Dense": torch.nn.Linear(width, 24), "3_Dense": torch.nn.Linear(24, 8, bias=False)}
    function = getattr(torch.nn, activation)()

    ours = build(
        tiny,
        backend,
        modules=[
            *MODULES,
            *({"type": "sentence_transformers.models.Dense", "path": name} for name in layers),
        ],
        dense={
            name: {
                "in_features": layer.in_features,
                "out_features": layer.out_features,
                "bias": layer.bias is not None,
                "activation_function": f"torch.nn.modules.activation.{activation}",
            }
            for name, layer in layers.items()
        },
        dense_weights={
            name: DictWeights({f"linear.{key}": value.to(dtype) for key, value in layer.state_dict().items()})
            for name, layer in layers.items()
        },
    ).embed(texts)

    states = torch.stack([states_of(tiny.oracle, text).mean(0) for text in texts])
    for layer in layers.values():
        states = function(layer.to(dtype).float()(states))
    np.testing.assert_allclose(ours, states.numpy(), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", ["deberta-v2", "mpnet"])
@each_backend
@torch.no_grad()
def test_the_texts_of_a_pair_are_distinguished_by_their_types_where_the_model_has_some(variant, backend):
    tiny = tiny_encoder(variant, labels=3)
    texts = texts_of(12, 30)
    types = [[0] * 5 + [1] * 7, None]

    ours = build(tiny, backend).embed(texts, types)

    has_types = tiny.config.get("type_vocab_size")
    given = {"token_type_ids": torch.tensor([types[0]])} if has_types else {}
    first = tiny.oracle(input_ids=torch.tensor([texts[0]]), **given).logits[0].numpy()
    np.testing.assert_allclose(ours, [first, scores_of(tiny.oracle, texts[1])], atol=3e-5, rtol=1e-4)


def test_types_that_a_model_does_not_have_are_refused():
    model = build(tiny_encoder("deberta-v2"))
    for types in ([[2]], [[-1]], [[1, 1]]):
        with pytest.raises(RequestError, match="token type"):
            model.embed([[5]], types)
