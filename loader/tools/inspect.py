"""The contents of an artifact, or of a folder of plain safetensors: as a JSON-ready value and as a
table for people.

Works from the manifest alone and reads nothing. Sizes are bytes; ratios are shares of the original
bytes, so lower is smaller. Keys may be added to the value without another number of its schema.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from ..format.checkpoint_files import shorten, unknown_names
from ..format.delta import BASE_PREFIX
from ..format.layout import is_stacked, layer_of
from ..format.manifest import FORMAT_VERSION, Group, Manifest, Tensor, Tier
from ..load.pages import find_pages, step_need
from .progress_bar import format_bytes

PRUNED_KEY = "teneral.pruned"  # of the metadata: see tools/pack/prune.py
SCHEMA = 1  # of the value that `describe` returns


def describe(manifest: Manifest, url: str) -> dict[str, Any]:
    """A JSON-ready value. Tied tensors count once, as they are stored. Plain safetensors have no
    `digest`.
    """
    groups = [_describe_group(manifest, group) for group in manifest.groups]
    digest = manifest.digest.hex() if manifest.digest is not None else None
    return {
        "schema": SCHEMA,
        "url": url,
        "format": f"teneral {FORMAT_VERSION}" if digest else "safetensors",
        "generator": manifest.generator,
        "digest": digest,
        "has_own_digest": manifest.has_own_digest,
        "notes": list(manifest_notes(manifest)),
        "pin": f"{url}@b3:{digest}" if digest else None,
        "totals": _with_ratios({key: sum(group[key] for group in groups) for key in _SUMMED}),
        "dtypes": dict(Counter(tensor.dtype for tensor in manifest.tensors)),
        "encodings": dict(Counter(tensor.encoding.value for tensor in manifest.tensors)),
        "precision": _describe_precision(manifest),
        "sparse": _describe_sparse(manifest),
        "experts": _describe_experts(manifest),
        "base": _describe_base(manifest),
        "pruned": manifest.metadata.get(PRUNED_KEY),
        "groups": groups,
        "parts": len(manifest.parts),
        "blobs": [{"name": blob.name, "bytes": blob.size_bytes} for blob in manifest.blobs],
        "files": [
            {
                "name": file.name,
                "bytes": file.size_bytes,
                "digest": file.digest.hex() if file.digest is not None else None,
            }
            for file in manifest.files
        ],
        "aliases": dict(manifest.aliases),
        "metadata": dict(manifest.metadata),
    }


def manifest_notes(manifest: Manifest, *, is_pinned: bool = False) -> tuple[str, ...]:
    """Notes about an artifact's manifest, a line each: that nothing but a pin vouches for its bytes, and
    the names of files that are not used.
    """
    if manifest.digest is None:
        return ()
    notes = []
    if not manifest.has_own_digest and not is_pinned:
        notes.append(NO_OWN_DIGEST)
    if unknown := unknown_names(file.name for file in manifest.files):
        notes.append(f"Small files that nothing uses, as their names are not known: {shorten(unknown)}")
    return tuple(notes)


NO_OWN_DIGEST = (
    "The manifest has no digest of its own, as an older Teneral wrote it: a flipped bit in it may go unseen. "
    "Pin the address, or pack the model again."
)
_SUMMED = ("tensors", "elements", "raw_bytes", "sketch_bytes", "draft_bytes", "refine_bytes")


def _describe_group(manifest: Manifest, group: Group) -> dict[str, Any]:
    tensors = [manifest.tensors[index] for index in group.tensors]
    stored = {
        f"{tier.name.lower()}_bytes": sum(part.size_bytes for part in manifest.parts_of(group.index, tier))
        for tier in Tier
    }
    return _with_ratios(
        {
            "name": group.name,
            "tensors": len(tensors),
            "elements": sum(math.prod(tensor.shape) for tensor in tensors),
            "raw_bytes": sum(tensor.size_bytes for tensor in tensors),
            **stored,
        }
    )


def _describe_experts(manifest: Manifest) -> dict[str, Any] | None:
    """Those that can be left out of memory, and the least of it for weights; None if there are none."""
    need = step_need(manifest)
    if need is None:
        return None
    pages = find_pages(manifest).values()
    return {
        "count": len(pages),
        "layers": len({layer_of(manifest.groups[page.group].name) for page in pages}),
        "raw_bytes": manifest.weight_bytes - need.resident_bytes,
        "least_weights_bytes": need.least_bytes,
    }


def _with_ratios(figures: dict[str, Any]) -> dict[str, Any]:
    """Ratios are of what must be read for a tier to be there, so with the tiers before it."""
    sketch_bytes = figures["sketch_bytes"]
    draft_bytes = sketch_bytes + figures["draft_bytes"]
    stored_bytes = draft_bytes + figures["refine_bytes"]
    raw_bytes = figures["raw_bytes"]

    def ratio(size_bytes: int) -> float | None:
        return round(size_bytes / raw_bytes, 4) if raw_bytes else None

    return {
        **figures,
        "stored_bytes": stored_bytes,
        "sketch_ratio": ratio(sketch_bytes),
        "draft_ratio": ratio(draft_bytes),
        "stored_ratio": ratio(stored_bytes),
    }


def _describe_precision(manifest: Manifest) -> list[dict[str, Any]]:
    """Of each dtype: how its tensors are stored, and whether they have nothing but their exact
    values.
    """
    by_dtype: dict[str, list[Tensor]] = {}
    for tensor in manifest.tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [
        {
            "dtype": dtype,
            "tensors": len(tensors),
            "raw_bytes": sum(tensor.size_bytes for tensor in tensors),
            "encodings": dict(Counter(tensor.encoding.value for tensor in tensors)),
            "exact_only": all(len(tensor.encoding.tiers) == 1 for tensor in tensors),
        }
        for dtype, tensors in sorted(by_dtype.items())
    ]


def _describe_base(manifest: Manifest) -> dict[str, Any] | None:
    """The artifact that this one has differences to, and the bytes that are read of it: unknown
    where it was not given.
    """
    if manifest.base is None:
        return None
    is_given = any(blob.name.startswith(BASE_PREFIX) for blob in manifest.blobs)
    first = next((n for n, blob in enumerate(manifest.blobs) if blob.name.startswith(BASE_PREFIX)), 0)
    read_bytes = sum(part.size_bytes for part in manifest.parts if part.blob >= first)
    own_bytes = sum(part.size_bytes for part in manifest.parts) - (read_bytes if is_given else 0)
    return {
        "digest": manifest.base.hex(),
        "bytes": read_bytes if is_given else None,
        "own_bytes": own_bytes,
    }


def _describe_sparse(manifest: Manifest) -> dict[str, Any] | None:
    """The tensors that are stored without their zeros, and the share of zeros in them; None where
    there are none.
    """
    tensors = [tensor for tensor in manifest.tensors if tensor.encoding.is_sparse]
    if not tensors:
        return None
    first = {tensor.index: tensor.encoding.tiers[0] for tensor in tensors}
    values = sum(
        segment.values or 0
        for part in manifest.parts
        for segment in part.segments
        if first.get(segment.tensor) is part.tier
    )
    elements = sum(tensor.num_elements for tensor in tensors)
    return {
        "tensors": len(tensors),
        "elements": elements,
        "values": values,
        "zeros_ratio": round(1 - values / elements, 4),
    }


def render_table(description: Mapping[str, Any]) -> str:
    """The result of `describe` for a terminal: a header, a row for each group, or for all experts of a layer, totals
    and files.
    """
    columns = _columns(description)
    rows: list[tuple[str, ...]] = [tuple(columns)]
    rows += [tuple(cell(figures) for cell in columns.values()) for figures in _merged(description["groups"])]
    rows.append(tuple(cell({"name": "total", **description["totals"]}) for cell in columns.values()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_table_line(row, widths) for row in rows]
    rule = "─" * len(lines[0])
    return "\n".join([*_header(description), "", lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _merged(groups: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The groups, with one in place of all experts of a layer: a mixture may have thousands."""
    for layer, found in groupby(groups, lambda group: layer_of(group["name"])):
        members = list(found)
        if layer is None or is_stacked(members[0]["name"]):
            yield from members
            continue
        sums = {key: sum(group[key] for group in members) for key in _SUMMED}
        yield {"name": f"{layer}.experts ({len(members)})", **_with_ratios(sums)}


def _render_experts(experts: Mapping[str, Any] | None) -> str:
    if experts is None:
        return ""
    size, least = (format_bytes(experts[key]) for key in ("raw_bytes", "least_weights_bytes"))
    return f"{experts['count']:,} in {experts['layers']} layers, {size}; --weights-bytes from {least} on"


def _columns(description: Mapping[str, Any]) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """Of plain safetensors nothing is split or coded: all columns of tiers would only repeat the
    raw size.
    """
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "group": lambda figures: str(figures["name"]),
        "tensors": lambda figures: f"{figures['tensors']:,}",
        "elements": lambda figures: f"{figures['elements']:,}",
        "raw": lambda figures: format_bytes(figures["raw_bytes"]),
    }
    if description["digest"] is None:
        return columns
    has_sketch = description["totals"]["sketch_bytes"] > 0
    if has_sketch:
        columns["sketch"] = lambda figures: format_bytes(figures["sketch_bytes"])
    columns["draft"] = lambda figures: format_bytes(figures["draft_bytes"])
    columns["refine"] = lambda figures: format_bytes(figures["refine_bytes"])
    if has_sketch:
        columns["sketch/raw"] = lambda figures: _percent(figures["sketch_ratio"])
    columns["draft/raw"] = lambda figures: _percent(figures["draft_ratio"])
    columns["stored/raw"] = lambda figures: _percent(figures["stored_ratio"])
    return columns


def _header(description: Mapping[str, Any]) -> list[str]:
    files = ", ".join(f"{file['name']} ({format_bytes(file['bytes'])})" for file in description["files"])
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(description["dtypes"].items()))
    fields = {
        "artifact" if description["digest"] else "model": description["url"],
        "family": _render_family(description.get("model")),
        "takes": _render_uses(description.get("model")),
        "memory": _render_memory(description),
        "format": f"{description['format']}, written by {description['generator']}"
        if description["digest"]
        else "plain weights, not packed",
        "digest": f"b3:{description['digest']}" if description["digest"] else "",
        "tensors": dtypes,
        "encodings": "; ".join(map(_render_precision, description["precision"]))
        if description["digest"]
        else "",
        "sparse": _render_sparse(description["sparse"]),
        "pruned": description["pruned"] or "",
        "experts": _render_experts(description["experts"]),
        "base": _render_base(description["base"]),
        "stored": f"{description['parts']} parts in {len(description['blobs'])} blobs",
        "tied": ", ".join(f"{name} = {target}" for name, target in description["aliases"].items()),
        "files": files,
        "note": f"\n{'':10}".join(description["notes"]),
    }
    return [f"{name:9} {text}" for name, text in fields.items() if text]


def _render_family(model: Mapping[str, Any] | None) -> str:
    """Of what the runtime says of config.json, where there is one."""
    if model is None:
        return ""
    if model["refused"]:
        return f"refused: {model['refused']}"
    native = "by the native core" if model["native_only"] else "by the native core and torch"
    why = ""
    if model["native_refuses"]:
        native, why = "not by the native core", f": {model['native_refuses']}"
    if model["kind"] == "decoder" and not model["native_only"]:
        why += f"; on a GPU by {'torch' if model['kernels_refuse'] else 'kernels'}"
    return f"{model['family']}, {model['kind']}, up to {model['max_tokens']:,} tokens; computed {native}{why}"


def _render_uses(model: Mapping[str, Any] | None) -> str:
    """The uses of the model's weights, by the runtime's description of config.json."""
    if model is None or model["refused"]:
        return ""
    uses = ["--quantize, GPTQ and AWQ"] if model["quantizes"] else []
    if model["adapts"]:
        uses.append(f"LoRA adapters of {' and '.join(model['adapts'])}")
    return "; ".join(uses)


def _render_memory(description: Mapping[str, Any]) -> str:
    """Of what a server holds, the process itself left out."""
    weights = f"{format_bytes(description['totals']['raw_bytes'])} of weights"
    kv = (description.get("model") or {}).get("kv_bytes_per_token")
    if kv is None:
        return weights
    bf16, int8 = (format_bytes(kv[dtype] * 1000) for dtype in ("bf16", "int8"))
    return f"{weights}; keys and values of 1,000 tokens {bf16}, in int8 {int8}"


def _render_precision(entry: Mapping[str, Any]) -> str:
    """Like "BF16 bf16.3 (8), whole (2)" or "I8 exact only, bytes (3)", with the numbers of tensors."""
    encodings = sorted(entry["encodings"].items(), key=lambda item: (-item[1], item[0]))
    stored = ", ".join(f"{name} ({count})" for name, count in encodings)
    return f"{entry['dtype']} {'exact only, ' if entry['exact_only'] else ''}{stored}"


def _render_base(base: Mapping[str, Any] | None) -> str:
    if base is None:
        return ""
    read = "" if base["bytes"] is None else f", of which {format_bytes(base['bytes'])} are read"
    return f"b3:{base['digest']}{read}; differences to it {format_bytes(base['own_bytes'])}"


def _render_sparse(sparse: Mapping[str, Any] | None) -> str:
    if sparse is None:
        return ""
    return f"{sparse['tensors']} tensors, of which {sparse['zeros_ratio']:.1%} is zero and not stored"


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"


def _table_line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        row[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
    ]
    return "  ".join(cells).rstrip()
