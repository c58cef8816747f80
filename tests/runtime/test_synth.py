"""Synthetic models have the right shapes, compress as trained ones do, and load in the reference
implementation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from teneral.loader.errors import UsageError
from teneral.loader.tools.progress_bar import TransferProgress
from teneral.runtime.synth import SHAPES, synthesize, tensor_specs

KNOWN_WEIGHTS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "minilm": 22_713_216,
}


@pytest.mark.parametrize("like", SHAPES)
def test_a_shape_has_as_many_weights_as_the_published_model(like: str) -> None:
    assert sum(int(np.prod(spec.shape)) for spec in tensor_specs(SHAPES[like])) == KNOWN_WEIGHTS[like]


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synth") / "minilm"
    synthesize("minilm", directory, num_layers=1)
    return directory


def test_the_same_seed_gives_the_same_bytes(small_bert: Path, tmp_path: Path) -> None:
    synthesize("minilm", tmp_path / "again", num_layers=1)
    synthesize("minilm", tmp_path / "other", num_layers=1, seed=1)
    first = (small_bert / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != first


def test_layers_can_be_made_to_add_less(small_bert: Path, tmp_path: Path) -> None:
    scaled = tmp_path / "scaled"
    synthesize("minilm", scaled, num_layers=1, residual_scale=0.25)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (scaled, small_bert))
    assert set(ours) == set(theirs)
    for name in ours:
        scale = 0.25 if name.endswith("output.dense.weight") else 1.0
        np.testing.assert_allclose(ours[name], scale * theirs[name], rtol=1e-6)


def test_the_tokenizer_gives_every_text_back(small_bert: Path) -> None:
    tokenizer = Tokenizer.from_file(str(small_bert / "tokenizer.json"))
    config = json.loads((small_bert / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    text = "Grüße, 世界! def f(x):\n\treturn x ** 2 🎉"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_weights_look_like_trained_ones(small_bert: Path) -> None:
    with safe_open(small_bert / "model.safetensors", "np") as file:
        weight = file.get_tensor("encoder.layer.0.intermediate.dense.weight")
        norm = file.get_tensor("embeddings.LayerNorm.weight")
    assert weight.shape == (1536, 384)
    assert 0.5 / np.sqrt(384) < weight.std() < 2 / np.sqrt(384)
    rows = weight.std(axis=1)
    assert rows.max() > 1.5 * rows.min()
    assert abs(norm.mean() - 1) < 0.05


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"like": "gpt-9"}, "gpt-9"),
        ({"like": "minilm", "num_layers": 0}, "layers"),
        ({"like": "minilm", "num_layers": 7}, "7"),
        ({"like": "minilm", "residual_scale": 0.0}, "residual scale"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        synthesize(directory=tmp_path / "x", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_a_directory_with_content_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(UsageError, match="exists already"):
        synthesize("minilm", tmp_path)
    assert (tmp_path / "mine").read_text() == "keep"


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(progress: TransferProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize("minilm", tmp_path / "x", num_layers=1, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
