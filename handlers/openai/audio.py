"""POST /v1/audio/transcriptions and /v1/audio/translations: forms to requests, and transcripts to responses.
Several requests share the engine's steps.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import Struct

from ...runtime.errors import RequestError
from ...runtime.speech.fallback import Thresholds
from ...runtime.step.requests import Priority
from ..http.forms import FormField, parse_form
from ..http.json_bodies import encode
from ..http.service import CALL, Service
from ..http.sse import EventStream, Framing, complete
from .responses import Transcription
from .routes import THRESHOLDS, TRANSCRIPT_FORMATS, TRANSCRIPTION, TRANSLATION
from .scribe import MAX_SEED, Scribe, ScribeOptions, Transcript, WindowAnswer

if TYPE_CHECKING:
    from ...runtime.speech.features import Spectrogram
    from ...runtime.speech.settings import SpeechSettings

STREAMED_FORMATS = ("json", "text")
MAX_PROMPT_CHARS = 8_192
_TRANSCRIBE, _TRANSLATE = "transcribe", "translate"
_PRIORITY = "teneral[priority]"  # as OpenAI's libraries write an object's field
_GRANULARITIES = ("timestamp_granularities[]", "timestamp_granularities")
_FIELDS = {
    _TRANSCRIBE: {*TRANSCRIPTION["properties"], *_GRANULARITIES},
    _TRANSLATE: {*TRANSLATION["properties"]},
}
_MEDIA = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}
_FRAMING = Framing("text/event-stream", b"data: ", b"\n\n", True, b"")


class AudioRequest(Struct, frozen=True):
    """A form's fields, checked."""

    file: memoryview
    model: str | None
    response_format: str
    granularities: frozenset[str]
    stream: bool
    options: ScribeOptions

    @classmethod
    def of(cls, fields: Sequence[FormField], task: str) -> AudioRequest:
        """Raises `RequestError`, naming the field."""
        known = _FIELDS[task]
        given: dict[str, FormField] = {}
        granularities: set[str] = set()
        for each in fields:
            if each.name not in known:
                raise RequestError(f"unknown field {each.name[:100]!r}", param=each.name[:100])
            if each.name in _GRANULARITIES:
                granularities.add(
                    _choice({_GRANULARITIES[0]: each.text}, _GRANULARITIES[0], ("segment", "word"))
                )
            elif each.name in given:
                raise RequestError(f"the form has {each.name} twice", param=each.name)
            given[each.name] = each
        if "file" not in given or not len(given["file"].content):
            raise RequestError("file is missing, or empty", param="file")
        texts = {name: each.text for name, each in given.items() if name != "file"}
        response_format = _choice(texts, "response_format", TRANSCRIPT_FORMATS)
        stream = _flag(texts, "stream")
        if stream and response_format not in STREAMED_FORMATS:
            raise RequestError(
                f"a stream's response_format must be one of {', '.join(STREAMED_FORMATS)}",
                param="response_format",
            )
        has_words = "word" in granularities
        if has_words and response_format != "verbose_json":
            raise RequestError(
                "times of words need the response_format verbose_json", param=_GRANULARITIES[0]
            )
        options = _options(texts, task, response_format, has_words=has_words)
        kinds = frozenset(granularities or {"segment"})
        return cls(given["file"].content, texts.get("model") or None, response_format, kinds, stream, options)


def _options(texts: Mapping[str, str], task: str, response_format: str, *, has_words: bool) -> ScribeOptions:
    prompt = texts.get("prompt", "")
    if len(prompt) > MAX_PROMPT_CHARS:
        raise RequestError(f"prompt may have {MAX_PROMPT_CHARS} characters", param="prompt")
    return ScribeOptions(
        task=task,
        language=texts.get("language") or None,
        prompt=prompt,
        has_times=response_format in ("srt", "verbose_json", "vtt"),
        needs_no_speech=response_format == "verbose_json",
        has_words=has_words,
        temperature=_number(texts, "temperature", 0, 1, 0.0),
        thresholds=_thresholds(texts),
        condition_on_prev_tokens=_flag(texts, "condition_on_prev_tokens"),
        seed=_seed(texts),
        priority=Priority(_choice(texts, _PRIORITY, tuple(Priority))),
    )


def _thresholds(texts: Mapping[str, str]) -> Thresholds:
    """The defaults, but for those that are given: `none` is None."""
    given: dict[str, float | None] = {}
    for name, (low, high) in THRESHOLDS.items():
        key = f"{name}_threshold"
        is_none = texts.get(key) == "none"
        given[name] = None if is_none else _number(texts, key, low, high, getattr(Thresholds(), name))
    return Thresholds(**given)


def _choice(texts: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    """The first one without a text."""
    text = texts.get(name) or allowed[0]
    if text not in allowed:
        raise RequestError(f"{name} must be one of {', '.join(allowed)}", param=name)
    return text


def _flag(texts: Mapping[str, str], name: str) -> bool:
    return _choice({name: texts.get(name, "").lower()}, name, ("false", "true", "0", "1")) in ("true", "1")


def _number(texts: Mapping[str, str], name: str, low: float, high: float, default: float) -> float:
    text = texts.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}", param=name)
    return value


def _seed(texts: Mapping[str, str]) -> int | None:
    text = texts.get("seed", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > MAX_SEED:
        raise RequestError(f"seed must be a whole number from 0 to {MAX_SEED}", param="seed")
    return int(text)


class AudioRoutes:
    """Both routes of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoding = asyncio.Semaphore(1)  # samples are many: of one file at a time

    async def transcriptions(self, request: web.Request) -> web.StreamResponse:
        return await self._post(request, _TRANSCRIBE)

    async def translations(self, request: web.Request) -> web.StreamResponse:
        return await self._post(request, _TRANSLATE)

    async def _post(self, request: web.Request, task: str) -> web.StreamResponse:
        service = self._service
        async with service.admission.form(request) as data:
            asked = AudioRequest.of(parse_form(request.headers.get("Content-Type", ""), data), task)
            service.check_model(asked.model)
            instance = service.instance
            with service.admission.waiting(1):
                tokenizer = await service.ready(instance.tokenizer, instance)
                settings = tokenizer.speech
                if settings is None:
                    raise RequestError(
                        "this model takes no sound",
                        param="model",
                        hint="Serve one that transcribes, as docs/models.md lists them.",
                    )
                async with self._decoding:
                    sound, duration_s = await asyncio.to_thread(_spectrogram, asked.file, settings)
                engine = await service.ready(instance.engine, instance)
                engine.require_room("", asked.options.priority)
            CALL.get().limit(service.limits.request_timeout_s)
            with service.admission.memory(sound.nbytes):
                scribe = Scribe(service, engine, tokenizer, settings, asked.options, sound, duration_s)
                if asked.stream:
                    return await _streamed(service, request, scribe)
                async for _ in scribe.windows():
                    pass
        return _response(asked, scribe.transcript)


def _spectrogram(file: memoryview, settings: SpeechSettings) -> tuple[Spectrogram, float]:
    """Of at least one window; and the sound's seconds."""
    from ...runtime.speech.features import HOP, spectrogram
    from ...runtime.speech.sound import SAMPLE_RATE, decode_sound

    samples = decode_sound(file)
    least = settings.window_columns * HOP
    return spectrogram(samples, settings.num_bands, least_samples=least), len(samples) / SAMPLE_RATE


# ---- answers ----


async def _streamed(service: Service, request: web.Request, scribe: Scribe) -> web.StreamResponse:
    """The text of each window as an event, and then the whole one."""

    async def send(stream: EventStream) -> None:
        sent = ""
        async for text in scribe.windows():
            if len(text) > len(sent):
                await stream.send(encode({"type": "transcript.text.delta", "delta": text[len(sent) :]}))
            sent = text
        await stream.send(encode({"type": "transcript.text.done", "text": sent}))

    async with EventStream(request, _FRAMING, service.limits, comment=service.load_comment) as stream:
        return await complete(stream, CALL.get(), send(stream))


def _response(asked: AudioRequest, transcript: Transcript) -> web.Response:
    response_format = asked.response_format
    if response_format in ("json", "verbose_json"):
        is_short = response_format == "json"
        body = Transcription(transcript.text) if is_short else _verbose(transcript, asked.granularities)
        return web.Response(body=encode(body), content_type="application/json")
    make = {"text": lambda made: made.text + "\n", "srt": _srt, "vtt": _vtt}[response_format]
    return web.Response(text=make(transcript), content_type=_MEDIA[response_format], charset="utf-8")


def _verbose(transcript: Transcript, granularities: Container[str]) -> Mapping[str, Any]:
    body: dict[str, Any] = {
        "task": transcript.task,
        "language": transcript.language,
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
    }
    if "segment" in granularities:
        body["segments"] = [_segment(number, each) for number, each in enumerate(transcript.answers)]
    if "word" in granularities:
        body["words"] = [
            {"word": each.text, "start": round(each.start_s, 2), "end": round(each.end_s, 2)}
            for each in transcript.words
        ]
    return body


def _segment(number: int, answer: WindowAnswer) -> Mapping[str, Any]:
    segment, window = answer.segment, answer.window
    return {
        "id": number,
        "seek": segment.first_column,
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": answer.text,
        "tokens": list(segment.tokens),
        "temperature": window.temperature,
        "avg_logprob": window.mean_logprob,
        "compression_ratio": window.compression_ratio,
        "no_speech_prob": window.no_speech_prob,
    }


def _srt(transcript: Transcript) -> str:
    return "".join(
        f"{number}\n{_clock(each.segment.start_s, ',')} --> {_clock(each.segment.end_s, ',')}\n{_line(each.text)}\n\n"
        for number, each in enumerate(transcript.answers, 1)
    )


def _vtt(transcript: Transcript) -> str:
    cues = "".join(
        f"{_clock(each.segment.start_s, '.')} --> {_clock(each.segment.end_s, '.')}\n{_line(each.text)}\n\n"
        for each in transcript.answers
    )
    return f"WEBVTT\n\n{cues}"


def _line(text: str) -> str:
    """Without what would end a cue."""
    return text.strip().replace("-->", "->").replace("\n", " ")


def _clock(seconds: float, mark: str) -> str:
    """A time of subtitles: 00:01:02,345."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
