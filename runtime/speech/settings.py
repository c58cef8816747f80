"""The tokens of a speech model, out of generation_config.json and config.json: languages, tasks, times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..errors import ModelError
from ..models.fields import MAX_VOCABULARY, Fields

MAX_LANGUAGES = 512
TASKS = ("transcribe", "translate")
_MAX_SUPPRESSED = 4_096
_FILE = "generation_config.json"
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
        """Raises `ModelError` naming what is missing or wrong."""
        own = Fields(config)
        vocab_size = own.integer("vocab_size", low=1, high=MAX_VOCABULARY)
        stated = {key: config.get(key) for key in _OF_EITHER_FILE if generation.get(key) is None}
        fields = Fields({**generation, **stated}, file=_FILE)
        highest = vocab_size - 1
        tokens = {
            key: fields.integer(key, low=0, high=highest)
            for key in ("decoder_start_token_id", "no_timestamps_token_id")
        }
        end = fields.get("eos_token_id")
        if isinstance(end, list) and len(end) == 1:
            fields = fields.replaced({"eos_token_id": end[0]})
        no_times = tokens["no_timestamps_token_id"]
        if not 0 < no_times < highest:
            raise fields.wrong("no_timestamps_token_id", "but there must be tokens before and behind it")
        languages = {
            name.removeprefix("<|").removesuffix("|>"): token
            for name, token in _tokens_of(fields, "lang_to_id", vocab_size).items()
        }
        tasks = _tokens_of(fields, "task_to_id", vocab_size)
        return cls(
            num_bands=own.integer("num_mel_bins", low=1, high=1_024, default=80),
            num_places=own.integer("max_source_positions", low=1, high=1 << 15, default=1_500),
            max_tokens=own.integer("max_target_positions", low=8, high=1 << 20, default=448),
            vocab_size=vocab_size,
            start=tokens["decoder_start_token_id"],
            end=fields.integer("eos_token_id", low=0, high=highest),
            no_times=no_times,
            languages=languages if fields.boolean("is_multilingual", default=bool(languages)) else {},
            tasks={name: tasks[name] for name in TASKS if name in tasks},
            suppressed=_list_of(fields, "suppress_tokens", vocab_size),
            suppressed_first=_list_of(fields, "begin_suppress_tokens", vocab_size),
            latest_first_time=fields.optional_integer("max_initial_timestamp_index", low=0, high=highest),
            before=fields.optional_integer("prev_sot_token_id", low=0, high=highest),
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


def _tokens_of(fields: Fields, key: str, vocab_size: int) -> dict[str, int]:
    """Names and tokens; none where the key is absent."""
    value = fields.get(key)
    if value is None:
        return {}
    if (
        not isinstance(value, dict)
        or len(value) > MAX_LANGUAGES
        or not all(isinstance(name, str) and _is_token(token, vocab_size) for name, token in value.items())
    ):
        raise fields.wrong(key, f"but must have up to {MAX_LANGUAGES} names with tokens")
    return value


def _list_of(fields: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.get(key)
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or len(value) > _MAX_SUPPRESSED
        or not all(_is_token(token, vocab_size) for token in value)
    ):
        raise fields.wrong(key, f"but must be a list of up to {_MAX_SUPPRESSED} tokens")
    return tuple(value)


def _is_token(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
