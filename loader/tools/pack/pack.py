"""Pack a model directory into an artifact: read, encode and write in a bounded pipeline, the
manifest last.

Any directory with safetensors files packs, whether or not it has a `config.json`. The artifact
exists whole or not at all: everything is written under names of its own, the manifest is put last
and only if no other process put one meanwhile, and on any failure, Ctrl-C included, what was
written is removed.

Memory: `threads` + 1 parts are in work. Each takes its tensors' bytes (at most 64 MiB; 32 MiB of
bf16), what they become (not more), and while it is encoded up to three times its largest tensor's
stretch. For bf16 on two cores: under 400 MiB.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ...artifact import is_artifact
from ...errors import UsageError
from ...format.checkpoint import Checkpoint, open_checkpoint, with_experts_apart
from ...format.checkpoint_files import shorten
from ...format.encoding import Encoding
from ...format.gguf.directory import GgufDirectory
from ...format.limits import MANIFEST_NAME
from ...format.manifest import Manifest, Part, align
from ...format.manifest_json import dump_manifest, manifest_digest
from ...format.tensor_digests import FILE_NAME, dump_tensor_digests
from ...process.cpu import available_cores
from ...sources.base import Source, Store
from ...sources.open import PIN_MARK
from ..garbage import StoredGeneration, describe_unused, find_unused_quietly
from ..progress_bar import TransferProgress, format_bytes
from ..stated_files import RecordedReads
from .content import Base, BaseReader, ContentReader, plan_differences
from .plan import Job, PackPlan, TierOptions, find_aliases, forward_order, plan_pack
from .prune import METADATA_KEY, PruneOptions, Pruner, find_prunable
from .quantize_plan import (
    CONFIG_NAME,
    Calibrate,
    QuantizeOptions,
    QuantizePlan,
    QuantizingReader,
    plan_quantize,
)
from .sparse_plan import choose_sparse
from .write import BlobWriter, EncodedPart, PartEncoder, buffer_bytes, find_replaced, publish

if TYPE_CHECKING:
    from .write import Bytes

# Beyond it reading and writing are the limit, and each thread holds parts in memory.
_MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class PackResult:
    """`conversions` says what became of the numbers of a GGUF file, and what was pruned. `unused` are
    the generations that nothing refers to any longer. `left_out` names files of the model that were
    not packed, although they look like settings.
    """

    pin: str  # the artifact's address with its digest
    manifest: Manifest
    # Of the checkpoint's weights, tied ones counted as often as they stood there; of a GGUF file, all of it.
    source_bytes: int
    stored_bytes: int
    unused: tuple[StoredGeneration, ...] = ()
    conversions: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_larger_than_file: bool = False  # of a GGUF file, whose blocks may have become wider numbers

    def render(self) -> str:
        """Some lines for people."""
        lines = [
            f"packed {format_bytes(self.source_bytes)} into {format_bytes(self.stored_bytes)}: {self.pin}"
        ]
        lines += [f"  {line}" for line in self.conversions]
        if self.is_larger_than_file:
            lines.append(
                "  This is more than the file, which loads faster as it is: `teneral serve` takes it from any store."
            )
        if self.left_out:
            lines.append(f"  not packed, as these names are not known: {shorten(self.left_out)}")
        if self.unused:
            lines.append(f"  {describe_unused(self.unused, self.pin.rpartition(PIN_MARK)[0])}")
        return "\n".join(lines)


def pack(
    source: Source,
    store: Store,
    *,
    tiers: TierOptions | None = None,
    quantize: QuantizeOptions | None = None,
    calibrate: Calibrate | None = None,
    prune: PruneOptions | None = None,
    sparse: bool = True,
    base: Base | None = None,
    for_base: bytes | None = None,
    force: bool = False,
    progress: Callable[[TransferProgress], None] | None = None,
    threads: int | None = None,
    checkpoint: Checkpoint | None = None,
    reads: RecordedReads | None = None,
) -> PackResult:
    """Pack the checkpoint in `source` into the folder `store`. Blocks; `progress` is called from
    this thread. `checkpoint` is given where the folder's files do not say it themselves, and `reads` where
    they are recorded: then the files are compared with the digests that their store states.

    `tiers` says how many bits come in which tier; with `quantize` the matrices of a decoder become
    integers, which have none (docs/quantize.md), chosen with what `calibrate` finds out about their
    inputs: it is called once it is clear that the checkpoint can be packed. With `prune` they lose
    their smallest weights first; with `sparse`, what is mostly zero is stored without its zeros
    (docs/prune.md); with `base`, only what differs from it (docs/fine-tunes.md). `for_base` is the
    digest of an artifact that is needed with this one, although it holds no differences to it: an
    adapter's base. `source` and `store` may be the same folder: the
    artifact then lies next to the safetensors files. An artifact that is there already is replaced
    only with `force`, in one step; its old objects stay, so that loads of it go on, until
    `collect_garbage` removes them. Raises `UsageError` when the source is itself an artifact, or has nothing
    that can be quantised, `AlreadyExistsError` when the destination holds one or gets one
    meanwhile, `CheckpointError` for a damaged checkpoint, `IntegrityError` for files with other digests,
    `NoSpaceError`, and the errors of both
    stores; nothing is left behind.
    """
    _check_options(source, threads, tiers, quantize, prune, base)
    replaced = find_replaced(store, force=force)
    checkpoint = checkpoint or open_checkpoint(source)
    if quantize is not None or prune is not None:
        checkpoint = with_experts_apart(checkpoint, takes_columns=quantize is not None)
    threads = threads or min(_MAX_THREADS, available_cores())
    work = _plan_work(
        source,
        checkpoint,
        threads,
        tiers=tiers,
        quantize=quantize,
        calibrate=calibrate,
        prune=prune,
        sparse=sparse,
        base=base,
        for_base=for_base,
    )
    writer = BlobWriter(store)
    manifest, data = _write(source, checkpoint, work, writer, progress=progress, threads=threads, reads=reads)
    publish(store, writer, data, replaced)
    digest = manifest_digest(data)
    file_bytes = source.file_bytes() if isinstance(source, GgufDirectory) else None
    stored_bytes = writer.stored_bytes + len(data)
    return PackResult(
        pin=f"{store.url}@b3:{digest.hex()}",
        manifest=manifest._replace(digest=digest, has_own_digest=True),
        source_bytes=checkpoint.weight_bytes if file_bytes is None else file_bytes,
        stored_bytes=stored_bytes,
        unused=find_unused_quietly(store) if replaced is not None else (),
        conversions=work.conversions,
        left_out=checkpoint.left_out,
        is_larger_than_file=file_bytes is not None and stored_bytes > file_bytes,
    )


def _check_options(
    source: Source,
    threads: int | None,
    tiers: TierOptions | None,
    quantize: QuantizeOptions | None,
    prune: PruneOptions | None,
    base: Base | None,
) -> None:
    """Raise `UsageError` for a source that is an artifact, and for options that exclude each other."""
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads cannot pack anything", key="threads", hint="Give at least 1.")
    if is_artifact(source):
        raise UsageError(
            f"{source.url} is an artifact already: it has a {MANIFEST_NAME}",
            hint="Serve it as it is, or give the folder of the original model.",
        )
    if quantize is not None and tiers not in (None, TierOptions()):
        raise _excluded(
            "quantised weights have no tiers: --draft-bits and the like cannot go with --quantize", "quantize"
        )
    if quantize is not None and prune is not None:
        raise _excluded("--prune cannot go with --quantize: few of the integers would be 0", "prune")
    if base is not None and (quantize is not None or prune is not None):
        raise _excluded(
            "--base cannot go with --quantize or --prune: what they change differs from the base everywhere",
            "base",
        )


def _excluded(message: str, key: str) -> UsageError:
    return UsageError(message, key=key, hint="Leave one of the two out.")


@dataclass(frozen=True, slots=True)
class _Work:
    """The plan of a pack, and the content that it stores."""

    plan: PackPlan
    content: ContentReader
    quantized: QuantizePlan | None
    base: Base | None
    conversions: tuple[str, ...]


def _plan_work(
    source: Source,
    checkpoint: Checkpoint,
    threads: int,
    *,
    tiers: TierOptions | None,
    quantize: QuantizeOptions | None,
    calibrate: Calibrate | None,
    prune: PruneOptions | None,
    sparse: bool,
    base: Base | None,
    for_base: bytes | None,
) -> _Work:
    """Choose every tensor's encoding. Reads the content where a choice depends on it; writes nothing."""
    quantized = plan_quantize(source, checkpoint, quantize) if quantize is not None else None
    aliases = find_aliases(source, checkpoint, forward_order(checkpoint))
    plan = plan_pack(checkpoint, aliases, tiers, quantized)
    if for_base is not None:
        plan = replace(plan, manifest=plan.manifest._replace(base=for_base))
    pruner = None
    conversions = source.conversions() if isinstance(source, GgufDirectory) else ()
    if prune is not None:
        names = find_prunable(checkpoint, aliases, prune)
        pruner = Pruner(source, checkpoint, names, prune)
        plan = plan.with_metadata(METADATA_KEY, prune.describe(len(names)))
        conversions = (*conversions, f"pruned: {prune.describe(len(names))}")
    quantizing = None
    if quantized is not None:
        moments_of = None if calibrate is None else calibrate(quantized.of_4_bits)
        quantizing = QuantizingReader(source, checkpoint, quantized, moments_of)
    content = ContentReader(source, checkpoint, quantizing=quantizing, pruner=pruner)
    if base is not None:
        plan = plan_differences(plan, content, base)
        dump_manifest(plan.uncompressed())
        conversions = (*conversions, _describe_differences(plan, base))
    if sparse:
        plan = choose_sparse(plan, content, threads)
    return _Work(plan, content, quantized, base, conversions)


def _write(
    source: Source,
    checkpoint: Checkpoint,
    work: _Work,
    writer: BlobWriter,
    *,
    progress: Callable[[TransferProgress], None] | None,
    threads: int,
    reads: RecordedReads | None,
) -> tuple[Manifest, bytes]:
    """Write everything but the manifest, and return that, also as bytes. Discards what it wrote when it fails."""
    base_reader = None if work.base is None else BaseReader(work.base, work.plan.jobs)
    try:
        manifest = _store_content(
            source,
            checkpoint,
            work.plan,
            work.quantized,
            PartEncoder(work.content, base_reader),
            writer,
            progress=progress,
            threads=threads,
            reads=reads or RecordedReads(),
        )
        return manifest, dump_manifest(manifest)
    except BaseException as error:
        writer.discard(error)
        raise
    finally:
        if base_reader is not None:
            base_reader.close()


def _describe_differences(plan: PackPlan, base: Base) -> str:
    counts = Counter(tensor.encoding for tensor in plan.manifest.tensors)
    num_same, num_delta = counts[Encoding.SAME], counts[Encoding.DELTA]
    num_whole = len(plan.manifest.tensors) - num_same - num_delta
    return f"of {base.source.url}: {num_same} tensors are the same, {num_delta} differ, {num_whole} are whole"


def _store_content(
    source: Source,
    checkpoint: Checkpoint,
    plan: PackPlan,
    quantized: QuantizePlan | None,
    encoder: PartEncoder,
    writer: BlobWriter,
    *,
    progress: Callable[[TransferProgress], None] | None,
    threads: int,
    reads: RecordedReads,
) -> Manifest:
    """Write everything but the manifest, and return that."""
    read_bytes = 0

    def done(num_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes += num_bytes
        if progress is not None:
            progress(TransferProgress(read_bytes, plan.read_bytes + reads.total_bytes))

    parts: list[Part] = []
    hashes = [blake3() for _ in plan.manifest.tensors]
    with closing(_encode_in_order(encoder, plan.jobs, threads)) as results:
        for job, data, encoded in results:
            parts += [_store_part(writer, part) for part in encoded]
            _hash_tensors(job, data, hashes)
            done(sum(stretch.size_bytes for stretch in job))
    reads.compare(threads, done)
    files = [
        writer.put_file(CONFIG_NAME, quantized.config)
        if quantized is not None and info.name == CONFIG_NAME
        else writer.copy_file(source, info)
        for info in checkpoint.files
        if info.name != FILE_NAME
    ]
    digests = ((tensor, hashes[tensor.index].digest()) for tensor in plan.manifest.tensors)
    files.append(writer.put_file(FILE_NAME, dump_tensor_digests(digests)))
    parts.sort(key=lambda part: part.tier)  # stable: within a tier they stay in forward order
    numbered = tuple(part._replace(index=index) for index, part in enumerate(parts))
    return plan.manifest._replace(
        blobs=writer.finish(), files=tuple(files), parts=numbered, generation=writer.generation
    )


def _hash_tensors(job: Job, content: Bytes, hashes: list[blake3]) -> None:
    """Add the job's stretches, as they were read, to their tensors' hashes. Jobs come in the
    tensors' order.
    """
    position = 0
    for stretch in job:
        hashes[stretch.tensor.index].update(content[position : position + stretch.size_bytes].data)
        position += align(stretch.size_bytes)


def _encode_in_order(
    encoder: PartEncoder, jobs: tuple[Job, ...], threads: int
) -> Generator[tuple[Job, Bytes, list[EncodedPart]], None, None]:
    """Encode jobs in threads; yields each with the bytes that were read for it (each stretch starts
    aligned) and its parts, which are valid until the next is asked for.

    At most `threads` + 1 jobs are in work, the one yielded included. Closing the iterator stops the
    threads.
    """
    size_bytes = max(map(buffer_bytes, jobs), default=0)
    buffers = [np.empty(0, np.uint8) for _ in range(threads + 1)]  # made at first use, then reused
    pending: deque[tuple[Job, Bytes, Future[list[EncodedPart]]]] = deque()
    waiting = deque(jobs)
    with ThreadPoolExecutor(threads, thread_name_prefix="teneral-pack") as pool:
        try:
            while waiting or pending:
                while waiting and buffers:
                    buffer = buffers.pop()
                    buffer = buffer if buffer.size else np.empty(size_bytes, np.uint8)
                    job = waiting.popleft()
                    pending.append((job, buffer, pool.submit(encoder.encode, job, buffer)))
                job, buffer, future = pending.popleft()
                yield job, buffer, future.result()
                buffers.append(buffer)
        finally:
            encoder.stop()
            for _, _, future in pending:
                future.cancel()


def _store_part(writer: BlobWriter, encoded: EncodedPart) -> Part:
    """Its index is set when all parts are known."""
    blob, offset_bytes = writer.append(encoded.tier, encoded.pieces, encoded.size_bytes)
    return Part(
        index=-1,
        tier=encoded.tier,
        group=encoded.group,
        blob=blob,
        offset_bytes=offset_bytes,
        size_bytes=encoded.size_bytes,
        digest=encoded.digest,
        segments=encoded.segments,
    )
