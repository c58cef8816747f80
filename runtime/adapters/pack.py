"""`teneral pack ADAPTER ARTIFACT --base BASE`: an adapter's folder as an artifact that names its base.

The artifact format (docs/format.md), with a group a layer, `adapter_config.json` as its small file, and the digest of
the base as `base`. The adapter is checked against the base as a server would do it, so one that packs can be served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...loader.artifact import open_artifact, read_file
from ...loader.errors import AccessDeniedError, FormatError, NotFoundError, UsageError
from ...loader.format.checkpoint import Checkpoint, StoredTensor
from ...loader.tools.pack.pack import PackResult, pack
from ...loader.tools.pack.plan import MAX_DRAFT_BITS, TierOptions
from ..errors import AdapterError, ModelError
from ..models.decoder_config import DecoderConfig
from .load import OpenedFile, open_adapter
from .peft import CONFIG_NAME

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest
    from ...loader.sources.base import Source, Store
    from ...loader.tools.progress_bar import TransferProgress
    from ...loader.tools.stated_files import RecordedReads

MODEL_CONFIG_NAME = "config.json"
MAX_ADAPTER_BYTES = 1 << 40


def is_adapter_folder(source: Source) -> bool:
    """True if the folder holds an adapter, and no model. Raises the source's errors."""
    return _has(source, CONFIG_NAME) and not _has(source, MODEL_CONFIG_NAME)


def pack_adapter(
    source: Source,
    store: Store,
    base: Source,
    *,
    base_pin: bytes | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: Callable[[TransferProgress], None] | None = None,
    reads: RecordedReads | None = None,
) -> PackResult:
    """Pack the adapter in `source` into the folder `store`. Blocks, and writes as `pack` does. `base` is the artifact
    that it was trained on, which must have the digest `base_pin` where that is given.

    Raises `UsageError` for an adapter that does not fit the base or is of an unsupported kind, and as `pack`.
    """
    manifest = open_artifact(base, digest=base_pin, without_base=True)
    if manifest.digest is None:
        raise UsageError(
            f"--base {base.url} is not packed: only an artifact can be a base",
            key="base",
            hint="Pack it first, and give the artifact.",
        )
    config = _config_of(base, manifest)
    try:
        opened = open_adapter(source, "", config, max_bytes=MAX_ADAPTER_BYTES)
    except AdapterError as error:
        raise UsageError(error.message, key="model", hint=error.hint) from error
    if not isinstance(opened, OpenedFile):
        raise UsageError(
            f"{source.url} is an artifact already", hint="Give the folder that PEFT has written."
        )
    named = [[entry.name for plan in layer for entry in (plan.a, plan.b)] for layer in opened.plan.layers]
    checkpoint = Checkpoint(
        url=source.url,
        shards=(opened.info,),
        tensors={name: StoredTensor(entry, shard=0) for name, entry in opened.file.entries.items()},
        files=(source.stat(CONFIG_NAME),),
        metadata=opened.file.metadata,
        groups=tuple((f"layers.{number}", tuple(names)) for number, names in enumerate(named) if names),
    )
    return pack(
        source,
        store,
        # All of bf16 in one tier: nothing can be done with less.
        tiers=TierOptions(draft_bits=MAX_DRAFT_BITS),
        sparse=False,
        for_base=manifest.digest,
        force=force,
        threads=threads,
        progress=progress,
        checkpoint=checkpoint,
        reads=reads,
    )


def _config_of(base: Source, manifest: Manifest) -> DecoderConfig:
    try:
        config = json.loads(read_file(base, manifest, MODEL_CONFIG_NAME))
        return DecoderConfig.from_json(config)
    except (NotFoundError, FormatError, ModelError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--base {base.url} is no decoder that adapters can be for: {error}", key="base"
        ) from error


def _has(source: Source, name: str) -> bool:
    try:
        source.stat(name)
    except NotFoundError:
        return False
    except AccessDeniedError as error:
        if not error.may_be_absent:
            raise
        return False
    return True
