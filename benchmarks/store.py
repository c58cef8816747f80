"""The store that models are fetched from in a benchmark, and the models in it.

The server is a process of its own, so that its CPU time and its GIL are its own; it paces all connections together.
Model files are read once beforehand, so that they come from the page cache.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.support.store_certificate import write_certificate

MODELS = ("plain", "packed")


class StoreProcess:
    """Serves the folders below `root` as buckets, at `rate_mb_s` (10**6 bytes a second; 0: as fast as it can)."""

    def __init__(
        self, root: Path, *, rate_mb_s: float = 0.0, latency_ms: float = 0.0, tls: bool = False
    ) -> None:
        secret = write_certificate(root.parent / "store.pem") if tls else None
        self.certificate = _without_key(secret) if secret else None
        command = [sys.executable, "-m", "tests.support.store_server", "--root", str(root)]
        command += ["--latency-ms", str(latency_ms)]
        command += ["--rate-mb-s", str(rate_mb_s)] if rate_mb_s else []
        command += ["--tls-certificate", str(secret)] if secret else []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise SystemExit("the store server did not start")

    def environment(self) -> dict[str, str]:
        """What tells every S3 client where this store is, and to trust it."""
        names = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "CURL_CA_BUNDLE") if self.certificate else ()
        return store_variables(self.url) | dict.fromkeys(names, str(self.certificate))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def store_variables(url: str) -> dict[str, str]:
    """What tells every S3 client that its store is at `url`. Credentials are not checked there; without any, clients
    would look for an instance's role first.
    """
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


def prepare(like: str, root: Path) -> None:
    """Write and pack the model once, into the bucket `models` below `root`, and read it into the page cache."""
    plain, packed = root / "models" / "plain", root / "models" / "packed"
    if not plain.exists():
        _teneral("synth", str(plain), "--like", like)
    if not (packed / "manifest.json").exists():
        _teneral("pack", str(plain), str(packed), "--force")
    read_once(root)


def read_once(folder: Path) -> None:
    """Bring all files into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def stored_bytes(root: Path) -> dict[str, int]:
    """What fetching the whole model brings, by the way in which it is stored."""
    return {
        model: sum(path.stat().st_size for path in (root / "models" / model).rglob("*") if path.is_file())
        for model in MODELS
    }


def _without_key(path: Path) -> Path:
    """A file with the certificate alone: there are clients that crash when they are given the key as well."""
    certificate, _, _ = path.read_text().partition("-----BEGIN PRIVATE KEY-----")
    target = path.with_suffix(".certificate.pem")
    target.write_text(certificate)
    return target


def _teneral(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "teneral", *arguments], check=True)
