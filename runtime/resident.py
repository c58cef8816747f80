"""A base in memory, for instances of its fine-tunes: its weights, its tokenizer, and the model that drafts for a
fine-tune while the differences arrive.

All of it stays the base's instance's, which must be closed after those of the fine-tunes. It does not know when an
instance is switched, nor what becomes of the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..loader.errors import UsageError
from ..loader.load.resident import ResidentBase
from .text.settings import TextSettings

if TYPE_CHECKING:
    from ..loader.format.manifest import Manifest
    from .backends.choose import BackendChoice
    from .files import ModelFiles
    from .models.decoder import Decoder
    from .models.decoder_config import DecoderConfig
    from .text.tokenizer import TextTokenizer
    from .weights import AnyLoad

# All that a tokenizer is made of, but config.json, which often differs in nothing that matters to it.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class BaseInMemory(NamedTuple):
    """An exact model and its tokenizer."""

    weights: ResidentBase
    load: AnyLoad  # which has ended
    text_settings: TextSettings
    tokenizer: TextTokenizer
    config: DecoderConfig | None  # None: no decoder of ours computes it

    def tokenizer_for(
        self, tuned: Manifest, files: ModelFiles, adjust: Callable[[TextSettings], TextSettings]
    ) -> TextTokenizer | None:
        """The base's tokenizer, if the fine-tune's would be the same; it stays the base's."""
        own, theirs = _digests(tuned), _digests(self.weights.manifest)
        if any(own.get(name) != theirs.get(name) for name in TEXT_FILES):
            return None
        if own.get("config.json") != theirs.get("config.json"):
            settings = adjust(TextSettings.read(files.read))
            if settings != self.text_settings:
                return None
        return self.tokenizer

    def drafter_for(
        self, model: Decoder, config: Mapping[str, Any], choice: BackendChoice, max_context: int | None
    ) -> Decoder | None:
        """The base as a model of its own, for the engine of the fine-tune's `model`, which was made of this
        config.json; None where their shapes or numbers differ, so that they cannot share a KV pool.
        """
        if self.config is None or getattr(model, "config", None) != self.config:
            return None
        from .models.build import build_model
        from .weights import StreamedWeights

        found = build_model(
            config, StreamedWeights(self.load), choice.model_backends(), max_context=max_context
        )
        is_same = (found.executor.name, found.computes) == (model.executor.name, model.computes)
        return found if is_same else None  # type: ignore[return-value]  # a decoder, by its config


def base_in_memory(
    load: AnyLoad, text_settings: TextSettings, tokenizer: TextTokenizer, model: Any
) -> BaseInMemory:
    """The base that a load has completed. Raises `UsageError` where it cannot be one."""
    if load.place != "host":
        raise UsageError(
            "weights on a GPU cannot be the base of a fine-tune that is switched to",
            key="model",
            hint="Pack the fine-tune whole, and start a server with it.",
        )
    if load.paged_groups:
        raise UsageError(
            "weights that are not all in memory (weights_bytes) cannot be the base of a fine-tune that is switched to",
            key="weights_bytes",
            hint="Leave it out, or start a server with the fine-tune.",
        )
    if load.paged_groups:
        raise UsageError(
            "with weights_bytes not all of the model is in memory, so it cannot be the base of a fine-tune",
            key="model",
            hint="Leave weights_bytes out, or start a server with the fine-tune and its --base.",
        )
    manifest = load.manifest
    slabs = [load.slab(group.index) for group in manifest.groups]
    from .models.decoder_config import DecoderConfig

    config = getattr(model, "config", None)
    return BaseInMemory(
        ResidentBase(manifest, slabs),
        load,
        text_settings,
        tokenizer,
        config if isinstance(config, DecoderConfig) else None,
    )


def _digests(manifest: Manifest) -> dict[str, bytes | None]:
    return {file.name: file.digest for file in manifest.files}
