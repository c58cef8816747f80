"""The JSON of the Hub's answers, and the errors that its refusals mean.

All of it is outside input: the caller bounds its size, each field is checked before it is used.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

from ...errors import AccessDeniedError, FormatError, NotFoundError, SourceError, UnavailableError
from ..base import is_name, shown_text
from ..http.head import Head
from ..http.source import status_error
from .address import HubAddress, is_commit

MAX_FILES = 100_000
MAX_FILE_BYTES = 1 << 50
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOGIN = "set HF_TOKEN to a token of an account that may read it, or run hf auth login"


class HubFile(NamedTuple):
    """A file of a revision. Its digest is the SHA-256 of its bytes where it is large (LFS), else Git's
    object name: the SHA-1 of a header and its bytes.
    """

    size_bytes: int
    sha256: str | None
    git_sha1: str | None


class Revision(NamedTuple):
    commit: str
    files: dict[str, HubFile]  # by name in the repository, in name order


def parse_revision(document: bytes, *, where: str) -> Revision:
    """The answer that lists a revision. Raises `FormatError`."""
    try:
        value = json.loads(document.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the Hub did not answer with JSON: {error}", where=where) from None
    siblings = value.get("siblings") if type(value) is dict else None
    commit = value.get("sha") if type(value) is dict else None
    if type(siblings) is not list or type(commit) is not str or not is_commit(commit):
        raise FormatError(f"{where}: the Hub did not answer with a commit and its files", where=where)
    if len(siblings) > MAX_FILES:
        raise FormatError(f"{where} has more than {MAX_FILES:,} files", where=where)
    files = dict(sorted(_parse_file(sibling, where) for sibling in siblings))
    return Revision(commit, {name: file for name, file in files.items() if is_name(name)})


def _parse_file(sibling: Any, where: str) -> tuple[str, HubFile]:
    fields = sibling if type(sibling) is dict else {}
    name, size, blob, lfs = (fields.get(key) for key in ("rfilename", "size", "blobId", "lfs"))
    if type(name) is not str or type(size) is not int or not 0 <= size < MAX_FILE_BYTES:
        raise FormatError(f"{where}: the Hub lists a file without a name or a size", where=where)
    if not lfs:
        return name, HubFile(size, None, blob if type(blob) is str and is_commit(blob) else None)
    digest = lfs.get("sha256") if type(lfs) is dict else None
    if type(digest) is not str or not _SHA256.fullmatch(digest):
        raise FormatError(f"{where}: the Hub lists {name} with a malformed SHA-256", where=where)
    return name, HubFile(size, digest, None)


def explain(
    head: Head, address: HubAddress, *, source: str, name: str, endpoint: str, has_token: bool
) -> SourceError:
    """The error for an answer of the Hub's own, by its status and the code that it has for people."""
    status, repo = head.status, address.repo
    code = head.headers.get("x-error-code", "")
    message = shown_text(head.headers.get("x-error-message", ""))
    detail = " ".join(text for text in (str(status), code, message) if text)
    page = f"{endpoint}/{repo}"
    if code == "GatedRepo" or (status == 403 and not code):
        return AccessDeniedError(
            f"{repo} is gated: its owner lets those read it who have accepted its terms ({detail})",
            source=source,
            name=name,
            hint=f"Accept them at {page}, and {_LOGIN}.",
        )
    if status in (401, 403) and has_token and "credentials" in message.lower():
        return AccessDeniedError(
            f"the Hub does not accept the token ({detail})",
            source=source,
            name=name,
            hint="Set HF_TOKEN to a token that is still good, run hf auth login again, or use --anonymous.",
        )
    if code == "RevisionNotFound":
        return NotFoundError(
            f"{repo} has no revision {address.revision}",
            source=source,
            name=name,
            hint=f"Branches and tags are at {page}/tree/main.",
        )
    if code == "RepoNotFound" or (not name and status in (401, 404)):
        hint = f"Check the name; if the model is private, {_LOGIN}."
        # Of an address without hf://, the user may have meant a folder.
        here = "" if os.path.lexists(repo) else f", and no folder {repo} here"
        return NotFoundError(
            f"there is no model {repo} on the Hub at {endpoint}{here}", source=source, name=name, hint=hint
        )
    if status in (401, 403):
        return AccessDeniedError(
            f"{source}: access is denied ({detail})",
            source=source,
            name=name,
            hint=f"Check the rights of the token, or {_LOGIN}.",
        )
    error = status_error(source, name, status, detail=detail, retry_after_s=head.retry_after_s)
    if status == 429 and isinstance(error, UnavailableError):
        error.hint = (
            "The Hub limits requests by address and account: wait, or give several servers one copy "
            "(a bucket, or the Hub's cache on a shared disk)."
        )
        if not has_token:
            error.hint += " With a token (HF_TOKEN) it allows more."
    return error
