"""The model at an address: a packed artifact, or plain safetensors that are read the same way.

`open_artifact` gives a checked manifest for either. An address may carry a pin, `…@b3:<64 hex
digits>`: the BLAKE3-256 of the manifest, which holds the digests of everything else, so a pinned
artifact cannot be replaced unnoticed. Reads only the manifest (or the safetensors headers) and
small files, never weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import AccessDeniedError, FormatError, IntegrityError, NotFoundError, UsageError
from .format.limits import MANIFEST_NAME, MAX_MANIFEST_BYTES, MAX_SMALL_FILE_BYTES
from .sources.base import Remote, Source, SourceOptions, changed
from .sources.open import PIN_MARK, model_address, open_source, scheme_of, split_pin

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cache.part_cache import PartCache
    from .format.manifest import File, Manifest
    from .format.manifest_json import Look
    from .timeline import Timeline


def open_model(
    url: str,
    options: SourceOptions | None = None,
    *,
    timeline: Timeline | None = None,
    keep_integers: bool = True,
    around: Callable[[Source], Source] | None = None,
) -> Source:
    """A source on the folder at `url`, or of the model of that name on the Hub; on one with the content
    of a model directory where `url` is a GGUF file's.

    Without `keep_integers` a GGUF file's numbers become floats. With the option `base`, the source has the base's
    objects, too. All reads go through what `around` makes of the store's own source. Does no I/O but a look
    at what this machine has. The timeline shows when the source waited for its store. Raises `UsageError` for an
    unusable address. The caller closes the source.
    """
    source = _opened(url, options, keep_integers=keep_integers, around=around)
    if timeline is not None and isinstance(source, Remote):
        from .sources.http.outage import show_outages  # local folders do without

        show_outages(source, timeline)
    return source


def _opened(
    url: str,
    options: SourceOptions | None,
    *,
    keep_integers: bool,
    around: Callable[[Source], Source] | None,
) -> Source:
    url = model_address(url)
    quantisation = _quantisation_of(url)
    if not quantisation and not is_gguf(url):
        source = open_source(url, options)
        source = source if around is None else around(source)
        return source if options is None or options.base is None else _with_base(source, options)
    from .format.gguf.directory import GgufDirectory  # most models are none
    from .format.gguf.model import Keeps

    keeps_blocks = options is None or options.gguf_blocks
    keeps = Keeps.FLOATS if not keep_integers else Keeps.BLOCKS if keeps_blocks else Keeps.INTEGERS

    folder, slash, name = url.rpartition("/")
    if quantisation:
        folder, slash, name = url, "", ""
    source = open_source(folder + slash or ".", options)
    source = source if around is None else around(source)
    return GgufDirectory(source, name, quantisation=quantisation, keeps=keeps)


def _with_base(source: Source, options: SourceOptions) -> Source:
    from .format.delta import BASE_PREFIX  # most models have no base
    from .sources.base import BasedSource

    assert options.base is not None
    address, digest = split_pin(model_address(options.base))
    base = open_source(address, options._replace(base=None))
    return BasedSource(source, base, prefix=BASE_PREFIX, base_digest=digest)


def is_gguf(url: str) -> bool:
    return url.lower().endswith(".gguf")


def _quantisation_of(url: str) -> str:
    """Of a GGUF file on the Hub that is chosen by it; '' for all other addresses."""
    if scheme_of(url) != "hf":
        return ""
    from .sources.hub.address import parse_url  # most models are elsewhere

    return parse_url(url).quantisation


def is_artifact(source: Source) -> bool:
    """True if the folder has a manifest. Does not read it. Raises `AccessDeniedError` where that is
    denied.
    """
    try:
        source.stat(MANIFEST_NAME)
    except NotFoundError:
        return False
    except AccessDeniedError as error:
        _check_absent(source, error)
        return False
    return True


def open_artifact(
    source: Source,
    *,
    digest: bytes | None = None,
    look: Look | None = None,
    in_place: bool = False,
    without_base: bool = False,
    held: Manifest | None = None,
) -> Manifest:
    """The folder's manifest; of a folder without one, the manifest made from its safetensors
    headers: with `in_place`, that of slabs as the files have them, where it can be
    (`manifest_in_place`).

    With `digest`, the manifest must be there and have it; `look` is as `parse_manifest` has it.
    The manifest of differences to a base is joined with that of the base, which `source` has where
    it was opened with one; with `without_base` it is left alone where there is none, and then its
    weights cannot be loaded. Raises `UsageError` for an artifact without its base, or with a base that it does
    not have, and `IntegrityError` for another base than its own.

    `held` is the manifest of weights that are in memory. It is the result, without a read, where `digest`
    pins it; of differences to it, the manifest is left alone, and its base is not read.

    Raises `IntegrityError` when it has not, `ManifestError` and `CheckpointError` for what is
    damaged, `NotFoundError` when there is nothing, `AccessDeniedError` when the manifest may not be
    read, and the source's own errors.
    """
    if held is not None and digest == held.digest and not _has_base(source):
        return held
    try:
        data, _ = source.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
    except NotFoundError as error:
        if digest is None and not _has_base(source):
            return _open_plain(source, in_place)
        if digest is None:
            raise UsageError(
                f"{source.url} has no {MANIFEST_NAME}, and so no base", key="base", hint="Leave --base out."
            ) from error
        raise NotFoundError(
            f"{source.url} has no {MANIFEST_NAME}, so it cannot be what {PIN_MARK}{digest.hex()} pins",
            source=source.url,
            name=MANIFEST_NAME,
            hint="Only packed artifacts can be pinned: pack the model, or remove the pin.",
        ) from error
    except AccessDeniedError as error:
        if digest is not None:
            raise
        return _open_denied(source, error, in_place)
    from .format.manifest_json import (
        manifest_digest,  # while the answer was on its way, a loader has imported it
    )

    if held is not None and manifest_digest(data) == held.digest:
        look = None  # its weights are there
    manifest = parse_or_reread(source, data, digest=digest, look=look)
    if manifest.base is None and not _has_base(source):
        return manifest
    if held is not None and held.digest == manifest.base and _pinned_base(source) in (None, held.digest):
        return manifest
    return _join_base(source, manifest, without_base, held)


def parse_or_reread(
    source: Source, data: bytes, *, digest: bytes | None = None, look: Look | None = None
) -> Manifest:
    """The manifest in `data`, which was read from the source; of another read where that is refused, as
    bits flip on the way, too. Raises as `parse_manifest` does, and the source's errors.
    """
    from .format.manifest_json import parse_manifest  # as above

    try:
        return parse_manifest(data, expected_digest=digest, look=look)
    except FormatError:
        again, _ = source.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
        if again == data:
            raise
    return parse_manifest(again, expected_digest=digest)


def _pinned_base(source: Source) -> bytes | None:
    """The digest that the base's address is pinned to; None where it is not, and without one."""
    digest: bytes | None = getattr(source, "base_digest", None)
    return digest


def _has_base(source: Source) -> bool:
    return hasattr(source, "base_digest")  # of a `BasedSource`, which most starts need not import


def _join_base(
    source: Source, manifest: Manifest, without_base: bool, held: Manifest | None = None
) -> Manifest:
    from .format.delta import join
    from .sources.base import BasedSource

    if manifest.base is None:
        raise UsageError(
            f"{source.url} is whole: it has no base",
            key="base",
            hint="Leave --base out, or give its fine-tune.",
        )
    if not isinstance(source, BasedSource):
        if without_base:
            return manifest
        other = (
            ""
            if held is None or held.digest is None
            else f", and the base in memory is b3:{held.digest.hex()}"
        )
        raise UsageError(
            f"{source.url} holds only the differences to b3:{manifest.base.hex()}{other}",
            key="base",
            hint="Give the address of that artifact with --base.",
        )
    base = open_artifact(source.base, digest=source.base_digest)
    if base.digest != manifest.base:
        raise IntegrityError(
            f"{source.base.url} is not the base of {source.url}",
            where=MANIFEST_NAME,
            expected=manifest.base.hex(),
            got="plain safetensors" if base.digest is None else base.digest.hex(),
            hint="Give the artifact that the fine-tune was packed against with --base.",
        )
    return join(manifest, base)


def _open_plain(source: Source, in_place: bool) -> Manifest:
    """From safetensors headers."""
    # An artifact's first bytes need not wait for these.
    from .format.checkpoint import manifest_in_place, manifest_of, open_checkpoint

    checkpoint = open_checkpoint(source)
    return (manifest_in_place(checkpoint) if in_place else None) or manifest_of(checkpoint)


def _open_denied(source: Source, denied: AccessDeniedError, in_place: bool) -> Manifest:
    """From safetensors headers, where it is certain enough that the manifest, which is denied, does
    not exist.

    Where the folder cannot be listed, another JSON file of it must have been readable: a right by
    suffix would otherwise hide the manifest of an artifact and show other weights next to it.
    """
    is_certain = _check_absent(source, denied)
    try:
        manifest = _open_plain(source, in_place)
    except AccessDeniedError as error:
        if not error.may_be_absent:
            raise
        raise denied from None
    if not is_certain and not any(file.name.endswith(".json") for file in manifest.files):
        from .sources.base import undecided

        raise undecided(source, MANIFEST_NAME) from denied
    return manifest


def _check_absent(source: Source, denied: AccessDeniedError) -> bool:
    """Raises `denied` where the manifest exists, or may exist. Returns whether a list shows that it
    does not; otherwise the source denies other objects that do not exist as well.
    """
    if not denied.may_be_absent:
        raise denied
    from .sources.base import denies_absent, is_listed  # only after a denial

    listed = is_listed(source, MANIFEST_NAME)
    if listed or (listed is None and not denies_absent(source)):
        raise denied
    return listed is False


def find_file(manifest: Manifest, name: str) -> File | None:
    return next((file for file in manifest.files if file.name == name), None)


def read_file(source: Source, manifest: Manifest, name: str, *, cache: PartCache | None = None) -> bytes:
    """The content of one small file, at most 256 MiB, checked against its digest where it has one.

    What has a digest is taken from the `cache` if it is there, and offered to it if not.

    Raises `NotFoundError` when the manifest names no such file, `IntegrityError` when its bytes are
    other ones, and `ChangedError` when a plain file is of another version than when the folder was
    opened, perhaps by another process.
    """
    file = find_file(manifest, name)
    if file is None:
        raise NotFoundError(f"{source.url} has no file {name}", source=source.url, name=name)
    kept = _read_cached(file, cache)
    if kept is not None:
        return kept
    data, info = source.read(file.path, max_bytes=MAX_SMALL_FILE_BYTES)
    if file.digest is not None and not _is_content(data, file):  # perhaps only on the way
        data, _ = source.read(file.path, max_bytes=MAX_SMALL_FILE_BYTES)
    if file.digest is None:
        if len(data) != file.size_bytes or file.version not in (None, info.version):
            raise changed(source.url, name, f"version {file.version} was expected, {info.version} is there")
        return data
    check_content(data, file)
    if cache is not None:
        cache.offer(file.digest, memoryview(data))
    return data


def _read_cached(file: File, cache: PartCache | None) -> bytes | None:
    if cache is None or file.digest is None:
        return None
    data = bytearray(file.size_bytes)
    if not cache.read_into(file.digest, 0, memoryview(data)):
        return None
    if not _is_content(data, file):
        cache.reject(file.digest)
        return None
    return bytes(data)


def _is_content(data: bytes | bytearray, file: File) -> bool:
    try:
        check_content(data, file)
    except IntegrityError:
        return False
    return True


def check_content(data: bytes | bytearray, file: File) -> None:
    """Raises `IntegrityError` when `data` is not the content that the manifest declares for the
    file.
    """
    from blake3 import blake3

    got = blake3(data).digest()
    if len(data) != file.size_bytes or got != file.digest:
        expected = file.digest.hex() if file.digest is not None else ""
        raise IntegrityError(
            f"{file.name} is damaged: its bytes are not those that were packed",
            where=file.path,
            expected=expected,
            got=got.hex(),
            hint="Pack the model again, or restore the object.",
        )
