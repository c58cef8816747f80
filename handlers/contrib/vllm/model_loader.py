"""vLLM's model loader for the load format `teneral`. Imported by vLLM's processes only, through `plugin.register`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ....runtime.into.files import open_weights
from .settings import parse_settings
from .weight_stream import Peers, WeightStream

# Below "vllm", to inherit its handlers and level.
_log = init_logger("vllm.plugins.teneral")


class TeneralModelLoader(BaseModelLoader):
    """Streams an artifact, or plain safetensors, at any address into the model that vLLM has built."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._settings = parse_settings(load_config.model_loader_extra_config)

    def download_model(self, model_config: Any) -> None:
        """Check that the model exists; nothing is downloaded."""
        base = self._settings.base if self._is_main(model_config) else None
        open_weights(self._address(model_config), base=base).source.close()

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights. Raises Teneral's errors."""
        is_whole_group = self._is_main(model_config)
        peers = _peers() if self._settings.share and is_whole_group else None
        base = self._settings.base if is_whole_group else None
        settings = replace(self._settings, artifact=None, base=base)
        stream = WeightStream(self._address(model_config), settings, peers=peers)
        yield from stream
        (_log.info if stream.digest is not None else _log.warning)("teneral: %s", stream.summary())
        for trouble in stream.statistics.troubles if stream.statistics is not None else ():
            _log.warning("teneral: %s", trouble)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load the weights. Raises the errors of `get_all_weights`, and vLLM's own if the artifact
        lacks weights of the model.
        """
        # vLLM's models have a `load_weights` that torch's types do not declare.
        built: Any = model
        loaded = built.load_weights(self.get_all_weights(model_config, model))
        if model_config.quantization is None and loaded is not None:
            DefaultModelLoader.track_weights_loading(self, model, loaded)

    def _address(self, model_config: Any) -> str:
        if self._settings.artifact is not None and self._is_main(model_config):
            return self._settings.artifact
        address: str = model_config.model
        return address

    def _is_main(self, model_config: Any) -> bool:
        """True if this is the served model, which all workers load, and not a draft model."""
        served = get_current_vllm_config().model_config
        return served is None or served.model == model_config.model


def _peers() -> Peers | None:
    group = get_tp_group()
    if group.world_size == 1:
        return None
    return Peers(
        rank=group.rank_in_group,
        ranks=tuple(group.ranks),
        cpu_group=group.cpu_group,
        device_group=group.device_group,
        device=torch.device(group.device),
    )
