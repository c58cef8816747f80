"""A benchmark's store, and the models in it.

The server is a process of its own, so that its CPU time and its GIL are its own; it paces all connections together.
Model files are read beforehand, so that they come from the page cache; before each run where a long benchmark shares a
virtual machine, whose host may take that memory back within minutes.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

MODELS = ("plain", "packed")
FOR_PEERS = "tensorized"


class StoreProcess:
    """Serves the folders below `root` as buckets, at `rate_mb_s` (10**6 bytes a second; 0: as fast as it can)."""

    def __init__(
        self, root: Path, *, rate_mb_s: float = 0.0, latency_ms: float = 0.0, tls: bool = False
    ) -> None:
        secret: Path | None = None
        if tls:
            from tests.support.store_certificate import write_certificate  # its library is not everywhere

            secret = write_certificate(root.parent / "store.pem")
        self.certificate = without_key(secret) if secret else None
        command = [sys.executable, "-m", "tests.support.store_server", "--root", str(root)]
        command += ["--latency-ms", str(latency_ms), "--tell-sent"]
        command += ["--rate-mb-s", str(rate_mb_s)] if rate_mb_s else []
        command += ["--tls-certificate", str(secret)] if secret else []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise SystemExit("the store server did not start")

    def environment(self) -> dict[str, str]:
        """The variables that direct every S3 client to this store, and make it trust it."""
        names = ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "CURL_CA_BUNDLE") if self.certificate else ()
        return store_variables(self.url) | dict.fromkeys(names, str(self.certificate))

    def sent_bytes(self) -> int:
        """Bytes sent to the network so far, also of unfinished answers. Takes a millisecond or so."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def store_variables(url: str) -> dict[str, str]:
    """The variables that direct every S3 client to the store at `url`. The store checks no credentials; without any,
    clients would look for an instance's role first.
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


def prepare(like: str, root: Path, *, residual_scale: float = 1.0, num_layers: int | None = None) -> None:
    """Write and pack the model once, into the bucket `models` below `root`, and read it into the page cache.

    `num_layers` are fewer than it has; None: all.
    """
    plain, packed = root / "models" / "plain", root / "models" / "packed"
    if not plain.exists():
        layers = [] if num_layers is None else ["--layers", str(num_layers)]
        _teneral("synth", str(plain), "--like", like, "--residual-scale", str(residual_scale), *layers)
    if not (packed / "manifest.json").exists():
        _teneral("pack", str(plain), str(packed), "--force")
    read_once(root)


def prepare_own(model: Path, root: Path) -> None:
    """The same with a model of one's own: a folder of safetensors, which is packed here, or an artifact in a folder, of
    which there is no plain form then. Raises SystemExit for what is neither.
    """
    is_artifact = (model / "manifest.json").is_file()
    if not is_artifact and not (model / "config.json").is_file():
        raise SystemExit(f"{model} is neither an artifact nor a model directory")
    _link(model, root / "models" / ("packed" if is_artifact else "plain"))
    packed = root / "models" / "packed"
    if not (packed / "manifest.json").exists():
        _teneral("pack", str(model), str(packed), "--force")
    read_once(root)


def folder_of(model: Path, work: Path) -> Path:
    """The model's folder below `work`: two models of one name have two."""
    path = model.resolve()
    return work / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _link(source: Path, target: Path) -> None:
    """Links to the files, in folders of its own: listing a bucket does not go into folders that are links."""
    shutil.rmtree(target, ignore_errors=True)
    for path in source.rglob("*"):
        if path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())


def read_once(folder: Path) -> None:
    """Bring all files into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def warm(root: Path) -> None:
    """Bring the models into the page cache that systems are compared over."""
    for model in (*MODELS, FOR_PEERS):
        read_once(root / "models" / model)


def stored_bytes(root: Path) -> dict[str, int]:
    """Bytes of a fetch of the whole model, by the way in which it is stored."""
    return {
        model: sum(path.stat().st_size for path in (root / "models" / model).rglob("*") if path.is_file())
        for model in MODELS
    }


def draft_bytes(root: Path) -> int:
    """Bytes of the packed model's draft: all but the last tier's parts."""
    from teneral.loader.artifact import open_artifact
    from teneral.loader.format.manifest import Tier
    from teneral.loader.sources.open import open_source

    manifest = open_artifact(open_source(str(root / "models" / "packed")))
    refine_bytes = sum(part.size_bytes for part in manifest.parts if part.tier is Tier.REFINE)
    return stored_bytes(root)["packed"] - refine_bytes


def without_key(path: Path) -> Path:
    """A file with the certificate alone: there are clients that crash when they are given the key as well."""
    certificate, _, _ = path.read_text().partition("-----BEGIN PRIVATE KEY-----")
    target = path.with_suffix(".certificate.pem")
    target.write_text(certificate)
    return target


def _teneral(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "teneral", *arguments], check=True)
