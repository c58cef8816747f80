"""Mistakes of users at the command line: one clear message, a code of its own, and nothing
half-written.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.loader import errors as loading
from teneral.runtime.config import SETTINGS
from teneral.runtime.synth import synthesize

DEMO_MODEL = str(Path(__file__).parents[1] / "demo" / "model")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("llama", directory)
    return directory


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifact") / "tiny"
    assert cli.run(["pack", str(checkpoint), str(directory), "--quiet"]) == 0
    return directory


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """Run a command that must fail with this code, without a traceback. Returns its standard error."""
    capsys.readouterr()
    assert cli.run(list(arguments)) == code
    printed = capsys.readouterr().err
    assert printed.startswith("teneral: ")
    assert "Traceback" not in printed
    return printed


TIGHT = """
import resource, sys
from teneral.cli import run
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 20),) * 2)
sys.exit(run(["serve", sys.argv[1], "--port", "0"]))
"""


def test_a_limit_on_memory_that_no_library_fits_in_is_named(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TIGHT, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        check=False,
    )
    assert done.returncode == 16, done.stderr
    assert "no more memory" in done.stderr
    assert "ulimit -v" in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(2, "No such file"), False),
        (ImportError("x.so: failed to map segment from shared object"), True),
        (ImportError("No module named 'x'"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("a defect"), False),
    ],
)
def test_errors_of_a_system_without_memory_are_recognised(error: Exception, is_it: bool) -> None:
    assert (loading.memory_error(error) is not None) is is_it


def test_packing_inspecting_verifying_and_unpacking_agree(
    checkpoint: Path, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(artifact), "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["totals"]["tensors"] > 0
    assert cli.run(["inspect", str(artifact)]) == 0
    shown = capsys.readouterr().out
    assert "layers.0" in shown
    assert f"{description['model']['family']}, {description['model']['kind']}, up to" in shown
    assert description["model"]["native_refuses"] is None
    assert cli.run(["verify", str(artifact), "--quiet"]) == 0
    assert cli.run(["unpack", str(artifact), str(tmp_path / "back"), "--quiet"]) == 0
    assert (tmp_path / "back" / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()


def test_a_missing_artifact_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = fails(capsys, 3, "inspect", str(tmp_path / "nowhere"))
    assert "nowhere" in printed


def test_a_truncated_manifest_is_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = copy / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert "manifest" in fails(capsys, 9, "inspect", str(copy))


def test_a_wrong_pin_is_refused(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = fails(capsys, 8, "inspect", f"{artifact}@b3:{'0' * 64}")
    assert "pinned" in printed


def test_a_damaged_part_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blob = next(copy.rglob("draft-000.bin"))
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    assert cli.run(["verify", str(copy), "--quiet"]) == 8
    assert "draft" in capsys.readouterr().out


def test_packing_over_an_artifact_needs_force(
    checkpoint: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in copy.rglob("*"))
    assert "--force" in fails(capsys, 6, "pack", str(checkpoint), str(copy), "--quiet")
    assert sorted(path.name for path in copy.rglob("*")) == before
    assert cli.run(["pack", str(checkpoint), str(copy), "--force", "--quiet"]) == 0
    assert cli.run(["verify", str(copy), "--quiet"]) == 0


def test_a_directory_without_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("no weights here")
    printed = fails(capsys, 10, "pack", str(tmp_path / "in"), str(tmp_path / "out"), "--quiet")
    assert "safetensors" in printed
    assert not (tmp_path / "out").exists()


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = json.dumps({"x": {"dtype": "F3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert "F3" in fails(capsys, 10, "pack", str(tmp_path), str(tmp_path / "out"), "--quiet")


def change_config(directory: Path, target: Path, **values: Any) -> Path:
    changed = Path(shutil.copytree(directory, target))
    config = json.loads((changed / "config.json").read_text()) | values
    (changed / "config.json").write_text(json.dumps(config))
    return changed


def test_an_unknown_architecture_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = change_config(
        checkpoint, tmp_path / "m", model_type="mamba9", architectures=["Mamba9ForCausalLM"]
    )
    assert "mamba9" in fails(capsys, 12, "serve", str(model), "--port", "0").lower()


def test_a_missing_tensor_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    model = change_config(checkpoint, tmp_path / "m", num_hidden_layers=layers + 1)
    assert f"layers.{layers}" in fails(capsys, 12, "serve", str(model), "--port", "0")


def test_a_port_in_use_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        printed = fails(capsys, 13, "serve", str(artifact), "--host", "127.0.0.1", "--port", str(port))
    assert str(port) in printed


def test_no_credentials_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    printed = fails(capsys, 4, "inspect", "s3://bucket/model", "--endpoint-url", "http://127.0.0.1:9")
    assert "credentials" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "m", "--port", "99999"),
        ("serve", "m", "--max-queued", "-1"),
        ("serve",),
        ("invoke", "m:f", "--model", "m", "--timeout-s", "-1"),
        ("synth", "x", "--like", "gpt-9"),
        ("serve", DEMO_MODEL, "--host", "203.0.113.1", "--port", "0"),  # of documentation, of no machine
        ("inspect", "ftp://host/model"),
    ],
)
def test_an_invalid_flag_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, 2, *arguments)


def test_invoke_prints_what_a_handler_yields_line_by_line(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def handler(event, context):\n"
        "    yield {'got': event}\n"
        "    yield {'tokens': len(context.model.tokenize('hello'))}\n"
    )
    (tmp_path / "event.json").write_text('{"a": 1}')
    code = cli.run(
        [
            "invoke",
            f"{tmp_path}/mine.py:handler",
            "--model",
            str(artifact),
            "--event",
            str(tmp_path / "event.json"),
        ]
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert lines[0] == {"got": {"a": 1}}
    assert lines[1]["tokens"] > 0


def test_a_handler_that_is_not_there_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.py" in fails(capsys, 14, "invoke", "nowhere.py:handler", "--model", str(artifact))


def test_what_a_handler_raises_is_shown_and_debug_is_named_where_its_traceback_is_not(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("def handler(event, context):\n    return event['missing_key']\n")
    (tmp_path / "event.json").write_text("{}")
    arguments = ("--model", str(artifact), "--event", str(tmp_path / "event.json"))
    printed = fails(capsys, 14, "invoke", f"{tmp_path}/broken.py:handler", *arguments)
    assert "KeyError" in printed
    assert "--debug" not in printed
    assert "return event['missing_key']" in caplog.text  # without a logging configuration, on standard error
    (tmp_path / "unfinished.py").write_text("import nothing_of_this_name\n")
    assert "--debug" in fails(capsys, 14, "invoke", f"{tmp_path}/unfinished.py:handler", *arguments)


def test_an_event_that_is_not_json_is_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "event.json").write_text("{")
    arguments = ("--model", str(artifact), "--event", str(tmp_path / "event.json"))
    printed = fails(capsys, 2, "invoke", "teneral.handlers.generate:handler", *arguments)
    assert "event.json" in printed


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 99}', "<html>"])
def test_a_file_that_is_no_timeline_is_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text(content)
    assert "internal error" not in fails(capsys, 9, "timeline", str(tmp_path / "t.json"))


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("pack", "unpack", "verify", "inspect", "serve", "invoke", "timeline", "synth"):
        with pytest.raises(SystemExit) as ended:
            cli.run([command, "--help"])
        assert ended.value.code == 0
        assert "usage: teneral" in capsys.readouterr().out


def test_a_seed_below_zero_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["synth", str(tmp_path / "x"), "--like", "minilm", "--seed", "-1"])
    assert ended.value.code == 2
    assert "whole number" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [("--timeout-s", "0.1"), ("--request-timeout-s", "0.1")])
def test_a_handler_whose_time_is_up_has_a_code_of_its_own(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: tuple[str, str]
) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef handler(event, context):\n"
        "    for _ in range(500):\n        time.sleep(0.01)\n        if context.cancelled: return\n"
    )
    (tmp_path / "event.json").write_text("{}")
    arguments = ("--model", str(artifact), "--event", str(tmp_path / "event.json"), *flag)
    assert "deadline" in fails(capsys, 14, "invoke", f"{tmp_path}/slow.py:handler", *arguments)


def test_a_bucket_in_another_region_is_the_stores_answer() -> None:
    assert cli.exit_code(loading.SourceError("the bucket is in another region")) == 5
    assert cli.exit_code(loading.NotFoundError("no such bucket")) == 3


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from teneral.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["teneral.cli", "teneral.cli_flags", "argparse", "teneral.loader.errors"])
def test_ctrl_c_while_the_command_line_is_imported_shows_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience_s(60), check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_while_the_command_line_is_read_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse", interrupted)
    assert cli.run(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_output_that_cannot_be_written_is_an_error(artifact: Path) -> None:
    command = [sys.executable, "-m", "teneral", "inspect", str(artifact)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=patience_s(60), check=False
        )
    assert (ended.returncode, ended.stderr) == (7, "teneral: no space is left where the output is written\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_packing_that_is_ended_by_a_signal_leaves_nothing_behind(
    tmp_path: Path, number: int, code: int
) -> None:
    synthesize("qwen2.5-0.5b", tmp_path / "model", num_layers=1)
    command = [
        sys.executable,
        "-m",
        "teneral",
        "pack",
        str(tmp_path / "model"),
        str(tmp_path / "out"),
        "--quiet",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob("out/**/*.tmp")):
            time.sleep(0.002)
        process.send_signal(number)
        printed = process.communicate(timeout=patience_s(60))[1]
    assert process.returncode == code
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    assert "COMMAND" in capsys.readouterr().out


def test_a_short_flag_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["-V"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("teneral ")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["srve"], "serve"),
        (["serve", "--conections", "3"], "--connections"),
        (["inspect", "--jsn", "model"], "--json"),
        (["pool", "chek", "pool.toml"], "check"),
        (["serve", "--conections=3"], "--connections"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_one_that_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"did you mean {meant}?" in error
    assert "--help lists what it takes" in error
    assert len(error.splitlines()) == 2


def test_help_of_serve_shows_what_people_use_and_help_all_every_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def flags_of(arguments: list[str]) -> set[str]:
        with pytest.raises(SystemExit):
            cli.run(arguments)
        return set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))

    usual, every = flags_of(["serve", "--help"]), flags_of(["serve", "--help-all"])
    assert len(usual - {"--help"}) <= 15
    assert {f"--{name.replace('_', '-')}" for name in SETTINGS if name != "model"} <= every
    assert usual < every


def test_results_are_printed_for_machines_too(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", str(artifact), "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert len(bytes.fromhex(report["digest"])) == 32
    assert cli.run(["gc", str(artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == []


@pytest.mark.parametrize(
    ("words", "completed"),
    [(["ser"], "serve"), (["serve", "--kv-h"], "--kv-host-bytes"), (["pool", "che"], "check")],
)
def test_bash_completes_commands_flags_and_actions(
    words: list[str], completed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    script += (
        f'COMP_WORDS=(teneral {" ".join(words)}); COMP_CWORD={len(words)}; _teneral; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert completed in done.stdout.split()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["completion", shell]) == 0
    assert "serve" in capsys.readouterr().out
