"""`teneral pool check`: all that is wrong with a file, and what does not fit; the lines of reloads; doubted figures."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from tests.support.virtual_pool import VirtualPool

from teneral import cli
from teneral.handlers.pool.file import parse_pool, read_pool
from teneral.handlers.pool.measure import OtherWork, doubts
from teneral.handlers.pool.values import Code, Model, Place, PoolFileError

SEVERAL = """version = 1
[models.first]
source = "ftp://bucket/x"
min_warm = "one"
bufer = 1
[models.first.serve]
max_runing = 4
[models.second]
source = "/models/second"
min_warm = 5
[aliases]
other = "first"
third = "secnd"
[[patch]]
platform = "nomad"
"""


def check(folder: Path, text: str, *flags: str) -> int:
    (folder / "pool.toml").write_text(text)
    return cli.run(["pool", "check", str(folder / "pool.toml"), *flags])


def test_all_errors_of_a_file_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, SEVERAL) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("teneral: ")]
    found = [line.removeprefix(f"teneral: {tmp_path}/pool.toml:").split(": ")[:2] for line in lines]
    assert sorted(found) == sorted(
        [
            ["3", "models.first.source"],
            ["4", "models.first.min_warm"],
            ["5", "models.first.bufer"],
            ["7", "models.first.serve.max_runing"],
            ["10", "models.second.min_warm"],
            ["13", "aliases.third"],
            ["14", "patch[0]"],
            ["14", "patch[0]"],
            ["15", "patch[0].platform"],
        ]
    )
    assert check(tmp_path, SEVERAL, "--json") == 2
    assert len(json.loads(capsys.readouterr().out)["errors"]) == len(found)


def test_an_error_of_a_default_is_named_once() -> None:
    models = "".join(f'[models.m{number}]\nsource = "/m"\n' for number in range(5))
    with pytest.raises(PoolFileError) as caught:
        parse_pool(f"version = 1\n[defaults]\nmin_warm = -1\n{models}")
    assert (caught.value.place.key, caught.value.others) == ("defaults.min_warm", ())


@pytest.mark.parametrize(
    ("text", "line"), [("version = 1\n[models.m]\nsource = \n", 3), ('version = 1\nx = """', 2)]
)
def test_a_syntax_error_names_its_line(text: str, line: int) -> None:
    with pytest.raises(PoolFileError) as caught:
        parse_pool(text)
    assert str(caught.value).startswith(f"pool.toml:{line}: is not TOML: ")


def test_a_byte_order_mark_and_terabytes_are_read(tmp_path: Path) -> None:
    text = 'version = 1\n[models.m]\nsource = "/m"\n[node]\nmemory = "1TiB"\n'
    (tmp_path / "pool.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_pool(tmp_path / "pool.toml").node.memory_bytes == 1 << 40


def test_what_is_not_there_and_what_does_not_fit_is_a_warning(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = '[models.m]\nsource = "nowhere/m"\nmin_warm = 2\n'
    assert check(tmp_path, f'version = 1\n{table}[node]\nmemory = "100MiB"\n') == 0
    warnings = capsys.readouterr().err
    assert f"models.m.source: is not there: {tmp_path}/nowhere/m [W6]" in warnings
    assert "node.memory: is 100 MiB, but one instance of m needs at least 250 MiB [W7]" in warnings
    assert "what is to be warm needs at least 500 MiB: 2 × 250 MiB of m [W7]" in warnings
    assert check(tmp_path, f"version = 1\n{table}", "--strict") == 2
    capsys.readouterr()

    shutil.copytree(models / "repository", tmp_path / "repository")
    (tmp_path / "repository" / "3").mkdir()
    text = (
        'version = 1\n[models.m]\nsource = "repository/{version}"\nmin_warm = 1\n[node]\nmemory = "300MiB"\n'
    )
    assert check(tmp_path, text) == 0
    assert capsys.readouterr().err == "", "it may fit"
    assert check(tmp_path, text, "--deep") == 0
    warnings = capsys.readouterr().err
    assert "models.m.source: version 3: " in warnings
    assert "one instance of m needs 5" in warnings, "its weights, 256 MiB of KV and 250 MiB"


def test_a_reload_is_logged_once_and_so_is_a_bad_file(caplog: pytest.LogCaptureFixture) -> None:
    pool = VirtualPool([Model("m", "/m/{version}")], memory_bytes=1 << 30)
    caplog.set_level(logging.INFO, logger="teneral.pool")
    pool.reload()
    assert caplog.messages == [], "nothing has changed"
    pool.reload([Model("m", "/m/{version}", priority=1)])
    assert caplog.messages == ["pool.toml was read again: 1 models"]
    caplog.clear()
    pool.mistake = PoolFileError(Code.E1, Place("pool.toml", "x", 3), "is not a known key")
    for _ in range(3):
        pool.reload()
    assert len(caplog.messages) == 1
    assert "pool.toml:3: x: is not a known key" in caplog.text
    caplog.clear()
    pool.mistake = None
    pool.store.away_until_s = pool.loop.now_s + 100.0
    for _ in range(3):
        pool.reload()
    assert caplog.messages == ["pool.toml was read again: 1 models", "m: the store does not answer"]
    pool.close()


def test_figures_of_a_busy_machine_are_doubted() -> None:
    assert list(doubts(0.05, {"1": 100.0, "2": 190.0, "4": 185.0})) == []
    busy, slower = doubts(1.3, {"2": 2463.0, "4": 1890.0, "8": 2485.0})
    assert "other processes used 1.3 of" in busy
    assert "1,890 tokens/s in batches of 4 are fewer than 2,463 in batches of 2" in slower
    assert OtherWork().cores() >= 0.0


def test_the_shares_of_a_gpu_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"a": 'device = "cuda"\ndevice_percent = 60', "b": 'device = "cuda:0"\ndevice_percent = 50'}

    def text(**serves: str) -> str:
        tables = (
            f'[models.{name}]\nsource = "/models/{name}"\nmin_warm = 1\n[models.{name}.serve]\n{serve}\n'
            for name, serve in serves.items()
        )
        return "version = 1\n" + "".join(tables)

    assert check(tmp_path, text(**shares)) == 0
    err = capsys.readouterr().err
    assert "models: take 110 percent of cuda:0 where all their min_warm instances run [W7]" in err
    assert check(tmp_path, text(**shares, c='device = "cuda:0"', d="device_percent = 5")) == 2
    err = capsys.readouterr().err
    assert "models.c.serve.device: is cuda:0, of which b takes a share" in err
    assert "models.d.serve.device_percent: needs the device that is shared" in err
