"""The next generation of a snapshot: the choice of its prefixes (a pure decision), and its writing.

Prefixes exported by name stay until they are exported again. They are followed by those that a
server found useful, within a limit of bytes, and then by the remains of earlier servers. A
generation consists of parts of the previous one, and of one new blob with the blocks that are in
none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ....loader.sources.base import Store
from .snapshot import PART_BYTES, RECENT, Identity, Snapshot
from .writer import NamedChain, Published, SnapshotWriter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_RECENT = 64  # prefixes that servers keep automatically

Chain = tuple[bytes, ...]
# Reads the contents of these blocks of a chain, (blocks, block_bytes), from the first up to the
# first missing one.
ReadBlocks = Callable[[Sequence[bytes]], "NDArray[np.uint8]"]


def plan_generation(
    base: Snapshot | None,
    *,
    exported: Mapping[str, Chain] | None = None,
    wanted: Sequence[Chain] = (),
    max_blocks: int | None = None,
) -> list[NamedChain]:
    """The prefixes of the generation after `base`, most valuable first.

    `exported` are those named now, `wanted` the useful ones, best first. With `max_blocks`, unnamed
    prefixes are left out if they would exceed that number of different blocks.
    """
    exported = exported or {}
    before = base.prefixes if base is not None else ()
    chains = {prefix.name: base.chain(prefix) for prefix in before} if base is not None else {}
    named = dict(exported)
    named |= {
        prefix.name: chains[prefix.name]
        for prefix in before
        if not prefix.is_automatic and prefix.name not in exported
    }
    candidates = [*wanted, *(chains[prefix.name] for prefix in before if prefix.is_automatic)]
    recent = _choose(candidates, list(named.values()), max_blocks)
    automatic = [NamedChain(f"{RECENT}{number}", chain) for number, chain in enumerate(recent, start=1)]
    return [*(NamedChain(name, chain) for name, chain in named.items()), *automatic]


def _choose(candidates: Sequence[Chain], named: Sequence[Chain], max_blocks: int | None) -> list[Chain]:
    taken = {each for chain in named for each in chain}
    chosen: list[Chain] = []
    for chain in candidates:
        if len(chosen) == MAX_RECENT:
            break
        new = [each for each in chain if each not in taken]
        # A chain without new blocks is the beginning of another one.
        if new and (max_blocks is None or len(taken) + len(new) <= max_blocks):
            taken.update(new)
            chosen.append(chain)
    ends = {each for chain in (*named, *chosen) for each in chain[:-1]}
    return [chain for chain in chosen if chain[-1] not in ends]


def write_generation(
    store: Store,
    identity: Identity,
    chains: Sequence[NamedChain],
    read: ReadBlocks,
    *,
    replaced: Published | None,
    is_time_left: Callable[[], bool] = lambda: True,
) -> tuple[bytes, int]:
    """Write this generation in the place of `replaced`. Returns its digest and the number of bytes
    written.

    Chains are cut at their first unreadable block. Raises the errors of `SnapshotWriter.publish`;
    then the old generation stays.
    """
    wanted = {each for chain in chains for each in chain.hashes}
    writer = SnapshotWriter(store, identity, replaced=replaced, kept=tuple(wanted))
    try:
        whole: list[NamedChain] = []
        for chain in chains:
            _add_missing(writer, identity, chain.hashes, read, is_time_left)
            held = writer.held
            length = next(
                (number for number, each in enumerate(chain.hashes) if each not in held), len(chain.hashes)
            )
            if length:
                whole.append(NamedChain(chain.name, chain.hashes[:length]))
    except BaseException:
        writer.discard()
        raise
    return writer.publish(whole, is_time_left=is_time_left), writer.written_bytes


def _add_missing(
    writer: SnapshotWriter,
    identity: Identity,
    hashes: Chain,
    read: ReadBlocks,
    is_time_left: Callable[[], bool],
) -> None:
    held = writer.held
    missing = [each for each in hashes if each not in held]
    step = max(1, PART_BYTES // identity.block_bytes)
    for start in range(0, len(missing), step):
        if not is_time_left():
            raise TimeoutError("no time was left to write the snapshot")
        piece = missing[start : start + step]
        content = read(piece)
        if len(content):
            writer.add(piece[: len(content)], content)
        if len(content) < len(piece):
            return
