"""The flags of `teneral pack` that say how many bits come when, and how many there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.checkpoints import llama_contents, model_objects

from teneral import cli


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, data in model_objects(llama_contents(num_layers=1)).items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    return tmp_path / "model"


def test_bits_are_given_by_flags_and_shown_by_inspect(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--draft-bits", "4", "--embed-bits", "5", "--head-bits", "6", "--sketch-bits", "1"]
    assert cli.run(["pack", str(checkpoint), str(tmp_path / "out"), *flags, "--quiet"]) == 0
    assert cli.run(["verify", str(tmp_path / "out"), "--quiet"]) == 0
    capsys.readouterr()
    assert cli.run(["inspect", str(tmp_path / "out"), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["encodings"] == {"bf16.1.4": 6, "bf16.1.5": 1, "bf16.1.6": 2, "whole.sketch": 3}
    assert value["totals"]["sketch_bytes"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-bits", "8"], "--draft-bits 8: a tier has 0 to 7 mantissa bits"),
        (["--sketch-bits", "3"], "--sketch-bits 3 leaves a draft of 3 mantissa bits nothing to add"),
    ],
)
def test_invalid_bits_end_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert cli.run(["pack", str(checkpoint), str(tmp_path / "out"), *flags, "--quiet"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "dtypes"),
    [
        (["int8"], {"I8": 9, "BF16": 12}),
        (["int4"], {"U8": 6, "I8": 3, "BF16": 12}),
        (["int4", "--group-size", "32", "--asymmetric"], {"U8": 12, "I8": 3, "BF16": 12}),
        (["int4", "--int8", "", "--no-calibrate"], {"U8": 7, "I8": 2, "BF16": 12}),
        (["int4", "--int8", "v,down"], {"U8": 5, "I8": 4, "BF16": 12}),
    ],
)
def test_weights_are_quantised_by_flags(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    dtypes: dict[str, int],
) -> None:
    out = str(tmp_path / "out")
    assert cli.run(["pack", str(checkpoint), out, "--quiet", "--quantize", *flags]) == 0
    assert cli.run(["verify", out, "--quiet"]) == 0
    capsys.readouterr()
    assert cli.run(["inspect", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtypes"] == dtypes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--group-size", "64"], "say how to quantise"),
        (["--asymmetric"], "say how to quantise"),
        (["--quantize", "int8", "--asymmetric"], "--asymmetric is for int4"),
        (["--quantize", "int4", "--group-size", "100"], "--group-size 100 is not supported"),
        (["--quantize", "int4", "--draft-bits", "3"], "quantised weights have no tiers"),
        (["--calibrate", "text"], "--calibrate is for int4"),
        (["--quantize", "int8", "--calibrate", "text"], "--calibrate is for int4"),
    ],
)
def test_invalid_ways_to_quantise_end_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert cli.run(["pack", str(checkpoint), str(tmp_path / "out"), *flags, "--quiet"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_serve_refuses_is_packed_with_a_warning(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any module can be filled from it, but the first start must not be the first to say so."""
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 8}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert cli.run(["pack", str(checkpoint), str(tmp_path / "out"), "--quiet"]) == 0
    warnings = [
        line for line in capsys.readouterr().err.splitlines() if "teneral serve does not take" in line
    ]
    assert len(warnings) == 1
    assert "mamba" in warnings[0]
    (checkpoint / "config.json").unlink()
    assert cli.run(["pack", str(checkpoint), str(tmp_path / "weights"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        ("file", "is a file"),
        ("file/below", "is a file"),
        ("ftp://bucket/x", "ftp:// is not a known kind of store"),
        ("", "is not a usable path"),
    ],
)
def test_a_destination_that_cannot_be_is_refused_as_a_destination(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], destination: str, message: str
) -> None:
    (tmp_path / "file").touch()
    named = str(tmp_path / destination) if destination.startswith("file") else destination
    assert cli.run(["pack", str(checkpoint), named, "--quiet"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "manifest.json" not in printed, "the hint for what is read"
    assert "http" not in printed, "which nothing is written to"
    assert "write to" in printed.lower()
