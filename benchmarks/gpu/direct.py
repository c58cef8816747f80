"""The path without torch on a GPU: its start, and steps of an 8B-shaped model with random weights.

    python -m benchmarks.gpu.direct [--json FILE] [--layers N] [--bits 16|8|4] [--kernel-dir FOLDER]

Times the driver, the kernels' modules, memory and the first programs; then decode steps of several batch sizes, as
graphs and with the choice of tokens, and a prompt. Says whether a row has the same bits alone and in a batch.
Needs no torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu import model_8b
from benchmarks.gpu.check import claim
from benchmarks.report import note, table
from msgspec.structs import replace

from teneral.loader.device.driver.base import CudaError
from teneral.loader.device.driver.open import open_driver
from teneral.runtime.backends.cuda.direct.compile import CompiledKernels
from teneral.runtime.backends.cuda.direct.device import DirectDevice
from teneral.runtime.backends.cuda.direct.executor import DirectExecutor, DirectModelBackend
from teneral.runtime.backends.cuda.direct.sampler import TokenSampler
from teneral.runtime.backends.cuda.direct.weights import tensor_at
from teneral.runtime.backends.cuda.direct.workspace import WorkspaceLimits
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.matrices import (
    DecoderWeights,
    IntegerMatrix,
    Matrix,
    Projection,
    StoredProjection,
)
from teneral.runtime.step.batch import SequenceSpan, StepBatch
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.step.state import SamplingState
from teneral.runtime.synth import tensor_specs
from teneral.runtime.tensors import DType, Tensor
from teneral.runtime.weights import DictWeights

BATCHES = (1, 8, 32, 128)
CONTEXT = 512
PROMPT_TOKENS = 2048
NUM_STEPS = 40
BLOCK_SIZE = 16
FILL_BYTES = 16 << 20  # of random bytes, repeated
GROUP_SIZE = 128  # of 4 bits


class Weights:
    """Random weights in the device's memory: repeated bytes, which are plausible numbers of their type."""

    def __init__(self, device: DirectDevice) -> None:
        self.device = device
        random = np.random.default_rng(0)
        floats = random.standard_normal(FILL_BYTES // 2).astype(np.float32) * np.float32(model_8b.STD)
        self._fill = {
            DType.BF16: (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
            DType.I8: random.integers(0, 256, FILL_BYTES, np.uint8),
        }
        self.size_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: DType, *, value: float | None = None) -> Tensor:
        """A tensor; with `value` (bf16), each of its numbers."""
        size_bytes = int(np.prod(shape)) * dtype.size_bytes
        fill = self._fill[DType.BF16 if dtype is DType.BF16 else DType.I8]
        if value is not None:
            bits = np.array([value], np.float32).view(np.uint32) >> 16
            fill = np.repeat(bits.astype(np.uint16), min(size_bytes, FILL_BYTES) // 2).view(np.uint8)
        driver, stream = self.device.driver, self.device.stream
        address = driver.alloc(size_bytes)
        for first in range(0, size_bytes, len(fill)):
            driver.copy_in(address + first, fill.ctypes.data, min(len(fill), size_bytes - first), stream)
        driver.synchronize_stream(stream)
        self.size_bytes += size_bytes
        return tensor_at(self.device, address, shape, dtype)

    def integers(self, weights: DecoderWeights, bits: int) -> DecoderWeights:
        """The same model with integers in its layers."""

        def matrix(own: Matrix) -> Matrix:
            group_size = GROUP_SIZE if bits == 4 else own.num_in
            scale = (own.num_out, own.num_in // group_size)
            levels = self.take((own.num_out, own.num_in * bits // 8), DType.U8 if bits == 4 else DType.I8)
            return IntegerMatrix(
                levels, self.take(scale, DType.BF16, value=model_8b.STD * 3.46 / (1 << bits))
            )

        def projection(own: Projection | None) -> StoredProjection | None:
            return None if own is None else StoredProjection(tuple(map(matrix, own.matrices())))

        layers = tuple(
            replace(
                layer,
                qkv=projection(layer.qkv),
                output=projection(layer.output),
                gate_up=projection(layer.gate_up),
                down=projection(layer.down),
            )
            for layer in weights.layers
        )
        return replace(weights, layers=layers)


def build(device: DirectDevice, weights: Weights, num_layers: int, bits: int) -> DirectExecutor:
    config = {**model_8b.CONFIG, "num_hidden_layers": num_layers}
    placed: dict[str, Tensor] = {}
    for name, dtype, shape in tensor_specs(config):
        is_of_layer = ".layers." in name and "norm" not in name
        if bits < 16 and is_of_layer:  # replaced below
            placed[name] = tensor_at(device, 0, shape, DType[dtype])
        else:
            placed[name] = weights.take(shape, DType[dtype], value=1.0 if "norm" in name else None)
    model = build_model(config, DictWeights(placed), [DirectModelBackend(device)])
    assert isinstance(model, Decoder)
    own = model.weights if bits == 16 else weights.integers(model.weights, bits)
    return DirectExecutor(model.spec, own, device)


def batch_of(num: int, length: int, context: int) -> StepBatch:
    """`num` sequences, each with its last `length` tokens of `context`, whose last rows are scored."""
    blocks_each = -(-context // BLOCK_SIZE)
    spans, slots, scored = [], [], []
    for number in range(num):
        blocks = tuple(range(number * blocks_each, (number + 1) * blocks_each))
        spans.append(SequenceSpan(number * length, length, context, blocks))
        places = range(context - length, context)
        slots += [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in places]
        scored.append((number + 1) * length - 1)
    tokens = np.tile(np.arange(length) * 37 % 250, num)
    positions = np.tile(np.arange(context - length, context), num)
    return StepBatch(tokens, positions, np.array(slots), tuple(spans), np.array(scored))


class Timer:
    """Seconds of the parts of a start, in their order."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        begin_s = time.perf_counter()
        made = work()
        self.parts[name] = time.perf_counter() - begin_s
        return made


def main() -> int:
    options = _options()
    timer = Timer()
    try:
        driver = timer("driver and context", lambda: open_driver(0))
    except CudaError as error:
        note(f"no device: {error.message}")
        return 2
    architecture = 10 * driver.attribute(75) + driver.attribute(76)
    device = DirectDevice(driver, CompiledKernels(architecture, [options.kernel_dir]))
    return measure(device, options, timer)


def measure(device: DirectDevice, options: argparse.Namespace, timer: Timer) -> int:
    weights = Weights(device)
    executor = timer("weights made", lambda: build(device, weights, options.layers, options.bits))
    kernels = device.kernels(executor.spec.dtype)
    timer("kernels' modules", lambda: kernels.load(executor.modules))
    most = max(8, *BATCHES)
    num_blocks = most * (max(CONTEXT, PROMPT_TOKENS // most) // BLOCK_SIZE + 1)
    kv = timer("pool", lambda: executor.new_kv(num_blocks, BLOCK_SIZE, KVKind.MODEL))
    limits = WorkspaceLimits(max_rows=PROMPT_TOKENS, max_spans=most, max_context=8192, block_size=BLOCK_SIZE)
    timer("workspace", lambda: executor.open(kv, limits))
    timer("first step", lambda: _finished(device, executor, batch_of(1, 1, CONTEXT)))
    measured: dict[str, Any] = {
        "device": device.architecture, "bits": options.bits, "layers": options.layers,
        "weight_bytes": weights.size_bytes, "start_s": timer.parts,
    }  # fmt: skip
    print(table(("start", "ms"), [(name, f"{1e3 * took_s:.1f}") for name, took_s in timer.parts.items()]))
    claims = [_same_bits(executor)]
    sampler = TokenSampler(device.driver, kernels, device.stream)
    rows = []
    for num in BATCHES:
        step_s, chosen_s = _decode_s(device, executor, sampler, num)
        rows.append((f"{num}", f"{1e3 * step_s:.3f}", f"{1e3 * chosen_s:.3f}", f"{num / chosen_s:,.0f}"))
        measured[f"decode_{num}"] = {"step_s": step_s, "with_choice_s": chosen_s, "tokens_s": num / chosen_s}
        model_8b.keep(options.json, "direct", measured, claims)
    print(table(("batch", "step ms", "with choice ms", "tokens/s"), rows))
    prompt = batch_of(1, PROMPT_TOKENS, PROMPT_TOKENS)
    _finished(device, executor, prompt)
    measured["prompt_s"] = min(_finished(device, executor, replace(prompt)) for _ in range(3))
    note(f"a prompt of {PROMPT_TOKENS:,} tokens: {1e3 * measured['prompt_s']:.1f} ms")
    model_8b.keep(options.json, "direct", measured, claims)
    return 0 if all(each["holds"] for each in claims) else 1


def _finished(device: DirectDevice, executor: DirectExecutor, batch: StepBatch) -> float:
    """The seconds of one step."""
    begin_s = time.perf_counter()
    executor.run(batch)
    device.driver.synchronize_stream(device.stream)
    return time.perf_counter() - begin_s


def _decode_s(
    device: DirectDevice, executor: DirectExecutor, sampler: TokenSampler, num: int
) -> tuple[float, float]:
    """Seconds of a step, launched one behind the other; and with the choice of its tokens, which waits."""
    batch = batch_of(num, 1, CONTEXT)
    for _ in range(10):  # as a graph from then on
        executor.run(batch)
    device.driver.synchronize_stream(device.stream)
    begin_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        logits = executor.run(batch)
    device.driver.synchronize_stream(device.stream)
    step_s = (time.perf_counter() - begin_s) / NUM_STEPS
    request = GenerationRequest("direct", (1,), sampling=SamplingParams(temperature=0))
    states = [SamplingState(request) for _ in range(num)]
    begin_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        sampler.choose(executor.run(batch).array, states)
    assert len(logits) == num
    return step_s, (time.perf_counter() - begin_s) / NUM_STEPS


def _same_bits(executor: DirectExecutor) -> dict[str, Any]:
    """The claim that the first sequence has the same logits alone, in each batch and next to other prompts."""
    length = min(CONTEXT, 64)
    executor.run(batch_of(1, length, length)).numpy()
    alone = executor.run(batch_of(1, 1, length)).numpy()[0]
    differing = [
        num for num in BATCHES if not np.array_equal(executor.run(batch_of(num, 1, length)).numpy()[0], alone)
    ]
    for num in (2, 5):  # whole prompts, next to each other
        found = executor.run(batch_of(num, length, length)).numpy()[0]
        if not np.array_equal(found, executor.run(batch_of(1, length, length)).numpy()[0]):
            differing.append(-num)
    note(f"batches in which a row has other bits: {differing or 'none'}")
    return claim("batches in which a row has other bits", len(differing), 0, at_most=True)


def _options() -> argparse.Namespace:
    parser = model_8b.parser(__doc__)
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16)
    parser.add_argument("--kernel-dir", type=Path, default=Path("/tmp/teneral-kernels"), metavar="FOLDER")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
