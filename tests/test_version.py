"""The commit in `teneral --version`: of a checkout, of a build, and of neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from teneral import __version__, cli
from teneral.cli_version import COMMIT_FILE, built_from, version_line

ROOT = Path(__file__).resolve().parent.parent


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.com", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout with the package's folder."""
    folder = tmp_path / "src" / "teneral"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    return folder


def test_a_checkout_names_its_commit_and_that_files_were_changed(package: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert built_from(package) == commit
    (package / "__init__.py").write_text("changed = True\n")
    assert built_from(package) == f"{commit}-dirty"


def test_the_file_of_a_build_counts_before_git(package: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (package / COMMIT_FILE).write_text("0123456789ab\n")
    assert built_from(package) == "0123456789ab"
    (package / COMMIT_FILE).write_text("a" * 1000)
    assert len(built_from(package)) == 64


def test_the_repository_around_an_environment_is_not_the_programs(package: Path, tmp_path: Path) -> None:
    """Installed without a commit into `.venv` of some project that has its own repository."""
    installed = tmp_path / ".venv" / "lib" / "site-packages" / "teneral"
    installed.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    assert built_from(installed) == ""


def test_without_git_the_version_stands_alone(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package.parents[1] / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert built_from(package) == ""
    monkeypatch.setattr("teneral.cli_version.built_from", lambda folder: "")
    assert version_line() == f"teneral {__version__}"


def test_the_command_prints_version_and_commit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{version_line()}\n"


@pytest.mark.skipif(not built_from(ROOT / "src" / "teneral"), reason="the tests' own sources name no commit")
def test_a_build_writes_the_commit_into_the_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="pip builds with one of its own")
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=100)
    assert (tmp_path / "teneral" / COMMIT_FILE).read_text().strip() == built_from(ROOT / "src" / "teneral")
