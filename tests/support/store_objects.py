"""Buckets as folders and objects as files, for the store server.

An ETag is made of a file's size, time and inode, not of its content: a folder of gigabytes is served at once.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.store_http import RequestStream

UPLOADS = ".uploads"


class StoreError(Exception):
    """An S3 error: its HTTP status and its code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Stored:
    path: Path
    size_bytes: int
    etag: str  # with its quotes
    modified_unix_s: float


class Objects:
    """The objects below one root folder. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        (root / UPLOADS).mkdir(parents=True, exist_ok=True)

    def make_bucket(self, bucket: str) -> None:
        _check_path(bucket)
        (self.root / bucket).mkdir(exist_ok=True)

    def find(self, bucket: str, key: str) -> Stored:
        path = self._path(bucket, key)
        try:
            status = path.stat()
        except OSError as error:
            raise StoreError(404, "NoSuchKey") from error
        if path.is_dir():
            raise StoreError(404, "NoSuchKey")
        return Stored(path, status.st_size, _etag(status), status.st_mtime)

    def list(self, bucket: str, prefix: str) -> Iterator[tuple[str, Stored]]:
        """Keys that start with `prefix`, in their order."""
        base = self._path(bucket, "")
        keys = sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())
        for key in keys:
            if key.startswith(prefix):
                yield key, self.find(bucket, key)

    def put(
        self, bucket: str, key: str, stream: RequestStream, *, allowed: Callable[[str | None], bool]
    ) -> Stored:
        """Store the request's body, if `allowed` says so about the ETag of what is there (None: nothing)."""
        path = self._path(bucket, key)
        temporary = self.root / UPLOADS / secrets.token_hex(8)
        try:
            _save(stream, temporary)
            self._move_into_place(temporary, path, bucket, key, allowed)
        finally:
            temporary.unlink(missing_ok=True)
        return self.find(bucket, key)

    def delete(self, bucket: str, key: str) -> None:
        path = self._path(bucket, key)
        with self._lock, suppress(OSError):  # until a folder is not empty
            path.unlink(missing_ok=True)
            while (path := path.parent) != self.root / bucket:
                path.rmdir()

    def begin_upload(self, bucket: str) -> str:
        self._path(bucket, "")
        upload_id = secrets.token_hex(16)
        (self.root / UPLOADS / upload_id).mkdir()
        return upload_id

    def put_part(self, upload_id: str, number: int, stream: RequestStream) -> str:
        """The part's ETag."""
        path = self._upload(upload_id) / f"{number:05d}"
        _save(stream, path)
        return _etag(path.stat())

    def finish_upload(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        parts: list[tuple[int, str]],
        *,
        allowed: Callable[[str | None], bool],
    ) -> Stored:
        folder = self._upload(upload_id)
        whole = folder / "whole"
        with whole.open("wb") as target:
            for number, etag in parts:
                part = folder / f"{number:05d}"
                if not part.exists() or _etag(part.stat()) != etag:
                    raise StoreError(400, "InvalidPart")
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)
        self._move_into_place(whole, self._path(bucket, key), bucket, key, allowed)
        self.abort_upload(upload_id)
        return self.find(bucket, key)

    def abort_upload(self, upload_id: str) -> None:
        shutil.rmtree(self._upload(upload_id))

    def pending_uploads(self) -> list[str]:
        return sorted(os.listdir(self.root / UPLOADS))

    def _move_into_place(
        self, source: Path, path: Path, bucket: str, key: str, allowed: Callable[[str | None], bool]
    ) -> None:
        with self._lock:
            try:
                present: str | None = self.find(bucket, key).etag
            except StoreError:
                present = None
            if not allowed(present):
                raise StoreError(412, "PreconditionFailed")
            path.parent.mkdir(parents=True, exist_ok=True)
            source.replace(path)

    def _path(self, bucket: str, key: str) -> Path:
        _check_path(bucket)
        if not (self.root / bucket).is_dir():
            raise StoreError(404, "NoSuchBucket")
        if key:
            _check_path(key)
        return self.root / bucket / key

    def _upload(self, upload_id: str) -> Path:
        folder = self.root / UPLOADS / upload_id
        if not upload_id.isalnum() or not folder.is_dir():
            raise StoreError(404, "NoSuchUpload")
        return folder


def _check_path(path: str) -> None:
    if any(part in ("", ".", "..", UPLOADS) for part in path.split("/")) or "\0" in path:
        raise StoreError(400, "InvalidArgument")


def _save(stream: RequestStream, path: Path) -> None:
    with path.open("wb") as file:
        while data := stream.read_body(1 << 20):
            file.write(data)


def _etag(status: os.stat_result) -> str:
    content = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}".encode()
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'
