"""A base in memory, for instances of its fine-tunes: its weights, its tokenizer, and the model that drafts for a
fine-tune while the differences arrive.

All of it stays the base's instance's, which must be closed after those of the fine-tunes. It does not know when an
instance is switched, nor what becomes of the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...loader.errors import UsageError
from ...loader.load.resident import ResidentBase
from ..errors import ModelError
from ..text.settings import TextSettings

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest
    from ...loader.load.base import AnyLoad, HostLoad
    from ..backends.choose import BackendChoice
    from ..files import ModelFiles
    from ..models.decoder import Decoder
    from ..text.tokenizer import TextTokenizer

# All that a tokenizer is made of, but config.json, which often differs in nothing that matters to it.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


class BaseInMemory(NamedTuple):
    """An exact model of another instance, and its tokenizer."""

    weights: ResidentBase
    text_settings: TextSettings
    tokenizer: TextTokenizer
    model: Decoder | None  # None: no decoder of ours computes it

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

    def drafter_for(self, model: Decoder, choice: BackendChoice) -> Decoder | None:
        """The base as a model of its own, for the engine of the fine-tune's `model`; None where their shapes
        or numbers differ, so that they cannot share a KV pool.
        """
        own = self.model
        if own is None or not _share_pool(own, model):
            return None
        from ..models.build import build_again

        return build_again(own, choice.model_backends())


class SharedBaseInMemory(NamedTuple):
    """The shared base of a standby pool's processes: exact weights, of which no model was made yet."""

    load: HostLoad
    config: Mapping[str, Any]  # its config.json
    tokenizer: None = None

    def tokenizer_for(
        self, tuned: Manifest, files: ModelFiles, adjust: Callable[[TextSettings], TextSettings]
    ) -> None:
        """None: the process that was taken has one that waits for its files."""

    def drafter_for(self, model: Decoder, choice: BackendChoice) -> Decoder | None:
        from ..models.build import build_model
        from ..models.decoder import Decoder
        from ..weights import StreamedWeights

        if not isinstance(model, Decoder):
            return None
        context, weights = model.config.max_context, StreamedWeights(self.load)
        try:
            own = build_model(self.config, weights, choice.model_backends(), max_context=context)
        except ModelError:
            return None  # the fine-tune is computed, and has no draft
        return own if isinstance(own, Decoder) and _share_pool(own, model) else None


def _share_pool(own: Decoder, model: Decoder) -> bool:
    """True if keys and values of both have the same shapes and numbers."""
    if getattr(model, "config", None) != own.config:
        return False
    return (own.executor.name, own.computes) == (model.executor.name, model.computes)


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
    from ..models.decoder import Decoder

    own = model if isinstance(model, Decoder) else None
    return BaseInMemory(ResidentBase.of(load.manifest, load.slab), text_settings, tokenizer, own)


def _digests(manifest: Manifest) -> dict[str, bytes | None]:
    return {file.name: file.digest for file in manifest.files}
