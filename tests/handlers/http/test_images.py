"""Chats with images, in front of a real engine with a tiny model that takes them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.instances import TinyParts
from tests.support.vision_models import (
    ONEVISION,
    PREPROCESSOR,
    data_url,
    file_of,
    picture,
    save_vision,
    theirs_of_onevision,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from teneral.handlers.function import images as chat_images
from teneral.handlers.openai.images import images_of
from teneral.handlers.openai.schemas import ContentPart, Message
from teneral.runtime.errors import ContextLengthError

NUM_TOKENS = 8
OPTIONS = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}


class Oracle:
    """transformers' answers to prompts with images."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._processor = Idefics3ImageProcessorPil(**PREPROCESSOR)

    @torch.no_grad()
    def answer(self, prompt: str, *images: Image.Image) -> tuple[list[int], int]:
        """Its tokens, and the number of the prompt's."""
        values, pieces = [], prompt.split("<image>")
        for index, image in enumerate(images):
            made = self._processor([[image]], return_tensors="pt", return_row_col_info=True)
            values.append(made["pixel_values"][0])
            text = get_image_prompt_string(
                made["rows"][0][0],
                made["cols"][0][0],
                4,
                "<fake_token_around_image>",
                "<image>",
                "<global-img>",
            )
            pieces[index] += text
        tokens = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        made = self._model.generate(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            pixel_values=torch.cat(values)[None],
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=319,
        )
        return made[0, len(tokens) :].tolist(), len(tokens)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[tuple[TinyParts, Oracle]]:
    directory = tmp_path_factory.mktemp("vision")
    model = save_vision(directory)
    parts = TinyParts.read(directory, model)
    yield parts, Oracle(model, parts.tokenizer)
    parts.tokenizer.close()


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[tuple[TinyParts, Any]]:
    """A model that cuts an image into a grid of tiles where it is alone, and transformers'."""
    directory = tmp_path_factory.mktemp("onevision")
    model = save_vision(directory, "llava_onevision")
    parts = TinyParts.read(directory, model)
    yield parts, model
    parts.tokenizer.close()


@torch.no_grad()
def onevision_answer(
    vision: tuple[TinyParts, Any], prompt: str, *images: Image.Image
) -> tuple[list[int], int]:
    """transformers' tokens, and the number of the prompt's."""
    parts, model = vision
    processor = theirs_of_onevision(**ONEVISION)
    made = processor.image_processor([list(images)], return_tensors="pt")
    texts = [processor.replace_image_token(made, index) for index in range(len(images))]
    pieces = prompt.split("<image>")
    text = pieces[0] + "".join(map(str.__add__, texts, pieces[1:]))
    tokens = parts.tokenizer.encode(text, add_special_tokens=False)
    answer = model.generate(
        input_ids=torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        **made,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=319,
    )
    return answer[0, len(tokens) :].tolist(), len(tokens)


@pytest.fixture
async def server(start: Any, vision: Any) -> Any:
    async with start(parts=vision[0]) as running:
        yield running


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file_of(image)), "detail": "auto"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat_with(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **OPTIONS, **fields}


def result_of(answer: Any) -> tuple[list[int], int]:
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["token_ids"], answer.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("size", [(64, 64), (20, 60), (300, 9), (32, 32)])
async def test_an_answer_about_an_image_is_that_of_transformers(
    server: Any, vision: Any, size: tuple[int, int]
) -> None:
    image = picture(*size)
    answer = await server.post(
        "/v1/chat/completions", chat_with(image_part(image), text_part("Describe it."))
    )
    expected = vision[1].answer("<|start|><|user|><image>Describe it.<|end|><|assistant|>", image)
    assert result_of(answer) == expected


async def test_a_conversation_of_several_images_and_turns(server: Any, vision: Any) -> None:
    first, second = picture(64, 30, seed=1), picture(40, 64, seed=2)
    messages = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [text_part("Compare "), image_part(first), text_part(" and "), image_part(second)],
        },
        {"role": "assistant", "content": "They differ."},
        {"role": "user", "content": "How?"},
    ]
    prompt = (
        "<|start|><|system|>Look.<|end|><|user|>Compare <image> and <image><|end|>"
        "<|assistant|>They differ.<|end|><|user|>How?<|end|><|assistant|>"
    )
    answer = await server.post("/v1/chat/completions", {"messages": messages, **OPTIONS})
    assert result_of(answer) == vision[1].answer(prompt, first, second)
    swapped = [messages[0], {**messages[1], "content": messages[1]["content"][::-1]}, *messages[2:]]
    again = await server.post("/v1/chat/completions", {"messages": swapped, **OPTIONS})
    assert (
        result_of(again)[0]
        == vision[1].answer(
            prompt.replace("Compare <image> and <image>", "<image> and <image>Compare "), second, first
        )[0]
    )


@pytest.mark.parametrize("size", [(64, 64), (20, 60), (300, 9), (1, 400), (1, 1), (200, 150)])
async def test_an_image_alone_is_cut_into_a_grid(start: Any, onevision: Any, size: tuple[int, int]) -> None:
    image = picture(*size)
    expected = onevision_answer(onevision, "<|start|><|user|><image>What?<|end|><|assistant|>", image)
    async with start(parts=onevision[0]) as server:
        answer = await server.post("/v1/chat/completions", chat_with(image_part(image), text_part("What?")))
        assert result_of(answer) == expected


async def test_an_image_becomes_another_one_once_it_is_not_alone(start: Any, onevision: Any) -> None:
    """Rows and cached keys of the one are not those of the other."""
    first, second = picture(64, 30, seed=1), picture(40, 64, seed=2)
    prompt = "<|start|><|user|><image>and<image>?<|end|><|assistant|>"
    both = chat_with(image_part(first), text_part("and"), image_part(second), text_part("?"))
    alone = chat_with(image_part(first), text_part("and?"))
    async with start(parts=onevision[0]) as server:
        for chat, expected in (
            (alone, onevision_answer(onevision, prompt.replace("and<image>", "and"), first)),
            (both, onevision_answer(onevision, prompt, first, second)),
        ):
            answers = [await server.post("/v1/chat/completions", chat) for _ in range(2)]
            assert [result_of(each) for each in answers] == [expected] * 2
            cached = [each.json["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
            assert cached[0] < 16 <= cached[1]


async def test_videos_are_refused_by_their_name(start: Any, onevision: Any) -> None:
    async with start(parts=onevision[0]) as server:
        part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        answer = await server.post("/v1/chat/completions", chat_with(part, text_part("?")))
    assert answer.status == 400
    assert "messages[0].content[0] is of type 'video_url'" in answer.json["error"]["message"]


async def test_a_second_turn_finds_the_first_in_the_cache(server: Any) -> None:
    chat = chat_with(image_part(picture(64, 64)), text_part("Describe it."))
    first = await server.post("/v1/chat/completions", chat)
    second = await server.post("/v1/chat/completions", chat)
    assert result_of(first) == result_of(second)
    cached = second.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > second.json["usage"]["prompt_tokens"] - 32
    other = await server.post(
        "/v1/chat/completions", chat_with(image_part(picture(64, 64, seed=9)), text_part("Describe it."))
    )
    assert other.json["usage"]["prompt_tokens_details"]["cached_tokens"] < 16


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_formats(server: Any, vision: Any, kind: str) -> None:
    data = file_of(picture(64, 40), kind)
    part = {"type": "image_url", "image_url": data_url(data, "image/whatever")}
    answer = await server.post("/v1/chat/completions", chat_with(part, text_part("?")))
    expected = vision[1].answer("<|start|><|user|><image>?<|end|><|assistant|>", _decoded(data))
    assert result_of(answer) == expected


def _decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


async def test_transparency_is_white(server: Any, vision: Any) -> None:
    image = picture(64, 40).convert("RGBA")
    image.putalpha(Image.fromarray(np.where(np.arange(64) < 32, 0, 255).astype(np.uint8)[None].repeat(40, 0)))
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    answer = await server.post("/v1/chat/completions", chat_with(image_part(image), text_part("?")))
    shown = Image.alpha_composite(white, image).convert("RGB")
    assert result_of(answer) == vision[1].answer("<|start|><|user|><image>?<|end|><|assistant|>", shown)


async def test_texts_alone_reach_a_template_of_parts(server: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], **OPTIONS}
    answer = await server.post("/v1/chat/completions", chat)
    tokens = server.instance.tokenizer.result().encode(
        "<|start|><|user|>Hello<|end|><|assistant|>", add_special_tokens=False
    )
    assert answer.json["prompt_token_ids"] == tokens


async def test_streams_and_other_apis_say_the_same(server: Any) -> None:
    image, text = picture(64, 64), "Describe it."
    expected, num_tokens = result_of(
        await server.post("/v1/chat/completions", chat_with(image_part(image), text_part(text)))
    )
    stream = await server.post(
        "/v1/chat/completions", chat_with(image_part(image), text_part(text), stream=True)
    )
    assert stream.status == 200
    url = data_url(file_of(image))
    parts = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": text},
    ]
    response = await server.post(
        "/v1/responses",
        {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": NUM_TOKENS},
    )
    assert response.status == 200, response.body
    assert response.json["usage"]["input_tokens"] == num_tokens
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": blocks}], "model": server.instance.config.served_name}
    message = await server.post("/v1/messages", {**body, "temperature": 0, "max_tokens": NUM_TOKENS})
    assert message.status == 200, message.body
    usage = message.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    text_there = "".join(block["text"] for block in message.json["content"])
    assert (
        server.instance.tokenizer.result().decode(expected).startswith(text_there)
    )  # it ends at the end token
    counted = await server.post("/v1/messages/count_tokens", body)
    assert counted.json["input_tokens"] == num_tokens


async def test_a_tool_result_may_be_an_image(server: Any) -> None:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": data_url(file_of(picture(9, 9))).partition(",")[2],
    }
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "see", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
            ],
        },
    ]
    answer = await server.post(
        "/v1/messages", {"messages": messages, "max_tokens": 2, "model": server.instance.config.served_name}
    )
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "image_url is missing"),
        ({"type": "image_url", "image_url": {"url": "ftp://x/y"}}, "address must be http or https"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "image_url is no data URL"),
        ({"type": "image_url", "image_url": "data:image/png;base64,###"}, "is not base64"),
        ({"type": "image_url", "image_url": data_url(b"hello")}, "format is not supported"),
        (
            {"type": "image_url", "image_url": data_url(file_of(picture(9, 9))[:60])},
            "the image cannot be read",
        ),
        (
            {"type": "image_url", "image_url": data_url(file_of(picture(9, 9), "BMP"))},
            "format is not supported",
        ),
        ({"type": "input_audio"}, "is of type 'input_audio'"),
    ],
)
async def test_images_that_cannot_be_read_are_refused(
    server: Any, part: dict[str, Any], message: str
) -> None:
    answer = await server.post("/v1/chat/completions", chat_with(part, text_part("?")))
    assert answer.status == 400
    assert message in answer.json["error"]["message"]
    assert answer.json["error"]["param"].startswith("messages[0].content[0]")


async def test_bounds(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teneral.handlers.function.images.MAX_IMAGES", 2)
    parts = [image_part(picture(64, 64, seed=seed)) for seed in range(3)]
    answer = await server.post("/v1/chat/completions", chat_with(*parts))
    assert answer.status == 400
    assert "the messages have 3 images, more than 2" in answer.json["error"]["message"]
    monkeypatch.setattr(chat_images, "MAX_TILE_BYTES", 10 * 3 * 32 * 32 - 1)
    answer = await server.post("/v1/chat/completions", chat_with(*parts[:2]))
    assert answer.status == 400
    assert "take more than" in answer.json["error"]["message"]
    assert answer.json["error"]["param"] == "messages[0].content[1]"


async def test_a_decompression_bomb_is_refused_by_its_header(server: Any) -> None:
    bomb = file_of(Image.new("1", (10_000, 10_000)))
    answer = await server.post(
        "/v1/chat/completions", chat_with({"type": "image_url", "image_url": data_url(bomb)})
    )
    assert answer.status == 400
    assert "10000 x 10000 pixels, more than" in answer.json["error"]["message"]


async def test_images_beyond_the_context_are_refused_before_all_are_read(vision: Any) -> None:
    good, bad = data_url(file_of(picture(64, 64))), "data:image/png;base64,x"
    parts = [ContentPart("image_url", image_url=url) for url in (good, good, bad)]
    images = images_of([Message(role="user", content=parts)])
    with pytest.raises(
        ContextLengthError, match=r"up to messages\[0\].content\[1\] take 40 tokens"
    ) as caught:
        images.expanded("<image><image><image>", vision[0].tokenizer.images, 39)
    assert caught.value.param == "messages[0].content[1]"


async def test_texts_that_look_like_images_are_refused_with_images(server: Any) -> None:
    chat = chat_with(image_part(picture(9, 9)), text_part("<image>"))
    answer = await server.post("/v1/chat/completions", chat)
    assert answer.status == 400
    assert "makes 2 places for 1 images" in answer.json["error"]["message"]


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_images_of_other_roles_are_refused(server: Any, role: str) -> None:
    chat = {"messages": [{"role": role, "content": [image_part(picture(9, 9))]}], **OPTIONS}
    answer = await server.post("/v1/chat/completions", chat)
    assert answer.status == 400
    assert f"a message of role '{role}' cannot have" in answer.json["error"]["message"]


async def test_clients_find_whether_a_model_takes_images(server: Any, start: Any) -> None:
    async with start() as of_text:
        for each, modalities in ((server, ["text", "image"]), (of_text, ["text"])):
            await each.post("/v1/chat/completions", {**chat_with(text_part("Hello")), "max_tokens": 1})
            props = (await each.get("/props")).json
            assert props["modalities"] == {"vision": "image" in modalities, "audio": False}
            (model,) = (await each.get("/v1/models")).json["data"]
            assert model["architecture"]["input_modalities"] == modalities


async def test_a_model_of_text_refuses_images(start: Any) -> None:
    async with start() as server:
        answer = await server.post(
            "/v1/chat/completions", chat_with(image_part(picture(9, 9)), text_part("?"))
        )
    assert answer.status == 400
    assert answer.json["error"]["message"] == (
        "messages[0].content[0] is an image; this model takes text only"
    )


async def test_a_function_gives_images_as_data_urls_and_as_files(start: Any, vision: Any) -> None:
    image = picture(70, 40)

    def handler(event: Any, context: Any) -> str:
        part = event if event else {"type": "image", "image": file_of(image)}
        messages = [{"role": "user", "content": [part, text_part("What?")]}]
        return str(
            context.model.generate(messages, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True).text
        )

    async with start(parts=vision[0], handler=handler) as server:
        chat = await server.post("/v1/chat/completions", chat_with(image_part(image), text_part("What?")))
        expected = chat.json["choices"][0]["message"]["content"]
        assert expected
        for event in (image_part(image), None):
            assert (await server.post("/invoke", event)).json == expected
        other = await server.post("/invoke", image_part(picture(70, 40, seed=1)))
        assert other.json != expected
        refused = await server.post("/invoke", {"type": "image", "image": "x"})
        assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].image")
        refused = await server.post(
            "/invoke", {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}
        )
        assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].image_url")
