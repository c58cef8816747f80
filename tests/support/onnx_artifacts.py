"""Packed ONNX models for tests: real artifacts with small segments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.onnx_models import MODELS, Made, save

from teneral.loader.artifact import open_artifact
from teneral.loader.format.manifest import Manifest
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import Source
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.files import ModelFiles
from teneral.runtime.onnx.graph import prepare
from teneral.runtime.onnx.pack import checkpoint_of
from teneral.runtime.onnx.spec import FILE_NAME, OnnxSpec, parse_spec

SEGMENT_BYTES = 16 << 10


class Packed(NamedTuple):
    """A model as a file, and the folder of its artifact."""

    made: Made
    path: Path
    artifact: Path

    @property
    def source(self) -> FileStore:
        return FileStore(self.artifact)

    @property
    def manifest(self) -> Manifest:
        return open_artifact(self.source)

    @property
    def spec(self) -> OnnxSpec:
        data = self.files(self.source).read(FILE_NAME)
        assert data is not None
        return parse_spec(data, self.manifest)

    def files(self, source: Source) -> ModelFiles:
        return ModelFiles(source, self.manifest, LoadOptions())


def pack_model(
    made: Made, folder: Path, *, external: bool = False, files: Mapping[str, bytes] | None = None
) -> Packed:
    """In this process, where `teneral pack` has one of its own for the graph. `files` are small ones, by name."""
    path = save(made, folder / "model" / "model.onnx", external=external)
    out = folder / "out"
    out.mkdir()
    prepare(path, out, SEGMENT_BYTES)
    for name, data in (files or {}).items():
        (out / name).write_bytes(data)
    pack(FileStore(out), FileStore(folder / "artifact"), checkpoint=checkpoint_of(out), threads=1)
    return Packed(made, path, folder / "artifact")


def pack_named(name: str, folder: Path) -> Packed:
    """One of `MODELS`; those of pictures have their weights in a file of their own."""
    return pack_model(MODELS[name](), folder, external=name in ("resnet", "vit"))
