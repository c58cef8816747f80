"""Claims of parts: they keep two workers of a job from computing the same part at the same time.

A claim is a small object, created by a conditional write before a part is computed, rewritten every
`RENEW_S` while the work goes on, and removed with it. The claim of a worker that was killed is
never rewritten: it expires once another worker has seen it unchanged for `LEASE_S`. Only that
worker's own clock measures this, and only while it reaches the store, so that wrong clocks, a
stopped observer and a store that is away expire nothing. A claim names the process that made it: a
worker started on the same host after a kill finds that process gone, and takes the part at once.

Claims save work and guarantee nothing: a part may still be computed twice, where its worker stalls
for longer than `LEASE_S`. Each part appears once because its own write is conditional (`parts.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ...loader.errors import AlreadyExistsError, FormatError, NotFoundError, SourceError, UnavailableError
from ...loader.sources.base import Store
from .input import MAX_PARTS
from .parts import remove_quietly

CLAIMS_FOLDER = "claims/"
MAX_CLAIM_BYTES = 200
RENEW_S = 5.0
LEASE_S = 15.0
# Seconds that one look may add to an unchanged claim's age: the holder may have lacked the store,
# too.
MAX_STEP_S = 6.0


@dataclass(slots=True)
class _Foreign:
    """A claim of another worker, as it was last seen."""

    version: str
    seen_s: float
    unchanged_s: float = 0.0


class Claims:
    """The claims of one worker, and its view of those that it waits for. Lives on one event loop."""

    def __init__(self, work: Store) -> None:
        self._work = work
        self._name = secrets.token_hex(8)
        self._process = " ".join(_own_process())
        self._held: dict[int, float] = {}  # when each was written last
        self._num_writes = 0
        # Claims of other workers; None before the first look at them.
        self._awaited: dict[int, _Foreign | None] = {}
        self._expired: dict[int, str] = {}  # the versions to replace
        self._looked_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """True if parts are in other workers' hands."""
        return bool(self._awaited)

    @property
    def held(self) -> list[int]:
        """The parts that this worker has claimed."""
        return list(self._held)

    async def take(self, number: int) -> bool:
        """Claim the part. False if another worker has, which may be alive: then `pulse` returns it when
        its claim is gone, or has expired. Raises the store's errors.
        """
        if await asyncio.to_thread(self._take, number, self._expired.pop(number, None)):
            self._held[number] = _now_s()
            return True
        self._awaited[number] = None
        return False

    async def release(self, numbers: Iterable[int]) -> None:
        """Remove claims of this worker; errors are ignored, since claims expire."""
        held = [number for number in numbers if self._held.pop(number, None) is not None]
        await asyncio.gather(
            *(asyncio.to_thread(remove_quietly, self._work, claim_name(number)) for number in held)
        )

    async def pulse(self, *, is_idle: bool) -> list[int]:
        """Renew claims that are due, and look at those of others: at each call if this worker has
        nothing else to do. Returns the parts to try again. Raises the store's errors of the look.
        """
        due = [number for number, written_s in self._held.items() if _now_s() - written_s >= RENEW_S]
        await asyncio.gather(*(self._renew(number) for number in due))
        if not self._awaited or not (is_idle or _now_s() - self._looked_s >= RENEW_S):
            return []
        self._looked_s = _now_s()
        versions = await asyncio.to_thread(list_claims, self._work)
        return [number for number in list(self._awaited) if self._is_free(number, versions.get(number))]

    def _is_free(self, number: int, version: str | None) -> bool:
        """True if the part's claim is gone or has expired; the part is then no longer awaited."""
        now_s, known = _now_s(), self._awaited[number]
        if version is None:
            del self._awaited[number]
            return True
        if known is None or known.version != version:
            self._awaited[number] = _Foreign(version, now_s)
            return False
        known.unchanged_s += min(now_s - known.seen_s, MAX_STEP_S)
        known.seen_s = now_s
        if known.unchanged_s < LEASE_S:
            return False
        del self._awaited[number]
        self._expired[number] = version
        return True

    async def _renew(self, number: int) -> None:
        with suppress(SourceError):  # tried again at the next pulse
            await asyncio.to_thread(self._work.put, claim_name(number), self._content())
            if number in self._held:
                self._held[number] = _now_s()
            else:  # released meanwhile
                await asyncio.to_thread(remove_quietly, self._work, claim_name(number))

    def _take(self, number: int, expired: str | None) -> bool:
        if self._create(number, expired):
            return True
        left = self._left_by_dead(number)
        return left is not None and self._create(number, left)

    def _left_by_dead(self, number: int) -> str | None:
        """The version of a claim whose process ran on this host and is gone; None for all others."""
        try:
            data, info = self._work.read(claim_name(number), max_bytes=MAX_CLAIM_BYTES)
        except (SourceError, FormatError):
            return None
        return info.version if _is_gone(data.decode("ascii", "replace").split()[2:]) else None

    def _create(self, number: int, expired: str | None) -> bool:
        name, data = claim_name(number), self._content()
        try:
            self._work.put(name, data, if_absent=expired is None, if_version=expired)
        except AlreadyExistsError:
            return False
        except UnavailableError:
            raise
        except SourceError:
            if expired is None:
                raise
            self._work.put(name, data)  # a store that cannot compare versions
        return True

    def _content(self) -> bytes:
        """Different in each write: in S3 the content decides the version."""
        self._num_writes += 1
        return f"{self._name} {self._num_writes} {self._process}\n".encode()


def claim_name(number: int) -> str:
    return f"{CLAIMS_FOLDER}{number:06}"


def list_claims(work: Store) -> dict[int, str]:
    """The version of each claim, by its part. Blocks."""
    versions: dict[int, str] = {}
    with suppress(NotFoundError):
        for info in islice(work.list(CLAIMS_FOLDER), 2 * MAX_PARTS):
            number = info.name.removeprefix(CLAIMS_FOLDER)
            if len(number) == 6 and number.isascii() and number.isdigit():
                versions[int(number)] = info.version
    return versions


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _own_process() -> list[str]:
    """The host with its boot and this process's PID namespace, the process's number, and when it was
    started: three words; none where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
        return [hashlib.sha256(boot.encode()).hexdigest()[:16], str(os.getpid()), _started(os.getpid())]
    except OSError:
        return []


def _is_gone(process: list[str]) -> bool:
    """True if `_own_process` of a worker names one of this host that has ended."""
    own = _own_process()
    if len(process) != 3 or process[:1] != own[:1] or not process[1].isdecimal():
        return False
    number = int(process[1])
    try:
        os.kill(number, 0)  # also where /proc hides the processes of other users
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    with suppress(OSError):
        return _started(number) != process[2]
    return False


def _started(number: int) -> str:
    """When a process was started, in clock ticks since the boot; "ended" for one that only waits to be collected."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
