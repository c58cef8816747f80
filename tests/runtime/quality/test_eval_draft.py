"""`teneral eval-draft` as a user meets it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import safetensors_file
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.loader.memory import limits as memory
from teneral.loader.sources.open import open_source
from teneral.loader.tools.progress_bar import TransferProgress
from teneral.runtime.quality import evaluate
from teneral.runtime.quality.evaluate import evaluate_draft
from teneral.runtime.quality.text import read_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def pack(model: Path, artifact: Path, *flags: str) -> Path:
    assert cli.run(["pack", str(model), str(artifact), "--quiet", *flags]) == 0
    return artifact


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Path:
    return pack(save_tiny("llama", folder / "llama", dtype=torch.bfloat16), folder / "llama.packed")


@pytest.fixture(scope="module")
def sketched(folder: Path, decoder: Path) -> Path:
    return pack(folder / "llama", folder / "llama.sketched", "--sketch-bits", "1")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Path:
    return pack(save_tiny("bert", folder / "bert", dtype=torch.bfloat16), folder / "bert.packed")


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.run(["eval-draft", *arguments, "--json", "--quiet"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    capsys.readouterr()
    assert cli.run(["eval-draft", *arguments, "--quiet"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith("teneral: ")
    return printed


def test_a_decoders_draft_is_measured(decoder, capsys):
    found = evaluated(capsys, str(decoder), "--max-tokens", "300")

    assert found["text"] == {"file": None, "tokens": 300}
    (tier,) = found["tiers"]
    assert (tier["name"], tier["kind"], tier["predictions"]) == ("draft", "decoder", 299)
    assert tier["stored_bytes"] < found["stored_bytes"] < found["weight_bytes"]
    assert tier["perplexity"] / tier["exact_perplexity"] == pytest.approx(tier["perplexity_ratio"])
    assert 0.5 < tier["agreement"] < 1
    assert 0 < tier["total_variation"] < 0.5
    assert 0.9 < tier["worst_hidden_cosine"] <= tier["hidden_cosine"] < 1
    places = tier["accepted"]["places"]
    assert len(places) == 9
    assert tier["accepted"]["mean"] == pytest.approx(sum(places) / 9)
    assert tier["accepted"]["mean"] < tier["exact_accepted"]["mean"] <= tier["accepted"]["drafted"] == 32


def test_a_sketch_is_measured_before_the_draft_which_is_the_same_as_without_one(decoder, sketched, capsys):
    (alone,) = evaluated(capsys, str(decoder), "--max-tokens", "64")["tiers"]

    sketch, draft = evaluated(capsys, str(sketched), "--max-tokens", "64")["tiers"]

    assert (sketch["name"], draft["name"]) == ("sketch", "draft")
    assert {**draft, "stored_bytes": None} == {**alone, "stored_bytes": None}
    assert sketch["stored_bytes"] < draft["stored_bytes"]
    assert sketch["kl_nats"] > draft["kl_nats"]


def test_progress_ends_when_everything_was_read(sketched):
    steps: list[TransferProgress] = []
    evaluate_draft(open_source(str(sketched)), read_text(None), max_tokens=16, progress=steps.append)
    assert steps[-1].done_bytes == steps[-1].total_bytes
    assert [step.done_bytes for step in steps] == sorted({step.done_bytes for step in steps})


def test_an_encoders_draft_is_measured(encoder, capsys):
    found = evaluated(capsys, str(encoder))

    (tier,) = found["tiers"]
    assert tier["kind"] == "encoder"
    assert tier["sentences"] > 10
    assert 0.9 < tier["worst_cosine"] <= tier["cosine"] < 1
    assert tier["rank_correlation"] > 0.5


def test_the_table_says_what_was_compared(decoder, encoder, capsys):
    assert cli.run(["eval-draft", str(decoder), "--max-tokens", "64", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "built in, 64 tokens: small" in printed
    assert "perplexity" in printed
    assert "accepted of 32 drafted, mean of 2 places" in printed
    assert cli.run(["eval-draft", str(encoder), "--max-tokens", "64", "--quiet"]) == 0
    assert "worst sentence: '" in capsys.readouterr().out


def test_a_text_of_ones_own_is_used(decoder, tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text("abcdefgh" * 10)
    assert evaluated(capsys, str(decoder), "--text", str(path))["text"] == {"file": str(path), "tokens": 80}


def test_sentences_are_taken_as_far_as_the_tokens_go(encoder, tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text(f"{'a' * 28}.\n{'b' * 28}.\n{'c' * 300}.\n")  # 29 bytes and 2 special tokens each
    assert (
        evaluated(capsys, str(encoder), "--text", str(path), "--max-tokens", "62")["tiers"][0]["sentences"]
        == 2
    )
    # the third is cut at the model's 96 tokens
    assert evaluated(capsys, str(encoder), "--text", str(path))["text"]["tokens"] == 31 + 31 + 96


def test_an_artifact_that_is_exact_only_is_reported(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    data = safetensors_file({"table": ("I64", (4, 4), bytes(128))})
    (tmp_path / "in" / "model.safetensors").write_bytes(data)
    artifact = pack(tmp_path / "in", tmp_path / "out")

    assert evaluated(capsys, str(artifact))["tiers"] == []
    assert cli.run(["eval-draft", str(artifact)]) == 0
    assert "exact only" in capsys.readouterr().out


def test_plain_safetensors_are_refused_with_what_to_do(folder, decoder, capsys):
    assert "teneral pack" in fails(capsys, 2, str(folder / "llama"))


def test_a_damaged_part_is_refused_by_name(decoder, tmp_path, capsys):
    copy = Path(shutil.copytree(decoder, tmp_path / "copy"))
    blob = next(copy.rglob("refine-000.bin"))
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    assert "refine" in fails(capsys, 8, str(copy))


@pytest.mark.parametrize("number", ["15", str((1 << 20) + 1)])
def test_an_invalid_number_of_tokens_is_refused(decoder, capsys, number):
    assert "max_tokens" in fails(capsys, 2, str(decoder), "--max-tokens", number)


def test_a_text_that_is_too_short_is_refused(decoder, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    assert "9 tokens" in fails(capsys, 2, str(decoder), "--text", str(path))


def test_a_missing_text_is_named(decoder, capsys):
    assert "nowhere.txt" in fails(capsys, 3, str(decoder), "--text", "nowhere.txt")


def test_two_models_that_do_not_fit_are_refused_before_anything_is_read(decoder, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "available", lambda: memory.Available(100 * memory.MIB, "a test"))
    assert "needs" in fails(capsys, 16, str(decoder))


def test_figures_are_finite(decoder, capsys):
    (tier,) = evaluated(capsys, str(decoder), "--max-tokens", "64")["tiers"]
    assert all(math.isfinite(value) for value in tier.values() if isinstance(value, float))
