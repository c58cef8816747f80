"""Tensor names → layer groups in the order in which a forward pass needs them.

Pure, and only about names: an unknown name is never an error, it just lands in a group that may be fetched a little too
early or late. The order inside a group is the order in memory, so q/k/v and gate/up lie next to each other and can be
used as one fused matrix without a copy.
It does not know dtypes, sizes or checkpoints; shapes are looked at only to keep fused parts adjacent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYER = re.compile(r"^(?:(?P<stack>.*?)\.)?(?:layers|layer|h|blocks?)\.(?P<number>\d+)\.(?P<rest>.+)$")
EMBED, HEAD = "embed", "head"


def group_tensors(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, list[str]]]:
    layers: dict[int, list[str]] = {}
    embed: list[str] = []
    head: list[str] = []
    for name in shapes:
        match = _LAYER.match(name)
        if match:
            layers.setdefault(int(match["number"]), []).append(name)
        elif (
            re.search(r"(^|\.)(lm_head|norm|ln_f|final_layernorm|pooler|classifier|score)\b", name)
            and "embed" not in name
        ):
            head.append(name)
        else:
            embed.append(name)
    groups = [(EMBED, embed)] + [(f"layers.{n}", layers[n]) for n in sorted(layers)] + [(HEAD, head)]
    return [(name, names) for name, names in groups if names]
