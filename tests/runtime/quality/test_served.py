"""`teneral eval --as-served`: what is measured goes through the kernels that generate tokens, on a trained model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.load import patience_s
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model

pytest.importorskip("numba", reason="kernels need the extra [cpu]")

from benchmarks.widened import widen

from teneral import cli
from teneral.runtime.errors import ModelError
from teneral.runtime.kernels.decoder import DecoderKernels
from teneral.runtime.models.build import build_model
from teneral.runtime.models.compute_dtype import CpuDtypes
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.quality.sequences import Steps
from teneral.runtime.quality.served import Computing, install_kernels
from teneral.runtime.weights import DictWeights

DEMO = Path(__file__).parents[3] / "demo" / "model"
NUM_TOKENS = 300

needs_fast_bf16 = pytest.mark.skipif(
    not CpuDtypes.of_this_machine().bfloat16,
    reason="here models compute in fp32, for which there are no kernels",
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others work on the same cores, threads of a team wait for one another longer than they compute."""
    monkeypatch.setattr("teneral.runtime.quality.served.available_cores", lambda: 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with rows that the kernels for integers take, and what becomes of it."""
    folder = tmp_path_factory.mktemp("models")
    widen(DEMO, folder / "bf16")
    for name, flags in {"int8": "int8", "int4": "int4", "int4-32": "int4 --group-size 32"}.items():
        arguments = [
            "pack",
            str(folder / "bf16"),
            str(folder / name),
            "--quiet",
            "--quantize",
            *flags.split(),
        ]
        assert cli.run(arguments) == 0
    return folder


def evaluated(
    capsys: pytest.CaptureFixture[str], artifact: Path, original: Path, *flags: str
) -> dict[str, Any]:
    capsys.readouterr()
    arguments = [
        str(artifact),
        "--against",
        str(original),
        "--max-tokens",
        str(NUM_TOKENS),
        "--json",
        "--quiet",
    ]
    assert cli.run(["eval", *arguments, *flags]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def fails(capsys: pytest.CaptureFixture[str], code: int, artifact: Path, *flags: str) -> str:
    capsys.readouterr()
    assert (
        cli.run(["eval", str(artifact), "--against", str(artifact), "--quiet", "--as-served", *flags]) == code
    )
    return capsys.readouterr().err


@needs_fast_bf16
@pytest.mark.parametrize("model", ["demo", "widened"])
def test_bf16_as_served_has_the_perplexity_of_bf16(folder, capsys, model):
    path = DEMO if model == "demo" else folder / "bf16"

    quality = evaluated(capsys, path, path, "--as-served")["quality"]

    assert quality["perplexity_ratio"] == pytest.approx(1.0, abs=0.004)
    assert 0 < quality["kl_nats"] < 0.001, "the same model, computed in another way"
    assert quality["worst_hidden_cosine"] > 0.999


@needs_fast_bf16
@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("int4", 0.02)])
def test_integers_as_served_cost_little_more_than_integers(folder, capsys, kind, bound):
    in_torch = evaluated(capsys, folder / kind, folder / "bf16")
    served = evaluated(capsys, folder / kind, folder / "bf16", "--as-served")

    assert served["quality"]["exact_perplexity"] == in_torch["quality"]["exact_perplexity"]
    assert served["quality"]["perplexity"] == pytest.approx(in_torch["quality"]["perplexity"], rel=bound)
    assert served["quality"]["kl_nats"] < in_torch["quality"]["kl_nats"] + 0.002
    assert served["quality"]["kl_nats"] != in_torch["quality"]["kl_nats"]
    if kind == "int8":  # its own error is small enough for that of the inputs' 8 bits to be seen
        assert served["quality"]["kl_nats"] > 1.2 * in_torch["quality"]["kl_nats"]


@needs_fast_bf16
def test_every_short_step_is_computed_by_kernels_and_the_report_counts_them(folder, capsys, monkeypatch):
    num_runs = 0
    run = DecoderKernels.run

    def counted(self: DecoderKernels, kernel: Any) -> None:
        nonlocal num_runs
        num_runs += 1
        run(self, kernel)

    monkeypatch.setattr(DecoderKernels, "run", counted)

    computed = evaluated(capsys, folder / "int8", folder / "bf16", "--as-served")["computed"]

    read, places = -(-(NUM_TOKENS - 1) // 32), NUM_TOKENS // 32
    drafted = 31 * -(-places // 8)
    first_place = (
        1  # whose context is 30 tokens; those of the others are prompts, whose last row meets the head
    )
    assert computed == {
        "as_served": True,
        "layers": "kernels",
        "head": "kernels",
        "compute_dtype": "bfloat16",
        "kv_dtype": "model",
        "max_rows": 32,
        "steps": read + drafted + first_place,
    }
    asked_about_the_head = 1
    assert num_runs == 2 * computed["steps"] + (places - first_place) + asked_about_the_head


@needs_fast_bf16
def test_the_table_says_which_way_was_computed(folder, capsys):
    arguments = [
        "eval",
        str(folder / "int4"),
        "--against",
        str(folder / "bf16"),
        "--max-tokens",
        "64",
        "--quiet",
    ]
    said = []
    for flags in (["--as-served"], ["--kv-dtype", "int8"]):
        capsys.readouterr()
        assert cli.run([*arguments, *flags]) == 0
        said.append(capsys.readouterr().out)

    assert "computed   as served: layers by kernels, head by kernels, " in said[0]
    assert "steps of up to 32 tokens; the original by torch" in said[0]
    assert "computed   by torch, in bfloat16, int8 keys and values" in said[1]


def test_without_the_flag_torch_computes(folder, capsys):
    computed = evaluated(capsys, folder / "int8", folder / "bf16")["computed"]

    assert not computed["as_served"]
    assert (computed["layers"], computed["head"], computed["max_rows"], computed["steps"]) == (
        "torch",
    ) * 2 + (
        None,
        0,
    )


@needs_fast_bf16
def test_int8_keys_and_values_leave_the_layers_to_torch_and_the_report_says_so(folder, capsys):
    plain = evaluated(capsys, folder / "bf16", folder / "bf16", "--kv-dtype", "int8")
    served = evaluated(capsys, folder / "bf16", folder / "bf16", "--kv-dtype", "int8", "--as-served")

    for found in (plain, served):
        assert found["computed"]["kv_dtype"] == "int8"
        assert found["computed"]["layers"] == "torch"
        assert found["quality"]["perplexity_ratio"] == pytest.approx(1.0, abs=0.01)
        assert found["quality"]["kl_nats"] > 0
    assert (plain["computed"]["head"], served["computed"]["head"]) == ("torch", "kernels")
    assert served["computed"]["steps"] > 0


def test_a_model_that_computes_in_fp32_is_refused(capsys, tmp_path):
    save_tiny("llama", tmp_path, dtype=torch.float32)

    said = fails(capsys, 2, tmp_path)

    assert (
        "is not served by kernels: kernels compute in bf16 on a CPU, and this model in torch.float32" in said
    )
    assert "Leave --as-served out" in said


def test_groups_that_no_kernel_takes_are_refused(folder, capsys):
    assert "is not served by kernels" in fails(capsys, 2, folder / "int4-32")


def test_without_numba_nothing_is_read_and_what_to_install_is_said(tmp_path):
    arguments = ["eval", str(tmp_path / "nowhere"), "--against", str(tmp_path), "--as-served", "--quiet"]
    program = (
        f"import sys\nsys.modules['numba'] = None\nfrom teneral import cli\nsys.exit(cli.run({arguments!r}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(120)
    )

    assert done.returncode == 2
    assert "--as-served needs numba" in done.stderr
    assert "pip install 'teneral[cpu]'" in done.stderr


def test_steps_that_torch_took_over_are_no_measurement():
    oracle = tiny_model("llama", dtype=torch.bfloat16)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    assert isinstance(decoder, Decoder)
    steps = install_kernels(decoder, "a model")
    assert (steps.max_rows, steps.counted) == (32, 0)

    with pytest.raises(
        ModelError, match="torch computed 2 of 5 steps: the threads of the kernels did not come"
    ):
        Computing.of(decoder, Steps(max_rows=32, counted=5, by_kernels=3))
