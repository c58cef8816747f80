"""The tokens of a speech model, out of generation_config.json and config.json: languages, tasks, times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..errors import ModelError

MAX_LANGUAGES = 512
TASKS = ("transcribe", "translate")
_MAX_SUPPRESSED = 4_096
_MAX_FILTER_WIDTH = 99
_MAX_ALIGNMENT_HEADS = 64
_OF_EITHER_FILE = ("decoder_start_token_id", "eos_token_id", "suppress_tokens", "begin_suppress_tokens")
_WITHOUT_LANGUAGES = (
    "the model's generation_config.json names no languages and tasks",
    "It is one of English alone, or was saved by an old version: ask for transcriptions without a language.",
)


class SpeechSettings(Struct, frozen=True):
    """The tokens around a window's text, and its bounds. A token of time is `times_from` + 50 for each second."""

    num_bands: int  # of a spectrogram
    num_places: int  # tokens of a prompt that a window's sound takes, 50 a second
    max_tokens: int  # of all others together, of prompt and answer
    vocab_size: int
    start: int
    end: int
    no_times: int
    languages: Mapping[str, int]  # code → its token; empty: a model of English alone
    tasks: Mapping[str, int]  # of `TASKS`
    suppressed: tuple[int, ...]  # never in an answer
    suppressed_first: tuple[int, ...]  # never at its beginning
    latest_first_time: int | None  # number of the token of time that may begin an answer at most
    before: int | None  # in front of a text that is not of this window
    # Layers and heads in them whose attention follows the sound; none: there are no times of words.
    alignment_heads: tuple[tuple[int, int], ...] = ()
    filter_width: int = 7  # places over which their attention is smoothed

    @property
    def times_from(self) -> int:
        """The token of the time 0."""
        return self.no_times + 1

    @property
    def no_speech(self) -> int:
        """The token whose probability behind `start` is that of silence."""
        return self.no_times - 1

    @property
    def window_columns(self) -> int:
        """Of a window's spectrogram."""
        return 2 * self.num_places

    @classmethod
    def read(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> SpeechSettings:
        """Raises `ModelError` naming the key that is missing or wrong."""
        vocab_size = _number(config, "vocab_size", 1, 1 << 24)
        stated = {key: config.get(key) for key in _OF_EITHER_FILE if generation.get(key) is None}
        own: dict[str, Any] = {**generation, **stated}
        end = own["eos_token_id"]
        own["eos_token_id"] = end[0] if isinstance(end, list) and len(end) == 1 else end
        no_times = _token(own, "no_timestamps_token_id", vocab_size)
        if not 0 < no_times < vocab_size - 1:
            raise _wrong(own, "no_timestamps_token_id", "there must be tokens before and behind it")
        tasks = _tokens_of(own, "task_to_id", vocab_size)
        languages = {
            name.removeprefix("<|").removesuffix("|>"): token
            for name, token in _tokens_of(own, "lang_to_id", vocab_size).items()
        }
        return cls(
            num_bands=_number(config, "num_mel_bins", 1, 1_024, 80),
            num_places=_number(config, "max_source_positions", 1, 1 << 15, 1_500),
            max_tokens=_number(config, "max_target_positions", 8, 1 << 20, 448),
            vocab_size=vocab_size,
            start=_token(own, "decoder_start_token_id", vocab_size),
            end=_token(own, "eos_token_id", vocab_size),
            no_times=no_times,
            languages={} if own.get("is_multilingual") is False else languages,
            tasks={name: tasks[name] for name in TASKS if name in tasks},
            suppressed=_list_of(own, "suppress_tokens", vocab_size),
            suppressed_first=_list_of(own, "begin_suppress_tokens", vocab_size),
            latest_first_time=_optional(own, "max_initial_timestamp_index", vocab_size),
            before=_optional(own, "prev_sot_token_id", vocab_size),
            alignment_heads=_heads_of(config, own),
            filter_width=_number(config, "median_filter_width", 1, _MAX_FILTER_WIDTH, 7) | 1,
        )

    def beginning(self, language: str | None, task: str, *, has_times: bool) -> list[int]:
        """The tokens in front of a window's text. Raises `ModelError` where the model has no such task."""
        tokens = [self.start]
        if self.languages:
            if task not in self.tasks or language is None or language not in self.languages:
                raise ModelError(_WITHOUT_LANGUAGES[0], hint=_WITHOUT_LANGUAGES[1])
            tokens += [self.languages[language], self.tasks[task]]
        elif task != TASKS[0]:
            raise ModelError(_WITHOUT_LANGUAGES[0], hint=_WITHOUT_LANGUAGES[1])
        return tokens if has_times else [*tokens, self.no_times]


def _number(data: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    value = default if data.get(key) is None else data[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(data, key, f"it must be a whole number from {low} to {high}")
    return value


def _token(data: Mapping[str, Any], key: str, vocab_size: int) -> int:
    return _number(data, key, 0, vocab_size - 1)


def _optional(data: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    return None if data.get(key) is None else _token(data, key, vocab_size)


def _tokens_of(data: Mapping[str, Any], key: str, vocab_size: int) -> dict[str, int]:
    """Names and tokens; none where the key is absent."""
    value = {} if data.get(key) is None else data[key]
    if not isinstance(value, dict) or len(value) > MAX_LANGUAGES:
        raise _wrong(data, key, f"it must have up to {MAX_LANGUAGES} names with tokens")
    return {name: _token(value, name, vocab_size) for name in value}


def _list_of(data: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    value = [] if data.get(key) is None else data[key]
    is_list = isinstance(value, list) and len(value) <= _MAX_SUPPRESSED
    if not is_list or not all(type(token) is int and 0 <= token < vocab_size for token in value):
        raise _wrong(data, key, f"it must be a list of up to {_MAX_SUPPRESSED} tokens below {vocab_size}")
    return tuple(value)


def _heads_of(config: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """The pairs of `alignment_heads`; none where the key is absent."""
    key = "alignment_heads"
    value = [] if own.get(key) is None else own[key]
    sizes = [_number(config, name, 1, 1 << 20, 1) for name in ("decoder_layers", "decoder_attention_heads")]
    is_list = isinstance(value, list) and len(value) <= _MAX_ALIGNMENT_HEADS
    if not is_list or not all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(each) is int and 0 <= each < size for each, size in zip(pair, sizes, strict=True))
        for pair in value
    ):
        complaint = (
            f"it must be a list of up to {_MAX_ALIGNMENT_HEADS} layers with heads that the decoder has"
        )
        raise _wrong(own, key, complaint)
    return tuple((layer, head) for layer, head in value)


def _wrong(data: Mapping[str, Any], key: str, complaint: str) -> ModelError:
    found = data.get(key)
    shown = f"{found!r:.40}" if isinstance(found, (str, float, bool)) else type(found).__name__
    shown = str(found) if type(found) is int and abs(found) < 10**20 else shown
    return ModelError(f"generation_config.json or config.json: {key[:80]} is {shown}, but {complaint}")
