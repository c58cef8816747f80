"""Reading how much memory is left, from made-up kernel files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cgroups import memory_cgroup
from tests.support.load import patience_s

from teneral.loader.errors import InsufficientMemoryError
from teneral.loader.memory.limits import (
    MIB,
    Available,
    available,
    available_bytes,
    check_fits,
    return_free_memory,
)

KIB = 1024


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return str(root)


MEMINFO = {"proc/meminfo": "MemTotal:       16000000 kB\nMemFree:  1000 kB\nMemAvailable:    8000000 kB\n"}


def test_without_limits_the_host_decides(tmp_path: Path) -> None:
    assert available(write(tmp_path, MEMINFO)) == Available(8_000_000 * KIB, "MemAvailable of the host")


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
    found = available(write(tmp_path, MEMINFO | files))
    assert found == Available(200 * MIB, "memory.max of the cgroup /pods")


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


def test_limits_of_the_process_leave_what_it_has_not_taken(tmp_path: Path) -> None:
    files = {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             unlimited            unlimited            bytes     \n"
        f"Max address space         {900 * MIB}            unlimited            bytes     \n",
        "proc/self/status": f"VmPeak:\t  999 kB\nVmSize:\t  {300 * KIB} kB\nVmData:\t  {100 * KIB} kB\n",
    }
    found = available(write(tmp_path, MEMINFO | files))
    assert found == Available(600 * MIB, "RLIMIT_AS, ulimit -v")
    files["proc/self/limits"] = (
        f"Max data size             {300 * MIB}            unlimited            bytes     \n"
    )
    found = available(write(tmp_path, MEMINFO | files))
    assert found == Available(200 * MIB, "RLIMIT_DATA, ulimit -d")


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


def test_the_limit_of_a_real_cgroup_is_found() -> None:
    with memory_cgroup() as cgroup:
        cgroup.set_limit(100 * MIB)
        program = "from teneral.loader.memory.limits import available; print(available())"
        output = subprocess.run(
            cgroup.command([sys.executable, "-c", program]),
            check=True,
            capture_output=True,
            text=True,
            timeout=patience_s(60),
        ).stdout
    assert cgroup.name in output
    found_bytes = int(output.partition("size_bytes=")[2].partition(",")[0])
    assert 50 * MIB < found_bytes < 100 * MIB


def test_too_much_is_refused_with_both_figures() -> None:
    with pytest.raises(
        InsufficientMemoryError,
        match=r"the model needs 3,000 MiB of memory, but 2,000 MiB are available \(MemAvailable of the host\)",
    ) as caught:
        check_fits(3000 * MIB, Available(2000 * MIB, "MemAvailable of the host"), what="the model")
    assert caught.value.needed_bytes == 3000 * MIB
    assert caught.value.available_bytes == 2000 * MIB
    assert "container" in caught.value.hint


def test_what_fits_exactly_is_allowed() -> None:
    left = Available(2000, "the limit")
    check_fits(2000, left, what="the model")
    with pytest.raises(InsufficientMemoryError, match=r"MiB of memory \(all of it weights\), but"):
        check_fits(2001, left, what="the model", made_of="all of it weights")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_was_freed_returns_to_the_system() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    held = [bytes(1000) for _ in range(60_000)]
    kept = held[::1000]  # in the way of the heap's end
    held.clear()
    before = resident_bytes()
    return_free_memory()
    assert resident_bytes() < before - 30_000_000
    assert len(kept) == 60
