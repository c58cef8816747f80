"""`teneral eval` as a user meets it: a smaller version of a model against the original."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.loader.memory import limits as memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny("llama", folder / "original", dtype=torch.bfloat16, intermediate_size=128)
    for kind in ("int8", "int4"):
        arguments = ["pack", str(folder / "original"), str(folder / kind), "--quantize", kind, "--quiet"]
        assert cli.run(arguments) == 0
    return folder


def evaluated(
    capsys: pytest.CaptureFixture[str], artifact: Path, original: Path, *flags: str
) -> dict[str, Any]:
    capsys.readouterr()
    arguments = [str(artifact), "--against", str(original), "--max-tokens", "200", "--json", "--quiet"]
    assert cli.run(["eval", *arguments, *flags]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    capsys.readouterr()
    assert cli.run(["eval", *arguments, "--quiet"]) == code
    return capsys.readouterr().err


def test_fewer_bits_take_less_and_keep_less(folder, capsys):
    found = {kind: evaluated(capsys, folder / kind, folder / "original") for kind in ("int8", "int4")}

    assert found["int8"]["text"] == {"file": None, "tokens": 200}
    assert found["int8"]["original"]["url"].endswith("original")
    sizes = [found["int8"]["original"], found["int8"]["artifact"], found["int4"]["artifact"]]
    assert sizes == sorted(sizes, key=lambda size: -size["weight_bytes"])
    assert 0 < found["int8"]["quality"]["kl_nats"] < found["int4"]["quality"]["kl_nats"]
    assert math.isfinite(found["int4"]["quality"]["perplexity"])


def test_a_model_is_as_good_as_itself_however_it_is_stored(folder, capsys, tmp_path):
    assert cli.run(["pack", str(folder / "original"), str(tmp_path / "packed"), "--quiet"]) == 0

    quality = evaluated(capsys, tmp_path / "packed", folder / "original")["quality"]

    assert quality["perplexity_ratio"] == pytest.approx(1.0, abs=0.02)
    assert quality["kl_nats"] < 0.02


def test_the_table_says_what_was_compared(folder, capsys):
    assert (
        cli.run(
            [
                "eval",
                str(folder / "int8"),
                "--against",
                str(folder / "original"),
                "--max-tokens",
                "64",
                "--quiet",
            ]
        )
        == 0
    )

    printed = capsys.readouterr().out
    for expected in ("artifact   ", "original   ", "in memory", "stored", "perplexity", "KL(exact"):
        assert expected in printed


def test_what_is_not_as_pinned_is_refused(folder, capsys):
    pinned = f"{folder / 'int8'}@b3:{'0' * 64}"

    assert "not the one that was pinned" in fails(capsys, 8, pinned, "--against", str(folder / "original"))


def test_an_encoder_is_refused(folder, capsys, tmp_path):
    save_tiny("bert", tmp_path, dtype=torch.bfloat16)

    assert "is an encoder" in fails(capsys, 2, str(tmp_path), "--against", str(tmp_path))


def test_models_of_different_vocabularies_are_refused(folder, capsys, tmp_path):
    save_tiny("llama", tmp_path, dtype=torch.bfloat16, vocab_size=300, num_hidden_layers=1)

    assert "has 320 tokens, but the original 300" in fails(
        capsys, 12, str(folder / "int8"), "--against", str(tmp_path)
    )


def test_models_of_different_widths_are_refused(folder, capsys, tmp_path):
    save_tiny("llama", tmp_path, dtype=torch.bfloat16, hidden_size=32, num_hidden_layers=1)

    assert "has hidden states of 64 numbers, but the original 32" in fails(
        capsys, 12, str(folder / "int8"), "--against", str(tmp_path)
    )


def test_too_few_tokens_are_refused(folder, capsys):
    both = [str(folder / "int8"), "--against", str(folder / "original")]

    assert "max_tokens must be from 16" in fails(capsys, 2, *both, "--max-tokens", "3")


def test_two_models_that_do_not_fit_are_refused_before_they_are_read(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "teneral.runtime.quality.against.available", lambda: memory.Available(100 * memory.MIB, "a test")
    )

    assert "the weights of both" in fails(
        capsys, 16, str(folder / "int8"), "--against", str(folder / "original")
    )


def test_a_quantised_directory_without_its_note_still_runs(folder, capsys, tmp_path):
    assert cli.run(["unpack", str(folder / "int8"), str(tmp_path / "plain"), "--quiet"]) == 0
    shutil.copy(folder / "original" / "config.json", tmp_path / "plain" / "config.json")

    quality = evaluated(capsys, tmp_path / "plain", folder / "int8")["quality"]

    assert quality["perplexity_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_fine_tune_is_read_over_its_base(folder, capsys, tmp_path):
    save_tiny("llama", tmp_path / "tuned", dtype=torch.bfloat16, intermediate_size=128)
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    tuned = {name: tensor * 1.02 for name, tensor in weights.items()}
    save_file(tuned, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    base, differences = tmp_path / "base", tmp_path / "differences"
    assert cli.run(["pack", str(folder / "original"), str(base), "--quiet"]) == 0
    pack = ["pack", str(tmp_path / "tuned"), str(differences), "--base", str(base), "--quiet"]
    assert cli.run(pack) == 0

    against_itself = evaluated(capsys, differences, tmp_path / "tuned", "--base", str(base))["quality"]
    against_its_base = evaluated(capsys, differences, base, "--base", str(base))["quality"]

    assert against_itself["kl_nats"] == pytest.approx(0.0, abs=1e-6)
    assert against_its_base["kl_nats"] > 1e-4
    base_as_draft = evaluated(capsys, base, differences, "--base", str(base))["quality"]
    assert base_as_draft["agreement"] == against_its_base["agreement"]
    refused = fails(capsys, 2, str(base), "--against", str(tmp_path / "tuned"), "--base", str(base))
    assert "neither of the two has a base" in refused
    refused = fails(capsys, 2, str(differences), "--against", str(base))
    assert "only the differences to" in refused
