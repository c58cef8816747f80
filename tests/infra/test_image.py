"""The image: what its Dockerfile installs, and the built one as a platform starts it (`scripts/conformance-image`)."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.support.ports import free_port
from tests.support.runpod_service import environment, runpod_service

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "infra" / "image"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
BUILT = os.environ.get("TENERAL_TEST_IMAGE", "")
VARIANTS = {"server": BUILT} | {
    name: os.environ.get(f"TENERAL_TEST_IMAGE_{name.upper()}", "") for name in ("lambda", "runpod")
}
CONFIG = os.environ.get("TENERAL_TEST_IMAGE_CONFIG", "")
needs_image = pytest.mark.skipif(not BUILT, reason="needs a built image: scripts/conformance-image")


def dependencies(extras: str, *flags: str) -> list[str]:
    program = [sys.executable, IMAGE / "dependencies.py", ROOT / "pyproject.toml", extras, *flags]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def docker_builds() -> list[tuple[str, list[str]]]:
    """The words of each `docker build` in the Dockerfile's head and in the pages."""
    pages = [ROOT / "Dockerfile", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        (f"{page.relative_to(ROOT)}:{number}", command.partition("   ")[0].split())
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for command in re.findall(r"docker build [^`#]*", line)
    ]


def test_an_image_installs_what_the_project_asks_for_and_the_extras():
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    assert sorted([*dependencies(""), *dependencies("", "--torch")]) == sorted(project["dependencies"])
    assert set(project["optional-dependencies"]["runpod"]) <= set(dependencies("runpod"))
    assert not [line for line in dependencies("runpod") if line.startswith("torch")]


def test_an_extra_that_is_unknown_ends_the_build():
    with pytest.raises(subprocess.CalledProcessError):
        dependencies("cuda99")


@pytest.mark.parametrize("extras", ["base", "ray", "runpod", "cuda13", "cuda13-direct"])
def test_the_lock_pins_each_requirement_within_its_range_and_by_its_hash(extras):
    """After a change of dependencies: scripts/lock."""
    text = (IMAGE / "lock" / f"{extras}.txt").read_text()
    pins = dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))
    torch = dependencies(extras, "--torch") if extras == "cuda13" else []
    for line in [*dependencies("" if extras == "base" else extras), *torch]:
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(pins[name]), f"{line}: {pins.get(name)} is locked"
    assert text.count("==") <= text.count("--hash=sha256:")
    assert ("\ntorch==" in text) == (extras == "cuda13")


def test_the_image_has_no_root_a_probe_and_a_process_1_that_obeys():
    assert "USER 10001:10001" in DOCKERFILE
    assert 'ENTRYPOINT ["tini", "--", "teneral"]' in DOCKERFILE
    assert "HEALTHCHECK --interval" in DOCKERFILE
    assert stages() == [
        *("system", "wanted", "dependencies", "code", "kernels"),
        *("serving", "lambda", "runpod", "listening", "direct", "server"),
    ]
    dependencies_stage = DOCKERFILE.partition(" AS dependencies")[2].partition("\nFROM ")[0]
    # A change of code, or of anything in pyproject.toml but the requirements, must not change this layer.
    assert "COPY . ." not in dependencies_stage
    assert "pyproject.toml" not in dependencies_stage


def stages() -> list[str]:
    return re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize(("place", "words"), docker_builds(), ids=[place for place, _ in docker_builds()])
def test_the_pages_build_targets_and_extras_that_there_are(place, words):
    targets = [words[number + 1] for number, word in enumerate(words) if word == "--target"]
    assert set(targets) <= set(stages())
    given = dict(
        words[number + 1].split("=", 1) for number, word in enumerate(words) if word == "--build-arg"
    )
    assert set(given) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    dependencies(given.get("EXTRAS", ""))  # ends with an error for one that is unknown


class Answering(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status if self.path == "/livez" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_is_what_livez_says(status, code, monkeypatch):
    monkeypatch.setattr(Answering, "status", status)
    server = http.server.HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert health(server.server_port) == code
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert health(server.server_port) == 1


def health(port: int) -> int:
    program = [sys.executable, "-IS", IMAGE / "healthcheck.py"]
    return subprocess.run(program, env={"PORT": str(port)}, capture_output=True, timeout=30).returncode


def test_the_health_check_needs_no_packages():
    spec = importlib.util.spec_from_file_location("healthcheck", IMAGE / "healthcheck.py")
    assert spec is not None
    assert (
        set(re.findall(r"^import (\w+)", (IMAGE / "healthcheck.py").read_text(), re.MULTILINE))
        <= sys.stdlib_module_names
    )


def test_each_stage_with_an_entry_point_has_a_command():
    """Builders drop the command of the stage before, where a stage sets an entry point."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    assert sum("ENTRYPOINT" in stage for stage in stages) == 2
    for stage in stages:
        assert stage.find("\nCMD") > stage.find("\nENTRYPOINT") or "ENTRYPOINT" not in stage


# The built image

LOAD_ALL = """
import ctypes, glob, os
libraries = glob.glob("/opt/teneral/lib/python*/site-packages/**/*.so", recursive=True)
for library in libraries:
    ctypes.CDLL(library, mode=os.RTLD_NOW)
print(len(libraries))
"""


def inside(*command: str) -> str:
    """The output of a command in the image, by root, as `RUN` in a derived image has it."""
    path = "/opt/teneral-code/bin:/opt/teneral/bin:/usr/local/bin:/usr/bin:/bin"
    program = ["chroot", BUILT, "env", "-i", f"PATH={path}", *command]
    result = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def start(
    *arguments: str, port: int, image: str = "server", variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the container like a platform: read-only but for /tmp, as user 10001, as process 1."""
    built = VARIANTS[image]
    config = json.loads(Path(CONFIG, f"{image}.json").read_text())["OCIv1"]["config"]
    given = {"PORT": str(port), "OMP_NUM_THREADS": "1", **(variables or {})}
    settings = [*config["Env"], *(f"{name}={value}" for name, value in given.items())]
    command = [*config["Entrypoint"], *arguments]
    script = f"""
set -e
mount --make-rprivate /
mount --bind {built} {built}
mount -t proc proc {built}/proc
mount -t tmpfs tmpfs {built}/tmp
mount --bind {ROOT}/demo/model {built}/mnt
[ -e {built}/dev/null ] || mount --bind /dev {built}/dev
mkdir -p {built}/dev/shm
mount -t tmpfs tmpfs {built}/dev/shm
mount -o remount,ro,bind {built}
exec chroot --userspec={config["User"]} {built} env -i "$@"
"""
    return subprocess.Popen(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
            "sh",
            *settings,
            *command,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def process_1(outer: subprocess.Popen[bytes]) -> int:
    """The pid, out here, of process 1 in there, once it is the image's entry point: an init, or the program itself."""
    for _ in range(2000):
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() in ("tini", "teneral"):
            return int(children[0])
        time.sleep(0.005)
    raise AssertionError("the entry point did not start")


@needs_image
@pytest.mark.timeout(300)
def test_the_built_image_answers_is_healthy_and_ends_on_sigterm():
    port = free_port()
    outer = start("serve", "/mnt", "--name", "demo", port=port)
    try:
        first = process_1(outer)
        body = json.dumps({"model": "demo", "prompt": "def f", "max_tokens": 4}).encode()
        answer = None
        for _ in range(600):
            try:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=100) as response:
                    answer = json.load(response)
                break
            except OSError:
                assert outer.poll() is None, outer.stdout.read().decode()[-2000:]
                time.sleep(0.1)
        assert answer["choices"][0]["text"]
        check = json.loads(Path(CONFIG, "server.json").read_text())["Docker"]["config"].get("Healthcheck")
        assert check is None or check["Test"][0] == "CMD"  # OCI's format has none; Docker's has
        assert health(port) == 0
        status = Path(f"/proc/{first}/status").read_text()
        assert re.search(r"^Uid:\s+10001\s+10001", status, re.MULTILINE)
        os.kill(first, signal.SIGTERM)
        assert outer.wait(60) in (0, 143)
        assert health(port) == 1
    finally:
        outer.kill()
        outer.wait()
        outer.stdout.close()


@needs_image
@pytest.mark.parametrize("delay_s", [0.05, 0.2, 1.0])
def test_sigterm_is_obeyed_while_the_server_is_still_being_imported(delay_s):
    outer = start("serve", "/mnt", port=free_port())
    try:
        first = process_1(outer)
        time.sleep(delay_s)
        os.kill(first, signal.SIGTERM)
        assert outer.wait(30) in (0, 143)
    finally:
        outer.kill()
        outer.wait()
        outer.stdout.close()


@needs_image
def test_a_release_changes_small_layers_only():
    def size(folder: str) -> int:
        return sum(path.stat().st_size for path in Path(BUILT, folder).rglob("*") if path.is_file())

    assert size("opt/teneral-code") < 32 << 20
    assert not list(Path(BUILT, "opt/teneral/lib").glob("python*/site-packages/teneral/"))


@needs_image
def test_the_image_takes_less_than_150_mb_beyond_its_base():
    """Of the disk, as `du` counts; without a GPU's kernels and other extras."""
    if any(Path(BUILT, "opt/teneral/lib").glob("python*/site-packages/torch")):
        pytest.skip("the image of another extra")
    paths = [path for folder in ("teneral", "teneral-code") for path in Path(BUILT, "opt", folder).rglob("*")]
    assert sum(path.lstat().st_blocks * 512 for path in paths) < 150_000_000


@needs_image
def test_extension_modules_load_without_their_symbols():
    assert int(inside("python", "-c", LOAD_ALL)) > 30
    product = "import numpy; a = numpy.eye(64) * 2; print(int((numpy.linalg.inv(a) @ a).sum()))"
    assert inside("python", "-c", product) == "64\n"


@needs_image
@pytest.mark.parametrize("pip", [("pip",), ("pip3",), ("python", "-m", "pip")])
def test_a_derived_image_installs_packages_where_handlers_find_them(pip):
    name = "teneral_added"
    wheel = Path(BUILT, "tmp", f"{name}-1.0-py3-none-any.whl")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    inside(*pip, "install", "--no-index", f"/tmp/{wheel.name}")
    assert inside("python", "-c", f"import {name}; print({name}.__file__)").startswith("/opt/teneral/lib/")
    inside(*pip, "uninstall", "--yes", name)
    wheel.unlink()


@needs_image
def test_the_bill_of_materials_names_what_is_installed():
    bill = json.loads(Path(BUILT, "opt/teneral/sbom.cdx.json").read_text())
    (site,) = Path(BUILT, "opt/teneral/lib").glob("python*/site-packages")
    there = {(each.metadata["Name"].lower(), each.version) for each in distributions(path=[str(site)])}
    listed = {(each["name"], each["version"]) for each in bill["components"]}
    assert {(re.sub("[-_.]+", "-", name), version) for name, version in there} <= listed
    names = {name for name, _ in listed}
    assert "tini" in names
    assert not names & {"huggingface-hub", "hf-xet", "pip", "binutils"}


@needs_image
def test_lambdas_variant_has_neither_init_nor_port():
    config = json.loads(Path(CONFIG, "lambda.json").read_text())["OCIv1"]["config"]
    assert config["Entrypoint"] == ["teneral"]
    assert config["Cmd"] == ["serve"]
    assert "ExposedPorts" not in config


@needs_image
@pytest.mark.timeout(300)
def test_runpods_variant_works_on_a_job_of_its_queue():
    with runpod_service() as (service, url):
        outer = start("serve", "/mnt", port=free_port(), image="runpod", variables=environment(url))
        try:
            first = process_1(outer)
            service.submit("one", {"prompt": "def f", "max_tokens": 4})
            service.wait(lambda: "one" in service.outputs or outer.poll() is not None, 200.0)
            assert "output" in service.outputs.get("one", {}), outer.stdout.read().decode()[-2000:]
            os.kill(first, signal.SIGTERM)
            assert outer.wait(60) in (0, 143)
        finally:
            outer.kill()
            outer.wait()
            outer.stdout.close()
