"""A family of decoders is one file and one row, and so are a way to compute and a stored number format:
`toy_family.py`, `toy_backend.py` and `toy_format.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.decoding import Stepper, prompt_of
from tests.support.load import patience_s
from tests.support.models import DictWeights, build_model
from tests.support.reference import operations as reference
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model
from tests.support.toy_backend import ROW as BACKEND
from tests.support.toy_backend import ToyBackend
from tests.support.toy_family import RENAMED
from tests.support.toy_family import ROW as FAMILY
from tests.support.toy_format import ROW as NUMBER_FORMAT
from tests.support.toy_format import SignMatrix, in_signs, numpy_product, torch_product

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.backends import choose
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch import layers
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import ModelError
from teneral.runtime.instance.instance import Instance
from teneral.runtime.models import projections
from teneral.runtime.models.decoder_config import FAMILY_MODULES
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.tensors import DType

WINDOW = 12
REQUEST = GenerationRequest(
    request_id="toy",
    prompt_tokens=(1, 2, 3, 4),
    max_tokens=8,
    sampling=SamplingParams(temperature=0.0),
    ignore_eos=True,
)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILY_MODULES, "toy", FAMILY["toy"])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "ROWS", (BACKEND, *choose.ROWS))


def toy_of(base: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the tensors of a toy that computes what this model of Mistral's does."""
    config = config_json(base) | {
        "model_type": "toy", "architectures": ["ToyForCausalLM"], "toy_window": WINDOW, "layer_types": None,
    }  # fmt: skip
    tensors = tensors_of(base)
    for new, old in RENAMED.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return config, tensors


def mistral() -> Any:
    model = tiny_model("mistral", sliding_window=WINDOW)
    model.config.layer_types = ["full_attention", "sliding_attention"] * model.config.num_hidden_layers
    return model


def stepper(config: dict[str, Any], tensors: dict[str, torch.Tensor], backend: Any = None) -> Stepper:
    backends = None if backend is None else [backend]
    return Stepper(build_model(config, DictWeights(tensors), backends=backends))


@pytest.mark.parametrize("backend", [TorchBackend, NativeBackend, ReferenceBackend])
def test_a_family_computes_what_its_base_does_by_every_backend(family: None, backend: Any) -> None:
    base, prompt = mistral(), prompt_of(30)
    expected = stepper(config_json(base), tensors_of(base), backend()).step({"a": prompt})["a"]
    given = stepper(*toy_of(base), backend()).step({"a": prompt})["a"]
    assert torch.equal(given, expected)
    narrow = stepper(config_json(base) | {"layer_types": None}, tensors_of(base), backend())
    assert not torch.equal(narrow.step({"a": prompt})["a"], expected)  # windows decide


def test_a_family_is_packed_and_generates(family: None, tmp_path: Path) -> None:
    config, tensors = toy_of(mistral())
    save_tiny("mistral", tmp_path / "model", sliding_window=WINDOW)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    pack(FileStore(tmp_path / "model"), FileStore(tmp_path / "artifact"))
    texts = [generated(tmp_path / place, "auto") for place in ("artifact", "model")]
    assert texts[0][1] == texts[1][1]


def test_a_backend_computes_what_the_native_one_does(backend: None) -> None:
    model, prompts = tiny_model("llama"), {"a": prompt_of(20), "b": prompt_of(7)}
    toy = stepper(config_json(model), tensors_of(model), ToyBackend()).greedy(prompts, 12)
    native = stepper(config_json(model), tensors_of(model), ReferenceBackend()).greedy(prompts, 12)
    assert toy == native


def test_a_backend_in_the_first_row_serves_the_models_that_it_implements(
    backend: None, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path / "llama")
    save_tiny("mistral", tmp_path / "mistral", sliding_window=WINDOW)
    assert generated(tmp_path / "llama", "auto")[0] == "toy"
    assert generated(tmp_path / "mistral", "auto")[0] in ("native", "torch")
    expected = generated(tmp_path / "llama", "native")
    assert generated(tmp_path / "llama", "auto")[1] == expected[1]


def test_a_backend_refuses_what_it_does_not_implement_by_name() -> None:
    model = tiny_model("gemma2")
    with pytest.raises(ModelError, match="toy does not implement norm = rms_plus_one"):
        build_model(config_json(model), DictWeights(tensors_of(model)), backends=[ToyBackend()])
    assert ToyBackend().compute_dtype(DType.BF16, is_quantised=False).dtype is DType.F32


@pytest.fixture
def number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "FORMATS", (NUMBER_FORMAT, *projections.FORMATS))
    monkeypatch.setitem(reference.FLOATS, SignMatrix, numpy_product)
    monkeypatch.setitem(layers.PRODUCTS, SignMatrix, torch_product)


def signed(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tensors = {name: tensor.float() for name, tensor in tensors_of(model).items()}
    names = [name.removesuffix(".weight") for name in tensors if "_proj.weight" in name]
    return in_signs(tensors, names)


@pytest.mark.parametrize("backend", [TorchBackend, ReferenceBackend])
def test_a_number_format_computes_what_its_numbers_do(number_format: None, backend: Any) -> None:
    model, prompts = tiny_model("llama"), {"a": prompt_of(20), "b": prompt_of(7)}
    config = config_json(model) | {"torch_dtype": "float32"}
    toy, plain = signed(model)
    assert set(toy) != set(plain)
    given, expected = (
        stepper(config, each, backend()).step({"a": prompts["a"]})["a"] for each in (toy, plain)
    )
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    one, other = (stepper(config, each, backend()).greedy(prompts, 12) for each in (toy, plain))
    assert one == other


def test_a_backend_without_a_product_refuses_a_number_format_by_name(number_format: None) -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="native does not multiply with a SignMatrix"):
        stepper(config_json(model), signed(model)[0], NativeBackend())


def generated(model: Path, backend: str) -> tuple[str, tuple[int, ...]]:
    """The name of the backend that computed, and a greedy answer."""
    with Instance(ServeConfig(model=str(model), backend=backend)) as instance:
        engine = instance.engine.result()
        events = list(engine.submit(REQUEST).events(patience_s(60)))
        tokens = tuple(token for event in events for token in event.tokens)
        built = instance.timeline.first("model", "build")
        return built.attributes["backend"], tokens
