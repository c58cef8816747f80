"""A decoder's layers on a device: torch's matrix products, and kernels for everything between them.

Computes the same step as `backends/torch/decoder.py`, over the same weights at the loader's
addresses and a pool in the device's layout. It follows arriving weights layer by layer, and reads
no weights at construction. No layer waits for the device, so a step is a sequence of launches whose
number and shapes do not depend on the data: `graphs.py` records it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ...kv.storage import KVPool
from ...step.batch import StepBatch
from ..torch.decoder import DecoderLayer, TorchExecutor
from ..torch.layers import RMSNorm
from ..torch.mlp import GatedMLP
from . import variants as v
from .implemented import refusal_of_spec
from .launch import Launcher
from .products import MIN_ROW_ARCHITECTURE, CudaProducts
from .storage import DeviceKVStorage
from .tables import StepTables, split_keys, tell_device
from .variants import shape_of, short_name

SEES_ALL = 1 << 30  # a window that no context reaches
# Rows of a prompt of its own from which torch's attention outweighs its preparation.
MIN_SDPA_ROWS = 64


class DeviceKernels:
    """The kernels for one decoder and one pool's block size."""

    def __init__(
        self,
        executor: TorchExecutor,
        launch: Launcher,
        *,
        block_size: int,
        max_context: int,
        num_processors: int = 1,
        architecture: int = 80,
    ) -> None:
        """Prepare for contexts up to `max_context`.

        `num_processors` of the device share the work; `architecture` is 10 · major + minor of its
        compute capability. Raises NotImplementedError for a model that the kernels do not support.
        """
        spec = executor.spec
        reason = refusal_of_spec(spec)
        if reason is not None:
            raise NotImplementedError(reason)
        self.shape = shape_of(executor, block_size)
        reason = v.why_not(self.shape) or _why_not_norms(executor, self.shape.norm_dtype)
        if reason is not None:
            raise NotImplementedError(reason)
        self.launch = launch
        self.executor = executor
        self.spec = spec
        self.group = spec.num_heads // spec.num_kv_heads
        self.num_processors = num_processors
        self.max_context = max_context
        self.scale = spec.attention_scale * math.log2(math.e)
        shape = self.shape
        self.products = CudaProducts(launch, shape.dtype, rows_by_kernel=architecture >= MIN_ROW_ARCHITECTURE)
        self.norm = v.norm_variant(shape, adds=False)
        self.add_norm = v.norm_variant(shape, adds=True)
        self.place = v.place_variant(shape)
        self.gate = v.gate_variant(shape)
        stages = v.decode_stages(architecture)
        self.whole, self.split = (
            v.decode_variant(shape, is_split=is_split, num_stages=stages) for is_split in (False, True)
        )
        self.merge = v.merge_variant(shape)
        self.chunk = v.chunk_variant(shape)

    @property
    def variants(self) -> tuple[v.Variant, ...]:
        """All variants that this model may launch."""
        stages = self.whole.num_stages
        return tuple(
            variant
            for variant in v.variants_of(self.shape)
            if variant.kernel != "decode_attention" or variant.num_stages == stages
        )

    def takes(self, batch: StepBatch, kv: KVPool) -> bool:
        """True if the kernels compute a step over this batch."""
        return (
            isinstance(kv, DeviceKVStorage) and kv.block_size == self.shape.block_size and bool(batch.spans)
        )

    def begin(
        self,
        batch: StepBatch,
        kv: KVPool,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        is_recorded: bool = False,
    ) -> DeviceStep:
        """The step over this batch; `cos` and `sin` are `RopeTable.rows`.

        A recorded step always has the number of splits of the longest context.
        """
        assert isinstance(kv, DeviceKVStorage)
        return DeviceStep(self, batch, kv, cos, sin, is_recorded=is_recorded)

    def normed(self, norm: RMSNorm, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """norm(x), or with `added` norm(x += added). (T, hidden_size) each."""
        out = torch.empty_like(x)
        variant = self.norm if added is None else self.add_norm
        other = x if added is None else added
        self.launch(variant, (len(x),), x, other, norm.weight, out, norm.eps)
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (R, vocab_size) fp32 from the last layer's rows."""
        if not len(x):
            return x.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        return self.products(self.executor.head, self.normed(self.executor.norm, x)).float()


class DeviceStep:
    """The state that all layers share in one step."""

    def __init__(
        self,
        kernels: DeviceKernels,
        batch: StepBatch,
        kv: DeviceKVStorage,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        is_recorded: bool,
    ) -> None:
        spans = batch.spans
        self._kernels = kernels
        self._kv = kv
        arrays = batch.on_device or tell_device(batch, kernels.group, kv.device)
        self._slots = arrays.slots
        self._cos, self._sin = cos, sin
        self._tables: StepTables = arrays.tables
        longest = max((span.context_len for span in spans), default=0)
        # A prompt that begins here and is alone: nothing of it has to be read back from the pool.
        self._is_one_prompt = (
            len(spans) == 1
            and MIN_SDPA_ROWS <= spans[0].length == spans[0].context_len
            and kv.device.type == "cuda"
            # In fp32 torch would materialise all scores.
            and kernels.shape.dtype != "fp32"
        )
        self._length = longest
        num_decoding = len(self._tables.decoding)
        num_kv_heads = kv.num_kv_heads
        keys = v.decode_keys(kernels.shape)
        self._split_keys = split_keys(
            num_decoding, num_kv_heads, kernels.num_processors, kernels.max_context, keys
        )
        most = kernels.max_context if is_recorded else max(longest, 1)
        self._num_splits = -(-most // self._split_keys)
        num_heads = kernels.spec.num_heads
        size = num_decoding * num_heads * self._num_splits if self._num_splits > 1 else 0
        # Written and read within each layer's attention, so all layers share one buffer.
        self._split_out = cos.new_empty((size, kv.head_dim), dtype=torch.float32)
        self._split_scale = cos.new_empty(size, dtype=torch.float32)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Compute this layer on x (T, hidden_size), in place."""
        kernels = self._kernels
        layer = kernels.executor.layers_of[index]
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None  # guaranteed by IMPLEMENTED
        assert isinstance(layer.mlp, GatedMLP)
        attended = self._attention(layer, kernels.normed(layer.attention_norm, x))
        added = kernels.products(layer.attention.output, attended)
        inner = kernels.products(layer.mlp.gate_up, kernels.normed(layer.mlp_norm, x, added))
        size = inner.shape[1] // 2
        active = inner.new_empty((len(inner), size))
        kernels.launch(kernels.gate, (len(inner), -(-size // v.PIECE)), inner, active)
        return kernels.products.add_(x, layer.mlp.down, active)

    def _attention(self, layer: DecoderLayer, normed: torch.Tensor) -> torch.Tensor:
        """Attention over the layer's normed rows, before the output projection: (T, num_heads *
        head_dim).
        """
        kernels, kv, attention = self._kernels, self._kv, layer.attention
        spec = kernels.spec
        heads = kernels.products(attention.qkv, normed).view(len(normed), -1, kv.head_dim)
        keys, values = kv.of_layer(layer.index)
        norms = attention.head_norm
        # Without norms the kernel reads neither weight.
        of_queries, of_keys = (heads, heads) if norms is None else (norms.queries.weight, norms.keys.weight)
        kernels.launch(
            kernels.place,
            (len(heads), -(-heads.shape[1] // v.PLACED_HEADS)),
            *(heads, self._cos, self._sin, of_queries, of_keys, keys, values, self._slots),
            *(spec.num_heads, kv.num_kv_heads, spec.norm_eps),
        )
        window = attention.window or SEES_ALL
        if self._is_one_prompt and window >= self._length:
            return self._prompt_alone(heads, spec.num_heads)
        out = heads.new_empty((len(heads), spec.num_heads * kv.head_dim))
        # The number of heads of a row, and of each kind.
        numbers = (heads.shape[1], spec.num_heads, kv.num_kv_heads, window)
        if len(self._tables.decoding):
            self._decode(heads, keys, values, out, numbers)
        if len(self._tables.tiles):
            tables = self._tables
            kernels.launch(
                kernels.chunk,
                (len(tables.tiles), kv.num_kv_heads),
                *(heads, keys, values, out, tables.starts, tables.lengths, tables.contexts),
                *(tables.table_starts, tables.blocks, tables.tiles, kernels.scale, *numbers),
            )
        return out

    def _decode(
        self,
        heads: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        numbers: tuple[int, ...],
    ) -> None:
        kernels, tables, num, keys_of_split = self._kernels, self._tables, self._num_splits, self._split_keys
        num_spans, num_heads, num_kv_heads = len(tables.decoding), numbers[1], numbers[2]
        kernels.launch(
            kernels.split if num > 1 else kernels.whole,
            (num_spans, num_kv_heads, num),
            *(heads, keys, values, out, self._split_out, self._split_scale),
            *(tables.starts, tables.contexts, tables.table_starts, tables.blocks, tables.decoding),
            *(kernels.scale, *numbers, num, keys_of_split),
        )
        if num > 1:
            kernels.launch(
                kernels.merge,
                (num_spans, num_heads),
                *(self._split_out, self._split_scale, out, tables.starts, tables.decoding, num_heads, num),
            )

    def _prompt_alone(self, heads: torch.Tensor, num_heads: int) -> torch.Tensor:
        num_kv_heads = self._kv.num_kv_heads
        by_head = heads.transpose(0, 1).unsqueeze(0)  # (1, heads, T, head_dim)
        queries, keys, values = by_head.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=True,
            scale=self._kernels.spec.attention_scale,
            enable_gqa=self._kernels.group > 1,
        )
        return out.squeeze(0).transpose(0, 1).reshape(len(heads), -1)


def _why_not_norms(executor: TorchExecutor, norm_dtype: str) -> str | None:
    norms = [executor.norm]
    for layer in executor.layers_of:
        norms += [norm for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None]
        if layer.attention.head_norm is not None:
            norms += [layer.attention.head_norm.queries, layer.attention.head_norm.keys]
    if any(short_name(norm.weight.dtype) != norm_dtype for norm in norms):
        return "its norms are stored in several dtypes"
    return None
