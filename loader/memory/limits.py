"""The memory that this process may still take: the least of what the host has, and what its cgroups
and its resource limits (`ulimit -v`, `ulimit -d`) allow.

Reads a few kernel files and caches nothing. Page cache counts as free, since the kernel drops it
before it refuses memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from ..errors import InsufficientMemoryError

MIB = 1024 * 1024
UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


class Available(NamedTuple):
    """Memory that can still be taken without swapping or being killed, and what says so."""

    size_bytes: int
    limit: str  # for people, such as "memory.max of the cgroup /pods/this"


def available(root: str = "/") -> Available | None:
    """The tightest of all limits; None where nothing says (not Linux).

    `root` is where /proc and /sys/fs/cgroup are looked for.
    """
    figures = [*_host_available(root), *_cgroup_figures(root), *_resource_figures(root)]
    tightest = min(figures, key=lambda figure: figure.size_bytes, default=None)
    return None if tightest is None else Available(max(0, tightest.size_bytes), tightest.limit)


def available_bytes(root: str = "/") -> int | None:
    """`available` as a number."""
    found = available(root)
    return None if found is None else found.size_bytes


def taken_bytes(*process_ids: int, root: str = "/") -> int:
    """Memory of their own that these processes have, which no cache gives back; 0 where nothing
    says. Memory that they share with others, such as the weights', does not count.
    """
    total_bytes = 0
    for process_id in process_ids:
        for line in _read(os.path.join(root, f"proc/{process_id}/status")).splitlines():
            if line.startswith("RssAnon:"):
                total_bytes += int(line.split()[1]) * 1024
    return total_bytes


def check_fits(needed_bytes: int, left: Available | None, *, what: str, made_of: str = "") -> None:
    """Raise `InsufficientMemoryError` when more is needed than available. Unknown counts as enough.

    `made_of` tells people what the need is made of.
    """
    if left is not None and needed_bytes > left.size_bytes:
        raise refused(needed_bytes, left, what=what, made_of=made_of)


def refused(
    needed_bytes: int, left: Available | None, *, what: str, made_of: str = ""
) -> InsufficientMemoryError:
    have = "the system has less"
    if left is not None:
        have = f"{left.size_bytes / MIB:,.0f} MiB are available ({left.limit})"
    return InsufficientMemoryError(
        f"{what} needs {needed_bytes / MIB:,.0f} MiB of memory{f' ({made_of})' if made_of else ''}, but {have}",
        needed_bytes=needed_bytes,
        available_bytes=None if left is None else left.size_bytes,
        hint="Give the container more memory, or load a smaller model.",
    )


def _host_available(root: str) -> Iterator[Available]:
    for line in _read(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) * 1024, "MemAvailable of the host")


def _cgroup_figures(root: str) -> Iterator[Available]:
    """The room that each limit leaves, from this process's cgroups up to their roots."""
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


# A row of /proc/self/limits, what counts for it in /proc/self/status, and its name for people.
_RESOURCES = (
    ("Max address space", "VmSize:", "RLIMIT_AS, ulimit -v"),
    ("Max data size", "VmData:", "RLIMIT_DATA, ulimit -d"),
)


def _resource_figures(root: str) -> Iterator[Available]:
    """The room that soft limits of this process leave. They count addresses, used or not."""
    limits = _read(os.path.join(root, "proc/self/limits")).splitlines()
    status = _read(os.path.join(root, "proc/self/status")).splitlines()
    for row, key, name in _RESOURCES:
        limit = next(
            (_number(line.removeprefix(row).split()[0]) for line in limits if line.startswith(row)), None
        )
        taken = next((int(line.split()[1]) * 1024 for line in status if line.startswith(key)), None)
        if limit is not None and taken is not None:
            yield Available(limit - taken, name)


def _walk_up(
    mount: str, path: str, limit_name: str, usage_name: str, cache_keys: tuple[str, ...]
) -> Iterator[Available]:
    # Inside a cgroup namespace the path may name folders that only the host sees: the mount itself
    # is then the container's.
    components = [component for component in path.split("/") if component not in ("", ".", "..")]
    for depth in range(len(components), -1, -1):
        folder = os.path.join(mount, *components[:depth])
        limit = _number(_read(os.path.join(folder, limit_name)))
        usage = _number(_read(os.path.join(folder, usage_name)))
        if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
            size_bytes = limit - usage + _cache_bytes(folder, cache_keys)
            yield Available(size_bytes, f"{limit_name} of the cgroup /{'/'.join(components[:depth])}")


def _cache_bytes(folder: str, keys: tuple[str, ...]) -> int:
    fields = (line.split() for line in _read(os.path.join(folder, "memory.stat")).splitlines())
    return sum(int(field[1]) for field in fields if len(field) == 2 and field[0] in keys)


def _number(text: str) -> int | None:
    """None for an absent file and for cgroup v2's "max"."""
    text = text.strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("ascii", "replace")
    except OSError:
        return ""


def return_free_memory() -> None:
    """Have the C library give the system what this process has freed, which it may keep for a long
    time otherwise. Takes milliseconds. No effect where the C library cannot.
    """
    import ctypes  # for the moments after a start

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
