"""Addresses with gaps: `s3://results/answers/{bucket}/{key}.jsonl`, and what is put into the gaps.

A template is checked once, when it is read: every gap is a known field in braces, and only a field of the bucket's may
stand in the bucket. It does no I/O and knows no events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from string import Formatter

MAX_TEMPLATE_CHARS = 1_024
_BUCKET_FIELDS = frozenset({"bucket"})
_LITERAL = re.compile(r"[^\x00-\x20\x7f{}\\]*")


@dataclass(frozen=True, slots=True)
class AddressTemplate:
    """Of objects in S3. `parse` makes it."""

    text: str
    fields: frozenset[str]  # that stand in it
    bucket: str  # its part for the bucket
    folder: str  # what the keys of all addresses begin with, up to a '/': '' or 'answers/'

    @classmethod
    def parse(cls, text: str, *, allowed: Iterable[str], required: str) -> AddressTemplate:
        """Raises ValueError saying what is allowed."""
        names = sorted(allowed)
        shown = ", ".join(f"{{{name}}}" for name in names)
        if not isinstance(text, str) or not 0 < len(text) <= MAX_TEMPLATE_CHARS:
            raise ValueError(f"must be an address of at most {MAX_TEMPLATE_CHARS} characters")
        bucket, slash, key = text.removeprefix("s3://").partition("/")
        if not (text.startswith("s3://") and bucket and slash and key):
            raise ValueError(f"must be s3://bucket/key, in which may stand {shown}")
        fields = _fields(text)
        unknown = fields - {*names}
        if unknown:
            raise ValueError(f"has no use for {{{min(unknown)[:40]}}}: there are {shown}")
        if required not in fields:
            raise ValueError(f"must have {{{required}}} in it, or all answers would have one place")
        if _fields(bucket) - _BUCKET_FIELDS:
            raise ValueError("may have no field but {bucket} before the first /")
        beginning = key.partition("{")[0]
        return cls(text, fields, bucket, beginning[: beginning.rfind("/") + 1])

    def fill(self, **values: str) -> str:
        """The address with these values in it, as they are. There must be one for each field."""
        parts = Formatter().parse(self.text)
        return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in parts)

    def may_be_bucket(self, bucket: str) -> bool:
        """Whether an address of this template can be in that bucket."""
        pattern = ".+".join(re.escape(part) for part in self.bucket.split("{bucket}"))
        return re.fullmatch(pattern, bucket) is not None


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
