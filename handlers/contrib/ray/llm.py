"""Ray Serve LLM with vLLM: the callback that keeps Ray from downloading weights that stream (docs/deploy/ray.md).

    LLMConfig(
        model_loading_config={"model_id": "chat", "model_source": "s3://models/chat"},
        engine_kwargs={"load_format": "teneral"},
        callback_config={"callback_class": "teneral.handlers.contrib.ray.llm:StreamedWeights"},
    )

Ray downloads a model to every node before vLLM starts, unless the load format is in a list of its own, which a plugin
cannot extend; and it gives vLLM the address of the weights for those formats only. The callback does both for the load
format `teneral`: nothing is downloaded, and vLLM gets the address. Tried with Ray 2.60.
"""

from __future__ import annotations

from typing import Any

try:
    from ray.serve.llm.callbacks import CallbackBase
except ImportError:  # before it became public
    from ray.llm._internal.common.callbacks.base import CallbackBase

from ....loader.errors import UsageError

LOAD_FORMAT = "teneral"


class StreamedWeights(CallbackBase):
    """A callback that Ray makes in each process of a deployment.

    `callback_kwargs={"artifact": ADDRESS}` names the weights if `model_source` does not; its scheme
    may be unknown to Ray, such as az://.
    """

    async def on_before_node_init(self) -> None:
        """Raise `UsageError` for another load format, and for a model without an address."""
        given = self.llm_config.engine_kwargs.get("load_format")
        if given != LOAD_FORMAT:
            raise UsageError(
                f"StreamedWeights is for the load format {LOAD_FORMAT}, not {given!r}",
                key="load_format",
                hint=f'Set engine_kwargs={{"load_format": "{LOAD_FORMAT}"}}.',
            )
        engine = self.llm_config.get_engine_config()
        engine.hf_model_id = self.kwargs.get("artifact") or _address(engine)
        # The class of the values is internal to Ray, and importing its module needs all of Ray's
        # download dependencies.
        self.ctx.worker_node_download_model = type(self.ctx.worker_node_download_model).NONE


def _address(engine: Any) -> str:
    mirror = engine.mirror_config
    address: str | None = mirror.bucket_uri if mirror is not None else engine.hf_model_id
    if not address:
        raise UsageError(
            "the model has no address",
            key="model_source",
            hint="Set model_source to the address of the artifact, or callback_kwargs={'artifact': ADDRESS}.",
        )
    return address
