"""Transcriptions over HTTP, in front of a real engine with a tiny model: texts, times and windows are transformers'."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from tests.support.instances import TinyParts
from tests.support.speech_models import (
    BEFORE,
    TIMES_FROM,
    features_of,
    noise,
    save_speech,
    wav_of,
)

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


class Oracle:
    """transformers' answers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self._tokenizer = tokenizer

    def text_of(self, tokens: list[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token < TIMES_FROM])

    @torch.no_grad()
    def text(self, sound: np.ndarray, **options: Any) -> str:
        """Of one window, without times."""
        made = self.model.generate(features_of(sound), return_timestamps=False, **options)
        return self.text_of(made[0].tolist()).strip()

    @torch.no_grad()
    def segments(self, sound: np.ndarray, **options: Any) -> list[tuple[float, float, str]]:
        features = features_of(sound)
        made = self.model.generate(
            features,
            return_timestamps=True,
            return_segments=True,
            time_precision=0.02,
            **options,
        )
        return [
            (
                round(float(each["start"]), 3),
                round(float(each["end"]), 3),
                self.text_of(each["tokens"].tolist()),
            )
            for each in made["segments"][0]
        ]


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[tuple[TinyParts, Oracle]]:
    directory: Path = tmp_path_factory.mktemp("speech")
    model = save_speech(directory)
    parts = TinyParts.read(directory, model)
    yield parts, Oracle(model, parts.tokenizer)
    parts.tokenizer.close()


@pytest.fixture
async def server(start: Any, speech: Any) -> Any:
    async with start(parts=speech[0]) as running:
        yield running


async def send(server: Any, sound: np.ndarray | bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> Any:
    form = aiohttp.FormData()
    data = sound if isinstance(sound, bytes) else wav_of(sound, kind=3, bits=32)
    form.add_field("file", data, filename="a.wav", content_type="audio/wav")
    for name, value in fields.items():
        form.add_field(name, str(value))
    async with server.client.post(path, data=form) as response:
        body = await response.read()
        return type("Answer", (), {"status": response.status, "body": body, "headers": response.headers})


def json_of(answer: Any) -> Any:
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_text_is_that_of_transformers(server: Any, speech: Any, seed: int) -> None:
    sound = noise(0.8, seed=seed)
    answer = await send(server, sound, language="de", model="tiny/model")
    expected = speech[1].text(sound, language="de", task="transcribe")
    assert json_of(answer) == {"text": expected}
    assert expected


async def test_the_language_is_detected(server: Any, speech: Any) -> None:
    sound = noise(0.8, seed=3)
    answer = json_of(await send(server, sound, TRANSLATIONS, response_format="json"))
    assert answer == {"text": speech[1].text(sound, task="translate")}
    verbose = json_of(await send(server, sound, response_format="verbose_json"))
    assert verbose["language"] in ("en", "de", "fr")


async def test_times_are_those_of_transformers(server: Any, speech: Any) -> None:
    for seed in range(4):
        sound = noise(0.9, seed=seed)
        answer = json_of(await send(server, sound, language="en", response_format="verbose_json"))
        own = [(each["start"], each["end"], each["text"]) for each in answer["segments"]]
        assert own == speech[1].segments(sound, language="en", task="transcribe")


async def test_long_sound_is_heard_window_by_window(server: Any, speech: Any) -> None:
    sound = noise(4.3, seed=7)
    answer = json_of(await send(server, sound, language="fr", response_format="verbose_json"))
    own = [(each["start"], each["end"], each["text"]) for each in answer["segments"]]
    assert own == speech[1].segments(sound, language="fr", task="transcribe")
    assert answer["duration"] == 4.3


async def test_a_prompt_precedes_each_window(server: Any, speech: Any) -> None:
    sound, tokens = noise(0.8, seed=5), speech[0].tokenizer.encode(" Ada", add_special_tokens=False)
    prompt = torch.tensor([BEFORE, *tokens])
    answer = json_of(await send(server, sound, language="en", prompt=" Ada "))
    expected = speech[1].text(sound, language="en", task="transcribe", prompt_ids=prompt)
    assert answer == {"text": expected}


async def test_times_in_files_of_subtitles(server: Any) -> None:
    sound = noise(2.2, seed=1)
    verbose = json_of(await send(server, sound, language="en", response_format="verbose_json"))
    srt = await send(server, sound, language="en", response_format="srt")
    vtt = await send(server, sound, language="en", response_format="vtt")
    text = await send(server, sound, language="en", response_format="text")
    assert srt.headers["Content-Type"] == text.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert vtt.headers["Content-Type"] == "text/vtt; charset=utf-8"
    assert text.body.decode() == verbose["text"] + "\n"
    assert vtt.body.startswith(b"WEBVTT\n\n00:00:00.")
    assert srt.body.startswith(b"1\n00:00:00,")
    assert srt.body.count(b" --> ") == vtt.body.count(b" --> ") == len(verbose["segments"])
    assert all(each["avg_logprob"] <= 0 for each in verbose["segments"])


async def test_requests_at_once_have_the_answers_of_each_alone(server: Any) -> None:
    sounds = [noise(1.7, seed=seed) for seed in range(5)]
    alone = [json_of(await send(server, sound, language="de")) for sound in sounds]
    together = await asyncio.gather(*(send(server, sound, language="de") for sound in sounds))
    assert [json_of(answer) for answer in together] == alone


async def test_a_temperature_draws(server: Any) -> None:
    sound = noise(0.8)
    answers = {str(json_of(await send(server, sound, language="en", temperature=1))) for _ in range(3)}
    assert len(answers) > 1


def error_of(answer: Any) -> Any:
    return json.loads(answer.body)["error"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"language": "xx"}, "language", "'xx' is not one of this model's"),
        ({"response_format": "xml"}, "response_format", "must be one of json, text"),
        ({"temperature": "hot"}, "temperature", "a number from 0 to 1"),
        ({"temperature": "nan"}, "temperature", "a number from 0 to 1"),
        ({"temperature": "2"}, "temperature", "a number from 0 to 1"),
        ({"stream": "true"}, "stream", "not supported"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "must be segment"),
        ({"chunking_strategy": "auto"}, "chunking_strategy", "unknown field"),
        ({"prompt": "x" * 9_000}, "prompt", "8192 characters"),
        ({"prompt": "<|start|>"}, "prompt", "special tokens"),
    ],
)
async def test_fields_that_cannot_be_followed_are_refused(
    server: Any, fields: dict[str, str], param: str, words: str
) -> None:
    answer = await send(server, noise(0.3), **fields)
    assert answer.status == 400
    assert error_of(answer)["param"] == param
    assert words in error_of(answer)["message"]


async def test_another_model_and_sound_that_is_none_are_refused(server: Any) -> None:
    assert (await send(server, noise(0.3), model="other")).status == 404
    answer = await send(server, wav_of(np.zeros((0, 1))))
    assert (answer.status, error_of(answer)["message"]) == (400, "the file has no sound")
    assert (await send(server, noise(0.3), TRANSLATIONS, language="en")).status == 400
    answer = await send(server, b"")
    assert error_of(answer)["message"] == "file is missing, or empty"
    answer = await server.post(TRANSCRIPTIONS, {"file": "x"})
    assert (answer.status, answer.error["param"]) == (400, None)
    assert "must be a form" in answer.error["message"]
    text = await server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
    assert (text.status, "Send sound to /v1/audio/transcriptions" in text.error["message"]) == (400, True)


async def test_a_page_of_another_origin_may_send_no_form(server: Any) -> None:
    form = aiohttp.FormData()
    form.add_field("file", wav_of(noise(0.1)), filename="a.wav")
    headers = {"Origin": "https://elsewhere.example"}
    async with server.client.post(TRANSCRIPTIONS, data=form, headers=headers) as response:
        assert response.status == 403


async def test_models_of_text_take_no_sound(start: Any) -> None:
    async with start() as server:
        answer = await send(server, noise(0.3))
        assert (answer.status, error_of(answer)["param"]) == (400, "model")


async def test_the_model_says_that_it_takes_sound(server: Any) -> None:
    listed = await server.get("/v1/models")
    assert listed.json["data"][0]["architecture"]["input_modalities"] == ["audio"]
