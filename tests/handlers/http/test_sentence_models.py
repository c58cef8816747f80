"""Encoders, and decoders that embed or rank, from a packed folder to answers over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.encoder_families import save_sentence_model
from tests.support.http_server import running_server
from tests.support.memory_store import MemoryStore
from tests.support.tiny_models import save_tiny, tiny_config

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance
from teneral.runtime.text.tokenizer import TextTokenizer

TEXTS = ["hi", "a nymph climbs a stem", "x" * 70]


def tokenizer_of(folder: Path) -> TextTokenizer:
    return TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := folder / name).exists() else None
    )


@pytest.mark.parametrize(
    ("variant", "dense"), [("modernbert", 0), ("deberta", 0), ("deberta-v3", 24), ("nomic_bert", 32)]
)
@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_folder_is_served_with_its_pooling_and_its_dense_layer(
    tmp_path: Path, one_thread: None, variant: str, dense: int, is_packed: bool
) -> None:
    saved = save_sentence_model(variant, tmp_path, dense=dense)
    source = FileStore(tmp_path)
    if is_packed:
        source = MemoryStore()
        pack(FileStore(tmp_path), source)
    tokenizer = tokenizer_of(tmp_path)
    config = ServeConfig(model="memory", name="tiny/model", threads=1)

    async with running_server(Instance(config, source=source)) as server:
        answer = await server.post("/v1/embeddings", {"input": TEXTS})

    assert answer.status == 200, answer.body
    ours = torch.tensor([entry["embedding"] for entry in answer.json["data"]])
    right = torch.stack([saved.embed(list(tokenizer.encode(text))) for text in TEXTS])
    assert ours.shape[1] == dense or not dense
    torch.testing.assert_close(ours, right, atol=3e-5, rtol=1e-4)
    tokenizer.close()


async def test_a_dense_layer_without_weights_is_named(tmp_path: Path) -> None:
    save_sentence_model("mpnet", tmp_path, dense=8)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()

    async with running_server(Instance(ServeConfig(model="memory"), source=FileStore(tmp_path))) as server:
        answer = await server.post("/v1/embeddings", {"input": "hi"})

    assert answer.status >= 500
    assert "there is no 2_Dense/model.safetensors" in answer.json["error"]["message"]


def served(folder: Path, *, is_packed: bool) -> Instance:
    source: Any = FileStore(folder)
    if is_packed:
        source = MemoryStore()
        pack(FileStore(folder), source)
    return Instance(ServeConfig(model="memory", name="tiny/model", threads=1), source=source)


@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_decoder_that_embeds_is_served_by_its_modules(
    tmp_path: Path, one_thread: None, is_packed: bool
) -> None:
    """Qwen3-Embedding is stored in this form: the layers alone, pooled by the last token."""
    save_tiny("qwen3", tmp_path, tie_word_embeddings=False)
    oracle = transformers.AutoModel.from_pretrained(tmp_path).eval()
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(
        {name.removeprefix("model."): own for name, own in tensors.items()}, tmp_path / "model.safetensors"
    )
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')

    async with running_server(served(tmp_path, is_packed=is_packed)) as server:
        answer = await server.post("/v1/embeddings", {"input": TEXTS})
        refused = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})

    assert answer.status == 200, answer.body
    tokenizer = tokenizer_of(tmp_path)
    with torch.no_grad():
        for text, entry in zip(TEXTS, answer.json["data"], strict=True):
            state = oracle(input_ids=torch.tensor([list(tokenizer.encode(text))])).last_hidden_state[0, -1]
            right = torch.nn.functional.normalize(state, dim=0)
            torch.testing.assert_close(torch.tensor(entry["embedding"]), right, atol=3e-5, rtol=1e-4)
    assert refused.status >= 400
    tokenizer.close()


@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_reranker_on_a_decoder_scores_the_query_followed_by_each_document(
    tmp_path: Path, one_thread: None, is_packed: bool
) -> None:
    save_tiny("qwen3", tmp_path)
    torch.manual_seed(0)
    config = tiny_config("qwen3", num_labels=1, pad_token_id=256)
    oracle = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    oracle.save_pretrained(tmp_path)
    documents = ["a b c", "nothing", "z"]

    async with running_server(served(tmp_path, is_packed=is_packed)) as server:
        answer = await server.post("/v1/rerank", {"query": "what is it? ", "documents": documents})

    assert answer.status == 200, answer.body
    tokenizer = tokenizer_of(tmp_path)
    with torch.no_grad():
        for entry in answer.json["results"]:
            tokens = list(tokenizer.encode(f"what is it? {documents[entry['index']]}"))
            right = torch.sigmoid(oracle(input_ids=torch.tensor([tokens])).logits[0, 0]).item()
            assert entry["relevance_score"] == pytest.approx(right, abs=3e-5)
    tokenizer.close()


PAIR_TEMPLATE = """
{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content")
   | first | default("Find it") -%}
{%- set query_text = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document_text = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|im_start|>user
<Instruct>: {{ instruction }}
<Query>: {{ query_text }}
<Document>: {{ document_text }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""
YES, NO = 100, 101


def save_reranker(folder: Path, *, says: str = "Given a query, find what answers it") -> Any:
    """A reranker as Qwen publishes it: a decoder with the files of sentence-transformers' CrossEncoder."""
    save_tiny("qwen3", folder)
    files: dict[str, Any] = {
        "modules.json": [
            {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {
                "path": "1_LogitScore",
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
        "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": NO},
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
        },
        "config_sentence_transformers.json": {
            "activation_fn": "torch.nn.modules.linear.Identity",
            "default_prompt_name": "query",
            "model_type": "CrossEncoder",
            "prompts": {"query": says},
        },
    }
    (folder / "1_LogitScore").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def log_odds_of(oracle: Any, tokenizer: TextTokenizer, instruction: str, query: str, document: str) -> float:
    """The model card's score: of a text with both, whose next token is yes or no."""
    text = (
        f"<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    logits = oracle(input_ids=torch.tensor([tokens])).logits[0, -1]
    return float(logits[YES] - logits[NO])


@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_reranker_as_published_answers_with_the_probability_of_yes(
    tmp_path: Path, one_thread: None, is_packed: bool
) -> None:
    says = "Given a query, find what answers it"
    oracle = save_reranker(tmp_path, says=says)
    documents = ["a b c", "nothing ü", "z", "zz"]
    body = {"query": "what is it?", "documents": documents}
    pairs = {"text_1": "what is it?", "text_2": documents}

    async with running_server(served(tmp_path, is_packed=is_packed)) as server:
        answer = await server.post("/v1/rerank", body)
        odds = await server.post("/v1/score", {**pairs, "use_activation": False})
        other = await server.post("/v1/score", {**pairs, "instruction": "Other"})
        short = await server.post("/v1/rerank", {**body, "max_tokens_per_doc": 1})
        label = await server.post("/v1/classify", {"input": "some text"})
        refused = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})

    assert answer.status == 200, answer.body
    tokenizer = tokenizer_of(tmp_path)
    wanted = [log_odds_of(oracle, tokenizer, says, "what is it?", document) for document in documents]
    of_other = [log_odds_of(oracle, tokenizer, "Other", "what is it?", document) for document in documents]
    for entry in answer.json["results"]:
        right = 1 / (1 + np.exp(-wanted[entry["index"]]))
        assert entry["relevance_score"] == pytest.approx(right, abs=3e-5)
    assert [each["score"] for each in odds.json["data"]] == pytest.approx(wanted, abs=1e-4)
    assert [each["score"] for each in other.json["data"]] == pytest.approx(
        (1 / (1 + np.exp(-np.array(of_other)))).tolist(), abs=3e-5
    )
    scores = {entry["index"]: entry["relevance_score"] for entry in short.json["results"]}
    first = 1 / (1 + np.exp(-log_odds_of(oracle, tokenizer, says, "what is it?", "z")))
    assert scores[2] == scores[3] == pytest.approx(first, abs=3e-5)
    assert 0 < label.json["data"][0]["probs"][0] < 1
    assert refused.status >= 400
    tokenizer.close()


@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_reranker_by_tokens_of_its_config_answers_as_in_vllm(
    tmp_path: Path, one_thread: None, is_packed: bool
) -> None:
    save_tiny("qwen3", tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    texts = {number: text for text, number in vocabulary.items()}
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": [texts[NO], texts[YES]],
        "is_original_qwen3_reranker": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    async with running_server(served(tmp_path, is_packed=is_packed)) as server:
        answer = await server.post("/v1/rerank", {"query": "what? ", "documents": ["a b c", "z"]})

    assert answer.status == 200, answer.body
    tokenizer = tokenizer_of(tmp_path)
    with torch.no_grad():
        for entry in answer.json["results"]:
            tokens = list(tokenizer.encode(f"what? {('a b c', 'z')[entry['index']]}"))
            logits = oracle(input_ids=torch.tensor([tokens])).logits[0, -1]
            right = torch.sigmoid(logits[YES] - logits[NO]).item()
            assert entry["relevance_score"] == pytest.approx(right, abs=3e-5)
    tokenizer.close()


async def test_a_chat_template_without_documents_is_refused(tmp_path: Path, one_thread: None) -> None:
    save_reranker(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")

    async with running_server(served(tmp_path, is_packed=False)) as server:
        answer = await server.post("/v1/rerank", {"query": "a", "documents": ["b"]})

    assert answer.status >= 500
    assert "role document" in answer.json["error"]["message"]


def test_texts_of_a_pair_are_shortened_wherever_the_template_puts_them(tmp_path: Path) -> None:
    save_reranker(tmp_path)
    settings = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    settings["modality_config"]["message"]["format"] = "structured"
    settings["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True, "mark": "#"}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for each in messages | reverse %}<{{ each.role }}>{{ each.content[0].text | trim }}{% endfor %}"
        "{% if add_generation_prompt %}{{ mark }}{% endif %}"
    )
    tokenizer = tokenizer_of(tmp_path)

    (pair,) = tokenizer.encode_pairs([(" ab ", " cde\n")], instruction="find")

    def text_of(tokens: tuple[int, ...]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    assert text_of(pair.tokens) == "<document>cde<query>ab<system>find#"
    assert text_of(pair.with_part(1, 1).tokens) == "<document>c<query>ab<system>find#"
    assert text_of(pair.within(len(pair.tokens) - 4).tokens) == "<document><query>a<system>find#"
    tokenizer.close()
