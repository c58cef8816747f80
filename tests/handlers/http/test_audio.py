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

from teneral.handlers.openai import scribe
from teneral.runtime.speech.windows import SpokenSegment
from teneral.runtime.speech.words import words_of

# Random weights are unlikely to be sure of a text.
NO_THRESHOLDS = {f"{name}_threshold": "none" for name in ("logprob", "compression_ratio", "no_speech")}
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
        if not made["segments"]:
            return []
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
    for name, value in {**NO_THRESHOLDS, **fields}.items():
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
    seeded = {str(json_of(await send(server, sound, language="en", temperature=1, seed=7))) for _ in range(3)}
    assert len(seeded) == 1


def own_segments(answer: Any) -> list[tuple[float, float, str]]:
    return [(each["start"], each["end"], each["text"]) for each in json_of(answer)["segments"]]


async def test_texts_so_far_precede_a_window_on_request(server: Any, speech: Any) -> None:
    tokens = speech[0].tokenizer.encode(" Ada", add_special_tokens=False)
    for seed in range(3):
        for prompt in ("", "Ada"):
            sound, fields = noise(3.7, seed=seed), {"language": "en", "response_format": "verbose_json"}
            answer = await send(server, sound, **fields, prompt=prompt, condition_on_prev_tokens="true")
            more = {"prompt_ids": torch.tensor([BEFORE, *tokens])} if prompt else {}
            expected = speech[1].segments(
                sound, language="en", task="transcribe", condition_on_prev_tokens=True, **more
            )
            assert own_segments(answer) == expected


@pytest.mark.parametrize("seconds", [0.9, 3.7])
async def test_times_of_words_are_those_of_transformers(server: Any, speech: Any, seconds: float) -> None:
    num_compared = 0
    for seed in range(3):
        sound, features = noise(seconds, seed=seed), features_of(noise(seconds, seed=seed))
        form = {"language": "en", "response_format": "verbose_json"}
        both = {"timestamp_granularities[]": "word", "timestamp_granularities": "segment"}
        answer = json_of(await send(server, sound, **form, **both))
        num_frames = min(features.shape[-1], round(seconds * 100))
        mask = (torch.arange(features.shape[-1]) < num_frames)[None].long()
        with torch.no_grad():
            made = speech[1].model.generate(
                features,
                attention_mask=mask,
                language="en",
                task="transcribe",
                return_timestamps=True,
                return_token_timestamps=True,
                return_segments=True,
                time_precision=0.02,
            )
        words = iter((each["word"], each["start"], each["end"]) for each in answer["words"])
        for own, each in zip(answer["segments"], made["segments"][0], strict=True):
            segment = SpokenSegment(0, 0, tuple(each["tokens"].tolist()), 0)
            ends = [0.0, *each["token_timestamps"].tolist(), 0.0]
            expected = words_of(segment, ends, TIMES_FROM, speech[1].text_of, "en")
            found = [next(words) for _ in expected]
            # transformers counts places from the end where a window has less than one of the sound.
            if num_frames - own["seek"] >= 2:
                assert found == [(text, round(start, 2), round(end, 2)) for text, start, end in expected]
                num_compared += len(found)
        assert next(words, None) is None
    assert num_compared > 3


async def test_words_come_without_segments(server: Any) -> None:
    fields = {"language": "en", "response_format": "verbose_json", "timestamp_granularities[]": "word"}
    answer = json_of(await send(server, noise(0.9, seed=5), **fields))
    assert "segments" not in answer
    assert all(0 <= word["start"] <= word["end"] <= 1 for word in answer["words"])


async def test_silent_windows_are_dropped_as_by_transformers(
    server: Any, speech: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, sound = speech[1], noise(6.6, seed=11)
    means, silences = watched(oracle, monkeypatch)
    fields = {"language": "en", "response_format": "verbose_json"}
    options = {"language": "en", "task": "transcribe"}
    answer = await send(server, sound, **fields)
    assert own_segments(answer) == oracle.segments(
        sound, **options, temperature=(0.0,), logprob_threshold=-50.0, no_speech_threshold=1.0
    )
    windows = {each["seek"]: each for each in json_of(answer)["segments"]}.values()
    num_segments = len(own_segments(answer))
    np.testing.assert_allclose([each["avg_logprob"] for each in windows], means, atol=1e-4)
    np.testing.assert_allclose([each["no_speech_prob"] for each in windows], silences, rtol=1e-3)

    monkeypatch.setattr(scribe, "TEMPERATURES", (0.0,))
    lowest, highest = sorted(means)[-3], sorted(silences)[2]
    limits = {"logprob_threshold": lowest + 1e-3, "no_speech_threshold": highest + 1e-5}
    answer = await send(server, sound, **fields, **limits)
    expected = oracle.segments(sound, **options, **limits, temperature=(0.0,))
    assert own_segments(answer) == expected
    assert 0 < len(expected) < num_segments


def watched(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[float]]:
    """The mean log-probabilities and probabilities of silence that transformers comes to, as it does."""
    means: list[float] = []
    silences: list[float] = []
    mean_of, decide = oracle.model._retrieve_avg_logprobs, oracle.model._need_fallback

    def retrieve(*args: Any) -> Any:
        means.append(float(mean_of(*args)))
        return means[-1]

    def need(*args: Any) -> Any:
        (detector,) = [each for each in args[3] if type(each).__name__ == "WhisperNoSpeechDetection"]
        silences.append(float(detector.no_speech_prob[0]))
        return decide(*args)

    monkeypatch.setattr(oracle.model, "_retrieve_avg_logprobs", retrieve)
    monkeypatch.setattr(oracle.model, "_need_fallback", need)
    return means, silences


async def test_poor_texts_are_drawn_again_at_higher_temperatures(server: Any) -> None:
    sound, fields = noise(1.4, seed=2), {"language": "en", "response_format": "verbose_json"}
    accepted = json_of(await send(server, sound, **fields, logprob_threshold="-100"))
    assert {each["temperature"] for each in accepted["segments"]} == {0.0}
    means = [each["avg_logprob"] for each in accepted["segments"]]
    poor = [
        await send(server, sound, **fields, **limits)
        for limits in ({"logprob_threshold": 0}, {"logprob_threshold": 0}, {"compression_ratio_threshold": 0})
    ]
    for answer in poor:
        assert {each["temperature"] for each in json_of(answer)["segments"]} == {1.0}
    assert json_of(poor[0]) == json_of(poor[1]), "draws have a seed"
    other = json_of(await send(server, sound, **fields, logprob_threshold=0, seed=3))
    assert other != json_of(poor[0])
    some = json_of(await send(server, sound, **fields, logprob_threshold=max(means) - 1e-3))
    assert any(each["temperature"] for each in some["segments"])
    alone = json_of(await send(server, sound, **fields, logprob_threshold=0, temperature=0.4))
    assert {each["temperature"] for each in alone["segments"]} == {0.4}


async def test_thresholds_are_set_by_themselves(server: Any) -> None:
    sound, defaults = noise(0.8, seed=2), dict.fromkeys(NO_THRESHOLDS, "")
    answer = json_of(await send(server, sound, language="en", response_format="verbose_json", **defaults))
    means = [(each["avg_logprob"], each["temperature"]) for each in answer["segments"]]
    assert all(mean >= -1 or temperature == 1 for mean, temperature in means)


async def test_a_stream_has_the_text_of_each_window(server: Any) -> None:
    sound = noise(3.3, seed=4)
    whole = json_of(await send(server, sound, language="de"))["text"]
    answer = await send(server, sound, language="de", stream="true")
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(each.removeprefix(b"data: ")) for each in answer.body.split(b"\n\n")[:-1]]
    assert {each["type"] for each in events[:-1]} == {"transcript.text.delta"}
    assert "".join(each["delta"] for each in events[:-1]) == whole
    assert len(events) > 2
    assert events[-1] == {"type": "transcript.text.done", "text": whole}
    refused = await send(server, sound, language="xx", stream="true")
    assert (refused.status, error_of(refused)["param"]) == (400, "language")


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
        ({"stream": "maybe"}, "stream", "one of false, true"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "one of json, text"),
        ({"logprob_threshold": "1"}, "logprob_threshold", "a number from -100 to 0"),
        ({"no_speech_threshold": "inf"}, "no_speech_threshold", "a number from 0 to 1"),
        ({"seed": "-1"}, "seed", "a whole number from 0"),
        ({"seed": "9" * 19}, "seed", "a whole number from 0"),
        ({"teneral[priority]": "high"}, "teneral[priority]", "one of interactive, batch"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "verbose_json"),
        ({"timestamp_granularities[]": "line"}, "timestamp_granularities[]", "one of segment, word"),
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
