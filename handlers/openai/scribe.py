"""A transcript, made by an engine window after window: each begins where the last whole segment of the one before
ended (`runtime/speech/windows.py`). It knows no forms and no responses.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...runtime.errors import ModelError, RequestError
from ...runtime.speech.fallback import (
    MAX_PROMPT_TEMPERATURE,
    TEMPERATURES,
    Thresholds,
    compression_ratio_of,
)
from ...runtime.speech.windows import COLUMNS_PER_TIME, S_PER_TIME
from ...runtime.step.requests import GenerationRequest, Priority, SamplingParams
from ..http.service import CALL, Service
from .generation import RequestSequences, SequenceOutcome

if TYPE_CHECKING:
    from ...runtime.engine.engine import Engine
    from ...runtime.speech.features import Spectrogram
    from ...runtime.speech.settings import SpeechSettings
    from ...runtime.speech.windows import SpokenSegment
    from ...runtime.speech.words import SpokenWord
    from ...runtime.step.images import PromptImage, SoundAttention
    from ...runtime.text.tokenizer import TextTokenizer

MAX_SEED = (1 << 63) - 1


class ScribeOptions(Struct, frozen=True):
    """A request's choices of how its sound is written down."""

    task: str
    language: str | None = None  # None: the likeliest of the first window
    prompt: str = ""
    has_times: bool = False
    needs_no_speech: bool = False  # the answer has its probability
    has_words: bool = False  # with times of their own
    temperature: float = 0.0  # 0: `TEMPERATURES`, as `thresholds` ask for them
    thresholds: Thresholds = Thresholds()
    condition_on_prev_tokens: bool = False  # texts so far are the prompt of a window
    seed: int | None = None  # None: 0, or with a temperature a random one
    priority: Priority = Priority.INTERACTIVE


class WindowText(Struct, frozen=True):
    """A window's tokens, and what decides about them."""

    tokens: tuple[int, ...]  # before the end token
    is_whole: bool  # there was one
    temperature: float
    mean_logprob: float  # of the tokens, with the end token, among those that may come next
    compression_ratio: float
    no_speech_prob: float | None = None  # None: not asked for


class WindowAnswer(Struct, frozen=True):
    """A segment with the text that it is of."""

    segment: SpokenSegment
    text: str
    window: WindowText


class Transcript(Struct):
    task: str
    language: str
    duration_s: float
    answers: list[WindowAnswer] = field(default_factory=list)
    words: list[SpokenWord] = field(default_factory=list)  # with `ScribeOptions.has_words`

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.answers).strip()


class Scribe:
    """One request's way through the engine."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        tokenizer: TextTokenizer,
        settings: SpeechSettings,
        options: ScribeOptions,
        sound: Spectrogram,
        duration_s: float,
    ) -> None:
        self._service = service
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._options = options
        self._sound = sound
        self.transcript = Transcript(options.task, "", duration_s)
        self._id = f"audio-{secrets.token_hex(12)}"
        self._has_times = options.has_times or sound.shape[1] > settings.window_columns
        self._prompt: list[int] = []  # of the request
        self._previous: list[int] = []  # tokens of the prompt, and of segments so far
        self._continues = options.condition_on_prev_tokens
        self._num_draws = 0
        self._image: tuple[int, PromptImage] | None = None  # the last window's, with its first column

    async def windows(self) -> AsyncIterator[str]:
        """The text after each window; `transcript` has all of it at the end. Raises the engine's errors."""
        settings, options = self._settings, self._options
        if options.has_words and not settings.alignment_heads:
            raise RequestError(
                "the model's generation_config.json has no alignment_heads, which times of words need",
                param="timestamp_granularities[]",
            )
        language = await self._language()
        try:
            beginning = settings.beginning(language, options.task, has_times=self._has_times)
        except ModelError as error:
            raise RequestError(error.message, param="model", hint=error.hint) from error
        self._prompt = await self._service.text_threads.run(len(options.prompt), self._prompt_tokens)
        self._previous = self._prompt
        self.transcript.language = language or "en"
        first, num_columns = 0, self._sound.shape[1]
        while first < num_columns:
            own = min(settings.window_columns, num_columns - first)
            first += await self._window(first, own, beginning)
            yield self.transcript.text

    async def _language(self) -> str | None:
        language, languages = self._options.language, self._settings.languages
        if not languages:
            if language not in (None, "en"):
                raise RequestError("this model writes English alone", param="language")
            return language
        if language is None:
            sampling = SamplingParams(temperature=0, allowed_tokens=tuple(languages.values()))
            outcome = await self._generate(0, [self._settings.start], sampling, max_tokens=1)
            return next(name for name, token in languages.items() if token == outcome.tokens[0])
        if language not in languages:
            raise RequestError(
                f"language {language[:40]!r} is not one of this model's",
                param="language",
                hint=f"It has {', '.join(sorted(languages))[:400]}.",
            )
        return language

    def _prompt_tokens(self) -> list[int]:
        """The tokens of the request's prompt, of which the end counts."""
        settings, prompt = self._settings, self._options.prompt.strip()
        if settings.before is None and (prompt or self._options.condition_on_prev_tokens):
            param = "prompt" if prompt else "condition_on_prev_tokens"
            raise RequestError("this model takes no prompt", param=param)
        if not prompt:
            return []
        tokens = self._tokenizer.encode(f" {prompt}", add_special_tokens=False)
        if any(token >= min(settings.end, settings.start) for token in tokens):
            raise RequestError("prompt has special tokens of the model", param="prompt")
        return tokens[-self._max_prompt :]

    @property
    def _max_prompt(self) -> int:
        return self._settings.max_tokens // 2 - 1

    def _before(self) -> list[int]:
        """The tokens in front of a window's own beginning."""
        tokens = self._previous[-self._max_prompt :] if self._continues else self._prompt
        return [self._settings.before, *tokens] if tokens and self._settings.before is not None else []

    async def _window(self, first: int, num_columns: int, beginning: list[int]) -> int:
        """Write down a window; returns how many columns the next one begins behind it."""
        from ...runtime.speech.windows import prompt_of, segments_of

        times_from, before = self._settings.times_from, self._before()
        made, is_silent = await self._accepted(first, before, beginning)
        is_cool = made.temperature < MAX_PROMPT_TEMPERATURE
        self._continues = self._options.condition_on_prev_tokens and is_cool
        if is_silent:
            return num_columns
        segments, step = segments_of(made.tokens, times_from, first_column=first, num_columns=num_columns)
        texts = await self._service.text_threads.run(len(made.tokens), self._texts, segments)
        self.transcript.answers += [
            WindowAnswer(segment, text, made) for segment, text in zip(segments, texts, strict=True)
        ]
        if self._options.has_words:
            await self._add_words(made, segments, [*before, *beginning], num_columns)
        self._previous = (self._previous + prompt_of(segments, times_from))[-self._max_prompt :]
        return max(step, 1)

    async def _add_words(
        self, made: WindowText, segments: Sequence[SpokenSegment], beginning: list[int], num_columns: int
    ) -> None:
        """Put the words of a window's segments to the transcript. Its text is computed once more for them."""
        from ...runtime.step.images import SoundAttention

        tokens = made.tokens if made.is_whole else made.tokens[:-1]
        if not tokens:
            return
        settings, first = self._settings, segments[0].first_column
        num_rows = len(beginning) + len(tokens)
        attention = SoundAttention(settings.alignment_heads, settings.num_places, num_rows)
        greedy = SamplingParams(temperature=0)
        await self._generate(first, [*beginning, *tokens], greedy, max_tokens=1, attention=attention)
        # Of the sound itself, without the silence behind it.
        num_heard = math.ceil(self.transcript.duration_s / S_PER_TIME * COLUMNS_PER_TIME - 1e-6) - first
        num_places = max(1, min(num_columns, num_heard) // COLUMNS_PER_TIME)
        aligned = partial(self._aligned, attention, segments, len(beginning), num_places)
        self.transcript.words += await self._service.text_threads.run(num_rows * num_places, aligned)

    def _aligned(
        self, attention: SoundAttention, segments: Sequence[SpokenSegment], num_skipped: int, num_places: int
    ) -> list[SpokenWord]:
        """The words, by the attention of the tokens behind the first ones."""
        from ...runtime.speech.words import token_ends, words_of

        settings = self._settings
        shares = (each[num_skipped:] for each in attention.shares())
        places = token_ends(shares, num_places, settings.filter_width)
        begin_s = segments[0].first_column / COLUMNS_PER_TIME * S_PER_TIME
        ends = [begin_s, *(begin_s + place * S_PER_TIME for place in places)]
        ends.append(ends[-1])  # of a last token without attention of its own
        words, at = [], 0
        for segment in segments:
            own = ends[at : at + len(segment.tokens) + 1]
            words += words_of(segment, own, settings.times_from, self._text_of, self.transcript.language)
            at += len(segment.tokens)
        return words

    async def _accepted(self, first: int, before: list[int], beginning: list[int]) -> tuple[WindowText, bool]:
        """The window's text, and whether it is silence."""
        options, thresholds = self._options, self._options.thresholds
        no_speech_prob = await self._no_speech(first, before) if options.needs_no_speech else None
        made = None
        for temperature in (options.temperature,) if options.temperature else TEMPERATURES:
            made = await self._text(first, [*before, *beginning], temperature)
            if no_speech_prob is None and thresholds.needs_silence(made.mean_logprob):
                no_speech_prob = await self._no_speech(first, before)
            made = replace(made, no_speech_prob=no_speech_prob)
            if no_speech_prob is not None and thresholds.is_silent(made.mean_logprob, no_speech_prob):
                return made, True
            if not thresholds.is_poor(made.mean_logprob, made.compression_ratio):
                break
        assert made is not None
        return made, False

    async def _text(self, first: int, beginning: list[int], temperature: float) -> WindowText:
        from ...runtime.speech.rules import SpeechRules

        settings = self._settings
        sampling = SamplingParams(
            temperature=temperature,
            seed=self._seed(),
            times_from=settings.times_from if self._has_times else None,
            masks_logprobs=True,
        )
        rules = SpeechRules(settings, has_times=self._has_times)
        outcome = await self._generate(first, beginning, sampling, grammar=rules, num_top_logprobs=0)
        logprobs = [entry.logprob for entry in outcome.logprobs]
        tokens = tuple(token for token in outcome.tokens if token != settings.end)
        text = await self._service.text_threads.run(len(tokens), self._text_of, tokens)
        return WindowText(
            tokens,
            len(tokens) < len(outcome.tokens),
            temperature,
            sum(logprobs) / max(1, len(logprobs)),
            compression_ratio_of(text.strip()),
        )

    def _seed(self) -> int | None:
        """The seed of the next text: each has draws of its own."""
        options = self._options
        self._num_draws += 1
        if options.seed is None and options.temperature:
            return None
        return ((options.seed or 0) + self._num_draws - 1) & MAX_SEED

    async def _no_speech(self, first: int, before: list[int]) -> float:
        """The probability that the window is silence."""
        sampling = SamplingParams(temperature=0, allowed_tokens=(self._settings.no_speech,))
        beginning = [*before, self._settings.start]
        outcome = await self._generate(first, beginning, sampling, max_tokens=1, num_top_logprobs=0)
        return math.exp(outcome.logprobs[0].logprob)

    def _texts(self, segments: Sequence[SpokenSegment]) -> list[str]:
        return [self._text_of(each.tokens) for each in segments]

    def _text_of(self, tokens: Sequence[int]) -> str:
        """The text of the tokens but those of times."""
        return self._tokenizer.decode([token for token in tokens if token < self._settings.times_from])

    async def _generate(
        self,
        first: int,
        beginning: Sequence[int],
        sampling: SamplingParams,
        *,
        attention: SoundAttention | None = None,
        **more: Any,
    ) -> SequenceOutcome:
        """The model's tokens behind the window that begins with this column, and these tokens."""
        call = CALL.get()
        if self._image is None or self._image[0] != first:
            self._image = first, self._window_image(first)
        image = self._image[1]
        prompt = (*(0,) * self._settings.num_places, *beginning)
        request = GenerationRequest(
            self._id,
            prompt,
            sampling=sampling,
            images=(image if attention is None else replace(image, attention=attention),),
            priority=self._options.priority,
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

    def _window_image(self, first: int) -> PromptImage:
        import numpy as np  # few servers need it here

        from ...runtime.step.images import PromptImage

        settings, sound = self._settings, self._sound
        window = np.zeros((1, len(sound), settings.window_columns), np.float32)
        own = sound[:, first : first + settings.window_columns]
        window[0, :, : own.shape[1]] = own
        digest = hashlib.blake2b(window.reshape(-1).data, digest_size=32, person=b"sound").digest()
        places = np.arange(settings.num_places, dtype=np.int64)
        return PromptImage(digest, window, np.zeros((0, 0), np.float32), places)
