"""Every single-bit flip anywhere in a stored part is caught: refetched when it passes, refused when it stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.artifacts import BuiltArtifact, build_artifact
from tests.support.faulty_loads import faulty_store, first_ranges
from tests.support.memory_store import MemoryStore
from tests.support.paced import WAIT_S
from tests.support.store_faults import Fault

from teneral.loader.errors import IntegrityError
from teneral.loader.format.manifest import Part
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions

ONE_AT_A_TIME = LoadOptions(connections=1, decode_threads=1)


@pytest.fixture(scope="module")
def built() -> BuiltArtifact:
    """Two parts, draft and refine, of one small matrix."""
    return build_artifact([("layers.0", {"w": ("BF16", (2, 16))})])


def all_bits(built: BuiltArtifact) -> list[tuple[Part, int]]:
    return [(part, bit) for part in built.manifest.parts for bit in range(part.size_bytes * 8)]


def test_a_bit_that_is_flipped_once_is_fetched_again_wherever_it_is(
    built: BuiltArtifact, tmp_path: Path
) -> None:
    with faulty_store(tmp_path, built=built) as store:
        for number, (part, bit) in enumerate(all_bits(built)):
            store.set_fault(first_ranges(1, Fault(flip_bit=bit), after=part.index))
            # No second request: that one's bytes would be good, whichever of the two the flip is in.
            done = store.load(connections=1, hedge_after_s=0)
            assert done.load.num_refetched_parts == 1, (part.index, bit, number)


def test_a_bit_that_stays_flipped_is_refused_by_name_wherever_it_is(built: BuiltArtifact) -> None:
    for part, bit in all_bits(built):
        blob = built.manifest.blobs[part.blob]
        stored = {
            each.name: built.store.read(each.name, max_bytes=1 << 20)[0] for each in built.manifest.blobs
        }
        data = bytearray(stored[blob.name])
        data[part.offset_bytes + bit // 8] ^= 1 << bit % 8
        with WeightLoad(
            MemoryStore(stored | {blob.name: bytes(data)}), built.manifest, options=ONE_AT_A_TIME
        ) as load:
            load.start()
            with pytest.raises(IntegrityError, match=rf"^part {part.index} \(layers\.0 "):
                load.wait(0, timeout_s=WAIT_S)
