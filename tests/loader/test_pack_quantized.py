"""`pack --quantize`: which tensors become which integers, in bounded memory, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import Contents, llama_contents, model_objects, random_content, read_back
from tests.support.memory_store import MemoryStore
from tests.support.quantized import slow_dequantize

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.errors import CheckpointError, UsageError
from teneral.loader.format import layout
from teneral.loader.format.manifest import FRAME_ELEMENTS, Encoding, Manifest, Tier
from teneral.loader.load.options import Order
from teneral.loader.load.plan import plan_load
from teneral.loader.tools.inspect import describe
from teneral.loader.tools.pack import quantize_plan as quantizing_reader
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.quantize import quantize_int4, quantize_int8, to_float32
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.loader.tools.unpack import unpack
from teneral.loader.tools.verify import verify

INT8, INT4 = QuantizeOptions(8), QuantizeOptions(4)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EMBEDDINGS = "model.embed_tokens.weight"


def source_of(contents: Contents, *, config: dict[str, Any] | None = None, **options: Any) -> MemoryStore:
    objects = model_objects(contents, **options)
    objects["config.json"] = json.dumps(config or {"model_type": "llama"}).encode()
    return MemoryStore(objects)


def packed(contents: Contents, options: QuantizeOptions, **more: Any) -> tuple[MemoryStore, Manifest]:
    store = MemoryStore()
    return store, pack(source_of(contents), store, quantize=options, **more).manifest


def unpacked(store: MemoryStore, folder: Path) -> Contents:
    unpack(store, folder)
    return read_back(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def numbers(contents: Contents, name: str) -> np.ndarray:
    dtype, shape, data = contents[name]
    if dtype in ("I8", "U8"):
        return np.frombuffer(data, np.dtype(dtype.lower().replace("8", "1"))).reshape(shape)
    return to_float32(np.frombuffer(data, np.uint8), dtype).reshape(shape)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and reads so small that a tiny model has many, which end within rows."""
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    monkeypatch.setattr("teneral.loader.tools.pack.plan.MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    monkeypatch.setattr(layout, "FINE_PART_ELEMENTS", FRAME_ELEMENTS)
    monkeypatch.setattr(quantizing_reader, "READ_ELEMENTS", 5000)
    monkeypatch.setattr(quantizing_reader, "CHUNK_ELEMENTS", 1000)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_matrix_of_a_decoder_becomes_integers_with_their_scales(dtype: str) -> None:
    contents = llama_contents(dtype=dtype, hidden=128)
    _, manifest = packed(contents, INT4)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in manifest.by_name.items()}
    for name, (_, shape, _) in contents.items():
        if len(shape) == 1:
            assert found.pop(name) == (dtype, shape)
        elif "layers" in name and not name.endswith("v_proj.weight"):
            assert found.pop(name) == ("U8", (shape[0], shape[1] // 2))
            assert found.pop(f"{name}_scale") == ("BF16", (shape[0], shape[1] // 32))
        else:
            assert found.pop(name) == ("I8", shape)
            assert found.pop(f"{name}_scale") == ("BF16", (shape[0], 1))
    assert found == {}


def test_int8_has_a_scale_for_each_row_and_groups_where_they_are_asked_for() -> None:
    contents = llama_contents(hidden=128)
    _, manifest = packed(contents, INT8)
    assert manifest.by_name[f"{Q_PROJ}_scale"].shape == (128, 1)
    _, manifest = packed(contents, QuantizeOptions(8, 32))
    assert manifest.by_name[f"{Q_PROJ}_scale"].shape == (128, 4)
    assert manifest.by_name[f"{EMBEDDINGS}_scale"].shape == (300, 1)


@pytest.mark.parametrize(("int8", "expected"), [((), set()), (("v", "down"), {"v", "down"}), (None, {"v"})])
def test_chosen_projections_have_8_bits_and_a_scale_for_each_row(
    int8: tuple[str, ...] | None, expected: set[str]
) -> None:
    contents = llama_contents(hidden=128)
    _, manifest = packed(contents, QuantizeOptions(4, int8=int8))
    own = {name: tensor for name, tensor in manifest.by_name.items() if name.endswith("_proj.weight")}
    wide = {name for name, tensor in own.items() if tensor.dtype == "I8"}
    assert {name.split("_proj")[0].rpartition(".")[2] for name in wide} == expected
    assert all(manifest.by_name[f"{name}_scale"].shape == (own[name].shape[0], 1) for name in wide)


def test_projections_that_are_not_there_cannot_have_8_bits() -> None:
    with pytest.raises(UsageError, match="no projection 'head'"):
        QuantizeOptions(4, int8=("v", "head"))
    with pytest.raises(UsageError, match="--int8 is for int4"):
        QuantizeOptions(8, int8=("v",))


def test_rows_that_cannot_be_cut_into_groups_have_8_bits() -> None:
    contents = llama_contents(hidden=96)  # down_proj has 192 columns
    _, manifest = packed(contents, INT4)
    assert manifest.by_name[Q_PROJ].dtype == "I8"
    assert manifest.by_name[f"{Q_PROJ}_scale"].shape == (96, 1)
    assert manifest.by_name["model.layers.0.mlp.down_proj.weight"].dtype == "U8"
    _, manifest = packed(contents, QuantizeOptions(4, 128))
    assert manifest.by_name["model.layers.0.mlp.down_proj.weight"].dtype == "I8"


@pytest.mark.parametrize(
    "options", [INT8, QuantizeOptions(8, 32), INT4, QuantizeOptions(4, 32, asymmetric=True)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_written_is_what_the_quantiser_makes_of_whole_matrices(
    small_pieces: None, tmp_path: Path, options: QuantizeOptions, threads: int
) -> None:
    contents = llama_contents(hidden=192, vocabulary=900)
    store, manifest = packed(contents, options, threads=threads)
    assert len(manifest.parts) > 12
    assert verify(store).ok
    written = unpacked(store, tmp_path / "out")
    for name, (_, shape, data) in contents.items():
        if len(shape) == 1:
            assert written[name][2] == data
            continue
        weights, is_embedding = numbers(contents, name), "layers" not in name
        group_size = options.group_size or (shape[1] if options.bits == 8 else 32)
        if is_embedding or (options.bits == 4 and name.endswith("v_proj.weight")):
            expected = quantize_int8(weights, shape[1])
        elif options.bits == 8:
            expected = quantize_int8(weights, group_size)
        else:
            expected = quantize_int4(weights, group_size, asymmetric=options.asymmetric)
        assert written[name][2] == expected.weight.tobytes()
        assert written[f"{name}_scale"][2] == expected.scale.tobytes()
        assert (f"{name}_zero" in written) == (expected.zero is not None)
        if expected.zero is not None:
            assert written[f"{name}_zero"][2] == expected.zero.tobytes()


def test_integers_mean_nearly_what_the_weights_were(tmp_path: Path) -> None:
    contents = llama_contents(num_layers=1, hidden=64)
    for options, most in ((INT8, 0.01), (INT4, 0.12), (QuantizeOptions(4, 32, asymmetric=True), 0.1)):
        store, _ = packed(contents, options)
        written = unpacked(store, tmp_path / f"{options}")
        zero = numbers(written, f"{Q_PROJ}_zero") if options.asymmetric else None
        meant = slow_dequantize(numbers(written, Q_PROJ), numbers(written, f"{Q_PROJ}_scale"), zero)
        weights = numbers(contents, Q_PROJ)
        assert np.linalg.norm(meant - weights) < most * np.linalg.norm(weights)


def test_everything_is_exact_from_the_beginning_and_inspect_says_so() -> None:
    _, manifest = packed(llama_contents(hidden=256), INT4)
    assert {part.tier for part in manifest.parts} == {Tier.DRAFT}
    assert {tensor.encoding for tensor in manifest.tensors} == {Encoding.BYTES, Encoding.WHOLE}
    assert all(entry["exact_only"] for entry in describe(manifest, "memory://x")["precision"])
    weights = sum(math.prod(tensor.shape) for tensor in manifest.tensors if tensor.dtype == "U8") * 2
    in_layers = sum(group["stored_bytes"] for group in describe(manifest, "x")["groups"][1:-1])
    assert in_layers < 0.58 * weights


def test_what_is_used_as_one_matrix_lies_back_to_back_with_its_scales_and_zeros() -> None:
    _, manifest = packed(llama_contents(hidden=128), QuantizeOptions(4, asymmetric=True, int8=()))
    prefix = "model.layers.1."
    for names in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        for piece in ("weight", "weight_scale", "weight_zero"):
            tensors = [manifest.by_name[f"{prefix}{name}.{piece}"] for name in names]
            for before, after in itertools.pairwise(tensors):
                assert after.offset_bytes == before.offset_bytes + before.size_bytes


def test_the_scales_of_the_embeddings_come_before_their_rows(small_pieces: None) -> None:
    _, manifest = packed(llama_contents(hidden=256, vocabulary=2000), INT8)
    scale = manifest.by_name[f"{EMBEDDINGS}_scale"].index
    [alone] = [part for part in manifest.parts if any(segment.tensor == scale for segment in part.segments)]
    assert [segment.tensor for segment in alone.segments] == [scale]
    for order in (Order.EXACT, Order.DRAFT_FIRST):
        assert plan_load(manifest, order, on_demand=True).steps[0].part is alone


@pytest.mark.parametrize("options", [INT8, INT4])
def test_tied_embeddings_share_their_scales_as_well(options: QuantizeOptions) -> None:
    store, manifest = packed(llama_contents(tied=True), options)
    assert manifest.aliases == {
        "lm_head.weight": EMBEDDINGS,
        "lm_head.weight_scale": f"{EMBEDDINGS}_scale",
    }
    assert open_artifact(store) == manifest


def test_config_json_says_what_was_done_and_in_what_to_compute() -> None:
    store = MemoryStore()
    source = source_of(
        llama_contents(dtype="F16"), config={"model_type": "llama", "dtype": "float32", "é": [1.5]}
    )
    manifest = pack(source, store, quantize=QuantizeOptions(4, 32, asymmetric=True)).manifest
    assert json.loads(read_file(store, manifest, "config.json")) == {
        "model_type": "llama",
        "dtype": "float16",
        "é": [1.5],
        "quantization_config": {"quant_method": "teneral", "bits": 4, "group_size": 32, "symmetric": False},
    }


def test_digests_are_those_of_the_tensors_in_the_artifact() -> None:
    blake3 = pytest.importorskip("blake3").blake3
    contents = llama_contents(num_layers=1)
    store, manifest = packed(contents, INT8)
    lines = read_file(store, manifest, "tensors.b3").decode().splitlines()
    expected = blake3(quantize_int8(numbers(contents, Q_PROJ), 64).weight.tobytes()).hexdigest()
    assert f"{expected}  {Q_PROJ}" in lines


def test_a_quantised_artifact_packs_again_from_its_safetensors_with_exact_scales(tmp_path: Path) -> None:
    contents = llama_contents(hidden=256)
    store, manifest = packed(contents, INT4)
    again = pack(source_of(unpacked(store, tmp_path)), MemoryStore()).manifest
    assert {name: tensor.shape for name, tensor in again.by_name.items()} == {
        name: tensor.shape for name, tensor in manifest.by_name.items()
    }
    assert {tensor.encoding.tiers for tensor in again.tensors} == {(Tier.DRAFT,)}


def test_scales_of_gptq_are_stored_exact_with_a_draft_of_the_rest() -> None:
    contents = llama_contents(num_layers=1, hidden=64, dtype="F16")
    for kind, shape, dtype in (
        ("qweight", (8, 64), "I32"),
        ("qzeros", (64, 8), "I32"),
        ("scales", (64, 64), "F16"),
    ):
        contents[f"model.layers.0.self_attn.q_proj.{kind}"] = random_content(dtype, shape)
    for tiers in (TierOptions(), TierOptions(sketch_bits=1)):
        manifest = pack(source_of(contents), MemoryStore(), tiers=tiers).manifest
        tiers_of = {name: tensor.encoding.tiers for name, tensor in manifest.by_name.items()}
        first = tiers_of[EMBEDDINGS][0]
        assert len(tiers_of[EMBEDDINGS]) > 1
        assert {tiers_of[f"model.layers.0.self_attn.q_proj.{kind}"] for kind in ("qweight", "scales")} == {
            (first,)
        }


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, None, True), "--asymmetric is for int4"),
        ((4, 48), "--group-size 48 is not supported"),
        ((2,), "2 bits"),
    ],
)
def test_invalid_options_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantizeOptions(*arguments)


def test_tiers_and_quantised_weights_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="quantised weights have no tiers"):
        packed(llama_contents(), INT8, tiers=TierOptions(draft_bits=5))


def test_encoders_and_unknown_models_are_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    names = ("embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.query.weight")
    with pytest.raises(UsageError, match="not a decoder of a family"):
        pack(source_of({name: random_content("BF16", (64, 64)) for name in names}), store, quantize=INT8)
    assert list(store.list()) == []


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_what_is_quantised_already_is_refused(key: str) -> None:
    source = source_of(llama_contents(), config={key: {"quant_method": "awq"}})
    with pytest.raises(UsageError, match=f"{key}: this model is quantised already"):
        pack(source, MemoryStore(), quantize=INT8)


def test_integers_are_not_quantised_again() -> None:
    contents = llama_contents()
    contents[Q_PROJ] = random_content("I8", (64, 64))
    with pytest.raises(UsageError, match=rf"{Q_PROJ} is I8") as caught:
        packed(contents, INT8)
    assert "GPTQ" in caught.value.hint


def test_matrices_that_are_called_as_gpt_2s_and_have_outputs_first_are_refused() -> None:
    """Those of GPT BigCode."""
    name = "transformer.h.0.attn.c_attn.weight"
    contents = {
        "transformer.wte.weight": random_content("BF16", (96, 64)),
        name: random_content("BF16", (192, 64)),
    }
    with pytest.raises(UsageError, match=rf"{name} of shape \[192, 64\]"):
        packed(contents, INT8)


def test_a_tensor_that_has_the_name_of_a_scale_is_refused() -> None:
    contents = llama_contents()
    contents[f"{Q_PROJ}_scale"] = random_content("F32", (64, 1))
    with pytest.raises(UsageError, match=f"{Q_PROJ}_scale already"):
        packed(contents, INT8)


def test_a_model_without_a_config_is_refused() -> None:
    objects = model_objects(llama_contents())
    del objects["config.json"]
    with pytest.raises(UsageError, match=r"has no config\.json"):
        pack(MemoryStore(objects), MemoryStore(), quantize=INT8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [INT8, INT4])
def test_a_number_that_is_none_is_refused_by_name_and_leaves_nothing(
    bad: float, options: QuantizeOptions
) -> None:
    contents = llama_contents(dtype="F32", num_layers=2)
    name = "model.layers.1.mlp.up_proj.weight"
    values = numbers(contents, name).copy()
    values[77, 5] = bad
    contents[name] = ("F32", values.shape, values.tobytes())
    store = MemoryStore()
    with pytest.raises(CheckpointError, match=rf"{name}, row 77"):
        pack(source_of(contents), store, quantize=options, threads=2)
    assert [info.name for info in store.list()] == []


def test_a_failure_while_scales_are_waited_for_ends_all_threads(small_pieces: None) -> None:
    class Broken(MemoryStore):
        def read_into(self, name: str, start: int, buffer: memoryview, *, version: str | None = None) -> None:
            if len(buffer) == 5000 // 256 * 256 * 2 and threading.current_thread().name.startswith(
                "teneral-pack"
            ):
                raise CheckpointError("gone")
            super().read_into(name, start, buffer, version=version)

    source = source_of(llama_contents(hidden=256))
    broken = Broken({info.name: source.read(info.name, max_bytes=1 << 30)[0] for info in source.list()})
    store = MemoryStore()
    with pytest.raises(CheckpointError, match="gone"):
        pack(broken, store, quantize=INT4, threads=4)
    assert not [each for each in threading.enumerate() if each.name.startswith("teneral-pack")]
    assert list(store.list()) == []
