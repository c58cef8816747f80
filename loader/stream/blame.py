"""Errors that say which part of which artifact they are about."""

from __future__ import annotations

from ..errors import FormatError, IntegrityError, TeneralError
from ..format.manifest import Manifest, Part
from .trace import describe_part


def blame_part(
    error: Exception, manifest: Manifest, part: Part, source_url: str, *, num_parts: int = 1
) -> TeneralError:
    """The same error, naming the part and the source; what nobody foresaw becomes a `TeneralError`.

    With `num_parts`, it came while so many were read together, of which the part is the first. To be raised `from` the
    error given.
    """
    what = describe_part(manifest, part)
    if num_parts > 1:
        what += f", or one of the {num_parts - 1} behind it,"
    where = f"{what} in {source_url}"
    if not isinstance(error, TeneralError):
        return TeneralError(
            f"{where} could not be loaded: {type(error).__name__}: {error}",
            hint="This is a defect of the loader or of its source; please report it.",
        )
    import copy  # only on the way to an error

    blamed = copy.copy(error)
    blamed.message = f"{where} could not be loaded: {error.message}"
    blamed.args = (blamed.message,)
    if isinstance(blamed, FormatError):
        blamed.where = where
    return blamed


def wrong_digest(manifest: Manifest, part: Part, source_url: str, got: bytes) -> IntegrityError:
    """For a part whose bytes differed from its digest twice."""
    where = f"{describe_part(manifest, part)} in {source_url}"
    return IntegrityError(
        f"{where} has a wrong digest, also when fetched again; none of it was used",
        where=where,
        expected=(part.digest or b"").hex(),
        got=got.hex(),
        hint="The artifact is damaged. `teneral verify` names every bad part; pack the model again.",
    )
