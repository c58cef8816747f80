"""The entry point `teneral` of `vllm.general_plugins`, called in each of vLLM's processes.

It registers the load format, and lets an artifact's address name the model. vLLM is imported here
and in `model_loader.py` only, which only this module imports, and never before vLLM itself is
running.
"""

from __future__ import annotations

from typing import Any

LOAD_FORMAT = "teneral"


def register() -> None:
    """Register the loader. Idempotent."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import register_model_loader

    from .model_loader import TeneralModelLoader

    if getattr(EngineArgs, "teneral_is_registered", False):
        return
    register_model_loader(LOAD_FORMAT)(TeneralModelLoader)
    _open_addresses(EngineArgs)
    EngineArgs.teneral_is_registered = True


def _open_addresses(engine_args: Any) -> None:
    """Have an artifact's small files written before vLLM looks for a configuration at the model's
    address.

    vLLM has no extension point for that: its own streamers are built in, by scheme. A version
    without this method still loads a local folder of small files, with `artifact` in the loader's
    extra config.
    """
    original = getattr(engine_args, "create_engine_config", None)
    if original is None:
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.load_format.lower() == LOAD_FORMAT:
            lay_down(self)
        return original(self, *args, **kwargs)

    engine_args.create_engine_config = create_engine_config


def lay_down(engine_args: Any) -> None:
    """Change vLLM's arguments: the model becomes a folder of small files, its weights stay at the
    pinned address.

    Does nothing if the extra config names the artifact already, or the model is a local folder that
    vLLM can use.
    """
    from vllm import envs

    from .folder import is_model_folder, write_small_files
    from .settings import ARTIFACT_KEY

    extra = dict(engine_args.model_loader_extra_config or {})
    if ARTIFACT_KEY in extra or is_model_folder(engine_args.model):
        return
    address = engine_args.model
    written = write_small_files(address, envs.VLLM_CACHE_ROOT)
    engine_args.model_loader_extra_config = {**extra, ARTIFACT_KEY: written.address}
    engine_args.model = str(written.folder)
    engine_args.tokenizer = engine_args.tokenizer or engine_args.model
    engine_args.served_model_name = engine_args.served_model_name or address
