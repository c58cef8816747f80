"""What a part is called, in messages and on the timeline."""

from __future__ import annotations

from collections.abc import Iterable

from ..format.manifest import Manifest, Part, Tier
from ..timeline import Timeline
from .progress import Phase


def describe_part(manifest: Manifest, part: Part) -> str:
    """Like "part 7 (layers.3 draft, bytes [0, 4096) of blobs/draft-000.bin)"."""
    begin, end = part.offset_bytes, part.offset_bytes + part.size_bytes
    blob = manifest.blobs[part.blob].name
    return f"part {part.index} ({_tiered(manifest, part)}, bytes [{begin}, {end}) of {blob})"


def add_part_span(
    timeline: Timeline,
    phase: Phase,
    manifest: Manifest,
    part: Part,
    *,
    begun_at_s: float,
    ended_at_s: float,
    **attributes: object,
) -> None:
    """Write down when a part was in `phase`. The times are on `time.monotonic()`'s clock."""
    timeline.add(
        phase,
        _tiered(manifest, part),
        begun_at_s - timeline.started_at,
        ended_at_s - timeline.started_at,
        group=manifest.groups[part.group].name,
        tier=part.tier.name.lower(),
        part=part.index,
        bytes=part.size_bytes,
        **attributes,
    )


def mark_ready(timeline: Timeline, manifest: Manifest, gates: Iterable[tuple[int, Tier]]) -> None:
    """Write down that these gates have opened, now."""
    for group, tier in gates:
        name = manifest.groups[group].name
        reached = "exact" if tier is Tier.REFINE else tier.name.lower()
        timeline.mark("ready", f"{name} {reached}", group=name, tier=reached)


def _tiered(manifest: Manifest, part: Part) -> str:
    return f"{manifest.groups[part.group].name} {part.tier.name.lower()}"
