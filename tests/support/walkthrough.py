"""Documentation pages followed command by command, as a newcomer types them, with all that they reach on loopback.

    python -m tests.support.walkthrough     follows the tutorial and the README in a fresh clone: `scripts/newcomer`

A page's steps are the commands of its `sh` and indented blocks, in order, and the files that its blocks name in their
first line (`# summarise.py`). Servers run until the next one starts, as with Ctrl-C in a terminal. The Hub and the
object store are servers of the tests; `aws` and `docker` are fakes that record their calls.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.doc_fragments import ROOT, blocks
from tests.support.fake_tools import FakeTools
from tests.support.hub_server import HubServer, hub_variables
from tests.support.load import patience_s
from tests.support.ports import free_port
from tests.support.store_server import StoreServer

PAGES = (ROOT / "docs" / "tutorial.md", ROOT / "README.md")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
OTHERS = {"vllm"}  # programs that the pages name, and no newcomer has
BUCKETS = ("bucket", "my-models")
_FILE = re.compile(r"# ([\w.-]+\.\w+)\n")
_PLACEHOLDER = re.compile(r"…|[A-Z]{2,}")  # words such as MODEL and ARTIFACT, and what is left out
_NO_PLACEHOLDERS = {"AWS"}  # a user name of ECR
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class Step(NamedTuple):
    """A command, or the content of a file where `file` names one."""

    place: str
    text: str
    file: str = ""

    @property
    def program(self) -> str:
        words = shlex.split(self.text, comments=True) if not self.file else [""]
        return next((word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)), "")


def steps(page: Path) -> list[Step]:
    """Of the page, in order. Commands with placeholders are left out: they are forms, not commands."""
    found = []
    for block in blocks(page):
        if name := _FILE.match(block.text):
            found.append(Step(block.place, block.text, name[1]))
        elif block.language in ("", "sh"):
            found += [Step(block.place, command) for command in _commands(block.text)]
    return found


def _commands(text: str) -> Iterator[str]:
    command = ""
    for line in text.splitlines():
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # quotes go on in the next line
            command += "\n"
            continue
        if command.endswith("\\"):
            command = command[:-1]
            continue
        if words and not any(map(_PLACEHOLDER.fullmatch, {*words} - _NO_PLACEHOLDERS)):
            yield command
        command = ""


class Walk:
    """A shell in one folder. Raises AssertionError, with the output, for a command that fails."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        self._environment = {**environment, "PORT": str(self.port)}
        self._server: subprocess.Popen[bytes] | None = None
        self._log = folder / "server.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def follow(self, step: Step) -> str:
        """The output of the command; a server's is empty."""
        if step.file:
            (self.folder / step.file).write_text(step.text)
            return ""
        command = step.text.replace("localhost:8080", f"localhost:{self.port}")
        if step.program == "teneral" and shlex.split(step.text)[1] == "serve":
            self._serve(step.place, command)
            return ""
        command = re.sub(r"^curl ", "curl --silent --show-error --fail-with-body --max-time 120 ", command)
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience_s(600),
            check=False,
        )
        assert result.returncode == 0, f"{step.place}: {command}\n{result.stdout}\n{self._logged()}"
        return result.stdout

    def _serve(self, place: str, command: str) -> None:
        self._stop()
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + patience_s(60)
        while not _is_open(self.port):
            assert self._server.poll() is None, f"{place}: {command} ended:\n{self._logged()}"
            assert time.monotonic() < deadline_s, f"{place}: {command} opens no port:\n{self._logged()}"
            time.sleep(0.05)

    def _stop(self) -> None:
        """Ctrl-C, as in a terminal."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)
        try:
            status = self._server.wait(patience_s(30))
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
            raise
        finally:
            self._server = None
        assert status in (0, 130), f"the server ended with {status}:\n{self._logged()}"

    def _logged(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class World(NamedTuple):
    """Everything that the pages' commands reach."""

    environment: dict[str, str]
    tools: FakeTools


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """A Hub with the tutorial's model, an object store with the pages' buckets, and fakes of `aws` and `docker`, as the
    environment of a shell whose user has set up nothing else.
    """
    model = chat_model(folder / "hub")
    for bucket in BUCKETS:
        (folder / "store" / bucket).mkdir(parents=True)
    tools = FakeTools(folder / "tools", "aws", "docker")
    tools.answer("aws .*StackStatus", "CREATE_COMPLETE\n")
    with HubServer() as hub, StoreServer(folder / "store") as store:
        hub.repository(MODEL, model)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "TENERAL_", "HF_", "PYTHON"))
        }
        environment |= hub_variables(hub, folder / "hf-home")
        environment |= {
            "AWS_ENDPOINT_URL_S3": store.url,
            "AWS_ACCESS_KEY_ID": "AKIATEST",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "PATH": f"{tools.bin}:{os.environ['PATH']}",
        }
        yield World(environment, tools)


def chat_model(folder: Path) -> Path:
    """The demo's model with a chat template, which stands for the tutorial's."""
    shutil.copytree(ROOT / "demo" / "model", folder)
    path = folder / "chat_template.jinja"
    path.write_text(_CHAT_TEMPLATE)
    return folder


def main() -> None:
    """Follow the pages in a fresh clone of the last commit. Their own commands make the environment, which needs a
    package index.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        chat_model(clone / "my-model")
        with world(Path(folder) / "world") as (environment, _):
            environment["PATH"] = f"{clone / 'venv' / 'bin'}:{environment['PATH']}"
            environment.pop("VIRTUAL_ENV", None)
            with Walk(clone, environment) as walk:
                for step in itertools.chain.from_iterable(map(steps, PAGES)):
                    if step.program in OTHERS or step.text.startswith("make demo-chat"):
                        continue  # other programs, and what downloads 93 MB
                    print(f"{step.place}  {step.file or step.text}", flush=True)
                    walk.follow(step)
        print("every command succeeded; removing the clone", flush=True)


if __name__ == "__main__":
    main()
