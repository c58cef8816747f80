"""Forms with files (multipart/form-data, RFC 7578): fields by name, over a body that is there.

Names, headers and fields are bounded; contents are views of the body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...runtime.errors import RequestError

MAX_FIELDS = 64
MAX_FIELD_HEAD_BYTES = 4 << 10
MEDIA_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r"""boundary=(?:"([ -!#-~]{1,70})"|([!#-+\--~]{1,70}))""")
_NAME = re.compile(rb"""[;\s]name="([^"\r\n]{1,200})\"""", re.IGNORECASE)
_FILE_NAME = re.compile(rb"""[;\s]filename="([^"\r\n]{0,400})\"""", re.IGNORECASE)
_DISPOSITION = b"content-disposition:"


class FormField(NamedTuple):
    name: str
    content: memoryview
    file_name: str | None  # None: it is no file

    @property
    def text(self) -> str:
        """Raises `RequestError` for what is not UTF-8."""
        try:
            return str(self.content, "utf-8")
        except UnicodeDecodeError:
            raise RequestError(f"{self.name} is not UTF-8", param=self.name) from None


def parse_form(content_type: str, data: bytes | bytearray) -> list[FormField]:
    """The fields, in order. Raises `RequestError` for a body that is no form, or has too many fields."""
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith(MEDIA_TYPE) or found is None:
        raise RequestError(f"the body must be a form: send it with 'Content-Type: {MEDIA_TYPE}; boundary=…'")
    mark = b"--" + (found[1] or found[2]).encode("ascii")
    return list(_fields(mark, data))


def _fields(mark: bytes, data: bytes | bytearray) -> Iterator[FormField]:
    view = memoryview(data)
    place = 0 if data.startswith(mark) else data.find(b"\r\n" + mark) + 2
    if place == 1:
        raise RequestError("the form has no fields: its boundary is not in the body")
    for _ in range(MAX_FIELDS + 1):
        begin = place + len(mark)
        if data.startswith(b"--", begin):
            return
        head_end = data.find(b"\r\n\r\n", begin, begin + MAX_FIELD_HEAD_BYTES)
        end = -1 if head_end < 0 else data.find(b"\r\n" + mark, head_end + 2)
        if end < 0:
            raise RequestError("the form is cut off, or the head of a field is too long")
        yield _field(bytes(view[begin:head_end]), view[min(head_end + 4, end) : end])
        place = end + 2
    raise RequestError(f"the form has more than {MAX_FIELDS} fields")


def _field(head: bytes, content: memoryview) -> FormField:
    line = next((each for each in head.split(b"\r\n") if each.lower().startswith(_DISPOSITION)), b"")
    name, file_name = _NAME.search(line), _FILE_NAME.search(line)
    if name is None:
        raise RequestError("a field of the form has no name")
    return FormField(
        name[1].decode("utf-8", "replace"),
        content,
        None if file_name is None else file_name[1].decode("utf-8", "replace"),
    )
