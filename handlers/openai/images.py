"""Images of chats: from parts of messages to the prompt's tokens and the pixels in their places.

A template writes one image token for each image. Its text becomes that of the image's tiles, in the order of the
messages. Every source is bounded: the number of images, their bytes, their pixels, and the memory of all tiles.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ...loader.errors import UsageError
from ...runtime.errors import ContextLengthError, RequestError
from .schemas import ContentPart, ImageUrl, Message

if TYPE_CHECKING:
    from ...runtime.images.processor import ImageProcessor, ImageTiles
    from ...runtime.step.images import PromptImage
    from ...runtime.text.tokenizer import TextTokenizer

IMAGE_PART = "image_url"  # the type of a part
MAX_IMAGES = 32  # of a request
MAX_TILE_BYTES = 256 << 20  # of all images of a request
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # Pillow's names

_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.ASCII)


class ImageSource(Struct, frozen=True):
    url: str
    param: str  # the part that names it


class _Tiled(Struct, frozen=True, eq=False):
    """One image of the prompt, whose tokens are not there yet."""

    digest: bytes
    tiles: ImageTiles


class ChatImages:
    """The images of one request, whose methods are called in this order. False where it has none."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """Raises `RequestError` for too many."""
        self._sources = tuple(
            ImageSource(image_url(part, message.role, param), param)
            for number, message in enumerate(messages)
            if isinstance(message.content, list)
            for index, part in enumerate(message.content)
            if part.type == IMAGE_PART and (param := f"messages[{number}].content[{index}]")
        )
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

    def expanded(self, text: str, processor: ImageProcessor | None, max_tokens: int | None) -> str:
        """The prompt with the text of each image in its place. Blocks while images are decoded. Raises `RequestError`
        for a model without images and for images that cannot be read, `ContextLengthError` for more than `max_tokens`.
        """
        if processor is None:
            param = self._sources[0].param
            raise RequestError(f"{param} is of type {IMAGE_PART!r}; this model takes text only", param=param)
        pieces = text.split(processor.image_token)
        if len(pieces) != len(self._sources) + 1:
            raise RequestError(
                f"the model's chat template makes {len(pieces) - 1} places for {len(self._sources)} images",
                param="messages",
                hint=f"Texts cannot contain {processor.image_token}, and not every message may have images.",
            )
        self._tiled = []
        num_tokens = num_bytes = 0
        for source in self._sources:
            tiled = _tiled(source, processor)
            num_tokens += len(tiled.tiles.tiles) * processor.tokens_per_tile
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
        sizes = [len(tiled.tiles.tiles) * processor.tokens_per_tile for tiled in self._tiled]
        if image_token is None or sum(sizes) != len(places):
            raise RequestError(
                f"the tokenizer makes {len(places)} tokens of {sum(sizes)} {processor.image_token}",
                param="messages",
            )
        levels, images = processor.levels, []
        for tiled, own in zip(self._tiled, np.split(places, np.cumsum(sizes)[:-1]), strict=True):
            images.append(PromptImage(tiled.digest, tiled.tiles.tiles, levels, own))
        self._tiled = []
        return tuple(images)


def image_url(part: ContentPart, role: str, param: str) -> str:
    """The address of a part that is an image. Raises `RequestError`."""
    url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
    if url is None:
        raise RequestError(f"{param}.image_url is missing", param=f"{param}.image_url")
    if role not in ("user", "tool"):
        raise RequestError(f"{param} is an image, which a message of role {role!r} cannot have", param=param)
    return url


def with_files(messages: Sequence[Message], files: Mapping[str, bytes]) -> list[Message]:
    """The messages, with these files as data URLs in place of their addresses."""

    def given(part: ContentPart) -> ContentPart:
        url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
        if part.type != IMAGE_PART or url is None or url not in files:
            return part
        data = binascii.b2a_base64(files[url], newline=False).decode()
        return replace(part, image_url=f"data:image/any;base64,{data}")

    return [
        replace(message, content=[given(part) for part in message.content])
        if isinstance(message.content, list)
        else message
        for message in messages
    ]


def _tiled(source: ImageSource, processor: ImageProcessor) -> _Tiled:
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
    return _Tiled(hashlib.sha256(data).digest(), processor.tiles(image))


def _bytes_of(source: ImageSource) -> bytes:
    """The image's file. Raises `RequestError`."""
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
