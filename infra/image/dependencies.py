"""The requirements that an image installs before the code: those of pyproject.toml, and of the chosen extras.

    python dependencies.py pyproject.toml torch,runpod               all but torch, one a line
    python dependencies.py pyproject.toml torch,runpod --torch       torch's alone, if any asks for it

torch is apart because its builds come from different indexes, where no file of `lock/` pins it. Runs on the image's
bare Python: standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib

APART = ("torch",)


def requirements(pyproject: str, extras: str) -> list[str]:
    """In the file's order. An extra may name extras of this project: `teneral[torch]`."""
    with open(pyproject, "rb") as file:
        project = tomllib.load(file)["project"]
    found, known = list(project["dependencies"]), project.get("optional-dependencies", {})
    waiting, seen = [name.strip() for name in extras.split(",") if name.strip()], set()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if name not in known:
            raise SystemExit(f"unknown extra {name!r}; there are {', '.join(sorted(known))}")
        for requirement in known[name]:
            nested = re.fullmatch(rf"{project['name']}\[([^\]]+)\]", requirement.strip())
            if nested:
                waiting += nested[1].split(",")
            elif requirement not in found:
                found.append(requirement)
    return found


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0].lower()


def main(arguments: list[str]) -> None:
    pyproject, extras, *flags = arguments
    wanted = "--torch" in flags
    for requirement in requirements(pyproject, extras):
        if (name_of(requirement) in APART) == wanted:
            sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
