"""`teneral kv export`: snapshots of the prefixes of texts, computed with the exact weights.

The stored prefix of a text is the full blocks of those tokens that do not depend on the following
text: the end of a text is tokenised together with its continuation, so the common beginning of
several continuations is taken. An instance computes it: the same engine, in the same steps, as when
a server computes a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..loader.errors import AlreadyExistsError, UsageError
from ..loader.sources.open import open_store
from ..loader.tools.progress_bar import format_bytes
from .config import ServeConfig
from .errors import ModelError, SnapshotMismatchError
from .instance.instance import Instance
from .kv.snapshots.snapshot import RECENT, SNAPSHOT_NAME, check_prefix_name, require_same

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .engine.engine import Engine
    from .kv.snapshots.snapshot import Identity, Snapshot
    from .kv.snapshots.writer import Chain, Published
    from .text.tokenizer import TextTokenizer

MAX_FILE_BYTES = 4 << 20
# Common first characters of users' texts: letters, digits, spaces, line ends, punctuation, and
# those of other scripts.
CONTINUATIONS = ("a", "Zebra", "1", " x", "\n", "\n\n", "\t", ".", "'s", "<", "é", "漢", "ж")


@dataclass(frozen=True, slots=True)
class PrefixText:
    """A text to be exported under a name. `is_system` selects the chat prompts with it as system
    prompt.
    """

    name: str
    text: str
    is_system: bool


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export: tokens by name, and the digest for a pin."""

    url: str
    digest: bytes
    tokens: dict[str, int]
    written_bytes: int

    def render(self) -> str:
        """The report as a few lines of text."""
        lines = [f"  {name}: {count:,} tokens" for name, count in self.tokens.items()]
        return "\n".join(
            [
                f"exported {format_bytes(self.written_bytes)} to {self.url}",
                *lines,
                f"  {self.url}@b3:{self.digest.hex()}",
            ]
        )


def read_prefix(given: str, *, is_system: bool) -> PrefixText:
    """Read NAME=FILE. Raises `UsageError` for an invalid name, file or text."""
    name, mark, path = given.partition("=")
    if not mark or not path:
        raise UsageError(f"{given!r} is not NAME=FILE", key="prefix")
    if check_prefix_name(name).startswith(RECENT):
        raise UsageError(f"names that begin with {RECENT!r} are reserved for servers", key="prefix")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the prefix {path}: {error.strerror}", key="prefix") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the prefix {path} is larger than {MAX_FILE_BYTES} bytes", key="prefix")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prefix {path} is not UTF-8: {error}", key="prefix") from error
    if not text:
        raise UsageError(f"the prefix {path} is empty", key="prefix")
    return PrefixText(name, text, is_system)


def export_prefixes(
    config: ServeConfig,
    address: str,
    prefixes: Sequence[PrefixText],
    *,
    cache_salt: str = "",
    force: bool = False,
) -> ExportReport:
    """Load the model, compute the prefixes, and write them to `address`. Blocks.

    An existing snapshot of the same identity keeps its prefixes of other names, up to the first block in a
    damaged part; any other is replaced only with `force`. Raises `UsageError`, `SnapshotMismatchError`,
    `AlreadyExistsError`, and the errors of the load and the stores.
    """
    names = [prefix.name for prefix in prefixes]
    if not names or len(set(names)) != len(names):
        raise UsageError("at least one prefix is needed, each with a different name", key="prefix")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported (docs/decisions/0007)
    with closing(open_store(address, config.source_options)) as store, Instance(config) as instance:
        tokenizer = instance.tokenizer.result()
        engine = instance.engine.result()
        if not instance.wait_exact():
            raise instance.failure or ModelError("the instance was closed")
        model = instance.digest
        if model is None:
            raise UsageError(
                f"{config.model} is plain safetensors, which have no digest for a snapshot",
                key="artifact",
                hint="Pack it first: teneral pack MODEL ARTIFACT.",
            )
        from .kv.snapshots.service import NO_STATES, identity_of
        from .kv.snapshots.tools import lost_blocks
        from .kv.snapshots.writer import (  # imports numpy while weights were arriving
            find_published,
            plan_generation,
            write_generation,
        )

        if engine.prefix_pool.has_states:
            raise UsageError(NO_STATES, key="model", hint="Its prompts are computed by each instance.")
        computing = _Computing(engine, cache_salt)
        tokens = {prefix.name: computing.add(prefix, tokenizer) for prefix in prefixes}
        identity = identity_of(engine.prefix_pool, model=model)
        replaced = find_published(store)
        base = _base_of(replaced, identity, store.url, address, force=force)
        chains = plan_generation(base, exported=computing.chains)
        lost = lost_blocks(store, base) if base is not None else set()
        digest, written_bytes = write_generation(
            store, identity, chains, computing.read, replaced=replaced, lost=lost
        )
    return ExportReport(store.url, digest, tokens, written_bytes)


def _base_of(
    replaced: Published | None, identity: Identity, url: str, address: str, *, force: bool
) -> Snapshot | None:
    """The published snapshot whose prefixes stay. Raises without `force` where it is of another kind."""
    base = replaced.snapshot if replaced is not None else None
    try:
        if replaced is not None and base is None:
            raise AlreadyExistsError(
                f"the object at {address} is not a readable KV snapshot",
                source=url,
                name=SNAPSHOT_NAME,
                hint="Choose another address, or replace it with --force.",
            )
        if base is not None:
            require_same(base.identity, identity, where=address)
    except (AlreadyExistsError, SnapshotMismatchError):
        if not force:
            raise
        return None
    return base


class _Computing:
    """Prefixes computed when their blocks are requested: the pool need not hold all of them at
    once.
    """

    def __init__(self, engine: Engine, cache_salt: str) -> None:
        self._engine = engine
        self._salt = cache_salt
        # The tokens of a prefix with each block.
        self._tokens: dict[bytes, list[int]] = {}
        self.chains: dict[str, Chain] = {}

    def add(self, prefix: PrefixText, tokenizer: TextTokenizer) -> int:
        """Add a prefix. Returns the number of its tokens in full blocks. Raises `UsageError` if
        there are none.
        """
        pool = self._engine.prefix_pool
        tokens = prefix_tokens(prefix, tokenizer)
        chain = pool.chain(tokens, salt=self._salt)
        if not chain:
            raise UsageError(
                f"prefix {prefix.name} has {len(tokens)} tokens, and a block has {pool.block_size}",
                key="prefix",
                hint="Such a short prefix is computed as fast as it is read.",
            )
        self.chains[prefix.name] = chain
        for each in chain:
            self._tokens.setdefault(each, tokens)
        return len(chain) * pool.block_size

    def read(self, hashes: Sequence[bytes]) -> NDArray[np.uint8]:
        """Read blocks, as a `ReadBlocks`; of other prefixes, whose tokens are not known here, those in the pool."""
        pool = self._engine.prefix_pool
        content = pool.get(hashes)
        if len(content) == len(hashes):
            return content
        tokens = next((self._tokens[each] for each in reversed(hashes) if each in self._tokens), None)
        if tokens is None:
            return content
        self._compute(tokens)
        return pool.get(hashes)

    def _compute(self, tokens: Sequence[int]) -> None:
        # The engine has imported it.
        from .step.requests import GenerationRequest, SamplingParams

        request = GenerationRequest(
            "kv-export",
            tuple(tokens),
            max_tokens=1,
            sampling=SamplingParams(temperature=0),
            cache_salt=self._salt,
        )
        self._engine.submit(request).result()


def prefix_tokens(prefix: PrefixText, tokenizer: TextTokenizer) -> list[int]:
    """The common beginning of the tokens of all prompts that begin with this text, or have it as
    system prompt.
    """

    def render(continuation: str) -> list[int]:
        if not prefix.is_system:
            return tokenizer.encode(prefix.text + continuation)
        messages = [{"role": "system", "content": prefix.text}, {"role": "user", "content": continuation}]
        return tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)

    return common_beginning([render(continuation) for continuation in CONTINUATIONS])


def common_beginning(lists: Sequence[Sequence[int]]) -> list[int]:
    """The longest common beginning."""
    length = 0
    for column in zip(*lists, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return list(lists[0][:length])
