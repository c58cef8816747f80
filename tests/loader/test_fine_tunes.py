"""Fine-tunes as differences to a base: bit for bit the fine-tune, and never over another base."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.checkpoints import (
    Content,
    Contents,
    llama_contents,
    model_store,
    random_content,
    read_back,
)
from tests.support.load import patience_s
from tests.support.manifest_documents import document_of
from tests.support.memory_store import MemoryStore
from tests.support.native import decoded_by, each_isa
from tests.support.paced import PacedSource
from tests.support.reference_reader import read_weights

from teneral.loader.artifact import open_artifact, open_model
from teneral.loader.device.ring import ring_bytes
from teneral.loader.errors import IntegrityError, ManifestError, NotFoundError, TeneralError, UsageError
from teneral.loader.format import codec
from teneral.loader.format.delta import BASE_PREFIX, difference, join
from teneral.loader.format.fill import Scratch, decode_planes
from teneral.loader.format.manifest import (
    DTYPE_BITS,
    FRAME_ELEMENTS,
    Encoding,
    Manifest,
    Plane,
    Segment,
    Tensor,
    Tier,
    align,
)
from teneral.loader.format.manifest_json import parse_manifest
from teneral.loader.load.launch import Task, is_possible, launch
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import RowParts
from teneral.loader.load.process_load import ProcessLoad
from teneral.loader.sources.base import BasedSource, Source, SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.loader.tools.inspect import describe, render_table
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.prune import PruneOptions
from teneral.loader.tools.unpack import unpack
from teneral.loader.tools.verify import verify

WAIT_S = patience_s(60)


def tuned(content: Content, seed: int = 0, size: int = 3) -> Content:
    """The tensor with small steps of its bit patterns, up and down, and a few wild ones."""
    dtype, shape, data = content
    rng = np.random.default_rng(seed)
    words = np.frombuffer(data, f"<u{DTYPE_BITS[dtype] // 8}").copy()
    words += rng.integers(-size, size + 1, words.size).astype(np.int64).astype(words.dtype)
    words[:: max(1, words.size // 7)] ^= words.dtype.type(1 << DTYPE_BITS[dtype] - 1)
    return dtype, shape, words.tobytes()


BASE = llama_contents(num_layers=2, hidden=128)
FINE_TUNE: Contents = {
    name: content if "layers.0" in name or "norm" in name else tuned(content, seed)
    for seed, (name, content) in enumerate(BASE.items())
}


@pytest.fixture(scope="module")
def base() -> MemoryStore:
    store = MemoryStore()
    pack(model_store(BASE), store)
    return store


@pytest.fixture(scope="module")
def store(base: MemoryStore) -> MemoryStore:
    store = MemoryStore()
    pack(model_store(FINE_TUNE), store, base=Base(base))
    return store


def together(store: Source, base: Source) -> BasedSource:
    return BasedSource(store, base, prefix=BASE_PREFIX)


def objects_of(store: Source) -> dict[str, bytes]:
    return {info.name: store.read(info.name, max_bytes=1 << 30)[0] for info in store.list()}


def bytes_of(contents: Contents) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in contents.items()}


def loaded(source: Source, **options: Any) -> dict[str, bytes]:
    manifest = open_artifact(source)
    with WeightLoad(source, manifest, options=LoadOptions(**options)) as load:
        for group in manifest.groups:
            load.slab(group.index)[:] = 0xA5
        load.start()
        for group in manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert load.join(WAIT_S)
        found = {tensor.name: load.array(tensor.name).tobytes() for tensor in manifest.tensors}
        load.check_integrity()
        return found


# Arithmetic


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    values=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=50),
)
def test_differences_of_any_words_come_back(width: int, values: list[tuple[int, int]]) -> None:
    base = np.array([value % 2 ** (8 * width) for value, _ in values], f"<u{width}")
    words = np.array([value % 2 ** (8 * width) for _, value in values], f"<u{width}")
    found = difference(words, base)
    back = [
        (one + (-(zigzag + 1) // 2 if zigzag % 2 else zigzag // 2)) % 2 ** (8 * width)
        for one, zigzag in zip(base.tolist(), found.tolist(), strict=True)
    ]
    assert back == words.tolist()


def test_differences_are_the_pages() -> None:
    base = np.array([0x3F7F, 0x3F7F, 7, 0], "<u2")
    words = np.array([0x3F80, 0x3F7D, 7, 0x8000], "<u2")
    assert difference(words, base).tolist() == [2, 3, 0, 0xFFFF]


@each_isa
@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(["BF16", "F16", "F32", "I64", "I8", "BOOL", "F8_E4M3"]),
    count=st.one_of(st.integers(1, 40), st.integers(1, 2 * FRAME_ELEMENTS)),
    kind=st.sampled_from(["near", "noise", "zeros", "same"]),
    seed=st.integers(0, 1 << 16),
)
def test_segments_of_differences_come_back(isa: str, dtype: str, count: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = DTYPE_BITS[dtype] // 8
    base = rng.integers(0, 256, count * width, dtype=np.uint8)
    data = {
        "near": lambda: base ^ rng.integers(0, 2, base.size, dtype=np.uint8),
        "noise": lambda: rng.integers(0, 256, base.size, dtype=np.uint8),
        "zeros": lambda: np.zeros_like(base),
        "same": base.copy,
    }[kind]()
    ((tier, coded),) = codec.encode_differences(dtype, data, base).items()
    assert tier is Tier.REFINE
    part, planes = bytearray(), []
    for plane_codec, content in coded:
        part += bytes(align(len(part), 8) - len(part))
        planes.append(Plane(plane_codec, len(part), len(content)))
        part += content
    tensor = Tensor(0, "w", dtype, (count,), 0, Encoding.BYTES, 0)
    segment = Segment(0, 0, count, tuple(planes), is_delta=True)
    for shift in (0, 1):  # numbers at odd addresses, too
        memory = np.full(shift + base.size + 8, 0x5A, np.uint8)
        out = memory[shift : shift + base.size]
        out[:] = base
        with decoded_by(isa):
            decode_planes(tensor, segment, tier, memoryview(bytes(part)), out, Scratch())
        assert np.array_equal(out, data)
        assert (memory[shift + base.size :] == 0x5A).all()


# Packing and loading


def test_tensors_are_the_same_or_differ(store: MemoryStore) -> None:
    manifest = open_artifact(store, without_base=True)
    for name in FINE_TUNE:
        expected = Encoding.SAME if FINE_TUNE[name] == BASE[name] else Encoding.DELTA
        assert manifest.by_name[name].encoding is expected, name


def test_the_artifact_is_smaller_and_names_its_base(store: MemoryStore, base: MemoryStore) -> None:
    whole = MemoryStore()
    pack(model_store(FINE_TUNE), whole)
    manifest = open_artifact(store, without_base=True)
    assert manifest.base == open_artifact(base).digest
    sizes = [sum(part.size_bytes for part in each.parts) for each in (manifest, open_artifact(whole))]
    assert sizes[0] < 0.3 * sizes[1]


@pytest.mark.parametrize("order", list(Order))
def test_a_load_gives_the_fine_tune_bit_for_bit(store: MemoryStore, base: MemoryStore, order: Order) -> None:
    assert loaded(together(store, base), order=order, decode_threads=3) == bytes_of(FINE_TUNE)


@pytest.mark.parametrize("tiers", [TierOptions(sketch_bits=1), TierOptions(draft_bits=7)])
def test_a_base_may_have_other_tiers(tiers: TierOptions) -> None:
    base, store = MemoryStore(), MemoryStore()
    pack(model_store(BASE), base, tiers=tiers)
    pack(model_store(FINE_TUNE), store, base=Base(base))
    assert loaded(together(store, base)) == bytes_of(FINE_TUNE)


def test_a_base_may_be_pruned(tmp_path: Path) -> None:
    base, store = MemoryStore(), MemoryStore()
    pack(model_store(BASE), base, prune=PruneOptions(0.5))
    unpack(base, tmp_path / "pruned")
    pruned = read_back([(tmp_path / "pruned" / "model.safetensors").read_bytes()])
    contents = {name: tuned(content) if "up_proj" in name else content for name, content in pruned.items()}
    pack(model_store(contents), store, base=Base(base))
    assert loaded(together(store, base)) == bytes_of(contents)


def test_every_dtype_may_differ() -> None:
    contents: Contents = {
        f"layers.0.{dtype}": random_content(dtype, (70, 40))
        for dtype in ("BF16", "F16", "F32", "F64", "I8", "U8", "I64", "F8_E4M3")
    }
    fine_tune = {name: tuned(content) for name, content in contents.items()}
    base, store = MemoryStore(), MemoryStore()
    pack(model_store(contents), base)
    pack(model_store(fine_tune), store, base=Base(base))
    assert loaded(together(store, base)) == bytes_of(fine_tune)


def test_tensors_that_are_new_or_of_another_shape_are_whole() -> None:
    contents = dict(FINE_TUNE)
    del contents["model.layers.1.mlp.up_proj.weight"]
    contents["model.embed_tokens.weight"] = random_content("BF16", (304, 128), 77)
    contents["model.layers.0.self_attn.q_proj.bias"] = random_content("BF16", (128,), 78)
    contents["model.layers.0.mlp.gate_proj.weight"] = random_content("BF16", (256, 128), 79)  # nothing alike
    contents["lm_head.weight"] = contents["model.embed_tokens.weight"]  # tied here
    base, store = MemoryStore(), MemoryStore()
    pack(model_store(BASE), base)
    result = pack(model_store(contents), store, base=Base(base))
    found = loaded(together(store, base))
    assert found == {name: data for name, data in bytes_of(contents).items() if name != "lm_head.weight"}
    assert result.manifest.by_name["model.embed_tokens.weight"].encoding.value == "bf16.5"
    assert verify(together(store, base)).ok


def test_a_fine_tune_of_tied_weights(tmp_path: Path) -> None:
    contents = llama_contents(hidden=128, tied=True)
    fine_tune = {name: tuned(content, 5) for name, content in contents.items()}
    base, store = MemoryStore(), MemoryStore()
    pack(model_store(contents), base)
    pack(model_store(fine_tune), store, base=Base(base))
    unpack(together(store, base), tmp_path / "model")
    assert read_back([(tmp_path / "model" / "model.safetensors").read_bytes()]) == fine_tune


def test_many_small_parts_are_added_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from teneral.loader.format import layout

    base, store = MemoryStore(), MemoryStore()
    contents = {f"layers.{number}.w": random_content("BF16", (600, 300), number) for number in range(3)}
    fine_tune = {name: tuned(content) for name, content in contents.items()}
    pack(model_store(contents), base)
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    pack(model_store(fine_tune), store, base=Base(base))
    source = together(store, base)
    assert len({part.has_delta for part in open_artifact(source).parts}) == 2
    for _ in range(3):
        paced = PacedSource(store)
        assert loaded(together(paced, base), decode_threads=4, range_bytes=4096) == bytes_of(fine_tune)


def test_rows_that_are_waited_for_are_the_fine_tunes(store: MemoryStore, base: MemoryStore) -> None:
    source = together(store, base)
    manifest = open_artifact(source)
    name = "model.embed_tokens.weight"
    table = RowParts(manifest, name)
    with WeightLoad(source, manifest, options=LoadOptions(on_demand=True)) as load:
        load.start()
        load.wait_parts(table.holding([0, 7, 299]), timeout_s=WAIT_S)
        rows = load.array(name)[[0, 7, 299]].tobytes()
        assert load.join(WAIT_S)
    expected = np.frombuffer(FINE_TUNE[name][2], "<u2").reshape(300, 128)[[0, 7, 299]].tobytes()
    assert rows == expected


def test_a_reader_made_from_the_page_gets_every_bit_back(store: MemoryStore, base: MemoryStore) -> None:
    assert read_weights(objects_of(store), base=objects_of(base)) == bytes_of(FINE_TUNE)


def test_unpack_verify_and_inspect(store: MemoryStore, base: MemoryStore, tmp_path: Path) -> None:
    source = together(store, base)
    unpack(source, tmp_path / "model", threads=3)
    assert read_back([(tmp_path / "model" / "model.safetensors").read_bytes()]) == FINE_TUNE
    assert verify(source).ok
    assert verify(store).ok  # what is there
    alone = describe(open_artifact(store, without_base=True), "memory://")
    joined = describe(open_artifact(source), "memory://")
    assert alone["base"]["bytes"] is None
    assert joined["base"]["bytes"] > 0
    assert alone["base"]["own_bytes"] == joined["base"]["own_bytes"]
    assert "differences to it" in render_table(joined)


def test_damage_to_either_is_found(store: MemoryStore, base: MemoryStore) -> None:
    manifest = open_artifact(together(store, base))
    for number, blob in enumerate(manifest.blobs):
        part = next(part for part in manifest.parts if part.blob == number)
        is_base = blob.name.startswith(BASE_PREFIX)
        damaged = objects_of(base if is_base else store)
        name = blob.name.removeprefix(BASE_PREFIX)
        content = bytearray(damaged[name])
        content[part.offset_bytes] ^= 1
        damaged[name] = bytes(content)
        whole = objects_of(store if is_base else base)

        def source(damaged: dict[str, bytes] = damaged, whole: dict[str, bytes] = whole) -> BasedSource:
            """Anew, since a load that fails closes what it reads."""
            stores = [MemoryStore(whole), MemoryStore(damaged)]
            return together(*stores) if is_base else together(*stores[::-1])  # noqa: B023 - called in this turn

        with pytest.raises(IntegrityError, match="wrong digest"):
            loaded(source())
        assert not verify(source()).ok


@pytest.mark.skipif(not is_possible(), reason="this system has no memory files")
def test_a_load_in_a_process_of_its_own_has_the_base(tmp_path: Path) -> None:
    pack(model_store(BASE), FileStore(tmp_path / "base"))
    pack(model_store(FINE_TUNE), FileStore(tmp_path / "tuned"), base=Base(FileStore(tmp_path / "base")))
    options = SourceOptions(base=str(tmp_path / "base"))
    task = Task(str(tmp_path / "tuned"), None, options, LoadOptions(), Timeline().started_at)
    load = ProcessLoad(launch(task))
    with closing(load):
        for group in load.manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert load.join(WAIT_S)
        for tensor in load.manifest.tensors:
            held = load.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
            assert held.tobytes() == FINE_TUNE[tensor.name][2]


def test_a_nodes_cache_that_has_the_base_needs_the_differences_only(
    store: MemoryStore, base: MemoryStore, tmp_path: Path
) -> None:
    options = LoadOptions(cache_dir=str(tmp_path), cache_bytes=1 << 30)
    with WeightLoad(base, open_artifact(base), options=options) as load:
        load.start()
        assert load.join(WAIT_S)
        assert load.join_cache(WAIT_S)
    paced, paced_base = PacedSource(store), PacedSource(base)
    source = together(paced, paced_base)
    manifest = open_artifact(source)
    with WeightLoad(source, manifest, options=options) as load:
        load.start()
        assert load.join(WAIT_S)
        assert {tensor.name: load.array(tensor.name).tobytes() for tensor in manifest.tensors} == bytes_of(
            FINE_TUNE
        )
    assert not paced_base.calls
    assert paced.calls


# Refusals


def refusal_of(source: Source, kind: type[TeneralError]) -> TeneralError:
    with pytest.raises(kind) as caught:
        open_artifact(source)
    assert caught.value.hint
    return caught.value


def test_another_base_is_refused_before_a_byte_of_weights_is_read(store: MemoryStore) -> None:
    other = MemoryStore()
    pack(model_store(llama_contents(num_layers=2, hidden=128, vocabulary=301)), other)
    paced, paced_other = PacedSource(store), PacedSource(other)
    assert "is not the base of" in refusal_of(together(paced, paced_other), IntegrityError).message
    assert not paced.calls
    assert not paced_other.calls


def test_a_base_that_is_plain_is_refused(store: MemoryStore) -> None:
    assert "is not the base of" in refusal_of(together(store, model_store(BASE)), IntegrityError).message


def test_differences_without_their_base_are_refused(store: MemoryStore, base: MemoryStore) -> None:
    digest = open_artifact(base).digest
    assert digest is not None
    assert f"only the differences to b3:{digest.hex()}" in refusal_of(store, UsageError).message


def test_a_base_of_a_whole_model_is_refused(base: MemoryStore) -> None:
    assert "it has no base" in refusal_of(together(base, base), UsageError).message
    assert "no manifest.json" in refusal_of(together(model_store(BASE), base), UsageError).message
    with pytest.raises((NotFoundError, UsageError)):
        open_artifact(together(MemoryStore(), base))


def test_a_pinned_base_must_be_the_pinned_one(tmp_path: Path) -> None:
    pack(model_store(BASE), FileStore(tmp_path / "base"))
    pack(model_store(FINE_TUNE), FileStore(tmp_path / "tuned"), base=Base(FileStore(tmp_path / "base")))
    digest = open_artifact(FileStore(tmp_path / "base")).digest
    assert digest is not None
    right = f"{tmp_path / 'base'}@b3:{digest.hex()}"
    with closing(open_model(str(tmp_path / "tuned"), SourceOptions(base=right))) as source:
        assert loaded(source) == bytes_of(FINE_TUNE)
    wrong = f"{tmp_path / 'base'}@b3:{'0' * 64}"
    with (
        closing(open_model(str(tmp_path / "tuned"), SourceOptions(base=wrong))) as source,
        pytest.raises(IntegrityError, match="not the one that was pinned"),
    ):
        open_artifact(source)


def test_a_base_with_a_base_is_refused(store: MemoryStore, base: MemoryStore) -> None:
    with pytest.raises(UsageError, match="has a base itself"):
        Base(together(store, base))
    with pytest.raises(ManifestError, match="has a base itself"):
        join(open_artifact(store, without_base=True), open_artifact(store, without_base=True))


def test_packing_against_what_is_no_base_is_refused(base: MemoryStore) -> None:
    with pytest.raises(UsageError, match="is not packed"):
        Base(model_store(BASE))
    store = MemoryStore()
    with pytest.raises(UsageError, match="no weights in common"):
        pack(model_store(llama_contents(hidden=64)), store, base=Base(base))
    with pytest.raises(UsageError, match=r"is F32 here and BF16 in the base .* numbers of one dtype"):
        pack(model_store(llama_contents(hidden=128, dtype="F32")), store, base=Base(base))
    with pytest.raises(UsageError, match="--base cannot go with"):
        pack(model_store(FINE_TUNE), store, base=Base(base), prune=PruneOptions(0.5))
    assert not list(store.list())


def test_a_base_that_lacks_a_tensor_is_refused(store: MemoryStore, base: MemoryStore) -> None:
    tuned_manifest, base_manifest = open_artifact(store, without_base=True), open_artifact(base)
    renamed = tuple(tensor._replace(name=f"{tensor.name}.old") for tensor in base_manifest.tensors)
    with pytest.raises(ManifestError, match="the base has no such tensor"):
        join(tuned_manifest, base_manifest._replace(tensors=renamed))
    reshaped = tuple(tensor._replace(shape=(*tensor.shape, 1)) for tensor in base_manifest.tensors)
    with pytest.raises(ManifestError, match="the base has it as BF16"):
        join(tuned_manifest, base_manifest._replace(tensors=reshaped))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.pop("base"), "needs a base, and there is none"),
        (lambda document: document.update(base="0" * 63), "64 lower-case hexadecimal"),
        (lambda document: document.update(base=None), "64 lower-case hexadecimal"),
        (lambda document: document.update(bases="0" * 64), "unknown"),
    ],
)
def test_a_manifest_is_refused_that_lies_about_its_base(
    store: MemoryStore, change: Any, message: str
) -> None:
    document = document_of(store.read("manifest.json", max_bytes=1 << 30)[0])
    change(document)
    generation = document.pop("generation")
    data = json.dumps({**document, "generation": generation}, separators=(",", ":")).encode()
    with pytest.raises(ManifestError, match=message):
        parse_manifest(data)


def test_a_gpu_is_refused_by_name(store: MemoryStore, base: MemoryStore) -> None:
    with pytest.raises(UsageError, match="a GPU cannot be loaded from differences"):
        ring_bytes(open_artifact(together(store, base)))


def test_the_manifest_of_the_fine_tune_keeps_its_own_digest(store: MemoryStore, base: MemoryStore) -> None:
    joined: Manifest = open_artifact(together(store, base))
    assert joined.digest == open_artifact(store, without_base=True).digest
    assert joined.weight_bytes == open_artifact(base).weight_bytes
