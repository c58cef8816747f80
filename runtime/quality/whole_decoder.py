"""A decoder with all its weights in memory, computed by the backend that a server would choose."""

from __future__ import annotations

from ...loader.errors import UsageError
from ...loader.format.manifest import Manifest
from ...loader.load.options import LoadOptions
from ...loader.sources.base import Source
from ...loader.tools.part_reader import PartReader
from ..backends.choose import AUTO, BackendChoice
from ..files import ModelFiles
from ..models.build import build_model
from ..models.decoder import Decoder
from .evaluate import PartCounter
from .tiers import TieredWeights, usable_tiers


class WholeDecoder:
    """`decoder`, over loaded weights, and its small `files`. Memory: the weights as stored."""

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        *,
        threads: int | None,
        on_part: PartCounter,
        compute_dtype: str = AUTO,
    ) -> None:
        """Read the model. Blocks; `on_part` is called from this thread. `compute_dtype` is `AUTO` or a
        name as in config.json.

        Raises `UsageError` for an encoder, `ModelError` for a model that no backend computes,
        `IntegrityError` naming a bad part, and the source's errors.
        """
        self.files = ModelFiles(source, manifest, LoadOptions())
        weights = TieredWeights(manifest)
        built = build_model(
            self.files.json("config.json", required=True),
            weights.tensors(),
            BackendChoice(compute_dtype=compute_dtype).model_backends(),
        )
        if not isinstance(built, Decoder):
            raise UsageError(
                f"{source.url} is an encoder, but only decoders can be compared and calibrated",
                hint="Use `teneral eval-draft` for an encoder's draft.",
            )
        self.decoder = built
        for tier in usable_tiers(manifest)[-1:]:
            weights.fill(tier, PartReader(source, manifest), threads=threads, on_part=on_part)
