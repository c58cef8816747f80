"""An encoder of sound as validated values of config.json: what makes the first rows of a decoder's sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from .fields import ACTIVATIONS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields

if TYPE_CHECKING:
    from ..step.batch import Int64s

MAX_BANDS = 1_024
MAX_PLACES = 1 << 15
NORM_EPS = 1e-5


class SpeechConfig(Struct, frozen=True):
    """A window of sound is a spectrogram of `num_bands` by twice as many columns as it has places in a prompt."""

    num_bands: int
    num_places: int
    hidden_size: int  # the decoder's, too
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float = NORM_EPS

    # As the encoder of prompts' images asks for them.
    is_whole = False
    has_grid = False
    image_token = 0  # of places, whose rows are not the token's
    needs_images = True

    @classmethod
    def from_fields(cls, config: Fields) -> SpeechConfig:
        """Raises `ModelError` naming the key that is missing or wrong."""
        hidden_size = config.integer("d_model", low=1, high=MAX_WIDTH)
        num_heads = config.integer("encoder_attention_heads", low=1, high=MAX_HEADS)
        if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_DIM:
            raise config.wrong(
                "encoder_attention_heads",
                f"but must divide d_model, {hidden_size}, by {MAX_HEAD_DIM} at most",
            )
        return cls(
            num_bands=config.integer("num_mel_bins", low=1, high=MAX_BANDS, default=80),
            num_places=config.integer("max_source_positions", low=1, high=MAX_PLACES, default=1_500),
            hidden_size=hidden_size,
            intermediate_size=config.integer("encoder_ffn_dim", low=1, high=MAX_WIDTH),
            num_layers=config.integer("encoder_layers", low=1, high=MAX_LAYERS),
            num_heads=num_heads,
            activation=config.choice("activation_function", ACTIVATIONS, default="gelu"),
        )

    def grid_of(self, height: int, width: int) -> tuple[int, int] | None:
        """The places of a window are one behind another."""
        return None

    def fits(self, tiles: Any, places: Int64s, layout: Any) -> bool:
        """True if the tiles are one spectrogram, at the beginning of its prompt."""
        shape = (1, self.num_bands, 2 * self.num_places)
        has_shape = tiles is not None and tiles.shape == shape and tiles.dtype == np.float32
        return has_shape and layout is None and np.array_equal(places, np.arange(self.num_places))
