"""The address of a model on the Hub, and the settings that say where the Hub and its cache are.

`settings_from` is the one place that reads the environment for them; all else here is pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import UsageError
from ..base import SourceOptions, is_name
from ..http.address import Origin, encode_path, encode_value, is_loopback, parse_address

DEFAULT_REVISION = "main"
FORM = "hf://org/name[@revision][/folder] or hf://org/name[@revision]:QUANTISATION"
MAX_TOKEN_BYTES = 4096
_ENDPOINT = "https://huggingface.co"
_ADDRESS = re.compile(
    r"(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})"
    # A branch, a tag or a commit; of those with a '/', what the Hub itself makes.
    r"(?:@(?P<revision>refs/(?:pr|convert)/[A-Za-z0-9._-]+|[A-Za-z0-9._-]+))?"
    r"(?::(?P<quantisation>[A-Za-z0-9_-]+)|(?P<folder>/.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = frozenset({"1", "on", "yes", "true"})


class HubAddress(NamedTuple):
    """A folder of a model repository at a revision, or a GGUF file by its quantisation."""

    repo: str  # org/name
    revision: str
    folder: str  # '' for the repository itself; no '/' at its ends
    quantisation: str  # '' for none

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, whose files never change."""
        return is_commit(self.revision)

    def at(self, revision: str) -> str:
        """The address for people, at another revision."""
        where = f"hf://{self.repo}" + ("" if revision == DEFAULT_REVISION else f"@{revision}")
        return f"{where}:{self.quantisation}" if self.quantisation else f"{where}/{self.folder}".rstrip("/")


class HubSettings(NamedTuple):
    """The Hub's address and the user's settings of it. `token_file` is None for no token at all."""

    origin: Origin
    path: str  # before that of the Hub; '' for none
    token: str | None
    token_file: str | None
    cache: str  # the folder of downloaded models
    is_offline: bool

    def __repr__(self) -> str:
        return f"HubSettings({self.origin}{self.path}, cache={self.cache!r}, is_offline={self.is_offline})"


def parse_url(url: str) -> HubAddress:
    """Raises `UsageError`."""
    found = _ADDRESS.fullmatch(url.partition("://")[2].rstrip("/"))
    folder = (found["folder"] or "").strip("/") if found else ""
    revision = (found["revision"] if found else "") or DEFAULT_REVISION
    if not found or ".." in found["repo"] + revision or (folder and not is_name(folder)):
        raise UsageError(f"{url} is not the address of a model on the Hub", hint=f"Write {FORM}.")
    return HubAddress(found["repo"], revision, folder, found["quantisation"] or "")


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def settings_from(options: SourceOptions, environment: Mapping[str, str]) -> HubSettings:
    """The variables of Hugging Face's own library. Raises `UsageError`.

    `--endpoint-url` is that of a bucket's store: a token never goes there.
    """
    url = environment.get("HF_ENDPOINT") or _ENDPOINT
    address = parse_address(url)
    if address is None or address.query:
        raise UsageError(
            "HF_ENDPOINT is not a web address", key="HF_ENDPOINT", hint="Write https://host, or unset it."
        )
    home = environment.get("HF_HOME") or os.path.join(
        environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface"
    )
    token = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
    cache = environment.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    token_file = environment.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    is_quiet = environment.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in _TRUE
    return HubSettings(
        origin=address.origin,
        path=address.path.rstrip("/"),
        token=None if options.anonymous else token.strip() or None,
        token_file=None if options.anonymous or is_quiet else os.path.expanduser(token_file),
        cache=os.path.expanduser(cache),
        is_offline=environment.get("HF_HUB_OFFLINE", "").lower() in _TRUE,
    )


def find_token(settings: HubSettings) -> str | None:
    """The user's token: that of the environment, else of the file that `hf auth login` writes.

    Raises `UsageError` for one that is malformed, or that would go over a network unencrypted.
    """
    token = settings.token
    if token is None and settings.token_file is not None:
        try:
            with open(settings.token_file, "rb") as file:
                token = file.read(MAX_TOKEN_BYTES + 1).decode("ascii", "replace").strip() or None
        except OSError:
            return None
    if token is None:
        return None
    if len(token) > MAX_TOKEN_BYTES or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise UsageError(
            "the Hub's token is malformed", key="HF_TOKEN", hint="Set HF_TOKEN, or run hf auth login again."
        )
    if settings.origin.scheme == "http" and not is_loopback(settings.origin):
        raise UsageError(
            f"the Hub's token is not sent to {settings.origin} over plain http",
            key="HF_ENDPOINT",
            hint="Write https://…, or read public models with --anonymous.",
        )
    return token


def list_target(settings: HubSettings, address: HubAddress) -> str:
    """The path and query that list a revision's files with their sizes and digests."""
    revision = encode_value(address.revision)
    return f"{settings.path}/api/models/{address.repo}/revision/{revision}?blobs=true"


def file_target(settings: HubSettings, repo: str, commit: str, name: str) -> str:
    return f"{settings.path}/{repo}/resolve/{commit}/{encode_path(name)}"
