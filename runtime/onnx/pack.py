"""`teneral pack model.onnx ARTIFACT`: segments as files, and their weights as the artifact's tensors.

A separate process with limits (`graph.py`) reads, optimises and cuts the graph, since a hostile
file can make the parser or constant folding use any amount of memory, or crash. Its output is
packed like any other model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...loader.errors import CheckpointError, NotFoundError, UsageError
from ...loader.format.checkpoint import Checkpoint, StoredTensor
from ...loader.format.checkpoint_files import SMALL_FILES
from ...loader.format.safetensors import TensorEntry
from ...loader.process.scratch import ScratchFolder, remove_abandoned
from ...loader.sources.base import ObjectInfo, Source, Store, check_name
from ...loader.sources.file.store import FileStore
from ...loader.sources.open import open_source
from ...loader.tools.pack.pack import PackResult, pack
from ...loader.tools.pack.write import find_replaced
from ...loader.tools.stated_files import check_digest
from .spec import FILE_NAME, METADATA, NO_TELEMETRY, WHOLE_NAME

if TYPE_CHECKING:
    from ...loader.sources.base import SourceOptions
    from ...loader.tools.progress_bar import TransferProgress

SUFFIX = ".onnx"
MODEL_NAME = "model.onnx"
MAX_FILE_BYTES = 64 << 30  # of a model that is copied here from a store
MAX_PACK_S = 3600.0
SPARE_BYTES = 4 << 30  # of the process that reads the graph, more than several times the model's own
_COPY_BYTES = 8 << 20
PACK_PREFIX, ARTIFACT_PREFIX = "teneral-pack-onnx-", "teneral-onnx-artifact-"  # of temporary folders

_EXPORT = 'torch.onnx.export(model, (example,), "model.onnx", dynamo=True, external_data=True)'
_OTHERS = {
    ".pt": ("a TorchScript or pickled PyTorch file", f"Export it to ONNX: {_EXPORT}"),
    ".pth": ("a pickled PyTorch file", f"Export it to ONNX: {_EXPORT}"),
    ".torchscript": (
        "a TorchScript file",
        f"Export it to ONNX from the model that it was made of: {_EXPORT}",
    ),
    ".pt2": ("an exported PyTorch program", "Export it to ONNX: torch.onnx.export(torch.export.load(path))."),
    ".pb": (
        "a TensorFlow graph",
        "Export it: python -m tf2onnx.convert --saved-model FOLDER --output model.onnx",
    ),
    ".tflite": (
        "a TensorFlow Lite file",
        "Export it: python -m tf2onnx.convert --tflite FILE --output model.onnx",
    ),
}


def refuse_other_formats(address: str) -> None:
    """Raises `UsageError` naming the command that exports to ONNX, for a file or folder of another framework."""
    path = address.rstrip("/")
    suffix = path[path.rfind(".") :].lower() if "." in path.rpartition("/")[2] else ""
    if suffix not in _OTHERS and "://" not in path and (Path(path) / "saved_model.pb").is_file():
        suffix = ".pb"
    if suffix in _OTHERS:
        detail, hint = _OTHERS[suffix]
        raise UsageError(
            f"{address} is {detail}, which is not loaded: it can run code", key="model", hint=hint
        )


def is_onnx_model(address: str, options: SourceOptions | None = None) -> bool:
    """True for the address of an ONNX file, or of a folder with a `model.onnx` and no safetensors."""
    if address.lower().endswith(SUFFIX):
        return True
    source = open_source(address, options)
    try:
        return _has(source, MODEL_NAME) and not any(
            _has(source, name)
            for name in ("model.safetensors", "model.safetensors.index.json", "manifest.json")
        )
    finally:
        source.close()


def _has(source: Source, name: str) -> bool:
    from ...loader.errors import TeneralError  # only here

    try:
        source.stat(name)
    except TeneralError:
        return False
    return True


def pack_onnx(
    address: str,
    store: Store,
    *,
    options: SourceOptions | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: Callable[[TransferProgress], None] | None = None,
) -> PackResult:
    """Pack the ONNX model at `address` (a file, or a folder with `model.onnx`) into `store`. Blocks.

    Needs space for two copies of the model in the temporary folder, and a third for a model that is
    not on a local disk. Raises `CheckpointError` for a model that is damaged, hostile, or cannot be
    served, `UsageError` if the packages that read ONNX files are missing, and the errors of `pack`.
    """
    _require_packages()
    find_replaced(store, force=force)  # before the work that `pack` begins with its own look
    remove_abandoned(PACK_PREFIX)
    with ScratchFolder(PACK_PREFIX) as temporary:
        work = temporary.path
        model, files = _at_hand(address, options, work)
        out = work / "out"
        out.mkdir()
        _run_child(model, out)
        for path in files:
            shutil.copyfile(path, out / path.name)
        source = FileStore(out)
        try:
            return pack(
                source, store, force=force, threads=threads, progress=progress, checkpoint=checkpoint_of(out)
            )
        finally:
            source.close()


def checkpoint_of(folder: Path) -> Checkpoint:
    """The weights and files that `graph.prepare` left, with a group for each segment."""
    listed = json.loads((folder / "tensors.json").read_text())
    info = _info(folder / "weights.bin")
    tensors: dict[str, StoredTensor] = {}
    groups: dict[str, list[str]] = {}
    for each in listed:
        entry = TensorEntry(each["name"], each["dtype"], tuple(each["shape"]), each["begin"], each["end"])
        tensors[entry.name] = StoredTensor(entry, 0)
        groups.setdefault(f"segments.{each['group']}", []).append(entry.name)
    names = [FILE_NAME, *sorted(path.name for path in folder.glob("segment-*.onnx")), WHOLE_NAME]
    names += [name for name in SMALL_FILES if (folder / name).is_file()]
    files = tuple(_info(folder / name) for name in names)
    ordered = tuple((name, tuple(members)) for name, members in groups.items())
    return Checkpoint(str(folder), (info,), tensors, files, dict(METADATA), ordered)


def _info(path: Path) -> ObjectInfo:
    return FileStore(path.parent).stat(path.name)


def _require_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"packing ONNX models needs {' and '.join(missing)}",
            key="model",
            hint="Install them: pip install 'teneral[onnx-pack]'",
        )


def _at_hand(address: str, options: SourceOptions | None, work: Path) -> tuple[Path, list[Path]]:
    """The model's file on a local disk, next to its external data, and its small files."""
    is_file = address.lower().endswith(SUFFIX)
    path = address.removeprefix("file://")
    if "://" not in path:
        model = Path(path) if is_file else Path(path) / MODEL_NAME
        if not model.is_file():
            raise NotFoundError(f"there is no file {model}", source=address, name=model.name)
        names = [name for name in _flat_files() if (model.parent / name).is_file()]
        confined = FileStore(model.parent, outside_links=False)
        for each in (model.name, *names):
            confined.stat(each)
        return model, [model.parent / name for name in names]
    folder, _, name = address.rpartition("/") if is_file else (address, "", MODEL_NAME)
    source = open_source(folder, options)
    try:
        here = work / "source"
        here.mkdir()
        _copy(source, source.stat(name), here)
        for location in _run_locations(here / name):
            (here / check_name(location)).parent.mkdir(parents=True, exist_ok=True)
            _copy(source, source.stat(location), here)
        small = [each for each in _flat_files() if _has(source, each)]
        for each in small:
            _copy(source, source.stat(each), here)
        return here / name, [here / each for each in small]
    finally:
        source.close()


def _flat_files() -> list[str]:
    return [name for name in SMALL_FILES if "/" not in name]


def _copy(source: Source, info: ObjectInfo, folder: Path) -> None:
    if info.size_bytes > MAX_FILE_BYTES:
        raise CheckpointError(
            f"{info.name} has {info.size_bytes} bytes, of {MAX_FILE_BYTES} allowed", where=info.name
        )
    buffer, digest = bytearray(min(info.size_bytes, _COPY_BYTES)), hashlib.sha256()
    with open(folder / info.name, "xb") as file, memoryview(buffer) as view:
        for start in range(0, info.size_bytes, _COPY_BYTES):
            piece = view[: min(_COPY_BYTES, info.size_bytes - start)]
            source.read_into(info.name, start, piece, version=info.version)
            file.write(piece)
            digest.update(piece)
    check_digest(source.url, info, digest.digest())


def _run_locations(model: Path) -> list[str]:
    """The names of the files that hold the model's external data, checked."""
    return list(json.loads(_child(["--locations", str(model), str(SPARE_BYTES)])))


def _run_child(model: Path, out: Path) -> None:
    size_bytes = sum(path.stat().st_size for path in model.parent.iterdir() if path.is_file())
    _child([str(model), str(out), str(SPARE_BYTES + 6 * size_bytes)])


def _child(arguments: list[str]) -> str:
    """The output of the process that reads the graph. Raises its error, or one with its exit status."""
    command = [sys.executable, "-m", "teneral.runtime.onnx.graph", *arguments]
    try:
        result = subprocess.run(
            command,
            env={NO_TELEMETRY: "1", **os.environ},
            capture_output=True,
            text=True,
            timeout=MAX_PACK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"the ONNX model was not read after {MAX_PACK_S:.0f} s", where=MODEL_NAME
        ) from None
    if result.returncode == 0:
        return result.stdout
    if result.returncode == 3:
        detail = json.loads(result.stdout)
        raise CheckpointError(detail["message"], where=MODEL_NAME, hint=detail["hint"])
    problem = "needs more memory than such a model should" if _is_memory(result) else "made its reader end"
    raise CheckpointError(
        f"the ONNX model cannot be packed: it {problem} (status {result.returncode})",
        where=MODEL_NAME,
        hint=result.stderr.strip()[-300:],
    )


def _is_memory(result: subprocess.CompletedProcess[str]) -> bool:
    return result.returncode == 4 or "bad_alloc" in result.stderr or "MemoryError" in result.stderr


@contextmanager
def temporary_artifact(address: str) -> Iterator[Path]:
    """An artifact of the local model at `address`, in a temporary folder that is removed at the end."""
    remove_abandoned(ARTIFACT_PREFIX)
    with ScratchFolder(ARTIFACT_PREFIX) as temporary:
        folder = temporary.path / "artifact"
        pack_onnx(address, FileStore(folder))
        yield folder
