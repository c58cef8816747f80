"""Sound manifests as documents, and changes to them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.format_artifacts import build_format_artifact

from teneral.loader.errors import ManifestError
from teneral.loader.format.manifest import FRAME_ELEMENTS
from teneral.loader.format.manifest_json import parse_manifest

Document = dict[str, Any]


def document_of(manifest: bytes) -> Document:
    """The JSON without the manifest's own digest, so that what is changed in it is not refused for that alone."""
    document: Document = json.loads(manifest)
    del document["blake3"]
    return document


# Parts 0, 1, 2: draft of embed.weight; 3: layers.0; 4: head. Parts 5, 6, 7: refine of embed.weight; 8: head.
SOUND: Document = document_of(
    build_format_artifact(
        {
            "embed": {"embed.weight": ("BF16", (2, FRAME_ELEMENTS + 5))},
            "layers.0": {"norm.weight": ("F32", (7,)), "up.weight": ("I16", (30, 30)), "none": ("U8", (0,))},
            "head": {"head.weight": ("BF16", (40, 40))},
        },
        files={"config.json": b"{}", "sub/more.json": b"[]"},
        aliases={"tied.weight": "embed.weight"},
        metadata={"format": "pt"},
        part_elements=FRAME_ELEMENTS,
    ).objects["manifest.json"]
)


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def refused(data: bytes) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(data)
    assert caught.value.where
    assert caught.value.hint
    return caught.value


# Parts 0, 1: sketches of layers.0 and of head; 2, 3: their drafts; 4, 5: their refinements. All in two blobs.
THREE_TIERS: Document = document_of(
    build_format_artifact(
        {"layers.0": {"w": ("BF16", (40, 40)), "norm": ("BF16", (40,))}, "head": {"head": ("F32", (40, 40))}},
        encodings={"w": "bf16.1.3", "norm": "whole.sketch", "head": "f32.1.7"},
    ).objects["manifest.json"]
)
