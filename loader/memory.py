"""How much memory this process may still take: the least of what the host has and what its cgroups allow.

Reads a few kernel files and caches nothing. Page cache counts as free, since the kernel drops it before it
refuses memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .errors import InsufficientMemoryError

MIB = 1024 * 1024
UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


def available_bytes(root: str = "/") -> int | None:
    """Memory that can still be taken without swapping or being killed; None where nothing says (not Linux).

    `root` is where /proc and /sys/fs/cgroup are looked for.
    """
    figures = [figure for figure in (_host_available(root), *_cgroup_figures(root)) if figure is not None]
    return max(0, min(figures)) if figures else None


def check_fits(needed_bytes: int, available: int | None, *, what: str) -> None:
    """Raise `InsufficientMemoryError` when more is needed than available. Unknown counts as enough."""
    if available is not None and needed_bytes > available:
        raise refused(needed_bytes, available, what=what)


def refused(needed_bytes: int, available: int | None, *, what: str) -> InsufficientMemoryError:
    left = "the system has less" if available is None else f"{available / MIB:,.0f} MiB are available"
    return InsufficientMemoryError(
        f"{what} needs {needed_bytes / MIB:,.0f} MiB of memory, but {left}",
        needed_bytes=needed_bytes,
        available_bytes=available,
        hint="Give the container more memory, or load a smaller model.",
    )


def _host_available(root: str) -> int | None:
    for line in _read(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_figures(root: str) -> Iterator[int]:
    """What each limit on the way from this process's cgroups up to their roots leaves."""
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk_up(mount, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            yield from _walk_up(
                os.path.join(mount, "memory"),
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )


def _walk_up(
    mount: str, path: str, limit_name: str, usage_name: str, cache_keys: tuple[str, ...]
) -> Iterator[int]:
    # Inside a cgroup namespace the path may name folders that only the host sees: the mount itself is then
    # the container's.
    components = [component for component in path.split("/") if component not in ("", ".", "..")]
    for depth in range(len(components), -1, -1):
        folder = os.path.join(mount, *components[:depth])
        limit = _number(_read(os.path.join(folder, limit_name)))
        usage = _number(_read(os.path.join(folder, usage_name)))
        if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
            yield limit - usage + _cache_bytes(folder, cache_keys)


def _cache_bytes(folder: str, keys: tuple[str, ...]) -> int:
    fields = (line.split() for line in _read(os.path.join(folder, "memory.stat")).splitlines())
    return sum(int(field[1]) for field in fields if len(field) == 2 and field[0] in keys)


def _number(text: str) -> int | None:
    """None for an absent file and for cgroup v2's "max"."""
    text = text.strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
