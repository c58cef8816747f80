"""Address templates: `s3://results/answers/{bucket}/{key}.jsonl`, and their fields' values.

A template is checked once, when it is read: every field in braces must be known, and the bucket (or
the account) may only be a field of its own. This module does no I/O and knows no events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import Formatter
from typing import NamedTuple

MAX_TEMPLATE_CHARS = 1_024
# The parts of an address before the key, for each kind of store, and the field that each may have.
_ROOTS = {"s3": ("bucket",), "gs": ("bucket",), "az": ("account", "bucket")}
_LITERAL = re.compile(r"[^\x00-\x20\x7f{}\\]*")


class AddressTemplate(NamedTuple):
    """A template of objects' addresses in S3, Cloud Storage or Azure's Blob Storage. `parse` makes
    it.
    """

    text: str
    fields: frozenset[str]  # the fields in it
    root: str  # the part in front of the key: s3://bucket, gs://bucket, az://account/container
    # The common beginning of the keys of all addresses, up to a '/': '' or 'answers/'.
    folder: str

    @classmethod
    def parse(cls, text: str, *, allowed: Iterable[str], required: str) -> AddressTemplate:
        """Parse a template. Raises ValueError with the allowed form."""
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
            raise ValueError(f"has the unknown field {{{min(unknown)[:40]}}}: known are {shown}")
        if required not in fields:
            raise ValueError(f"must contain {{{required}}}, or all answers would have the same address")
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
        """The address with these values, unescaped. There must be one for each field."""
        return _filled(self.text, values)

    def key(self, **values: str) -> str:
        """The key of that address, after the bucket."""
        return self.fill(**values).removeprefix(f"{_filled(self.root, values)}/")

    def may_hold(self, root: str) -> bool:
        """True if addresses of this template can lie in the bucket `s3://bucket`."""
        pattern = "[^/]+".join(re.escape(literal) for literal in re.split(r"\{[a-z]+\}", self.root))
        return re.fullmatch(pattern, root) is not None


def _filled(text: str, values: dict[str, str]) -> str:
    parts = Formatter().parse(text)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in parts)


def _fields(text: str) -> frozenset[str]:
    """The fields of a template. Raises ValueError for anything in braces that is not a plain name."""
    found = set()
    # The parser itself raises ValueError for unbalanced braces.
    for literal, name, form, conversion in Formatter().parse(text):
        if _LITERAL.fullmatch(literal) is None:
            raise ValueError("may have no spaces, braces or backslashes outside its fields")
        if name is None:
            continue
        if not re.fullmatch(r"[a-z]+", name) or form or conversion:
            raise ValueError("must have plain names in its braces, as in {key}")
        found.add(name)
    return frozenset(found)
