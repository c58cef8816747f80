"""Transcriptions over HTTP, in front of a real engine with a tiny model: texts, times and windows are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from tests.support.instances import TinyParts
from tests.support.speech_models import (
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
    import json

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
