"""Decoders that embed or classify: as transformers computes them, by each backend, in any batch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import tensors_of, tiny_config, tiny_model, with_tensors

from teneral.loader.artifact import open_model
from teneral.runtime.backends.describe import describe_model
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ContextLengthError, ModelError, RequestError
from teneral.runtime.models import pooled_decoder
from teneral.runtime.models.fields import Fields
from teneral.runtime.models.pooling_config import logit_score_of

BACKENDS = {"native": NativeBackend, "numpy": ReferenceBackend, "torch": TorchBackend}
MODULES = [
    {"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")
]
LAST = {"pooling_mode_lasttoken": True}
FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4")
PAD = 7

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_family = pytest.mark.parametrize("family", FAMILIES)


def texts_of(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(PAD + 1, 256, length).tolist() for length in lengths]


def config_of(oracle: Any) -> dict[str, Any]:
    """The oracle's config.json."""
    config: dict[str, Any] = json.loads(oracle.config.to_json_string(use_diff=False))
    return config | {"architectures": [type(oracle).__name__]}


def embedder(
    family: str, backend: str, options: dict[str, Any] | None = None, **files: Any
) -> tuple[Any, Any]:
    """Ours, over the tensors' names without "model." as embedding models are stored, and transformers' layers."""
    oracle = tiny_model(family, **(options or {}))
    tensors = {name.removeprefix("model."): tensor for name, tensor in oracle.state_dict().items()}
    tensors.pop("lm_head.weight")
    config = config_of(oracle if options is None else oracle.model)
    sentence = {"modules": MODULES, "pooling": LAST} | files
    return build_model(config, DictWeights(tensors), backends=[BACKENDS[backend]()], **sentence), oracle.model


@torch.no_grad()
def states_of(oracle: Any, text: list[int]) -> np.ndarray:
    """(L, hidden_size)."""
    return oracle(input_ids=torch.tensor([text])).last_hidden_state[0].numpy()


@each_family
@each_backend
def test_embeddings_are_those_of_transformers(family, backend):
    model, oracle = embedder(family, backend)
    texts = texts_of(1, 96, 17, 64, 2)
    right = np.array([states_of(oracle, text)[-1] for text in texts])
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    np.testing.assert_allclose(model.embed(texts), right, atol=3e-5)


@pytest.mark.parametrize(
    ("mode", "pool"),
    [
        ("mean", lambda states: states.mean(0)),
        ("cls", lambda states: states[0]),
        ("max", lambda states: states.max(0)),
    ],
)
def test_long_texts_are_read_in_pieces_for_every_pooling(mode, pool, monkeypatch):
    monkeypatch.setattr(pooled_decoder, "STEP_TOKENS", 32)
    model, oracle = embedder("qwen3", "native", modules=MODULES[:2], pooling={"pooling_mode": mode})
    texts = texts_of(100, 3, 33, 20)
    right = np.array([pool(states_of(oracle, text)) for text in texts])
    np.testing.assert_allclose(model.embed(texts), right, atol=3e-5, rtol=1e-4)


def test_a_text_has_the_same_bits_in_any_batch():
    model, _ = embedder("qwen3", "native")
    texts = texts_of(40, 5, 17, 90)
    together = model.embed(texts)
    for text, row in zip(texts, together, strict=True):
        assert model.embed([text])[0].tobytes() == row.tobytes()


@each_backend
def test_a_bidirectional_model_with_dense_modules_is_that_of_transformers_in_any_batch(backend, monkeypatch):
    monkeypatch.setattr(pooled_decoder, "STEP_TOKENS", 32)
    torch.manual_seed(0)
    linear = {"2_Dense": torch.nn.Linear(64, 48, bias=False), "3_Dense": torch.nn.Linear(48, 64, bias=False)}
    dense = [{"type": "sentence_transformers.models.Dense", "path": folder} for folder in linear]
    model, oracle = embedder(
        "gemma3_text",
        backend,
        {"use_bidirectional_attention": True},
        modules=[*MODULES[:2], *dense, MODULES[2]],
        pooling={"pooling_mode_mean_tokens": True},
        dense={
            folder: {
                "in_features": each.in_features,
                "out_features": each.out_features,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
            for folder, each in linear.items()
        },
        dense_weights={
            folder: DictWeights({"linear.weight": each.weight.detach()}) for folder, each in linear.items()
        },
    )
    texts = texts_of(1, 96, 17, 6, 2, 8, 30)
    right = np.array([states_of(oracle, text).mean(0) for text in texts])
    for each in linear.values():
        right = right @ each.weight.detach().numpy().T
    right /= np.linalg.norm(right, axis=1, keepdims=True)

    together = model.embed(texts)

    np.testing.assert_allclose(together, right, atol=3e-5)
    if backend == "native":
        for text, row in zip(texts, together, strict=True):
            assert model.embed([text])[0].tobytes() == row.tobytes()


def test_without_modules_a_model_of_layers_alone_gives_the_last_state_at_unit_length():
    oracle = tiny_model("qwen3").model
    model = build_model(config_of(oracle), DictWeights(oracle.state_dict()))
    (text,) = texts_of(9)
    right = states_of(oracle, text)[-1]
    np.testing.assert_allclose(model.embed([text])[0], right / np.linalg.norm(right), atol=3e-5)


@each_family
@each_backend
@pytest.mark.parametrize("pad", [None, PAD])
def test_scores_are_those_of_transformers(family, backend, pad):
    config = tiny_config(family, num_labels=3, pad_token_id=pad)
    torch.manual_seed(0)
    oracle = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model = build_model(config_of(oracle), DictWeights(oracle.state_dict()), backends=[BACKENDS[backend]()])
    texts = [*texts_of(3, 50, 96), [30, 40, PAD, PAD], [PAD]]

    assert model.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    with torch.no_grad():
        right = [oracle(input_ids=torch.tensor([text])).logits[0].numpy() for text in texts]
    np.testing.assert_allclose(model.embed(texts), right, atol=3e-5, rtol=1e-4)


LOGIT_SCORE = [
    {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
]


@each_backend
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma2", "granite", "phi"]
)  # plain, with a cap, scaled, with biases
@pytest.mark.parametrize("false_token", [9, None])
def test_the_logits_of_two_tokens_are_a_score(family, backend, false_token):
    oracle = tiny_model(family, **({} if family == "phi" else {"tie_word_embeddings": false_token is None}))
    model = build_model(
        config_of(oracle),
        DictWeights(oracle.state_dict()),
        backends=[BACKENDS[backend]()],
        modules=LOGIT_SCORE,
        logit_score={"true_token_id": 12, "false_token_id": false_token},
    )
    texts = [*texts_of(3, 50, 96), [30, 40, PAD, PAD]]

    scores = model.embed(texts)

    assert model.config.labels == ("LABEL_0",)
    with torch.no_grad():
        logits = [oracle(input_ids=torch.tensor([text])).logits[0, -1].numpy() for text in texts]
    right = [[each[12] - (0 if false_token is None else each[false_token])] for each in logits]
    np.testing.assert_allclose(scores, right, atol=3e-5, rtol=1e-4)
    if backend == "native":
        for text, row in zip(texts, scores, strict=True):
            assert model.embed([text])[0].tobytes() == row.tobytes()


@pytest.mark.parametrize(
    ("modules", "logit_score", "named"),
    [
        (LOGIT_SCORE, None, "there is no 1_LogitScore/config.json"),
        (LOGIT_SCORE, {"true_token_id": 320}, "true_token_id"),
        (LOGIT_SCORE, {"true_token_id": 1, "false_token_id": -1}, "false_token_id"),
        (LOGIT_SCORE, {"true_token_id": 1, "module_input_name": "scores"}, "module_input_name"),
        ([*LOGIT_SCORE, MODULES[2]], {"true_token_id": 1}, "last module"),
        ([LOGIT_SCORE[0], LOGIT_SCORE[1] | {"path": "../up"}], {"true_token_id": 1}, "path"),
    ],
)
def test_a_wrong_logit_score_is_refused_by_its_field(modules, logit_score, named):
    oracle = tiny_model("qwen3")
    with pytest.raises(ModelError, match=named):
        build_model(
            config_of(oracle), DictWeights(oracle.state_dict()), modules=modules, logit_score=logit_score
        )


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_of_the_head_of_a_gguf_file_are_a_score(kind, is_tied, tmp_path):
    pytest.importorskip("gguf")
    from tests.support.gguf_models import tensors_and_config, write_gguf  # which imports gguf

    oracle = tiny_model("qwen3", hidden_size=256, intermediate_size=256, tie_word_embeddings=is_tied)
    rounded = {name: each.bfloat16().float() for name, each in tensors_of(oracle).items()}
    oracle = with_tensors(oracle, rounded)  # what is not quantised becomes bf16
    meant = write_gguf(tmp_path / "model.gguf", oracle, kind)
    source = open_model(str(tmp_path / "model.gguf"))
    tensors, config = tensors_and_config(source)
    config["dtype"] = config["torch_dtype"] = "float32"
    tensors = {name: each.float() if each.dtype == torch.bfloat16 else each for name, each in tensors.items()}
    model = build_model(
        config,
        DictWeights(tensors),
        backends=[NativeBackend("float32")],
        modules=LOGIT_SCORE,
        logit_score={"true_token_id": 12, "false_token_id": 9},
    )
    texts = texts_of(3, 50)

    scores = model.embed(texts)

    oracle = with_tensors(oracle, meant)
    with torch.no_grad():
        logits = [oracle(input_ids=torch.tensor([text])).logits[0, -1].numpy() for text in texts]
    atol = 1e-5 * max(100.0, *(float(np.abs(each).max()) for each in logits))
    np.testing.assert_allclose(scores, [[each[12] - each[9]] for each in logits], atol=atol, rtol=1e-3)


BPE = {"model": {"vocab": {"no": 9, "yes": 12}}, "added_tokens": [{"id": 13, "content": "<yes>"}]}
UNIGRAM = {"model": {"vocab": [["<unk>", 0.0], ["no", -1.0], ["yes", -2.0]]}}
QWEN = {"is_original_qwen3_reranker": True}


@pytest.mark.parametrize(
    ("keys", "tokenizer", "right"),
    [
        ({"classifier_from_token": ["no", "yes"], **QWEN}, BPE, (12, 9)),
        ({"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}, UNIGRAM, (2, 1)),
        ({"classifier_from_token": ["<yes>"]}, BPE, (13, None)),
    ],
)
def test_tokens_of_the_config_classify_as_in_vllm(keys, tokenizer, right):
    oracle = tiny_model("qwen3")
    config = config_of(oracle) | {"architectures": ["Qwen3ForSequenceClassification"], **keys}
    model = build_model(
        config, DictWeights(oracle.state_dict()), logit_score=logit_score_of(Fields(config), tokenizer)
    )
    tokens = model.config.score_tokens
    assert (tokens.true, tokens.false, model.config.labels) == (*right, ("LABEL_0",))


@pytest.mark.parametrize(
    ("keys", "tokenizer", "named"),
    [
        ({"classifier_from_token": ["no", "yes"]}, BPE, "one token, or two with a method"),
        ({"classifier_from_token": ["yes"], **QWEN}, BPE, "one token, or two with a method"),
        (
            {"classifier_from_token": "yes"},
            BPE,
            "classifier_from_token is 'yes', but must be a list of strings",
        ),
        ({"classifier_from_token": ["yes"], "method": "max"}, BPE, "method"),
        ({"classifier_from_token": ["maybe"]}, BPE, "tokenizer.json has no token 'maybe'"),
        ({"classifier_from_token": ["yes"]}, {"model": []}, "no vocabulary"),
        ({"classifier_from_token": ["yes"]}, {"model": {"vocab": {"yes": 320}}}, "true_token_id"),
        ({"classifier_from_token": ["yes"]}, None, "there is no tokenizer.json"),
    ],
)
def test_tokens_of_the_config_that_cannot_be_used_are_named(keys, tokenizer, named):
    oracle = tiny_model("qwen3")
    config = config_of(oracle) | {"architectures": ["Qwen3ForSequenceClassification"], **keys}
    with pytest.raises(ModelError, match=named):
        build_model(
            config, DictWeights(oracle.state_dict()), logit_score=logit_score_of(Fields(config), tokenizer)
        )


def test_texts_that_do_not_fit_are_refused_by_their_place():
    model, _ = embedder("qwen3", "native", sentence_bert={"max_seq_length": 20})
    assert model.config.max_tokens == 20
    with pytest.raises(ContextLengthError, match="input 1 has 21 tokens"):
        model.embed(texts_of(4, 21))
    with pytest.raises(RequestError, match="input 0 has no tokens"):
        model.embed([[]])
    with pytest.raises(RequestError, match="outside the vocabulary of 320"):
        model.embed([[320]])
    model, _ = embedder("qwen3", "native", max_context=16)
    assert model.config.max_tokens == 16


def test_a_head_that_is_missing_is_named():
    oracle = tiny_model("qwen3")
    config = config_of(oracle) | {"architectures": ["Qwen3ForSequenceClassification"]}
    with pytest.raises(ModelError, match=r"score\.weight"):
        build_model(config, DictWeights(oracle.state_dict()))


def test_layers_alone_are_described_as_an_encoder():
    config = config_of(tiny_model("qwen3").model)
    described = describe_model(json.dumps(config).encode())
    assert tuple(described[key] for key in ("refused", "kind", "family", "adapts")) == (
        None,
        "encoder",
        "qwen3",
        [],
    )
