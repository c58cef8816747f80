"""The bill of materials of an image, or of a lock file: CycloneDX 1.6 as JSON.

    python sbom.py lock/base.txt                                     the locked packages, with the hashes of their files
    python sbom.py lock/base.txt --installed FOLDER --system         what an image holds: the distributions in FOLDER
                                                                     (with the locked hashes), and Debian's packages

The same input gives the same bytes. Runs on the image's bare Python: standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import uuid
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]

_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)\s*(?:;\s*([^\\]*?))?\s*\\?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_DPKG = "${binary:Package}\t${Version}\t${Architecture}\n"
_IDS = uuid.UUID("6b0f2d0e-3c55-4c1e-9b5f-6a2f0c6f4f0a")


def read_lock(text: str) -> list[Component]:
    """A component a pin; a package with several pins (by markers) is several."""
    found: list[Component] = []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if hashed := _HASH.search(line):
            if not found:
                raise SystemExit(f"a hash without a pin: {line.strip()[:80]}")
            found[-1]["externalReferences"][0]["hashes"].append({"alg": "SHA-256", "content": hashed[1]})
            continue
        pin = _PIN.fullmatch(line.strip())
        if pin is None:
            raise SystemExit(f"not a pinned requirement: {line.strip()[:80]}")
        component = python_package(pin[1], pin[2])
        # Hashes are of the files that may be installed, one of them on each machine, and so not the component's own.
        component["externalReferences"] = [{"type": "distribution", "url": component["purl"], "hashes": []}]
        if pin[3]:
            component["properties"] = [{"name": "python:marker", "value": pin[3].strip()}]
        found.append(component)
    return found


def python_package(name: str, version: str) -> Component:
    plain = re.sub(r"[-_.]+", "-", name).lower()
    purl = f"pkg:pypi/{plain}@{quote(version)}"
    return {"type": "library", "bom-ref": purl, "name": plain, "version": version, "purl": purl}


def installed(folder: str, locked: list[Component]) -> list[Component]:
    """The distributions in a folder of packages; what is locked has its hashes."""
    known = {component["purl"]: component for component in locked}
    found = []
    for distribution in distributions(path=[folder]):
        component = python_package(distribution.metadata["Name"], distribution.version)
        found.append(known.get(component["purl"], component))
    if not found:
        raise SystemExit(f"no distributions in {folder}")
    return found


def debian_packages() -> list[Component]:
    result = subprocess.run(["dpkg-query", "-W", "-f", _DPKG], capture_output=True, text=True, check=True)  # noqa: S607 - the image's own
    found = []
    for line in result.stdout.splitlines():
        name, version, architecture = line.split("\t")
        name = name.partition(":")[0]
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='~.-')}?arch={architecture}"
        found.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return found


def document(components: list[Component], *, kind: str) -> dict[str, Any]:
    ordered = sorted(components, key=lambda each: str(each["bom-ref"]))
    refs = [str(each["bom-ref"]) for each in ordered]
    for number, component in enumerate(ordered):
        if refs.index(refs[number]) != number:  # one version behind several markers
            component["bom-ref"] = f"{refs[number]}#{number}"
    content = json.dumps(ordered, sort_keys=True).encode()
    serial = uuid.uuid5(_IDS, f"{kind} {hashlib.sha256(content).hexdigest()}")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": kind, "bom-ref": "teneral", "name": "teneral"}},
        "components": ordered,
        "dependencies": [{"ref": "teneral", "dependsOn": [each["bom-ref"] for each in ordered]}],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("lock")
    parser.add_argument("--installed", metavar="FOLDER")
    parser.add_argument("--system", action="store_true", help="Debian's packages, too")
    given = parser.parse_args(arguments)
    path = Path(given.lock)
    locked = read_lock(path.read_text(encoding="utf-8")) if path.exists() or not given.installed else []
    components = installed(given.installed, locked) if given.installed else locked
    if given.system:
        components = [*components, *debian_packages()]
    kind = "container" if given.installed else "application"
    json.dump(document(components, kind=kind), sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
