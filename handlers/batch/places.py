"""The stores and object names of a job, from its addresses.

If the output is a folder or prefix, the job's own objects are in it. If it is a name that ends in
`.jsonl`, they are in a folder next to it, `NAME.jsonl.parts/`, and the file comes last. This module
does not know their content.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from ...loader.errors import ChangedError, UsageError
from ...loader.format.json_object import is_text
from ...loader.sources.base import ObjectInfo, Source, SourceOptions, Store, check_name
from ...loader.sources.open import open_source, open_store, scheme_of
from .spec import JobSpec

WORK_SUFFIX = ".parts"
FILE_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Input:
    """The object to read. `address` identifies it for as long as its content is the same."""

    source: Source
    name: str
    address: str
    version: str | None  # the expected one

    def look(self) -> ObjectInfo:
        """The current object. Raises `ChangedError` if it is not the expected version."""
        info = self.source.stat(self.name)
        if self.version is not None and self.version.strip('"') != info.version.strip('"'):
            raise ChangedError(
                f"{self.address} has the version {info.version}, not the expected {self.version}",
                source=self.source.url,
                name=self.name,
                hint="It was replaced: the newer version is a job of its own.",
            )
        return info

    def identity_of(self, info: ObjectInfo) -> str:
        """The version in the job's identity: for a file without its inode, which differs between
        nodes that mount the same folder.
        """
        version = info.version.strip('"')
        return version.rpartition("-")[0] if scheme_of(self.address) == "" else version


@dataclass(frozen=True, slots=True)
class Places:
    """The open stores of a job. A context manager, which closes them."""

    input: Input
    output: str  # as configured
    work: Store  # of the job's own objects
    # Of the one output file, if one is configured.
    final: Store | None
    final_name: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in (self.input.source, self.work, self.final):
            if store is not None:
                store.close()


def open_places(spec: JobSpec, default: SourceOptions) -> Places:
    """Open the stores, without I/O. Raises `UsageError` for invalid addresses."""
    options = spec.source_options or default
    folder, name = _split(spec.input, "input")
    given = Input(open_source(folder, options), name, _plain(folder, name), spec.input_version)
    if not is_text(given.address):
        raise UsageError(
            f"the address of the input is too long or not printable: {spec.input[:80]!r}", key="input"
        )
    if not spec.output.endswith(FILE_SUFFIX):
        return Places(given, spec.output, open_store(spec.output, options), None)
    folder, name = _split(spec.output, "output")
    if _plain(folder, name) == given.address:
        raise UsageError("the output is the input", key="output", hint="Choose another file for the answers.")
    work = open_store(spec.output + WORK_SUFFIX, options)
    return Places(given, spec.output, work, open_store(folder, options), name)


def _split(address: str, key: str) -> tuple[str, str]:
    """The folder and the name in it."""
    scheme = scheme_of(address)
    if scheme in ("", "file"):
        path = unquote(urlsplit(address).path) if scheme else os.path.expanduser(address)
        if not path or path.endswith("/") or "\0" in path:
            raise UsageError(f"{address!r} does not name a file", key=key)
        folder, name = os.path.split(os.path.abspath(path))
        return folder, check_name(name)
    folder, _, name = address.rpartition("/")
    if folder.endswith("/") or not name:  # s3://bucket, or s3://bucket/folder/
        raise UsageError(
            f"{address} does not name an object",
            key=key,
            hint="Write s3://bucket/key, gs://bucket/key, or the path of a file.",
        )
    return folder, check_name(name)


def _plain(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
