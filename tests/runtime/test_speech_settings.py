"""The tokens of speech models out of their files, and the rules and segments of transcripts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.speech_models import (
    END,
    GENERATION,
    LANGUAGES,
    NO_TIMES,
    START,
    TASKS,
    TIMES_FROM,
    VOCAB_SIZE,
)

from teneral.runtime.errors import ModelError
from teneral.runtime.speech.rules import SpeechRules
from teneral.runtime.speech.settings import SpeechSettings
from teneral.runtime.speech.windows import segments_of

CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "max_source_positions": 50,
    "max_target_positions": 40,
    "decoder_layers": 3,
    "decoder_attention_heads": 2,
    "eos_token_id": [END],
}
OWN = {key: value for key, value in GENERATION.items() if key != "eos_token_id"}


def test_a_window_begins_with_language_task_and_times() -> None:
    settings = SpeechSettings.read(CONFIG, OWN)
    language, task = LANGUAGES["<|de|>"], TASKS["translate"]
    assert settings.beginning("de", "translate", has_times=True) == [START, language, task]
    assert settings.beginning("de", "translate", has_times=False) == [START, language, task, NO_TIMES]
    assert (settings.end, settings.times_from, settings.window_columns) == (END, TIMES_FROM, 100)


def test_a_model_of_english_alone() -> None:
    settings = SpeechSettings.read(CONFIG, {**OWN, "is_multilingual": False})
    assert settings.beginning(None, "transcribe", has_times=False) == [START, NO_TIMES]
    with pytest.raises(ModelError, match="names no languages and tasks"):
        settings.beginning(None, "translate", has_times=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"no_timestamps_token_id": None}, "no_timestamps_token_id is NoneType"),
        ({"no_timestamps_token_id": VOCAB_SIZE - 1}, "tokens before and behind it"),
        ({"no_timestamps_token_id": -1}, "no_timestamps_token_id is -1"),
        ({"decoder_start_token_id": 1.5}, "decoder_start_token_id is 1.5"),
        ({"eos_token_id": 10**400}, "eos_token_id is int"),
        ({"lang_to_id": {"<|en|>": VOCAB_SIZE}}, "en"),
        ({"lang_to_id": [1]}, "lang_to_id is list"),
        ({"task_to_id": {"transcribe": True}}, "transcribe is True"),
        ({"suppress_tokens": [VOCAB_SIZE]}, "suppress_tokens is list"),
        ({"alignment_heads": [[3, 0]]}, "alignment_heads is list"),
        ({"alignment_heads": [[0, 2]]}, "layers with heads that the decoder has"),
        ({"alignment_heads": [[0, True]]}, "alignment_heads is list"),
        ({"alignment_heads": [[0, 0]] * 65}, "a list of up to 64"),
        ({"alignment_heads": {}}, "alignment_heads is dict"),
        ({"suppress_tokens": [0] * 5_000}, "up to 4096 tokens"),
        ({"max_initial_timestamp_index": "1"}, "max_initial_timestamp_index is '1'"),
    ],
)
def test_hostile_files_are_refused_by_the_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        SpeechSettings.read(CONFIG, {**OWN, **change})


def test_rules_end_with_their_tokens() -> None:
    """No mask is empty, whatever was chosen before, and a copy goes its own way."""
    random, settings = np.random.default_rng(0), SpeechSettings.read(CONFIG, OWN)
    for has_times in (False, True):
        matcher = SpeechRules(settings, has_times=has_times).start()
        for _ in range(300):
            words = np.zeros(matcher.num_mask_words, np.uint32)
            matcher.copy().mask_into(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            assert len(allowed)
            assert allowed.max() < VOCAB_SIZE
            assert not set(allowed.tolist()) & set(settings.suppressed)
            matcher.accept(int(random.choice(allowed)))


def test_segments_end_at_pairs_of_times() -> None:
    first, last = TIMES_FROM, TIMES_FROM + 30
    made, step = segments_of([first, 9, last, last, 8], TIMES_FROM, first_column=200, num_columns=100)
    assert [(each.start_s, round(each.end_s, 6), each.tokens) for each in made] == [
        (2.0, 2.6, (first, 9, last))
    ]
    assert step == 60
    made, step = segments_of([first, 9, last, last, 8, last + 5], TIMES_FROM, first_column=0, num_columns=90)
    assert ([each.tokens[1] for each in made], step) == ([9, 8], 90)
    made, step = segments_of([], TIMES_FROM, first_column=0, num_columns=90)
    assert ([(each.start_s, each.end_s) for each in made], step) == ([(0.0, 0.9)], 90)
