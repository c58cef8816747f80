"""The choice of a GGUF file by its quantisation, which its name states: `org/name:Q4_K_M`.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import NotFoundError

SUFFIX = ".gguf"
MAX_SHOWN = 40
_TAG = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q[0-9]+(?:_[A-Z0-9]+)*|TQ[0-9](?:_[0-9])*|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))$",
    re.IGNORECASE,
)
_PIECE = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
# Files of a model's repository that are no model: its vision encoder, and statistics for quantising it.
_OTHERS = ("mmproj", "imatrix")


def choose_file(names: Iterable[str], quantisation: str, *, where: str) -> str:
    """The GGUF file of this quantisation among these names, in whatever case it is written.

    Raises `NotFoundError`, which lists the quantisations that there are, where none or several match.
    """
    by_tag: dict[str, list[str]] = {}
    for name in sorted(names):
        tag = _tag_of(name)
        if tag is not None:
            by_tag.setdefault(tag, []).append(name)
    found = by_tag.get(quantisation.upper(), [])
    if len(found) == 1:
        return found[0]
    if found and _PIECE.search(found[0].removesuffix(SUFFIX)):
        what = f"{quantisation} in {where} is split into {len(found)} files"
        hint = "Join them with llama-gguf-split --merge, and give the file."
    elif found:
        what = f"{quantisation} names {len(found)} files in {where}"
        hint = f"Give the address of one of them: {', '.join(found[:MAX_SHOWN])}."
    else:
        what = f"{where} has no GGUF file of the quantisation {quantisation}"
        hint = f"It has {', '.join(sorted(by_tag)[:MAX_SHOWN]) or 'no GGUF file whose name states one'}."
    raise NotFoundError(what, source=where, hint=hint)


def _tag_of(name: str) -> str | None:
    """The quantisation in the name of a model's file, in capitals; None for all others."""
    file = name.rpartition("/")[2]
    if not file.lower().endswith(SUFFIX) or file.lower().startswith(_OTHERS):
        return None
    found = _TAG.search(_PIECE.sub("", file[: -len(SUFFIX)]))
    return found[1].upper() if found else None
