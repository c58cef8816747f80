"""The pool on a device: its blocks are the host's pool's blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.direct_kernels import needs_kernels, open_device

from teneral.runtime.backends.cuda.direct import storage
from teneral.runtime.backends.cuda.direct.memory import Array, DeviceArena
from teneral.runtime.backends.cuda.direct.storage import DirectInt8KVStorage, DirectKVStorage, DirectPool
from teneral.runtime.errors import ModelError
from teneral.runtime.kv.storage import Int8KVStorage, KVStorage, PoolShape
from teneral.runtime.tensors import DType

SHAPE = PoolShape(2, 3, 8, 12, 4, DType.BF16)

pytestmark = needs_kernels


@pytest.fixture(params=[DirectKVStorage, DirectInt8KVStorage])
def pool(request: pytest.FixtureRequest) -> Iterator[DirectPool]:
    made: DirectPool = request.param(SHAPE, open_device())
    yield made
    made.close()


def content(pool: DirectPool, num: int, seed: int = 0) -> np.ndarray:
    size = pool.block_bytes(SHAPE)
    return np.random.default_rng(seed).integers(0, 256, (num, size), np.uint8)


def test_blocks_come_back_as_they_went_in(pool: DirectPool) -> None:
    given, others = content(pool, 3), content(pool, 2, seed=1)
    pool.copy_in([7, 0, 11], given)
    pool.copy_in([1, 2], others)
    found = np.empty_like(given)
    pool.copy_out([7, 0, 11], found)
    np.testing.assert_array_equal(found, given)
    pool.copy_out([2, 11, 1], found)
    np.testing.assert_array_equal(found, [others[1], given[2], others[0]])


def test_more_than_is_copied_at_a_time(pool: DirectPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_COPY_BYTES", 2 * pool.block_bytes(SHAPE))
    given, found = content(pool, 5), content(pool, 5, seed=2)
    pool.copy_in([3, 1, 4, 0, 5], given)
    pool.copy_out([3, 1, 4, 0, 5], found)
    np.testing.assert_array_equal(found, given)


def test_its_blocks_are_the_hosts(pool: DirectPool) -> None:
    """Each reads the other's, and the first tokens of a block are the same in both."""
    host = KVStorage(SHAPE) if isinstance(pool, DirectKVStorage) else Int8KVStorage(SHAPE)
    assert pool.layout == host.layout
    assert (pool.size_bytes, pool.element_bytes) == (host.size_bytes, host.element_bytes)
    given = content(pool, 12)
    for each in (pool, host):
        each.copy_in(range(12), given)
        each.copy_tokens(3, 8, 3)
    found = [np.empty_like(given) for _ in range(2)]
    for each, into in zip((pool, host), found, strict=True):
        each.copy_out(range(12), into)
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != given).any()


def test_layers_lie_one_behind_the_other(pool: DirectPool) -> None:
    """Keys, then values; all codes before all scales."""
    places = [pool.of_layer(layer) for layer in range(2)]
    per_part = 12 * 4 * 3
    size = 8 if isinstance(pool, DirectInt8KVStorage) else 16
    numbers = [address for each in places for address in (each.keys, each.values)]
    assert numbers == [pool.address + number * per_part * size for number in range(4)]
    scales = [address for each in places for address in (each.key_scales, each.value_scales)]
    if size == 16:
        assert scales == [0] * 4
    else:
        assert scales == [pool.address + 4 * per_part * size + number * per_part * 2 for number in range(4)]


def test_an_arena_hands_out_what_it_has() -> None:
    arena = DeviceArena(1 << 20, 2048)
    first = arena.take("rows", (3, 100), DType.BF16)
    second = arena.take("numbers", (5,), DType.U32)
    assert (first, second.address) == (Array(1 << 20, (3, 100), DType.BF16), (1 << 20) + 768)
    assert first.row(2) == first.address + 400
    arena.check_integrity()
    with pytest.raises(ModelError, match=r"logits \[1, 300\] float32 takes 1,280 bytes .* has 1,024 left"):
        arena.take("logits", (1, 300), DType.F32)
    assert DeviceArena.measure(lambda own: own.take("rows", (3, 100), DType.BF16)) == 768
