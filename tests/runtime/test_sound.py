"""Sound out of files, and its spectrograms, which are those of transformers."""

from __future__ import annotations

import io
import struct
import sys
from typing import Any

import numpy as np
import pytest
from tests.support.speech_models import extractor, noise, wav_of

from teneral.runtime.errors import RequestError
from teneral.runtime.speech.features import spectrogram
from teneral.runtime.speech.sound import MAX_SECONDS, SAMPLE_RATE, decode_sound, resampled


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.3, 30.0, 31.7])
def test_spectrograms_are_those_of_transformers(num_bands: int, seconds: float) -> None:
    sound = noise(seconds)
    more: dict[str, Any] = {"truncation": False, "padding": "longest"} if seconds > 30 else {}
    made = extractor(num_bands, 30)(sound, sampling_rate=SAMPLE_RATE, return_tensors="np", **more)
    own = spectrogram(sound, num_bands, least_samples=30 * SAMPLE_RATE)
    np.testing.assert_allclose(own, made["input_features"][0], atol=2e-4)


@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_samples_of_wav_files(kind: int, bits: int, num_channels: int) -> None:
    sound = np.stack([noise(0.2, seed=seed) for seed in range(num_channels)], axis=1)
    own = decode_sound(wav_of(sound, kind=kind, bits=bits))
    np.testing.assert_allclose(own, sound.mean(axis=1), atol=2 / 2 ** min(bits, 22))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 15_999])
def test_a_tone_keeps_its_pitch_at_another_rate(rate: int) -> None:
    times = np.arange(rate) / rate
    own = resampled(np.sin(2 * np.pi * 440 * times).astype(np.float32), rate)
    assert len(own) == SAMPLE_RATE
    expected = np.sin(2 * np.pi * 440 * np.arange(SAMPLE_RATE) / SAMPLE_RATE)
    np.testing.assert_allclose(own[400:-400], expected[400:-400], atol=2e-3)


def test_what_is_above_the_band_is_left_out() -> None:
    times = np.arange(48_000) / 48_000
    own = resampled(np.sin(2 * np.pi * 12_000 * times).astype(np.float32), 48_000)
    assert np.abs(own[400:-400]).max() < 1e-3


def changed(data: bytes, place: int, form: str, *values: Any) -> bytes:
    whole = bytearray(data)
    struct.pack_into(form, whole, place, *values)
    return bytes(whole)


WAV = wav_of(noise(0.1))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (WAV[:36], "no samples"),
        (WAV[:44], "no sound"),
        (changed(WAV, 20, "<H", 2), "format 2"),
        (changed(WAV, 34, "<H", 12), "12 bits"),
        (changed(WAV, 22, "<H", 0), "0 channels"),
        (changed(WAV, 22, "<H", 65_535), "65535 channels"),
        (changed(WAV, 24, "<I", 0), "0 samples a second"),
        (changed(WAV, 24, "<I", 1 << 31), "samples a second"),
        (changed(WAV, 32, "<H", 3), "3 bytes"),
        (changed(WAV, 16, "<I", 8), "too short"),
        (WAV[:12] + WAV[36:] + WAV[12:36], "before their form"),
        (wav_of(np.array([np.nan]), kind=3, bits=32), "not finite"),
        (wav_of(np.array([np.inf, 0.0]), kind=3, bits=64), "not finite"),
        (wav_of(np.zeros(1_000 * (MAX_SECONDS + 1)), 1_000, bits=8), "at 1000 samples a second, more than"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_hostile_files_are_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        decode_sound(data)
    assert caught.value.param == "file"


def test_a_stream_says_too_large_a_size() -> None:
    whole = changed(WAV, 40, "<I", 0xFFFFFFFF)
    assert len(decode_sound(whole)) == 1_600


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_other_files_by_soundfile(form: str) -> None:
    library = pytest.importorskip("soundfile")
    sound, file = np.stack([noise(0.5), noise(0.5)], axis=1), io.BytesIO()
    library.write(file, sound, 16_000, format=form)
    own = decode_sound(file.getvalue())
    assert abs(len(own) - 8_000) <= 1_200
    if form == "FLAC":
        np.testing.assert_allclose(own, sound[:, 0], atol=1e-4)
    with pytest.raises(RequestError, match=r"no sound|cannot be read"):
        decode_sound(file.getvalue()[:40])


def test_other_files_need_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(RequestError, match="soundfile, which is not installed"):
        decode_sound(b"fLaC")
