"""`teneral pool render`: documents to standard output or into a folder, and the check that a folder still has them."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...handlers.pool.file import read_pool
from ...handlers.pool.values import Model, Pool, PoolWarning
from ...loader.errors import NoSpaceError, UsageError
from ...loader.sources.base import SourceOptions
from . import deploy
from .documents import ModelSize, Options
from .render import Rendered, chosen_models, render

MAX_FILE_BYTES = 4 << 20  # of a file that is compared
SUFFIX = ".yaml"
OURS = "# Rendered by `teneral pool render "


def run_render(
    platform: str,
    file: str,
    *,
    output: str | None,
    check: str | None,
    model: str | None,
    strict: bool,
    options: Options,
    manifests: SourceOptions | None,
) -> int:
    """Returns 0, or with `check` 1 and a diff on standard output where the folder differs.

    With `manifests`, the models' manifests are read from their sources, to size instances by.
    """
    pool = read_pool(file)
    sizes = {} if manifests is None else model_sizes(chosen_models(pool, model), pool, manifests)
    rendered = render(pool, platform, options=options, sizes=sizes, model=model)
    if strict and rendered.warnings:
        raise rendered.warnings[0].as_error()
    for warning in rendered.warnings:
        print(f"teneral: warning: {warning}", file=sys.stderr)
    if check is not None:
        return compare(rendered, Path(check))
    if output is None:
        sys.stdout.write(rendered.stream())
        return 0
    write(rendered, Path(output))
    return 0


def limits(pool: Pool, platform: str) -> Sequence[PoolWarning]:
    """The warnings of rendering for a platform; raises its errors. For `teneral pool check --for`."""
    return render(pool, platform).warnings


def texts_of(rendered: Rendered) -> dict[str, str]:
    """File name → text of all that a folder gets: the documents, the script that deploys them, its README."""
    return rendered.texts() | deploy.texts(rendered.deployment, rendered.platform, rendered.file)


def write(rendered: Rendered, folder: Path) -> None:
    """Write the files, each replaced whole. Files that an earlier rendering left there are named, not removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts_of(rendered).items():
            temporary = folder / f".{name}.{os.getpid()}"
            try:
                temporary.write_text(text, encoding="utf-8")
                if name == deploy.SCRIPT:
                    temporary.chmod(temporary.stat().st_mode | 0o111)
                temporary.replace(folder / name)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError | PermissionError):
            raise UsageError(f"cannot write into {folder}: {error.strerror}", key="-o") from error
        raise NoSpaceError(f"cannot write into {folder}: {error.strerror}", source=str(folder)) from error
    for name in stale_files(rendered, folder):
        print(f"teneral: {folder / name} is not rendered any more; remove it", file=sys.stderr)


def compare(rendered: Rendered, folder: Path) -> int:
    """0 when the folder has exactly these files; else 1, and the differences on standard output."""
    differs = False
    for name, text in texts_of(rendered).items():
        before = _read(folder / name)
        if before != text:
            differs = True
            lines = difflib.unified_diff(
                (before or "").splitlines(keepends=True),
                text.splitlines(keepends=True),
                f"{folder / name}" if before is not None else "/dev/null",
                f"{name} (rendered)",
            )
            sys.stdout.writelines(lines)
    for name in stale_files(rendered, folder):
        differs = True
        print(f"{folder / name} is not rendered any more")
    return int(differs)


def stale_files(rendered: Rendered, folder: Path) -> list[str]:
    """Files that an earlier rendering wrote into the folder and this one does not, by their first line."""
    names = {document.file for document in rendered.documents}
    found = sorted(path.name for path in folder.glob(f"*{SUFFIX}") if path.name not in names)
    return [name for name in found if (_read(folder / name) or "").startswith(OURS)]


def _read(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None


def model_sizes(models: Sequence[Model], pool: Pool, options: SourceOptions) -> dict[str, ModelSize]:
    """Each model's size, by its name. Reads manifests and configs, never weights."""
    from ...handlers.pool.repository import has_kv
    from ...loader.artifact import open_artifact, open_model  # only where sizes are wanted
    from ...loader.sources.open import split_pin

    def local(address: str) -> str:
        return address if "://" in address else str(pool.folder / address)

    sizes: dict[str, ModelSize] = {}
    for model in models:
        addresses = [model.address(version) for version in model.named_versions() or ()]
        for address in addresses or ([] if model.is_versioned else [model.address()]):
            plain, digest = split_pin(address)
            own = options._replace(base=None if model.base is None else local(model.base))
            source = open_model(local(plain), own)
            manifest = open_artifact(source, digest=digest)
            before = sizes.get(model.name, ModelSize(0, has_kv=False))
            sizes[model.name] = ModelSize(
                max(before.weight_bytes, manifest.weight_bytes), before.has_kv or has_kv(source, manifest)
            )
    return sizes
