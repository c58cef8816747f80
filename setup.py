"""The build's steps that pyproject.toml cannot name: the native core (`build_native.py`), and the commit that
`teneral --version` prints.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a build backend does not

import build_native

PACKAGE = build_native.ROOT / "src" / "teneral"


class BuildNative(Command):
    """Compiles libraries into the package, or next to its sources in an editable install."""

    description = "compile the native core"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False
        self.built: list[Path] = []

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        assert self.build_lib is not None
        folder = Path(self.build_lib, "teneral", build_native.LIBRARY_DIR)
        if self.editable_mode:
            folder = build_native.ROOT / build_native.LIBRARY_DIR
        elif folder.exists():  # of an earlier build, perhaps for another machine
            shutil.rmtree(folder)
        self.built = build_native.build(folder)

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(build_native.ROOT)) for path in build_native.ROOT.glob("native/*.[ch]")]

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [str(path) for path in self.built]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildWithNative(build):
    sub_commands: ClassVar[list[tuple[str, Any]]] = [*build.sub_commands, ("build_native", None)]


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # which asks git whenever the version is asked for
            write_commit(Path(self.build_lib, "teneral"))


class SourcesWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir, "src", "teneral"))


def write_commit(folder: Path) -> None:
    """Write the file that names the commit into a copy of the package, where git or the sources name it."""
    # By its path: the package itself imports what is not installed here.
    version = runpy.run_path(str(PACKAGE / "cli_version.py"))
    if commit := version["built_from"](PACKAGE):
        (folder / version["COMMIT_FILE"]).write_text(f"{commit}\n", encoding="ascii")


class PlatformWheel(bdist_wheel):
    """A wheel for every Python on one platform; for all platforms where it holds no library."""

    def get_tag(self) -> tuple[str, str, str]:
        step = self.get_finalized_command("build_native")
        return ("py3", "none", build_native.wheel_platform() if step.built else "any")


setup(
    cmdclass={
        "build": BuildWithNative,
        "build_native": BuildNative,
        "build_py": BuildWithCommit,
        "bdist_wheel": PlatformWheel,
        "sdist": SourcesWithCommit,
    }
)
