"""Images in OpenAI's parts of messages."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ...runtime.errors import RequestError
from ..function.images import ChatImages, ImageSource, check_role
from .schemas import ContentPart, ImageUrl, Message, PlacedPart


def images_of(messages: Sequence[Message]) -> ChatImages:
    """The images of a chat. Raises `RequestError`."""
    return ChatImages(
        [
            ImageSource(image_url(part, message.role, param), param)
            for number, message in enumerate(messages)
            if isinstance(message.content, list)
            for index, part in enumerate(message.content)
            if part.is_image and (param := place_of(part, f"messages[{number}].content[{index}]"))
        ]
    )


def place_of(part: ContentPart, param: str) -> str:
    """The client's field that has the part, which is `param` in a chat."""
    return part.place if isinstance(part, PlacedPart) else param


def image_url(part: ContentPart, role: str, param: str) -> str:
    """The address of a part that is an image. Raises `RequestError`."""
    url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
    if url is None:
        raise RequestError(f"{param}.image_url is missing", param=f"{param}.image_url")
    check_role(role, param)
    return url


def with_files(messages: Sequence[Message], files: Mapping[str, bytes]) -> list[Message]:
    """The messages, with these files as data URLs in place of their addresses."""

    def given(part: ContentPart) -> ContentPart:
        url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
        if not part.is_image or url is None or url not in files:
            return part
        data = binascii.b2a_base64(files[url], newline=False).decode()
        return replace(part, image_url=f"data:image/any;base64,{data}")

    return [
        replace(message, content=[given(part) for part in message.content])
        if isinstance(message.content, list)
        else message
        for message in messages
    ]
