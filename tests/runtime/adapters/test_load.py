"""The ranges in which an adapter's file is read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.adapters import save_adapter
from tests.support.memory_store import MemoryStore
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.loader.format.safetensors import FIRST_READ_BYTES, SafetensorsFile, TensorEntry
from teneral.runtime.adapters import load
from teneral.runtime.adapters.load import LAST_RANGE_BYTES, NUM_CONNECTIONS, RANGE_BYTES, open_adapter
from teneral.runtime.adapters.peft import WEIGHTS_NAME, AdapterPlan, ModulePlan
from teneral.runtime.models.adapter import AdapterPlace, Module
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.tensors import DType

HEADER_BYTES = 50_000


def file_of(num_layers: int, matrix_bytes: int) -> tuple[AdapterPlan, SafetensorsFile]:
    """Layers of two matrices each, in the order of their names, in which layer 10 comes before layer 2."""
    order = sorted(range(num_layers), key=str)
    begins = {layer: HEADER_BYTES + 2 * matrix_bytes * place for place, layer in enumerate(order)}
    layers = []
    entries = {}
    for layer in range(num_layers):
        a, b = (
            TensorEntry(f"{layer}.{side}", "BF16", (1, matrix_bytes // 2), begin, begin + matrix_bytes)
            for side, begin in (("A", begins[layer]), ("B", begins[layer] + matrix_bytes))
        )
        entries |= {a.name: a, b.name: b}
        module = Module("self_attn.o_proj", AdapterPlace.OUTPUT, 0, matrix_bytes // 2, matrix_bytes // 2)
        layers.append((ModulePlan(module, 1.0, a, b),))
    size_bytes = HEADER_BYTES + 2 * matrix_bytes * num_layers
    return AdapterPlan(tuple(layers), DType.BF16), SafetensorsFile("x", {}, entries, HEADER_BYTES, size_bytes)


@pytest.mark.parametrize("start", [0, 100, HEADER_BYTES, HEADER_BYTES + 70_000])
@pytest.mark.parametrize(
    ("num_layers", "matrix_bytes"), [(1, 2), (24, 367_000), (40, 9_000), (3, 20_000_000)]
)
def test_ranges_hold_every_byte_once_and_the_last_ones_are_small(start, num_layers, matrix_bytes):
    plan, file = file_of(num_layers, matrix_bytes)
    start = min(start, file.size_bytes)
    ranges, of_layers = load.split_ranges(plan, file, start)
    assert sum(end - begin for begin, end in ranges) == file.size_bytes - start
    ordered = sorted(ranges)
    assert all(end == begin for (_, end), (begin, _) in pairwise(ordered))
    assert all(0 < end - begin <= RANGE_BYTES for begin, end in ranges)
    last = ranges[-NUM_CONNECTIONS:]
    assert sum(end - begin for begin, end in last) <= NUM_CONNECTIONS * LAST_RANGE_BYTES
    for plans, own in zip(plan.layers, of_layers, strict=True):
        for entry in (plans[0].a, plans[0].b):
            held = sorted(ranges[number] for number in own)
            covered = sum(
                min(end, entry.end) - max(begin, entry.begin, start)
                for begin, end in held
                if begin < entry.end and end > max(entry.begin, start)
            )
            assert covered == max(0, entry.end - max(entry.begin, start))


class CountingStore(MemoryStore):
    """Keeps the ranges that were read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.reads: list[tuple[int, int]] = []

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        self.reads.append((start, start + len(buffer)))
        return super().read_into(name, start, buffer, version=version)


def test_nothing_of_a_file_is_read_twice(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    base = save_tiny("llama", tmp_path / "base", **sizes)
    folder = save_adapter(tmp_path / "a", tiny_model("llama", **sizes), r=64)
    store = CountingStore({path.name: path.read_bytes() for path in folder.iterdir()})
    size_bytes = (folder / WEIGHTS_NAME).stat().st_size
    assert size_bytes > 2 * FIRST_READ_BYTES
    config = DecoderConfig.from_json(json.loads((base / "config.json").read_text()))
    opened = open_adapter(store, "", config, max_bytes=1 << 30)
    layers: list[int] = []
    opened.read(opened.plan.allocate(), layers.append)
    assert layers == [0, 1, 2]
    reads = sorted(store.reads)
    assert reads[0] == (0, FIRST_READ_BYTES)
    assert [begin for begin, _ in reads[1:]] == [end for _, end in reads[:-1]]
    assert reads[-1][1] == size_bytes
