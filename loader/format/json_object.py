"""JSON objects of a manifest, or of another document, read with distrust: each has the keys that it
must have, and each value the type, range and spelling that is asked for. Anything else raises an
error of the document's that names the place.

A document may have a digest of itself: its last key, `blake3`, is the BLAKE3-256 of all bytes
before it, so that damage is found before anything is parsed (decision 0060).

It does not know what the values mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from blake3 import blake3

from ..errors import FormatError, IntegrityError, ManifestError, UsageError
from ..sources.base import check_name, is_showable
from .limits import MANIFEST_NAME

MAX_TEXT_BYTES = 1024
MAX_INTEGER = 2**53 - 1  # what every JSON reader holds exactly

DAMAGED = "The file is damaged, or `teneral pack` did not write it. Pack the model again."
NEWER = "A newer Teneral may have written it: upgrade, or pack the model again with this version."

OWN_DIGEST_KEY = "blake3"  # of the document itself; those written before it was introduced have none
_OWN_DIGEST = re.compile(rb',\s*"blake3": ?"([0-9a-f]{64})"\s*}\s*\Z')
_OWN_DIGEST_BYTES = 100  # with its spaces
_DIGEST = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class DocumentKind(NamedTuple):
    """A kind of JSON document: its object's name, and what is raised about one that is wrong, and
    advised.
    """

    name: str
    error: type[FormatError]
    damaged: str
    newer: str

    def refuse(self, message: str, where: str, *, hint: str = "") -> NoReturn:
        """Raises the error about a place in the document, or, where that is its name, about all of
        it.
        """
        place = where if where == self.name else f"{self.name}, {where}"
        raise self.error(f"{place}: {message}", where=where, hint=hint or self.damaged)

    def check_own_digest(self, digest: str, found: str, *, hint: str = "") -> None:
        """Raise `IntegrityError` unless the digest of itself is the one that was found."""
        if digest != found:
            raise IntegrityError(
                f"{self.name} is damaged: its bytes are not those that were written",
                where=self.name,
                expected=digest,
                got=found,
                hint=hint or self.damaged,
            )

    def read_checked(self, data: bytes, *, max_items: int) -> dict[str, Any]:
        """`read` without the digest of itself, which is checked before. Raises `IntegrityError` when it
        is another one; a document without one is read as it is.
        """
        found = _OWN_DIGEST.search(data, max(0, len(data) - _OWN_DIGEST_BYTES))
        if found is not None:
            own = blake3(memoryview(data)[: found.start()]).hexdigest()
            self.check_own_digest(found[1].decode(), own)
        document = self.read(data, max_items=max_items)
        if document.pop(OWN_DIGEST_KEY, None) is not None and found is None:
            self.refuse_misplaced_digest()
        return document

    def refuse_misplaced_digest(self) -> NoReturn:
        """Raises the error about a digest of itself that is not found without parsing."""
        self.refuse(f'{self.name} does not end with it, as 64 hexadecimal digits and "}}', OWN_DIGEST_KEY)

    def read(self, data: bytes, *, max_items: int) -> dict[str, Any]:
        """The JSON object in `data`, in which no key stands twice and all numbers are integers."""
        # One of these stands before every value but those of objects' first keys.
        if data.count(b",") + data.count(b"[") + data.count(b"{") > max_items:
            self.refuse(f"it holds more than {max_items} items", self.name)
        try:
            document = json.loads(
                data.decode("utf-8"),
                object_pairs_hook=self._unique_keys,
                parse_float=self._refuse_number,
                parse_constant=self._refuse_number,
            )
        except RecursionError:
            self.refuse("it is nested too deeply", self.name)
        except ValueError as error:  # of json, of UTF-8, or of an integer with thousands of digits
            raise self.error(
                f"{self.name} is not valid JSON: {error}", where=self.name, hint=self.damaged
            ) from error
        if type(document) is not dict:
            self.refuse("it is not a JSON object", self.name)
        return document

    def _unique_keys(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = dict(pairs)
        if len(table) != len(pairs):
            self.refuse("a key stands twice in one object", self.name)
        return table

    def _refuse_number(self, text: str) -> NoReturn:
        self.refuse(f"the number {text[:40]} is not an integer", self.name)


def with_own_digest(data: bytes) -> bytes:
    """A document of one or more keys, as `json.dumps` has it, with its digest of itself. One that is
    indented by 1 stays so, and gets a last newline.
    """
    is_indented = data.endswith(b"\n}")
    before, space, end = (data[:-2], b" ", b"\n}\n") if is_indented else (data[:-1], b"", b"}")
    gap = b"\n " if is_indented else b""
    return b'%b,%b"%b":%b"%b"%b' % (
        before, gap, OWN_DIGEST_KEY.encode(), space, blake3(before).hexdigest().encode(), end
    )  # fmt: skip


MANIFEST = DocumentKind(MANIFEST_NAME, ManifestError, DAMAGED, NEWER)


def refuse(message: str, where: str, *, hint: str = DAMAGED) -> NoReturn:
    """Raises the `ManifestError` about a place in the manifest, or about all of it."""
    MANIFEST.refuse(message, where, hint=hint)


def is_unicode(value: Any) -> bool:
    """True if it is a string that can be written as UTF-8, so one without half of a surrogate pair."""
    try:
        return type(value) is str and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def is_text(value: Any) -> bool:
    """True if it is a string of 1 to `MAX_TEXT_BYTES` bytes of UTF-8 that `is_showable`."""
    if not is_unicode(value) or not 0 < len(value) <= MAX_TEXT_BYTES:
        return False
    if value.isascii() and value.isprintable():
        return True
    return len(value.encode()) <= MAX_TEXT_BYTES and is_showable(value)


def is_digest(value: Any) -> bool:
    """True if it is 32 bytes, written as 64 lower-case hexadecimal digits."""
    return type(value) is str and _DIGEST.fullmatch(value) is not None


class JsonObject:
    """A JSON object with exactly the keys `keys`, whose values are read by their keys."""

    __slots__ = ("_document", "_value", "_where")

    def __init__(
        self, value: Any, where: str, keys: frozenset[str], *, document: DocumentKind = MANIFEST
    ) -> None:
        self._document = document
        refuse = document.refuse
        if type(value) is not dict:
            refuse("it is not a JSON object", where)
        if value.keys() != keys:
            if missing := sorted(keys - value.keys()):
                refuse(f"key {missing[0]!r} is missing", where)
            unknown = next(key for key in value if key not in keys)
            refuse(f"key {unknown[:40]!r} is unknown", where, hint=document.newer)
        self._value: dict[str, Any] = value
        self._where = where

    def integer(self, key: str, maximum: int = MAX_INTEGER) -> int:
        """An integer from 0 to `maximum`."""
        value = self._value[key]
        # True is an int, but not of that type.
        if type(value) is not int or not 0 <= value <= maximum:
            self._document.refuse(f"it is not an integer from 0 to {maximum}", self._place(key))
        return value

    def text(self, key: str) -> str:
        """A text, as `is_text` has it."""
        value = self._value[key]
        if not is_text(value):
            self._document.refuse(
                f"it is not a string of 1 to {MAX_TEXT_BYTES} bytes without control characters",
                self._place(key),
            )
        text: str = value
        return text

    def one_of(self, key: str, names: Mapping[str, T]) -> T:
        """The value that a text names. A name that is not among `names` may be a newer version's."""
        given = self._value[key]
        if type(given) is not str or given not in names:
            text = self.text(key)
            self._document.refuse(
                f"{text[:40]!r} is not one of {', '.join(names)}", self._place(key), hint=self._document.newer
            )
        return names[given]

    def found(self, key: str, find: Callable[[str], T | None]) -> T:
        """The value that `find` knows by a text. An unknown one may be a newer version's."""
        text = self.text(key)
        value = find(text)
        if value is None:
            self._document.refuse(
                f"{text[:40]!r} is not known here", self._place(key), hint=self._document.newer
            )
        return value

    def object_name(self, key: str, folder: str = "") -> str:
        """A text that is safe as the relative name of a stored object; with the `folder` before it."""
        try:
            return check_name(folder + self.text(key))
        except UsageError as error:
            place = self._place(key)
            raise self._document.error(
                f"{self._document.name}, {place}: {error.message}", where=place, hint=error.hint
            ) from error

    def digest(self, key: str) -> bytes:
        """32 bytes, written as 64 lower-case hexadecimal digits."""
        value = self._value[key]
        if not is_digest(value):
            self._document.refuse("it is not 64 lower-case hexadecimal digits", self._place(key))
        return bytes.fromhex(value)

    def items(self, key: str, maximum_count: int) -> Iterator[tuple[Any, str]]:
        """The items of a list, each with its place."""
        place = self._place(key)
        values = self._value[key]
        if type(values) is not list or len(values) > maximum_count:
            self._document.refuse(f"it is not a list of at most {maximum_count} items", place)
        return ((value, f"{place}[{index}]") for index, value in enumerate(values))

    def table(self, key: str, is_valid: Callable[[Any], bool]) -> dict[str, str]:
        """An object whose keys and values are such strings as `is_valid` lets pass."""
        table = self._value[key]
        if type(table) is not dict:
            self._document.refuse("it is not a JSON object", self._place(key))
        for name, value in table.items():
            if not is_valid(name) or not is_valid(value):
                self._document.refuse(f"{str(name)[:40]!r} or its value cannot stand here", self._place(key))
        return table

    def _place(self, key: str) -> str:
        return key if self._where == self._document.name else f"{self._where}.{key}"
