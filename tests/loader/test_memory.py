"""Reading how much memory is left, from made-up kernel files."""

from __future__ import annotations

from pathlib import Path

import pytest

from teneral.loader.errors import InsufficientMemoryError
from teneral.loader.memory import MIB, available_bytes, check_fits

KIB = 1024


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return str(root)


MEMINFO = {"proc/meminfo": "MemTotal:       16000000 kB\nMemFree:  1000 kB\nMemAvailable:    8000000 kB\n"}


def test_without_limits_the_host_decides(tmp_path: Path) -> None:
    assert available_bytes(write(tmp_path, MEMINFO)) == 8_000_000 * KIB


def test_a_cgroup_v2_limit_counts_page_cache_as_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{1000 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{700 * MIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 9\ninactive_file {400 * MIB}\nactive_file {100 * MIB}\nshmem 5\n",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == 800 * MIB


def test_the_tightest_limit_on_the_way_up_decides(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/this\n",
        "sys/fs/cgroup/pods/memory.max": f"{300 * MIB}\n",
        "sys/fs/cgroup/pods/memory.current": f"{100 * MIB}\n",
        "sys/fs/cgroup/pods/this/memory.max": "max\n",
        "sys/fs/cgroup/pods/this/memory.current": f"{50 * MIB}\n",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == 200 * MIB


def test_a_container_that_sees_its_hosts_path_is_limited_by_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/kubepods/burstable/pod1/abc\n",
        "sys/fs/cgroup/memory.max": f"{512 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{12 * MIB}\n",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == 500 * MIB


def test_cgroup_v1_is_understood_and_its_no_limit_ignored(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{500 * MIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{256 * MIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{100 * MIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 7\ntotal_inactive_file {20 * MIB}\n",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == 176 * MIB


def test_an_overdrawn_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == 0


def test_where_nothing_says_it_is_unknown_and_counts_as_enough(tmp_path: Path) -> None:
    assert available_bytes(str(tmp_path)) is None
    check_fits(1 << 50, None, what="anything")


def test_this_machine_has_a_positive_figure() -> None:
    figure = available_bytes()
    assert figure is None or figure > 0


def test_too_much_is_refused_with_both_figures() -> None:
    with pytest.raises(
        InsufficientMemoryError, match=r"the model needs 3,000 MiB of memory, but 2,000 MiB"
    ) as caught:
        check_fits(3000 * MIB, 2000 * MIB, what="the model")
    assert caught.value.needed_bytes == 3000 * MIB
    assert caught.value.available_bytes == 2000 * MIB
    assert "container" in caught.value.hint


def test_what_fits_exactly_is_allowed() -> None:
    check_fits(2000, 2000, what="the model")
    with pytest.raises(InsufficientMemoryError):
        check_fits(2001, 2000, what="the model")
