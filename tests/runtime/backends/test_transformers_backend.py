"""Models that only transformers knows: what an instance says is what transformers says by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper
from tests.support.encoder_families import save_sentence_model
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny, transformers

from teneral.loader.errors import UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.backends import choose
from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.backends.transformers.decoder import TransformersDecoder
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import ModelError
from teneral.runtime.instance.instance import Instance
from teneral.runtime.models.executor import ComputeDtype
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.tensors import DType

WAIT_S = patience_s(60)
CONFIG = ServeConfig(model="memory", backend="transformers", kv_bytes=1 << 20)
GPT_2: dict[str, Any] = {
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 257,
    "eos_token_id": 256,
}

GREEDY = SamplingParams(temperature=0.0)
GEMMA_4_TOKENS = [f"{name}_token_id" for name in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")]


def random_weights(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def gpt_2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = save_tiny("llama", tmp_path_factory.mktemp("gpt-2"))  # for its tokenizer
    model = random_weights(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT_2)))
    model.save_pretrained(folder)
    return folder, model


def greedy(oracle: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def mamba_2() -> Any:
    config = transformers.Mamba2Config(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=2,
        chunk_size=8,
    )
    return random_weights(transformers.Mamba2ForCausalLM(config))


def of_layers_of_several_kinds(model_type: str) -> Any:
    """A tiny model with recurrent layers, or with heads of several sizes."""
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
    text = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 257,
        "eos_token_id": 256,
        "pad_token_id": 0,
    }
    gemma_4 = {
        **text,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
    }
    numbers = dict(zip(GEMMA_4_TOKENS, range(300, 307), strict=True))
    vision = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    settings: dict[str, Any] = {
        "falcon_h1": {**text, **mamba, "mamba_d_ssm": 128},
        "gemma4_text": gemma_4,
        "gemma4": {
            "text_config": gemma_4,
            "vision_config": {**vision, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8},
            "audio_config": None,
            **numbers,
        },
    }
    config = transformers.AutoConfig.for_model(model_type, **settings[model_type])
    return random_weights(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("model_type", ["falcon_h1", "gemma4_text", "gemma4"])
def test_a_config_of_transformers_5_is_read_with_its_floats_and_layers(
    tmp_path: Path, model_type: str
) -> None:
    """Infinity is {"__float__": "Infinity"} in it, and Gemma 4 has no number of heads for all layers."""
    oracle = of_layers_of_several_kinds(model_type)
    oracle.save_pretrained(save_tiny("llama", tmp_path))
    assert ("__float__" in (tmp_path / "config.json").read_text()) == ("gemma" not in model_type)
    with Instance(CONFIG, source=FileStore(tmp_path)) as instance:
        engine = instance.engine.result(WAIT_S)
        for prompt in ([5, 6, 7], list(range(20, 60))):
            request = GenerationRequest(
                "test",
                tuple(prompt),
                max_tokens=6,
                sampling=SamplingParams(temperature=0.0),
                ignore_eos=True,
            )
            assert tokens_of(engine.submit(request)) == greedy(oracle, prompt, 6)


def decoder_of(model: Any) -> TransformersDecoder:
    return TransformersDecoder(model, model.config, ComputeDtype(DType.F32, DType.F32, "asked for"))


def tokens_of(generation: Any) -> list[int]:
    return [token for event in generation.events(WAIT_S) for token in event.tokens]


def test_greedy_tokens_of_several_sequences_are_those_of_transformers(gpt_2: tuple[Path, Any]) -> None:
    folder, oracle = gpt_2
    prompts = [[5, 6, 7], list(range(20, 60)), [5, 6, 7, 9], [100]]
    with Instance(CONFIG, source=FileStore(folder)) as instance:
        engine = instance.engine.result(WAIT_S)
        requests = [
            GenerationRequest(
                "test",
                tuple(prompt),
                max_tokens=12,
                sampling=SamplingParams(temperature=0.0),
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        generations = [engine.submit(request) for request in requests]
        ours = [tokens_of(generation) for generation in generations]
        again = tokens_of(engine.submit(requests[1]))  # whose prefix is in the pool
        assert instance.timeline.first("model", "build").attributes["backend"] == "transformers"

    for own, prompt in zip(ours, prompts, strict=True):
        assert own == greedy(oracle, prompt, 12)
    assert again == ours[1]


def test_an_artifact_is_served_as_its_checkpoint(gpt_2: tuple[Path, Any], tmp_path: Path) -> None:
    folder, oracle = gpt_2
    pack(FileStore(folder), FileStore(tmp_path / "packed"))
    with Instance(CONFIG, source=FileStore(tmp_path / "packed")) as instance:
        request = GenerationRequest("test", (5, 6, 7), max_tokens=6, sampling=GREEDY, ignore_eos=True)
        ours = tokens_of(instance.engine.result(WAIT_S).submit(request))
    assert ours == greedy(oracle, [5, 6, 7], 6)


def test_a_cached_sequence_computes_its_new_tokens_only(gpt_2: tuple[Path, Any]) -> None:
    stepper = Stepper(decoder_of(gpt_2[1]))
    computed: list[int] = []
    hook = gpt_2[1].register_forward_pre_hook(
        lambda _, __, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    for new in ([5, 6, 7], [8], [9, 10], [11]):
        stepper.step({"a": new})
    hook.remove()

    assert computed == [3, 1, 2, 1]


def test_a_recurrent_model_says_the_same_after_several_tokens_at_once() -> None:
    oracle = mamba_2()
    stepper = Stepper(decoder_of(oracle))
    known: list[int] = []
    for new in ([5, 6, 7, 8, 9], [10], [11, 12, 13], [14], [15, 16]):
        ours = stepper.step({"a": new})["a"]
        known += new
        with torch.no_grad():
            right = oracle(torch.tensor([known]), use_cache=False).logits[0, -len(new) :]
        torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)


def test_sampled_tokens_follow_their_seed(gpt_2: tuple[Path, Any]) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    request = GenerationRequest("test", (5, 6, 7), max_tokens=10, sampling=sampling, ignore_eos=True)
    with Instance(CONFIG, source=FileStore(gpt_2[0])) as instance:
        engine = instance.engine.result(WAIT_S)
        assert tokens_of(engine.submit(request)) == tokens_of(engine.submit(request))


def test_an_encoder_that_only_transformers_knows_embeds(tmp_path: Path) -> None:
    save_sentence_model("distilbert", tmp_path, dense=16)
    config = transformers.ElectraConfig(
        vocab_size=320,
        embedding_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=96,
    )
    oracle = random_weights(transformers.ElectraModel(config))
    oracle.save_pretrained(tmp_path)
    texts = [[1, 30, 31, 2], [1, 2]]
    with Instance(CONFIG, source=FileStore(tmp_path)) as instance:
        ours = instance.embedder.result(WAIT_S).embed(texts).result(WAIT_S)

    from safetensors.torch import load_file

    dense = load_file(tmp_path / "2_Dense" / "model.safetensors")
    for row, text in zip(ours, texts, strict=True):
        with torch.no_grad():
            mean = oracle(torch.tensor([text])).last_hidden_state[0].mean(0)
        right = torch.tanh(dense["linear.weight"] @ mean + dense["linear.bias"])
        np.testing.assert_allclose(row, (right / right.norm()).numpy(), atol=2e-5)


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    save_tiny("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NewForCausalLM"]}))
    with (
        Instance(CONFIG, source=FileStore(tmp_path)) as instance,
        pytest.raises(ModelError, match="NewForCausalLM") as caught,
    ):
        instance.embedder.result(WAIT_S)
    assert "trust_remote_code" in caught.value.hint


def test_without_transformers_the_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose.find_spec
    monkeypatch.setattr(choose, "find_spec", lambda name: None if name == "transformers" else found(name))
    with pytest.raises(UsageError, match="transformers is not installed"):
        BackendChoice("transformers").check()
    with pytest.raises(UsageError, match="on the CPU"):
        BackendChoice("transformers", device="cuda").check()


def test_a_classifier_scores_texts_and_pairs(tmp_path: Path) -> None:
    save_tiny("bert", tmp_path)
    config = transformers.ElectraConfig(
        vocab_size=320,
        embedding_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=96,
        num_labels=3,
    )
    oracle = random_weights(transformers.ElectraForSequenceClassification(config))
    oracle.save_pretrained(tmp_path)
    text, types = [1, 30, 2, 40, 2], [0, 0, 0, 1, 1]
    with Instance(CONFIG, source=FileStore(tmp_path)) as instance:
        embedder = instance.embedder.result(WAIT_S)
        assert embedder.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        ours = embedder.classify([text, text], [types, [0] * 5]).result(WAIT_S)

    for row, own in zip(ours, (types, [0] * 5), strict=True):
        with torch.no_grad():
            right = oracle(torch.tensor([text]), token_type_ids=torch.tensor([own])).logits[0].numpy()
        np.testing.assert_allclose(row, right, atol=2e-5)
