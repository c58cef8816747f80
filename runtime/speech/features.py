"""The spectrograms of a speech model: logarithms of energies in bands of the mel scale, 100 columns a second, as
transformers' WhisperFeatureExtractor makes them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .sound import SAMPLE_RATE, Samples

HOP = 160  # samples from one column to the next
_FRAME = 400  # samples of a column
_HIGHEST_HZ = 8_000.0
_COLUMNS_AT_ONCE = 1 << 12
# The mel scale of Slaney's Auditory Toolbox: even up to this frequency, then logarithmic.
_EVEN_UP_TO_HZ, _HZ_PER_MEL = 1_000.0, 200.0 / 3
_EVEN_UP_TO_MEL = _EVEN_UP_TO_HZ / _HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27.0

Spectrogram = npt.NDArray[np.float32]  # (num_bands, columns)


def spectrogram(samples: Samples, num_bands: int, *, least_samples: int = 0) -> Spectrogram:
    """Of sound that silence makes `least_samples` long: a column for each whole hop. The loudest number of all decides
    what is silence.
    """
    if len(samples) < least_samples:
        samples = np.pad(samples, (0, least_samples - len(samples)))
    num_columns = len(samples) // HOP
    if not num_columns:
        return np.zeros((num_bands, 0), np.float32)
    padded = _reflected(samples, _FRAME // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::HOP][:num_columns]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)
    bands = mel_bands(num_bands)
    logs = np.empty((num_bands, num_columns), np.float32)
    for first in range(0, num_columns, _COLUMNS_AT_ONCE):
        waves = np.fft.rfft(frames[first : first + _COLUMNS_AT_ONCE] * window)
        energies = waves.real**2 + waves.imag**2
        logs[:, first : first + len(energies)] = np.log10(np.maximum(bands @ energies.T, 1e-10))
    made: Spectrogram = (np.maximum(logs, logs.max() - np.float32(8)) + np.float32(4)) / np.float32(4)
    return made


def mel_bands(num_bands: int) -> npt.NDArray[np.float64]:
    """(num_bands, _FRAME // 2 + 1): triangles of equal area over the frequencies of a frame."""
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _FRAME // 2 + 1)
    corners = _hz_of(np.linspace(0, _mel_of(_HIGHEST_HZ), num_bands + 2))
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - left) / (centre - left), (right - frequencies) / (right - centre)
    bands: npt.NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling)) * 2 / (right - left)
    return bands


def _reflected(samples: Samples, reach: int) -> Samples:
    """With as many samples before and behind it, mirrored at its ends; sound that is too short for that is silence
    beyond them.
    """
    if len(samples) <= reach:
        samples = np.pad(samples, (0, reach + 1 - len(samples)))
    return np.pad(samples, reach, mode="reflect")


def _mel_of(hz: float) -> float:
    return float(_EVEN_UP_TO_MEL + np.log(hz / _EVEN_UP_TO_HZ) / _LOG_STEP)


def _hz_of(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = np.maximum(mels - _EVEN_UP_TO_MEL, 0)
    hz: npt.NDArray[np.float64] = np.where(
        mels < _EVEN_UP_TO_MEL, mels * _HZ_PER_MEL, _EVEN_UP_TO_HZ * np.exp(_LOG_STEP * above)
    )
    return hz
