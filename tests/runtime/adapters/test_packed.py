"""Packed adapters: the same weights as from PEFT's folder, verified, and never over another base."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.adapters import SETS, greedy, load_adapter, merged, save_adapter
from tests.support.load import patience_s
from tests.support.tiny_models import config_json, save_tiny, tiny_model

from teneral import cli
from teneral.loader.artifact import open_artifact
from teneral.loader.errors import IntegrityError, NotFoundError, TeneralError
from teneral.loader.format.encoding import Encoding
from teneral.loader.sources.open import open_source
from teneral.runtime.adapters.load import open_adapter
from teneral.runtime.adapters.loaded import LoadedAdapter
from teneral.runtime.adapters.packed import PackedAdapter, open_packed
from teneral.runtime.adapters.registry import AdapterRegistry
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import AdapterError, AdapterNotFoundError
from teneral.runtime.instance.instance import Instance
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

WAIT_S = patience_s(30)
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
PROMPT = tuple((number * 7) % 90 for number in range(20))
CONFIG = DecoderConfig.from_json(config_json(tiny_model("llama", **SMALL)))


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_model("llama", **SMALL)
        self.plain = save_tiny("llama", folder / "plain", **SMALL)
        self.base = folder / "base"
        assert cli.run(["pack", str(self.plain), str(self.base), "--quiet"]) == 0
        self.digest = self.digest_of(self.base)

    def adapter(self, name: str, **options: Any) -> Path:
        return save_adapter(self.folder / "peft" / name, self.model, **options)

    def pack(self, adapter: Path, artifact: Path, *flags: str, base: Path | None = None) -> int:
        arguments = [str(adapter), str(artifact), "--base", str(base or self.base), "--quiet"]
        return cli.run(["pack", *arguments, *flags])

    @staticmethod
    def digest_of(artifact: Path) -> bytes:
        with closing(open_source(str(artifact))) as source:
            digest = open_artifact(source, without_base=True).digest
        assert digest is not None
        return digest


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("packed-adapters"))


def load_packed(artifact: Path, base_digest: bytes | None, **options: Any) -> LoadedAdapter:
    with closing(open_source(str(artifact))) as source:
        opened = open_adapter(source, "", CONFIG, max_bytes=1 << 24, base_digest=base_digest, **options)
        assert isinstance(opened, PackedAdapter)
        adapter = LoadedAdapter(artifact.name, str(artifact))
        weights = opened.plan.allocate()
        adapter.begin(weights)
        layers: list[int] = []
        adapter.finish(opened.read(weights, layers.append), None)
        assert layers == list(range(CONFIG.num_layers))
    return adapter


def arrays_of(adapter: LoadedAdapter) -> list[np.ndarray[Any, Any]]:
    sites = [site for layer in adapter.weights.layers for site in layer.values()]
    return [each.array for site in sites for each in (site.a, *(part.b for part in site.parts))]


def factors_of(adapter: LoadedAdapter) -> list[float]:
    return [part.factor for layer in adapter.weights.layers for site in layer.values() for part in site.parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_both_forms_are_the_same_weights(rig: Rig, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = save_adapter(tmp_path / "peft", rig.model, dtype=dtype, **SETS[name])
    assert rig.pack(folder, tmp_path / "packed") == 0
    plain, packed = load_adapter(folder, CONFIG), load_packed(tmp_path / "packed", rig.digest)
    assert factors_of(plain) == factors_of(packed)
    for one, other in zip(arrays_of(plain), arrays_of(packed), strict=True):
        assert one.tobytes() == other.tobytes()
    assert packed.digest == rig.digest_of(tmp_path / "packed")


def test_matrices_that_are_equal_share_their_bytes(rig: Rig, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "peft", rig.model, size=0.0)
    assert rig.pack(folder, tmp_path / "packed") == 0
    packed = load_packed(tmp_path / "packed", rig.digest)
    assert not any(array.any() for array in arrays_of(packed))


def test_an_artifact_of_bf16_is_smaller_and_in_one_tier(rig: Rig, tmp_path: Path) -> None:
    options = {"dtype": torch.bfloat16, "r": 256, "target_modules": "all-linear"}
    folder = save_adapter(tmp_path / "peft", rig.model, **options)
    assert rig.pack(folder, tmp_path / "packed") == 0
    with closing(open_source(str(tmp_path / "packed"))) as source:
        manifest = open_artifact(source, without_base=True)
    assert len({part.tier for part in manifest.parts}) == 1
    stored = sum(part.size_bytes for part in manifest.parts)
    assert stored < 0.8 * (folder / "adapter_model.safetensors").stat().st_size
    assert manifest.base == rig.digest


def test_tools_take_it_without_its_base(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rig.pack(rig.adapter("tools"), tmp_path / "packed") == 0
    assert cli.run(["verify", str(tmp_path / "packed"), "--quiet"]) == 0
    capsys.readouterr()
    assert cli.run(["inspect", str(tmp_path / "packed"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["base"]["digest"] == rig.digest.hex()


def test_another_base_is_refused_by_name(rig: Rig, tmp_path: Path) -> None:
    assert rig.pack(rig.adapter("another"), tmp_path / "packed") == 0
    other = b"\1" * 32
    for digest, words in ((other, f"is b3:{other.hex()}"), (None, "is not packed")):
        with pytest.raises(AdapterError) as caught:
            load_packed(tmp_path / "packed", digest)
        assert rig.digest.hex() in caught.value.message
        assert words in caught.value.message
        assert caught.value.hint


def test_a_model_is_no_packed_adapter(rig: Rig) -> None:
    with pytest.raises(AdapterError, match="not a packed adapter"):
        load_packed(rig.base, rig.digest)


@pytest.mark.parametrize("encoding", [Encoding.SAME, Encoding.DELTA])
def test_matrices_that_are_differences_are_refused(rig: Rig, tmp_path: Path, encoding: Encoding) -> None:
    assert rig.pack(rig.adapter("differences"), tmp_path / "packed") == 0
    with closing(open_source(str(tmp_path / "packed"))) as source:
        manifest = open_artifact(source, without_base=True)
        first, *others = manifest.tensors
        changed = manifest._replace(tensors=(first._replace(encoding=encoding), *others))
        with pytest.raises(AdapterError, match=rf"{re.escape(first.name)}.* '{encoding.value}'"):
            open_packed(source, changed, CONFIG, rig.digest, max_bytes=1 << 24)


def test_a_pin_must_be_its_own(rig: Rig, tmp_path: Path) -> None:
    folder = rig.adapter("pinned")
    assert rig.pack(folder, tmp_path / "packed") == 0
    load_packed(tmp_path / "packed", rig.digest, digest=rig.digest_of(tmp_path / "packed"))
    with pytest.raises(IntegrityError):
        load_packed(tmp_path / "packed", rig.digest, digest=b"\2" * 32)
    with closing(open_source(str(folder))) as source, pytest.raises(NotFoundError):
        open_adapter(source, "", CONFIG, max_bytes=1 << 24, digest=b"\2" * 32)


def test_damage_is_found_before_it_is_used(rig: Rig, tmp_path: Path) -> None:
    assert rig.pack(rig.adapter("damaged"), tmp_path / "packed") == 0
    blobs = [path for path in tmp_path.rglob("*.bin") if path.stat().st_size]
    for path in [*blobs, *tmp_path.rglob("*adapter_config.json")]:
        content = path.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        path.write_bytes(changed)
        with pytest.raises(IntegrityError):
            load_packed(tmp_path / "packed", rig.digest)
        path.write_bytes(content)
    load_packed(tmp_path / "packed", rig.digest)


def test_a_manifest_cut_short_is_refused(rig: Rig, tmp_path: Path) -> None:
    assert rig.pack(rig.adapter("short"), tmp_path / "packed") == 0
    path = tmp_path / "packed" / "manifest.json"
    for content in (path.read_bytes()[:-200], b"", b"[]", b'{"base": 1}'):
        path.write_bytes(content)
        with pytest.raises(TeneralError):
            load_packed(tmp_path / "packed", rig.digest)


# Packing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
        ({"r": 0}, "r is 0"),
    ],
)
def test_what_no_server_takes_is_not_packed(
    rig: Rig, tmp_path: Path, options: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(rig.adapter("refused"), tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | options))
    assert rig.pack(folder, tmp_path / "packed") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()


def test_packing_for_what_is_no_base_is_refused(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rig.adapter("no base")
    assert rig.pack(folder, tmp_path / "packed", base=rig.plain) == 2
    assert "is not packed" in capsys.readouterr().err
    wide = save_tiny("llama", tmp_path / "wide", **{**SMALL, "hidden_size": 128})
    assert cli.run(["pack", str(wide), str(tmp_path / "wide-base"), "--quiet"]) == 0
    assert rig.pack(folder, tmp_path / "packed", base=tmp_path / "wide-base") == 2
    assert "has shape" in capsys.readouterr().err
    assert rig.pack(folder, tmp_path / "packed", "--quantize", "int8") == 2
    assert "packed as it is" in capsys.readouterr().err
    assert cli.run(["pack", str(folder), str(tmp_path / "packed"), "--quiet"]) == 2
    assert "is a LoRA adapter" in capsys.readouterr().err
    assert rig.pack(folder, tmp_path / "packed") == 0
    assert rig.pack(tmp_path / "packed", tmp_path / "again") == 2
    assert rig.pack(folder, tmp_path / "packed") != 0  # it is there
    assert rig.pack(folder, tmp_path / "packed", "--force") == 0


def test_a_fine_tune_that_is_stored_as_differences_may_be_the_base(rig: Rig, tmp_path: Path) -> None:
    arguments = [str(rig.plain), str(tmp_path / "tuned"), "--base", str(rig.base), "--quiet"]
    assert cli.run(["pack", *arguments]) == 0
    assert rig.pack(rig.adapter("of a fine-tune"), tmp_path / "packed", base=tmp_path / "tuned") == 0
    load_packed(tmp_path / "packed", rig.digest_of(tmp_path / "tuned"))


# Serving


def test_a_server_reads_either_form_by_name(rig: Rig, tmp_path: Path) -> None:
    peft = {name: rig.adapter(name, seed=seed) for seed, name in enumerate(("one", "two"))}
    store = tmp_path / "store"
    shutil.copytree(peft["one"], store / "one")
    assert rig.pack(peft["two"], store / "two") == 0
    assert rig.pack(peft["one"], tmp_path / "elsewhere") == 0
    other = save_tiny("llama", tmp_path / "other", seed=5, **SMALL)
    assert cli.run(["pack", str(other), str(tmp_path / "other-base"), "--quiet"]) == 0
    assert rig.pack(peft["two"], store / "strange", base=tmp_path / "other-base") == 0
    config = ServeConfig(
        model=str(rig.base),
        name="base",
        backend="native",
        loader="thread",
        kv_bytes=1 << 21,
        adapters=f"{store}/{{name}}",
        model_control=True,
    )

    def answer(instance: Instance, adapter: str) -> list[int]:
        request = GenerationRequest(
            "test", PROMPT, 8, sampling=SamplingParams(temperature=0), ignore_eos=True, adapter=adapter
        )
        return list(instance.engine.result(WAIT_S).submit(request).result(WAIT_S).tokens)

    with Instance(config) as instance:
        for name, folder in peft.items():
            assert answer(instance, name) == greedy(merged(rig.model, folder), PROMPT, 8)
        with pytest.raises(AdapterError, match="was packed for the base b3:"):
            answer(instance, "strange")
        with pytest.raises(AdapterNotFoundError):
            answer(instance, "none")
        registry = instance.adapters
        assert isinstance(registry, AdapterRegistry)
        pin = rig.digest_of(tmp_path / "elsewhere").hex()
        registry.load("pinned", f"{tmp_path / 'elsewhere'}@b3:{pin}")
        assert answer(instance, "pinned") == answer(instance, "one")
        with pytest.raises(AdapterError):
            registry.load("wrong", f"{tmp_path / 'elsewhere'}@b3:{'0' * 64}")
        registry.check_integrity()


def test_one_that_is_larger_than_the_budget_is_refused_before_it_is_read(rig: Rig, tmp_path: Path) -> None:
    assert rig.pack(rig.adapter("big", r=64, target_modules="all-linear"), tmp_path / "packed") == 0
    with (
        closing(open_source(str(tmp_path / "packed"))) as source,
        pytest.raises(AdapterError, match="may have 1000"),
    ):
        open_adapter(source, "", CONFIG, max_bytes=1000, base_digest=rig.digest)
