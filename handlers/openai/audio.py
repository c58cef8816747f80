"""POST /v1/audio/transcriptions and /v1/audio/translations.

Sound is written down window by window: each begins where the last whole segment of the one before ended
(`runtime/speech/windows.py`). Several requests share the engine's steps.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import Struct, field

from ...runtime.errors import ModelError, RequestError
from ...runtime.step.requests import GenerationRequest, Priority, SamplingParams
from ..http.forms import FormField, parse_form
from ..http.json_bodies import encode
from ..http.service import CALL, Service
from .generation import RequestSequences, SequenceOutcome
from .responses import Transcription

if TYPE_CHECKING:
    from ...runtime.engine.engine import Engine
    from ...runtime.speech.features import Spectrogram
    from ...runtime.speech.settings import SpeechSettings
    from ...runtime.speech.windows import SpokenSegment
    from ...runtime.text.tokenizer import TextTokenizer

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
MAX_PROMPT_CHARS = 8_192
_TRANSCRIBE, _TRANSLATE = "transcribe", "translate"
_FIELDS = ("file", "model", "prompt", "response_format", "temperature")
_OF_TRANSCRIPTIONS = ("language", "timestamp_granularities[]", "timestamp_granularities", "stream")
_MEDIA = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


class AudioRequest(Struct, frozen=True):
    """A form's fields, checked."""

    file: memoryview
    model: str | None
    task: str
    language: str | None
    prompt: str
    response_format: str
    temperature: float

    @property
    def has_times(self) -> bool:
        return self.response_format in ("srt", "verbose_json", "vtt")

    @classmethod
    def of(cls, fields: Sequence[FormField], task: str) -> AudioRequest:
        """Raises `RequestError`, naming the field."""
        known = (*_FIELDS, *(_OF_TRANSCRIPTIONS if task == _TRANSCRIBE else ()))
        given: dict[str, FormField] = {}
        for each in fields:
            if each.name not in known:
                raise RequestError(f"unknown field {each.name[:100]!r}", param=each.name[:100])
            if each.name in given and not each.name.startswith("timestamp"):
                raise RequestError(f"the form has {each.name} twice", param=each.name)
            if each.name.startswith("timestamp") and each.text != "segment":
                raise RequestError(
                    "timestamp_granularities[] must be segment: times of words are not supported",
                    param="timestamp_granularities[]",
                )
            given[each.name] = each
        texts = {name: each.text for name, each in given.items() if name != "file"}
        if "file" not in given or not len(given["file"].content):
            raise RequestError("file is missing, or empty", param="file")
        if texts.get("stream", "false").lower() not in ("false", "0", ""):
            raise RequestError("stream is not supported here", param="stream", hint="Leave it out.")
        response_format = texts.get("response_format") or "json"
        if response_format not in FORMATS:
            raise RequestError(
                f"response_format must be one of {', '.join(FORMATS)}", param="response_format"
            )
        prompt = texts.get("prompt", "")
        if len(prompt) > MAX_PROMPT_CHARS:
            raise RequestError(f"prompt may have {MAX_PROMPT_CHARS} characters", param="prompt")
        return cls(
            given["file"].content,
            texts.get("model") or None,
            task,
            texts.get("language") or None,
            prompt,
            response_format,
            _temperature(texts.get("temperature") or "0"),
        )


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise RequestError("temperature must be a number from 0 to 1", param="temperature")
    return value


class WindowAnswer(Struct, frozen=True):
    """A segment with what is known of its window's tokens."""

    segment: SpokenSegment
    text: str
    mean_logprob: float


class Transcript(Struct):
    task: str
    language: str
    duration_s: float
    temperature: float
    answers: list[WindowAnswer] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.answers).strip()


class AudioRoutes:
    """Both routes of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoding = asyncio.Semaphore(1)  # samples are many: of one file at a time

    async def transcriptions(self, request: web.Request) -> web.Response:
        return await self._post(request, _TRANSCRIBE)

    async def translations(self, request: web.Request) -> web.Response:
        return await self._post(request, _TRANSLATE)

    async def _post(self, request: web.Request, task: str) -> web.Response:
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
                engine.require_room("", Priority.INTERACTIVE)
            CALL.get().limit(service.limits.request_timeout_s)
            with service.admission.memory(sound.nbytes):
                scribe = Scribe(service, engine, tokenizer, settings, asked)
                transcript = await scribe.write(sound, duration_s)
        return _response(asked.response_format, transcript)


def _spectrogram(file: memoryview, settings: SpeechSettings) -> tuple[Spectrogram, float]:
    """Of at least one window; and the sound's seconds."""
    from ...runtime.speech.features import HOP, spectrogram
    from ...runtime.speech.sound import SAMPLE_RATE, decode_sound

    samples = decode_sound(file)
    least = settings.window_columns * HOP
    return spectrogram(samples, settings.num_bands, least_samples=least), len(samples) / SAMPLE_RATE


class Scribe:
    """One request's way through the engine, window after window."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        tokenizer: TextTokenizer,
        settings: SpeechSettings,
        asked: AudioRequest,
    ) -> None:
        self._service = service
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._asked = asked
        self._id = f"audio-{secrets.token_hex(12)}"

    async def write(self, sound: Spectrogram, duration_s: float) -> Transcript:
        """The transcript. Raises the engine's errors."""
        asked, settings = self._asked, self._settings
        num_columns, size = sound.shape[1], settings.window_columns
        has_times = asked.has_times or num_columns > size
        language = asked.language
        if settings.languages:
            language = await self._language(sound) if language is None else language
            if language not in settings.languages:
                raise RequestError(
                    f"language {language[:40]!r} is not one of this model's",
                    param="language",
                    hint=f"It has {', '.join(sorted(settings.languages))[:400]}.",
                )
        elif language not in (None, "en"):
            raise RequestError("this model writes English alone", param="language")
        try:
            beginning = settings.beginning(language, asked.task, has_times=has_times)
        except ModelError as error:
            raise RequestError(error.message, param="model", hint=error.hint) from error
        beginning = await self._service.text_threads.run(len(asked.prompt), self._before, beginning)
        transcript = Transcript(asked.task, language or "en", duration_s, asked.temperature)
        first = 0
        while first < num_columns:
            own = min(size, num_columns - first)
            first += await self._window(sound, first, own, beginning, transcript, has_times=has_times)
        return transcript

    def _before(self, beginning: list[int]) -> list[int]:
        """The tokens before each window's text, with the request's prompt, of which its end counts."""
        settings, prompt = self._settings, self._asked.prompt.strip()
        if not prompt:
            return beginning
        if settings.before is None:
            raise RequestError("this model takes no prompt", param="prompt")
        tokens = self._tokenizer.encode(f" {prompt}", add_special_tokens=False)
        if any(token >= min(settings.end, settings.start) for token in tokens):
            raise RequestError("prompt has special tokens of the model", param="prompt")
        most = settings.max_tokens // 2 - 1
        return [settings.before, *tokens[-most:], *beginning]

    async def _window(
        self,
        sound: Spectrogram,
        first: int,
        num_columns: int,
        beginning: list[int],
        transcript: Transcript,
        *,
        has_times: bool,
    ) -> int:
        """Write down a window; returns how many columns the next one begins behind it."""
        from ...runtime.speech.rules import SpeechRules
        from ...runtime.speech.windows import segments_of

        settings, asked = self._settings, self._asked
        sampling = SamplingParams(
            temperature=asked.temperature, times_from=settings.times_from if has_times else None
        )
        outcome = await self._generate(
            sound,
            first,
            beginning,
            sampling,
            grammar=SpeechRules(settings, has_times=has_times),
            num_top_logprobs=0,
        )
        tokens = [token for token in outcome.tokens if token != settings.end]
        segments, step = segments_of(tokens, settings.times_from, first_column=first, num_columns=num_columns)
        texts = await self._service.text_threads.run(len(tokens), self._texts, segments)
        logprobs = [entry.logprob for entry in outcome.logprobs]
        mean = sum(logprobs) / max(1, len(logprobs))
        transcript.answers += [
            WindowAnswer(segment, text, mean) for segment, text in zip(segments, texts, strict=True)
        ]
        return max(step, 1)

    def _texts(self, segments: Sequence[SpokenSegment]) -> list[str]:
        """Of each segment's tokens but those of times."""
        times_from = self._settings.times_from
        return [
            self._tokenizer.decode([token for token in each.tokens if token < times_from])
            for each in segments
        ]

    async def _language(self, sound: Spectrogram) -> str:
        """The likeliest language of the first window."""
        languages = self._settings.languages
        sampling = SamplingParams(temperature=0, allowed_tokens=tuple(languages.values()))
        outcome = await self._generate(sound, 0, [self._settings.start], sampling, max_tokens=1)
        return next(name for name, token in languages.items() if token == outcome.tokens[0])

    async def _generate(
        self, sound: Spectrogram, first: int, beginning: Sequence[int], sampling: SamplingParams, **more: Any
    ) -> SequenceOutcome:
        """The model's tokens behind the window that begins with this column, and these tokens."""
        import numpy as np  # few servers need it here

        from ...runtime.step.images import PromptImage

        settings, call = self._settings, CALL.get()
        window = np.zeros((1, len(sound), settings.window_columns), np.float32)
        own = sound[:, first : first + settings.window_columns]
        window[0, :, : own.shape[1]] = own
        digest = hashlib.blake2b(window.tobytes(), digest_size=32, person=b"sound").digest()
        places = np.arange(settings.num_places, dtype=np.int64)
        prompt = (*(0,) * settings.num_places, *beginning)
        request = GenerationRequest(
            self._id,
            prompt,
            sampling=sampling,
            images=(PromptImage(digest, window, np.zeros((0, 0), np.float32), places),),
            **more,
        )
        outcome = SequenceOutcome()
        with RequestSequences(self._service, call) as sequences:
            sequences.submit(self._engine, [request])
            call.prompt_tokens += len(prompt)
            self._service.metrics.prompt_taken(len(prompt))
            while steps := await sequences.next_steps():
                for _, event in steps:
                    outcome.add(event)
        return outcome


# ---- answers ----


def _response(response_format: str, transcript: Transcript) -> web.Response:
    if response_format in ("json", "verbose_json"):
        body = Transcription(transcript.text) if response_format == "json" else _verbose(transcript)
        return web.Response(body=encode(body), content_type="application/json")
    make = {"text": lambda made: made.text + "\n", "srt": _srt, "vtt": _vtt}[response_format]
    return web.Response(text=make(transcript), content_type=_MEDIA[response_format], charset="utf-8")


def _verbose(transcript: Transcript) -> Mapping[str, Any]:
    return {
        "task": transcript.task,
        "language": transcript.language,
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
        "segments": [
            {
                "id": number,
                "seek": each.segment.first_column,
                "start": round(each.segment.start_s, 3),
                "end": round(each.segment.end_s, 3),
                "text": each.text,
                "tokens": list(each.segment.tokens),
                "temperature": transcript.temperature,
                "avg_logprob": each.mean_logprob,
                "compression_ratio": _compression_ratio(each.text),
            }
            for number, each in enumerate(transcript.answers)
        ],
    }


def _compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data))


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
