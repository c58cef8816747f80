"""The versions of a model that lie in a folder or a bucket, and whether each is whole.

An artifact counts from when its manifest can be read, which is written last; a plain folder from when its config and
every file of its weights are there. All functions block.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ...loader.artifact import find_file, open_artifact, open_model, read_file
from ...loader.errors import FormatError, NotFoundError, TeneralError, UsageError
from ...loader.format.limits import MANIFEST_NAME
from ...loader.sources.base import Source, SourceOptions
from ...loader.sources.open import forms, is_read_only, open_source, scheme_of, split_pin
from ...runtime.config import ServeConfig
from ...runtime.files import is_onnx
from .keys import SERVED_NAME, VERSION_NAME
from .values import Model, PoolNode

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest

MAX_LISTED = 100_000  # objects of a bucket that are looked through for versions
logger = logging.getLogger("teneral.pool")


class Release(NamedTuple):
    """One version that can be served. `revision` changes when its bytes do; `weight_bytes` is its weights' size in
    memory, `stored_bytes` in the store, without those of a base. Encoders and ONNX models have no keys and values.
    """

    version: int | None  # None: its model has no versions
    address: str
    revision: str
    weight_bytes: int
    base: str | None = None  # the address of the artifact that it holds differences to
    stored_bytes: int = 0
    is_packed: bool = True
    has_kv: bool = True


class RolledBackError(NotFoundError):
    """A version that is not to be served any more; of a model, that it has no other."""


class ReleaseRepository:
    """The releases of one pool's models. Remembers what it opened, and opens again only what has changed."""

    def __init__(self, folder: Path) -> None:
        """Relative addresses are relative to `folder`."""
        self._folder = folder
        self._opened: dict[tuple[str, str | None], tuple[str, Release | TeneralError]] = {}

    def releases(
        self, model: Model, *, without: Mapping[tuple[int | None, str], str] = MappingProxyType({})
    ) -> tuple[tuple[Release, ...], str]:
        """Those to serve, oldest first, and why others are not: '' when nothing is wrong. `without` has the
        versions and revisions that are not to be served, each with its reason.

        Raises the error of a source that cannot be listed, and of a model without any usable release.
        """
        base = None if model.base is None else self.absolute(model.base)
        options = ServeConfig(model="unused", base=base, **model.serve).source_options
        if not model.is_versioned:
            return (self._open(None, self.absolute(model.source), options),), ""
        present = set(_present(self.absolute(model.source), options, model))
        return choose_releases(
            model,
            present,
            lambda number: self._open(number, self.absolute(model.address(number)), options),
            without=without,
        )

    def standby_base(self, node: PoolNode) -> Release | None:
        """The artifact that the node's standby processes have in memory, if any. Raises the error of one that cannot be
        read, and `UsageError` for weights that are not packed.
        """
        if node.standby_base is None:
            return None
        options = ServeConfig(model="unused", **node.standby_store).source_options
        found = self._open(None, self.absolute(node.standby_base), options)
        if not found.is_packed:
            raise UsageError(
                f"{node.standby_base} is not packed, as the base of standby processes must be",
                key="standby_base",
                hint="Pack it first, or leave standby_base out: plain weights are mapped where they lie.",
            )
        return found

    def absolute(self, address: str) -> str:
        return absolute(self._folder, address)

    def _open(self, version: int | None, address: str, options: SourceOptions) -> Release:
        url, digest = split_pin(address)
        source = open_model(url, options)
        key = (address, options.base)
        try:
            stamp = _stamp(source)
            known, found = self._opened.get(key, ("", None))
            # Its base may have come since.
            may_be_whole_now = options.base is not None and isinstance(found, TeneralError)
            if found is None or known != stamp or may_be_whole_now:
                found = _opened(source, version, address, digest, stamp)
                # What a store refused, or did not answer, may be there the next time.
                if isinstance(found, Release | FormatError | NotFoundError):
                    self._opened[key] = (stamp, found)
        finally:
            source.close()
        if isinstance(found, TeneralError):
            raise found
        # Another model may have it as another version.
        return found._replace(version=version, base=options.base)


def choose_releases(
    model: Model,
    present: set[int],
    open_version: Callable[[int], Release],
    *,
    without: Mapping[tuple[int | None, str], str] = MappingProxyType({}),
) -> tuple[tuple[Release, ...], str]:
    """The releases to serve of a model with these versions, oldest first, and why others are not: '' when nothing
    is wrong. `open_version` may raise `TeneralError`.
    """
    left = set(present)
    chosen: list[Release] = []
    missing = sorted(set(model.named_versions()) - left)
    trouble = [f"version {number}, which the pool file names, is not there" for number in missing]
    last: TeneralError | None = None
    rolled_back: RolledBackError | None = None
    while len(chosen) < len(numbers := model.versions.chosen(left)):
        for number in reversed(numbers):
            if any(each.version == number for each in chosen):
                continue
            try:
                release = open_version(number)
                if (reason := without.get((number, release.revision))) is not None:
                    rolled_back = RolledBackError(reason)
                    raise rolled_back
                chosen.append(release)
            except TeneralError as error:
                left.discard(number)  # the next older one takes its place
                trouble.append(f"version {number}: {error.message}")
                last = error
    if not chosen:
        raise (
            rolled_back
            or last
            or NotFoundError(
                f"{model.name} has no version at {model.source}",
                source=model.source,
                hint="Versions are folders whose names are whole numbers.",
            )
        )
    return tuple(sorted(chosen, key=lambda release: release.version or 0)), "; ".join(trouble)


def absolute(folder: Path, address: str) -> str:
    """A path relative to the pool file's folder as an absolute one; other addresses as they are."""
    if scheme_of(address):
        return address
    path = os.path.expanduser(address)
    return path if os.path.isabs(path) else os.path.join(folder.absolute(), path)


def _opened(
    source: Source, version: int | None, address: str, digest: bytes | None, stamp: str
) -> Release | TeneralError:
    try:
        manifest = open_artifact(source, digest=digest)
        if manifest.digest is None:
            source.stat("config.json")  # the headers of plain weights say nothing of it
    except TeneralError as error:
        logger.info("%s is not served yet: %s", address, error.message)
        return error
    revision = manifest.digest.hex()[:16] if manifest.digest is not None else stamp
    weight_bytes = sum(tensor.size_bytes for tensor in manifest.tensors)
    stored_bytes = sum(part.size_bytes for part in manifest.parts)
    is_packed = manifest.digest is not None
    return Release(
        version,
        address,
        revision,
        weight_bytes,
        stored_bytes=stored_bytes,
        is_packed=is_packed,
        has_kv=has_kv(source, manifest),
    )


def has_kv(source: Source, manifest: Manifest) -> bool:
    """True if it generates; also if its config cannot be read or is not known, which its instance says better."""
    from ...runtime.models.decoder_config import is_pooled  # the tables of families, for a pool that runs
    from ...runtime.models.encoder_config import is_encoder

    if is_onnx(manifest):
        return False
    try:
        config = json.loads(read_file(source, manifest, "config.json"))
        has_modules = find_file(manifest, "modules.json") is not None
        return not is_encoder(config) and not is_pooled(config, has_modules=has_modules)
    except (TeneralError, ValueError):
        return True


def _stamp(source: Source) -> str:
    """A text that differs when what is there does: cheap, without reading it."""
    try:
        return source.stat(MANIFEST_NAME).version
    except NotFoundError:
        pass
    digest = hashlib.blake2b(digest_size=8)
    try:
        for number, info in enumerate(source.list()):
            digest.update(f"{info.name}\0{info.version}\0".encode())
            if number >= MAX_LISTED:
                break
    except UsageError:  # http cannot list
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
            try:
                digest.update(f"{name}\0{source.stat(name).version}\0".encode())
            except NotFoundError:
                continue
    return digest.hexdigest()


def _present(address: str, options: SourceOptions, model: Model) -> Iterator[int]:
    """Numbers of the version folders that are there."""
    before, _, after = address.partition("{version}")
    folder, _, name_begin = before.rpartition("/")
    name_end, _, _ = after.partition("/")
    pattern = re.compile(re.escape(name_begin) + f"({VERSION_NAME.pattern})" + re.escape(name_end))
    if is_read_only(address):
        yield from model.named_versions()  # HTTP cannot be listed: the file names them
        return
    for name in _folders(folder, options):
        if found := pattern.fullmatch(name):
            yield int(found.group(1))
        else:
            logger.debug("%s: %s/%s is not a version", model.name, folder, name)


def models_in(address: str) -> dict[str, str]:
    """Sources by name of the models in a folder or bucket: `<model>/<version>/`. Blocks. Raises `TeneralError`."""
    base = address.rstrip("/")
    if is_read_only(address):
        raise UsageError(f"{address} cannot be listed", key="repository", hint=f"Give {forms(stores=True)}.")
    names = [name for name in _folders(base, SourceOptions()) if SERVED_NAME.fullmatch(name)]
    sources = {name: f"{base}/{name}/{{version}}" for name in sorted(names)}
    return {name: source for name, source in sources.items() if _has_versions(f"{base}/{name}")}


def _has_versions(folder: str) -> bool:
    return any(VERSION_NAME.fullmatch(name) for name in _folders(folder, SourceOptions()))


def _folders(address: str, options: SourceOptions) -> set[str]:
    if scheme_of(address) == "":
        try:
            with os.scandir(address or "/") as entries:
                return {entry.name for entry in entries if entry.is_dir()}
        except OSError as error:
            raise NotFoundError(
                f"cannot list {address}: {error.strerror}", source=address, hint="Create the folder."
            ) from error
    source = open_source(address, options)
    try:
        names: set[str] = set()
        for number, info in enumerate(source.list()):
            name, slash, _ = info.name.partition("/")
            if slash:  # an object of a version's name is no folder
                names.add(name)
            if number >= MAX_LISTED:
                logger.warning(
                    "%s: only its first %d objects were looked at for versions", address, MAX_LISTED
                )
                break
        return names
    finally:
        source.close()
