"""Untrusted files of sound to samples: one channel at 16 kHz.

WAV files are read here; the others by soundfile, `pip install 'teneral[audio]'`. A header is checked before a sample is
decoded: seconds, channels and rates are bounded, so that a small file cannot become a large array.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import RequestError

SAMPLE_RATE = 16_000  # of all models
MAX_SECONDS = 1_800
MAX_CHANNELS = 32
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
MAX_SAMPLES = 1 << 26  # of one channel, at the file's rate: 256 MiB
_FRAMES_AT_ONCE = 1 << 16
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_END = bytes.fromhex(
    "000000001000800000aa00389b71"
)  # behind the two bytes of an extensible header's format
_ZERO_CROSSINGS = 32  # of the low-pass filter, to each side
_ROLL_OFF = 0.945  # of the lower rate's band, up to which it lets pass
_KAISER_BETA = 14.77
_OUTPUTS_AT_ONCE = 1 << 14

Samples = npt.NDArray[np.float32]  # (N,), from -1 to 1


class _Form(NamedTuple):
    """The content of a WAV file's `fmt ` chunk that counts."""

    kind: int
    num_channels: int
    rate: int
    sample_bytes: int


def decode_sound(data: bytes | memoryview, *, param: str = "file") -> Samples:
    """The file's sound, the mean of its channels, at `SAMPLE_RATE`.

    Raises `RequestError`, naming `param`, for a file that is damaged, empty, too long or of another format, or needs
    soundfile, which is not installed.
    """
    view = memoryview(data)
    if bytes(view[:4]) in (b"RIFF", b"RF64") and bytes(view[8:12]) == b"WAVE":
        samples, rate = _read_wav(view, param)
    else:
        samples, rate = _read_others(view, param)
    if not np.isfinite(samples).all():
        raise RequestError("the sound has samples that are not finite numbers", param=param)
    return resampled(samples, rate)


def _read_wav(view: memoryview, param: str) -> tuple[Samples, int]:
    form: _Form | None = None
    for name, content in _chunks(view):
        if name == b"fmt ":
            form = _form_of(content, param)
        elif name == b"data":
            if form is None:
                raise RequestError("the WAV file has samples before their form", param=param)
            return _mean_of_channels(content, form, param), form.rate
    raise RequestError("the WAV file has no samples", param=param)


def _chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Names and contents; the last one's content may be shorter than it says, as that of streams is."""
    place = 12
    while place + 8 <= len(view):
        name, size = bytes(view[place : place + 4]), struct.unpack_from("<I", view, place + 4)[0]
        yield name, view[place + 8 : place + 8 + size]
        place += 8 + size + size % 2


def _form_of(content: memoryview, param: str) -> _Form:
    if len(content) < 16:
        raise RequestError("the WAV file's fmt chunk is too short", param=param)
    kind, num_channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", content)
    if kind == _EXTENSIBLE and len(content) >= 40 and bytes(content[26:40]) == _GUID_END:
        kind = struct.unpack_from("<H", content, 24)[0]
    if not (kind == _PCM and bits in (8, 16, 24, 32)) and not (kind == _FLOAT and bits in (32, 64)):
        raise RequestError(
            f"the WAV file has samples of format {kind} in {bits} bits, which are not supported",
            param=param,
            hint="Send PCM of 8, 16, 24 or 32 bits, or floats.",
        )
    _check_form(num_channels, rate, param)
    if frame_bytes != num_channels * bits // 8:
        raise RequestError(f"the WAV file has {frame_bytes} bytes for {num_channels} samples", param=param)
    return _Form(kind, num_channels, rate, bits // 8)


def _check_form(num_channels: int, rate: int, param: str) -> None:
    if not 0 < num_channels <= MAX_CHANNELS:
        raise RequestError(
            f"the sound has {num_channels} channels, but must have 1 to {MAX_CHANNELS}", param=param
        )
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise RequestError(
            f"the sound has {rate} samples a second, but must have {LOWEST_RATE} to {HIGHEST_RATE}",
            param=param,
        )


def _check_length(num_samples: int, rate: int, param: str) -> None:
    """Of one channel."""
    if not num_samples:
        raise RequestError("the file has no sound", param=param)
    if num_samples > min(MAX_SECONDS * rate, MAX_SAMPLES):
        raise RequestError(
            f"the sound has {num_samples / rate:.0f} s at {rate} samples a second, more than the {MAX_SECONDS} s or "
            f"{MAX_SAMPLES} samples that are allowed",
            param=param,
            hint="Send it in parts.",
        )


def _mean_of_channels(content: memoryview, form: _Form, param: str) -> Samples:
    frame_bytes = form.num_channels * form.sample_bytes
    num_samples = len(content) // frame_bytes
    _check_length(num_samples, form.rate, param)
    raw = np.frombuffer(content[: num_samples * frame_bytes], np.uint8)
    values: npt.NDArray[np.float32]
    if form.kind == _FLOAT:
        values = raw.view(f"<f{form.sample_bytes}").astype(np.float32)
    elif form.sample_bytes == 1:
        values = (raw.astype(np.float32) - np.float32(128)) / np.float32(128)
    else:
        # Each sample is the highest bytes of an integer of 32 bits.
        wide = np.zeros((num_samples * form.num_channels, 4), np.uint8)
        wide[:, 4 - form.sample_bytes :] = raw.reshape(-1, form.sample_bytes)
        values = wide.reshape(-1).view("<i4").astype(np.float32) / np.float32(1 << 31)
    return _joined(values.reshape(num_samples, form.num_channels))


def _joined(frames: npt.NDArray[np.float32]) -> Samples:
    """(N, channels) → (N,)"""
    return frames[:, 0] if frames.shape[1] == 1 else frames.mean(axis=1, dtype=np.float32)


def _read_others(view: memoryview, param: str) -> tuple[Samples, int]:
    library = _soundfile(param)
    try:
        with library.SoundFile(io.BytesIO(view)) as file:
            _check_form(file.channels, file.samplerate, param)
            rate = int(file.samplerate)
            _check_length(file.frames, rate, param)
            samples, num_samples = np.empty(file.frames, np.float32), 0
            while num_left := min(_FRAMES_AT_ONCE, len(samples) - num_samples):
                frames = file.read(num_left, dtype="float32", always_2d=True)
                if not len(frames):
                    break
                samples[num_samples : num_samples + len(frames)] = _joined(frames)
                num_samples += len(frames)
    except RequestError:
        raise
    except Exception as error:  # decoders raise nearly any error for damaged files
        raise RequestError(
            f"the sound cannot be read: {type(error).__name__}: {str(error)[:200]}",
            param=param,
            hint="Send WAV, FLAC, MP3 or Ogg.",
        ) from error
    _check_length(num_samples, rate, param)
    return samples[:num_samples], rate


def _soundfile(param: str) -> Any:
    """Import soundfile, an extra, as few models take sound. Raises `RequestError` where it is not installed."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without its library in C
        raise RequestError(
            "the file is no WAV file, and others need soundfile, which is not installed",
            param=param,
            hint="pip install 'teneral[audio]', or send WAV.",
        ) from error
    return soundfile


def resampled(samples: Samples, rate: int) -> Samples:
    """The sound at `SAMPLE_RATE`: ceil(N * SAMPLE_RATE / rate) samples, by a low-pass filter of a sinc in a Kaiser
    window.
    """
    if rate == SAMPLE_RATE:
        return samples
    divisor = math.gcd(rate, SAMPLE_RATE)
    num_phases, step = SAMPLE_RATE // divisor, rate // divisor
    cut = _ROLL_OFF * min(1.0, SAMPLE_RATE / rate)  # of the file's own band
    reach = math.ceil(_ZERO_CROSSINGS / cut)  # samples to each side
    offsets = np.arange(-reach, reach + 1)
    num_outputs = -(-len(samples) * num_phases // step)
    outputs = np.empty(num_outputs, np.float32)
    for first in range(0, num_outputs, _OUTPUTS_AT_ONCE):
        numbers = np.arange(first, min(first + _OUTPUTS_AT_ONCE, num_outputs))
        whole, phases = np.divmod(numbers * step, num_phases)
        used, which = np.unique(phases, return_inverse=True)
        distances = offsets - (used / num_phases)[:, None]
        window = np.i0(_KAISER_BETA * np.sqrt(np.maximum(0.0, 1 - (distances / (reach + 1)) ** 2)))
        taps = (cut * np.sinc(cut * distances) * window / np.i0(_KAISER_BETA)).astype(np.float32)
        begin, end = int(whole[0]) - reach, int(whole[-1]) + reach + 1
        own = np.pad(samples[max(begin, 0) : end], (max(-begin, 0), max(end - max(len(samples), begin), 0)))
        near = np.lib.stride_tricks.sliding_window_view(own, len(offsets))[whole - whole[0]]
        outputs[first : first + len(numbers)] = np.einsum("nt,nt->n", near, taps[which])
    return outputs
