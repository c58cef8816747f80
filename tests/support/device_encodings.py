"""Every encoding that a device merges, with a dtype that has it, and lengths of tensors with all kinds of ends."""

from __future__ import annotations

from teneral.loader.format.manifest import FRAME_ELEMENTS

COUNTS = (1, 2, 15, 4097, FRAME_ELEMENTS - 1, FRAME_ELEMENTS, FRAME_ELEMENTS + 1, 2 * FRAME_ELEMENTS + 12_345)
FLOATS = [
    *[("BF16", f"bf16.{known}") for known in range(8)],
    *[("F16", f"f16.{known}") for known in (0, 1, 3, 6, 7, 8, 10)],
    *[("F32", f"f32.{known}") for known in (0, 3, 7, 8, 14, 22, 23)],
    ("BF16", "bf16.0.3"),
    ("BF16", "bf16.1.3"),
    ("BF16", "bf16.2.7"),
    ("F16", "f16.2.5"),
    ("F32", "f32.3.19"),
]
OTHERS = [("F16", "bytes"), ("I32", "bytes"), ("F64", "bytes.sketch"), ("C64", "bytes"), ("F8_E4M3", "bytes")]
OTHERS += [("BF16", "whole"), ("F32", "whole.sketch"), ("F4", "bytes"), ("BOOL", "whole")]
