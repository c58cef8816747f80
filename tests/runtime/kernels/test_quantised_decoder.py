"""With compiled kernels a quantised model says what its integers mean, to within its inputs' 8 bits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.decoding import Stepper, prompt_of
from tests.support.tiny_models import save_tiny

pytest.importorskip("numba", reason="kernels need the extra [cpu]")

from teneral import cli
from teneral.runtime.kernels.decoder import DecoderKernels, NotCompiledError
from teneral.runtime.models.build import build_model
from teneral.runtime.models.compute_dtype import ComputePolicy, CpuDtypes
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.quantized import dequantize
from teneral.runtime.weights import DictWeights

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def quantised(
    folder, kind: str, dtype: torch.dtype = torch.bfloat16, **shape: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    save_tiny("qwen2", folder / "plain", dtype=dtype, **SHAPE, **shape)
    packed, unpacked = str(folder / "packed"), str(folder / "unpacked")
    assert cli.run(["pack", str(folder / "plain"), packed, "--quiet", "--quantize", *kind.split()]) == 0
    assert cli.run(["unpack", packed, unpacked, "--quiet"]) == 0
    config = json.loads((folder / "unpacked" / "config.json").read_text())
    return config, load_file(folder / "unpacked" / "model.safetensors")


def meant(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Decoder:
    """The model of what the integers mean, in fp32."""
    dense = {}
    for name, tensor in tensors.items():
        if f"{name}_scale" in tensors:
            dense[name] = dequantize(tensor, tensors[f"{name}_scale"], tensors.get(f"{name}_zero"))
        elif not name.endswith(("_scale", "_zero")):
            dense[name] = tensor.float()
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return build_model(plain, DictWeights(dense))


def logits_of(decoder: Decoder) -> torch.Tensor:
    """A prompt, and then one, three and twelve sequences' tokens at a time."""
    stepper = Stepper(decoder)
    names = [f"s{number}" for number in range(12)]
    outputs = [*stepper.step({name: prompt_of(40 if name == "s0" else 3, seed=4) for name in names}).values()]
    for count in (1, 3, 12):
        outputs += stepper.step({name: [9 + count] for name in names[:count]}).values()
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", ["int8", "int4", "int4 --group-size 128", "int4 --asymmetric"])
def test_a_quantised_model_computes_what_its_integers_mean(tmp_path, kind):
    config, tensors = quantised(tmp_path, kind)
    exact = logits_of(meant(config, tensors))
    decoder = build_model(config, DictWeights(tensors))
    torch_error = (logits_of(decoder) - exact).abs().mean()

    kernels = DecoderKernels(decoder)
    kernels.use_for(range(1, 33))
    kernels.install()
    own = logits_of(decoder)

    error = (own - exact).abs().mean()
    assert error <= 2.0 * torch_error + 0.01 * exact.std()
    assert (own.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


def test_an_original_in_fp16_has_kernels_where_the_processor_is_fast_in_bf16(tmp_path):
    config, tensors = quantised(tmp_path, "int8", torch.float16)
    policy = ComputePolicy(CpuDtypes(bfloat16=True, float16=False))
    decoder = build_model(config, DictWeights(tensors), policy=policy)
    assert decoder.dtype is torch.bfloat16
    expected = logits_of(decoder)

    kernels = DecoderKernels(decoder)
    kernels.use_for(range(1, 33))
    kernels.install()

    assert (logits_of(decoder) - expected).abs().mean() < 0.02 * expected.std()


def test_groups_of_32_are_left_to_torch(tmp_path):
    config, tensors = quantised(tmp_path, "int4 --group-size 32")
    with pytest.raises(NotCompiledError):
        DecoderKernels(build_model(config, DictWeights(tensors)))
