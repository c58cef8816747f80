"""Whether a model fits on a device: numbers in, an error that says what to do out. Pure."""

from __future__ import annotations

from ..errors import InsufficientMemoryError
from ..memory import MIB

# Left for what is allocated behind the counter's back: other libraries' handles, and the code of their kernels. A
# guess. Keys and values are their pool's to account for, which takes what is left.
MARGIN_BYTES = 256 * MIB


def check_device_fits(name: str, free_bytes: int, *, weights_bytes: int, ring_bytes: int) -> None:
    """Raise `InsufficientMemoryError` when the device has less than this takes, and a margin."""
    needed_bytes = weights_bytes + ring_bytes + MARGIN_BYTES
    if needed_bytes > free_bytes:
        made_of = (
            f"weights {weights_bytes / MIB:,.0f}, images on their way {ring_bytes / MIB:,.0f}, "
            f"a margin of {MARGIN_BYTES / MIB:,.0f}"
        )
        raise device_refused(name, needed_bytes, free_bytes, made_of)


def device_refused(
    name: str, needed_bytes: int, free_bytes: int | None, made_of: str
) -> InsufficientMemoryError:
    """For memory that a device does not have, or, with None, did not give."""
    have = "it gave less" if free_bytes is None else f"{free_bytes / MIB:,.0f} MiB are free"
    return InsufficientMemoryError(
        f"the model needs {needed_bytes / MIB:,.0f} MiB of the memory of {name} ({made_of}), but {have}",
        needed_bytes=needed_bytes,
        available_bytes=free_bytes,
        hint="End what else uses the device, name another one (--device cuda:1), serve a smaller or quantised model, "
        "or use the CPU (--device cpu).",
    )
