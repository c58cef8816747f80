"""Addresses with gaps: `s3://results/answers/{bucket}/{key}.jsonl`, and what is put into the gaps.

A template is checked once, when it is read: every gap is a known field in braces, and only a field of the bucket's (or
of the account's) may stand in its place. It does no I/O and knows no events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from string import Formatter

MAX_TEMPLATE_CHARS = 1_024
# Of each kind of store: the parts of an address before the key, and which field each of them may have.
_ROOTS = {"s3": ("bucket",), "gs": ("bucket",), "az": ("account", "bucket")}
_LITERAL = re.compile(r"[^\x00-\x20\x7f{}\\]*")


@dataclass(frozen=True, slots=True)
class AddressTemplate:
    """Of objects in S3, Cloud Storage or Azure's Blob Storage. `parse` makes it."""

    text: str
    fields: frozenset[str]  # that stand in it
    root: str  # the part in front of the key: s3://bucket, gs://bucket, az://account/container
    folder: str  # what the keys of all addresses begin with, up to a '/': '' or 'answers/'

    @classmethod
    def parse(cls, text: str, *, allowed: Iterable[str], required: str) -> AddressTemplate:
        """Raises ValueError saying what is allowed."""
        names = sorted(allowed)
        shown = ", ".join(f"{{{name}}}" for name in names)
        if not isinstance(text, str) or not 0 < len(text) <= MAX_TEMPLATE_CHARS:
            raise ValueError(f"must be an address of at most {MAX_TEMPLATE_CHARS} characters")
        scheme, _, rest = text.partition("://")
        own_fields = _ROOTS.get(scheme, ("",))
        *parts, key = rest.split("/", len(own_fields)) if scheme in _ROOTS else [""]
        if len(parts) < len(own_fields) or not all(parts) or not key:
            raise ValueError(
                "must be s3://bucket/key, gs://bucket/key or az://account/container/key, in which may stand "
                f"{shown}"
            )
        fields = _fields(text)
        unknown = fields - {*names}
        if unknown:
            raise ValueError(f"has no use for {{{min(unknown)[:40]}}}: there are {shown}")
        if required not in fields:
            raise ValueError(f"must have {{{required}}} in it, or all answers would have one place")
        if any(_fields(part) - {own} for part, own in zip(parts, own_fields, strict=True)):
            where = " and ".join(f"{{{own}}}" for own in own_fields)
            raise ValueError(
                f"may have no field but {where} before the {'second' if own_fields[1:] else 'first'} /"
            )
        beginning = key.partition("{")[0]
        root = f"{scheme}://{'/'.join(parts)}"
        return cls(text, fields, root, beginning[: beginning.rfind("/") + 1])

    @property
    def scheme(self) -> str:
        return self.root.partition("://")[0]

    def fill(self, **values: str) -> str:
        """The address with these values in it, as they are. There must be one for each field."""
        return _filled(self.text, values)

    def key(self, **values: str) -> str:
        """The part of that address behind the bucket."""
        return self.fill(**values).removeprefix(f"{_filled(self.root, values)}/")

    def may_hold(self, root: str) -> bool:
        """True if addresses of this template can lie in the bucket `s3://bucket`."""
        pattern = "[^/]+".join(re.escape(literal) for literal in re.split(r"\{[a-z]+\}", self.root))
        return re.fullmatch(pattern, root) is not None


def _filled(text: str, values: dict[str, str]) -> str:
    parts = Formatter().parse(text)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in parts)


def _fields(text: str) -> frozenset[str]:
    """Raises ValueError for anything in braces that is not a plain name."""
    found = set()
    # Braces that do not match are a ValueError of the parser's own.
    for literal, name, form, conversion in Formatter().parse(text):
        if _LITERAL.fullmatch(literal) is None:
            raise ValueError("may have no spaces, braces or backslashes beside its fields")
        if name is None:
            continue
        if not re.fullmatch(r"[a-z]+", name) or form or conversion:
            raise ValueError("must have plain names in its braces, as in {key}")
        found.add(name)
    return frozenset(found)
