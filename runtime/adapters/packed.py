"""A packed adapter's way from a store into memory: an artifact that names its base, with a group a layer.

A part is verified before anything of it is decoded, and so each layer before a forward pass may use it. `pack.py`
writes such artifacts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...loader.artifact import find_file, read_file
from ...loader.format.encoding import Encoding
from ...loader.format.manifest import Manifest
from ...loader.format.safetensors import TensorEntry
from ...loader.load.load import WeightLoad
from ...loader.load.options import LoadOptions
from ...loader.sources.base import Source
from ..errors import AdapterError
from ..models.adapter import AdapterWeights
from ..models.decoder_config import DecoderConfig
from .peft import CONFIG_NAME, MAX_CONFIG_BYTES, AdapterPlan, PeftConfig, plan_adapter

NUM_CONNECTIONS = 4
STAGING_BYTES = 32 << 20
# What a layer's matrices take more in an artifact's memory than in an adapter's, at most.
ALIGNMENT_BYTES = 4096


def is_adapter(manifest: Manifest) -> bool:
    """True if the artifact holds a packed adapter."""
    return find_file(manifest, CONFIG_NAME) is not None


class PackedAdapter(NamedTuple):
    """A packed adapter of which all is known but its content."""

    source: Source  # of its folder
    manifest: Manifest
    plan: AdapterPlan

    @property
    def stored_bytes(self) -> int:
        return sum(part.size_bytes for part in self.manifest.parts)

    def read(self, weights: AdapterWeights, on_layer: Callable[[int], None]) -> bytes:
        """Fill `weights`, reporting each layer, in order, once it is there; returns the artifact's digest. Holds the
        decoded matrices meanwhile. Raises `IntegrityError` for a damaged part, and the source's errors.
        """
        tensors = self.manifest.by_name
        options = LoadOptions(connections=NUM_CONNECTIONS, staging_bytes=STAGING_BYTES)
        with WeightLoad(self.source, self.manifest, options=options) as load:

            def content(entry: TensorEntry) -> memoryview:
                tensor = tensors[entry.name]
                end_bytes = tensor.offset_bytes + tensor.size_bytes
                return load.slab(tensor.group)[tensor.offset_bytes : end_bytes].data

            load.start()
            for number, layer in enumerate(self.plan.layers):
                for group in sorted(
                    {tensors[each.name].group for plan in layer for each in (plan.a, plan.b)}
                ):
                    load.wait(group)
                self.plan.fill(weights, number, content)
                on_layer(number)
            load.join()
        assert self.manifest.digest is not None
        return self.manifest.digest


def open_packed(
    source: Source, manifest: Manifest, base: DecoderConfig, base_digest: bytes | None, *, max_bytes: int
) -> PackedAdapter:
    """The adapter of this manifest, checked against the base and its digest (None: the base is not packed). Reads its
    config. Raises `AdapterError`, or the source's own errors.
    """
    if not is_adapter(manifest) or manifest.base is None:
        raise AdapterError(
            f"{source.url} is an artifact, but not a packed adapter",
            hint="Pack the adapter's folder: teneral pack ADAPTER ARTIFACT --base BASE.",
        )
    if manifest.base != base_digest:
        served = "is not packed" if base_digest is None else f"is b3:{base_digest.hex()}"
        raise AdapterError(
            f"it was packed for the base b3:{manifest.base.hex()}, and the base here {served}",
            hint="Serve that base, or pack the adapter's folder for this one.",
        )
    if manifest.weight_bytes > max_bytes + base.num_layers * ALIGNMENT_BYTES:
        raise too_big(manifest.weight_bytes, max_bytes)
    file = find_file(manifest, CONFIG_NAME)
    if file is None or file.size_bytes > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_NAME} has more than {MAX_CONFIG_BYTES} bytes")
    for tensor in manifest.tensors:
        if tensor.encoding in (Encoding.SAME, Encoding.DELTA):
            raise AdapterError(
                f"matrix {tensor.name} is stored as '{tensor.encoding.value}', for which the base has no counterpart",
                hint="Pack the adapter's folder again.",
            )
    peft = PeftConfig.parse(read_file(source, manifest, CONFIG_NAME))
    entries = {
        name: TensorEntry(name, tensor.dtype, tensor.shape, 0, tensor.size_bytes)
        for name, tensor in manifest.by_name.items()
    }
    return PackedAdapter(source, manifest, plan_adapter(peft, entries, base))


def too_big(size_bytes: int, max_bytes: int) -> AdapterError:
    return AdapterError(
        f"the adapter has {size_bytes} bytes, and all adapters together may have {max_bytes}",
        hint="Raise --adapters-bytes.",
    )
