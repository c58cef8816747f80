"""Images of chats: from parts of messages to the prompt's tokens and the pixels in their places.

A template writes one image token for each image. Its text becomes that of the image's tiles, in the order of the
messages. Every source is bounded: the number of images, their bytes, their pixels, and the memory of all tiles.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ...loader.errors import UsageError
from ...runtime.errors import ContextLengthError, RequestError
from ...runtime.text.chat import mentions

if TYPE_CHECKING:
    from ...runtime.images.processor import ImageProcessor, ImageTiles
    from ...runtime.step.images import PromptImage
    from ...runtime.text.tokenizer import TextTokenizer

IMAGE_PART = "image_url"  # the type of a part with an address
FILE_PART = "image"  # the type of a part with a file's bytes, of programs alone
ROLES = ("user", "tool")  # of messages that may have images
MAX_IMAGES = 32  # of a request
MAX_TILE_BYTES = 256 << 20  # of all images of a request
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # Pillow's names

_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.ASCII)


class ImageSource(Struct, frozen=True):
    url: str
    param: str  # the part that names it
    data: bytes = b""  # the file, in place of an address


class _Tiled(Struct, frozen=True, eq=False):
    """One image of the prompt, whose tokens are not there yet."""

    digest: bytes
    tiles: ImageTiles


class ChatImages:
    """The images of one request, whose methods are called in this order. False where it has none."""

    def __init__(self, sources: Sequence[ImageSource] = ()) -> None:
        """Raises `RequestError` for too many."""
        self._sources = tuple(sources)
        if len(self._sources) > MAX_IMAGES:
            raise RequestError(
                f"the messages have {len(self._sources)} images, more than {MAX_IMAGES}",
                param="messages",
                hint="Send fewer, or several on one image.",
            )
        self._tiled: list[_Tiled] = []

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def remote(self) -> tuple[ImageSource, ...]:
        """Those with an address that is no data URL."""
        return tuple(source for source in self._sources if not source.url.startswith("data:"))

    def check(self, processor: ImageProcessor | None) -> ImageProcessor:
        """The processor. Raises `RequestError` for a model without images."""
        if processor is None:
            param = self._sources[0].param
            raise RequestError(f"{param} is an image; this model takes text only", param=param)
        return processor

    def expanded(self, text: str, processor: ImageProcessor | None, max_tokens: int | None) -> str:
        """The prompt with the text of each image in its place. Blocks while images are decoded. Raises `RequestError`
        for a model without images and for images that cannot be read, `ContextLengthError` for more than `max_tokens`.
        """
        processor = self.check(processor)
        pieces = text.split(processor.placeholder)
        if len(pieces) != len(self._sources) + 1:
            raise RequestError(
                f"the model's chat template makes {len(pieces) - 1} places for {len(self._sources)} images",
                param="messages",
                hint=f"Texts cannot contain {processor.placeholder}, and not every message may have images.",
            )
        self._tiled = []
        num_tokens = num_bytes = 0
        for source in self._sources:
            tiled = _tiled(source, processor, len(self._sources))
            num_tokens += processor.num_tokens(tiled.tiles)
            num_bytes += tiled.tiles.tiles.nbytes
            if max_tokens is not None and num_tokens > max_tokens:
                raise ContextLengthError(
                    f"the images up to {source.param} take {num_tokens} tokens, but there is room for {max_tokens}",
                    param=source.param,
                    hint="Send fewer or smaller images.",
                )
            if num_bytes > MAX_TILE_BYTES:
                raise RequestError(
                    f"the images take more than {MAX_TILE_BYTES} bytes as the model sees them",
                    param=source.param,
                    hint="Send fewer or smaller images.",
                )
            self._tiled.append(tiled)
        texts = [processor.text(tiled.tiles) for tiled in self._tiled]
        return pieces[0] + "".join(map(str.__add__, texts, pieces[1:]))

    def placed(self, tokens: Sequence[int], tokenizer: TextTokenizer) -> tuple[PromptImage, ...]:
        """The images at their places in these tokens of the expanded prompt. Raises `RequestError`."""
        import numpy as np  # which most servers import later

        from ...runtime.step.images import PromptImage  # imports it, too

        processor = tokenizer.images
        assert processor is not None
        image_token = tokenizer.piece_to_id(processor.image_token)
        places = np.flatnonzero(np.array(tokens) == image_token)
        sizes = [processor.num_tokens(tiled.tiles) for tiled in self._tiled]
        if image_token is None or sum(sizes) != len(places):
            raise RequestError(
                f"the tokenizer makes {len(places)} tokens of {sum(sizes)} {processor.image_token}",
                param="messages",
            )
        levels, images = processor.levels, []
        for tiled, own in zip(self._tiled, np.split(places, np.cumsum(sizes)[:-1]), strict=True):
            images.append(PromptImage(tiled.digest, tiled.tiles.tiles, levels, own, tiled.tiles.layout))
        self._tiled = []
        return tuple(images)


def render(
    tokenizer: TextTokenizer, messages: Sequence[Any], variables: Mapping[str, Any], max_tokens: int | None
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """The prompt's tokens, and the images in their places. Blocks. Raises `RequestError`, `ContextLengthError`."""
    messages, sources = image_parts(messages)
    images = ChatImages(sources)
    images.check(tokenizer.images)
    text = tokenizer.chat(messages, keeps_parts=mentions(tokenizer.templates, "image"), **variables)
    text = images.expanded(text, tokenizer.images, max_tokens)
    # The template wrote the special tokens.
    tokens = tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
    return tokens, images.placed(tokens, tokenizer)


def image_parts(messages: Sequence[Any]) -> tuple[list[Any], list[ImageSource]]:
    """The messages of a program with `{"type": "image"}` in place of each image, and the images: parts with
    `image_url`, a data URL or an object with one as `url`, or with `image`, a file's bytes. Raises `RequestError`.
    """
    given: list[Any] = []
    sources: list[ImageSource] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            given.append(message)
            continue
        parts: list[Any] = []
        for index, part in enumerate(content):
            is_image = isinstance(part, Mapping) and part.get("type") in (IMAGE_PART, FILE_PART)
            if is_image:
                sources.append(_source_of(part, message.get("role"), f"messages[{number}].content[{index}]"))
            parts.append({"type": "image"} if is_image else part)
        given.append({**message, "content": parts})
    return given, sources


def _source_of(part: Mapping[str, Any], role: Any, param: str) -> ImageSource:
    check_role(str(role), param)
    kind = part["type"]
    value = part.get(kind)
    if kind == FILE_PART:
        if not isinstance(value, bytes) or not value:
            raise RequestError(f"{param}.image must be the bytes of an image's file", param=f"{param}.image")
        return ImageSource("data:", param, value)
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise RequestError(f"{param}.image_url is missing", param=f"{param}.image_url")
    return ImageSource(url, param)


def check_role(role: str, param: str) -> None:
    """Raise `RequestError` for an image in a message that cannot have one."""
    if role not in ROLES:
        raise RequestError(f"{param} is an image, which a message of role {role!r} cannot have", param=param)


def _tiled(source: ImageSource, processor: ImageProcessor, num_images: int) -> _Tiled:
    from ...runtime.images.decode import decode_image  # imports Pillow, for servers that get images

    data = _bytes_of(source)
    try:
        image = decode_image(data, formats=FORMATS, param=source.param)
    except UsageError as error:
        raise RequestError(
            "this server reads no images: Pillow is not installed",
            param=source.param,
            hint="Its operator can pip install 'teneral[images]'.",
        ) from error
    tiles, digest = processor.tiles(image, num_images), hashlib.sha256(data)
    if tiles.layout is not None:  # which the number of images may change
        digest.update(repr(tiles.layout).encode())
    return _Tiled(digest.digest(), tiles)


def _bytes_of(source: ImageSource) -> bytes:
    """The image's file. Raises `RequestError`."""
    if source.data:
        return source.data
    url, param = source.url, source.param
    head = _DATA_URL.match(url[:200])
    if head is None:
        raise RequestError(
            f"{param}.image_url is no data URL of base64",
            param=f"{param}.image_url",
            hint="Send the image as data:image/png;base64,…; addresses are fetched for answers only.",
        )
    try:
        return binascii.a2b_base64(url[head.end() :], strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{param}.image_url is not base64: {error}", param=f"{param}.image_url") from None
