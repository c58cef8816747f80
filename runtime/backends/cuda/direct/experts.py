"""Mixtures of experts: the rows of all experts in one product, sorted by expert.

A step's (row, expert) pairs have places, those of an expert one behind the other in the order of
rows. Which places they are depends on the step; what a row gives does not.
"""

from __future__ import annotations

import ctypes

from .....loader.device.driver.base import Driver, KernelLaunch
from ....models.experts_config import Experts, ExpertShares
from ....models.gptq_awq import GptqAwqMatrix
from ....models.matrices import DecoderLayerWeights, DecoderWeights
from ....models.spec import DecoderSpec
from ....tensors import DType
from .arguments import AddExperts, GroupPairs, MatrixPart, RouteExperts
from .memory import Array, DeviceArena
from .products import (
    FEW_ROWS,
    WEIGHT_KINDS,
    Tiles,
    expert_product_launch,
    format_of,
    layout_of,
    matrices_of,
    parts_of,
)
from .program import Kernels
from .sources import EXPERTS

MAX_EXPERTS, MAX_CHOSEN = 1024, 32  # as the kernels' shared memory has room
_THREADS, _ROUTE_THREADS = 256, 32
_TILE_SIZE = 3  # numbers
_PARTS = 3  # of an expert: gate, up, down
_PART_WORDS = ctypes.sizeof(MatrixPart) // 8


def refusal_of_experts(layer: DecoderLayerWeights, dtype: DType, name: str) -> str | None:
    """Why the kernels cannot multiply with these experts, all of a format that they take otherwise; None: they can."""
    for projections in zip(*((each.gate_up, each.down) for each in layer.experts), strict=True):
        matrices = [matrix for each in projections for matrix in matrices_of(each)]
        if len({layout_of(matrix, dtype) for matrix in matrices}) > 1:
            return f"{name} does not take experts of several formats in one layer"
    for expert in layer.experts:
        if any(
            type(matrix) is GptqAwqMatrix and matrix.num_out != expert.down.num_in
            for matrix in matrices_of(expert.gate_up)
        ):
            return f"{name} does not take gates and ups in one matrix of GPTQ or AWQ"
    return None


def formats_of_experts(weights: DecoderWeights, dtype: DType) -> list[str]:
    """The names in `sources.FORMATS` of the products of experts, each once."""
    firsts = [layer.experts[0] for layer in weights.layers if layer.experts]
    matrices = [matrices_of(each)[0] for expert in firsts for each in (expert.gate_up, expert.down)]
    return list(dict.fromkeys(format_of(matrix, dtype) or "" for matrix in matrices))


class ExpertArrays:
    """Arrays that the mixtures of a step write, and the addresses of all experts' matrices."""

    def __init__(self, arena: DeviceArena, spec: DecoderSpec, experts: Experts, num_rows: int) -> None:
        num_pairs, dtype = num_rows * experts.num_used, spec.dtype
        most_tiles = num_pairs // FEW_ROWS[0] + experts.num
        self.scores = arena.take("scores of experts", (num_rows, experts.num), DType.F32)
        self.chosen = arena.take("chosen experts", (num_rows, experts.num_used), DType.U32)
        self.weights = arena.take("weights of experts", (num_rows, experts.num_used), DType.F32)
        self.rows = arena.take("rows of pairs", (num_pairs,), DType.U32)
        self.places = arena.take("places of pairs", (num_pairs,), DType.U32)
        self.tiles = arena.take("tiles of experts", (most_tiles, _TILE_SIZE), DType.U32)
        self.inner = arena.take("gate and up of experts", (num_pairs, 2 * experts.size), dtype)
        self.active = arena.take("active of experts", (num_pairs, experts.size), dtype)
        self.made = arena.take("rows of experts", (num_pairs, spec.hidden_size), dtype)
        self.shared = arena.take("rows of the shared expert", (num_rows, spec.hidden_size), dtype)
        self.shared_gate = arena.take("gate of the shared expert", (num_rows, 1), dtype)
        num_parts = sum(experts.layers) * experts.num * _PARTS
        self.parts = arena.take("matrices of experts", (num_parts, _PART_WORDS), DType.U64)


class ExpertLaunches:
    """Makes the launches of mixtures around their gates. Reads no weights."""

    def __init__(
        self,
        kernels: Kernels,
        spec: DecoderSpec,
        experts: Experts,
        weights: DecoderWeights,
        arrays: ExpertArrays,
        counts: Array,
    ) -> None:
        self._kernels = kernels
        self._spec = spec
        self._experts = experts
        self._layers = weights.layers
        self.arrays = arrays
        self._counts = counts
        self._first_parts: dict[int, tuple[int, int]] = {}  # of a layer: for gate and up, and for down

    def num_pairs(self, num_rows: int) -> int:
        return num_rows * self._experts.num_used

    def load(self, driver: Driver, stream: int) -> None:
        """Have the addresses of all matrices on the device. Blocks."""
        experts, parts = self._experts, list[MatrixPart]()
        for number, layer in enumerate(self._layers):
            if not layer.experts:
                continue
            firsts = [len(parts)]
            parts += [part for each in layer.experts for part in parts_of(each.gate_up, experts.size)]
            firsts.append(len(parts))
            parts += [part for each in layer.experts for part in parts_of(each.down, self._spec.hidden_size)]
            self._first_parts[number] = self.arrays.parts.row(firsts[0]), self.arrays.parts.row(firsts[1])
        table = self.arrays.parts
        assert len(parts) == table.shape[0]
        host = (MatrixPart * len(parts))(*parts)
        driver.copy_in(table.address, ctypes.addressof(host), table.size_bytes, stream)
        driver.synchronize_stream(stream)  # before `host` is freed

    def up(self, number: int, x: Array, bucket: int) -> list[KernelLaunch]:
        """From the router's scores to gate and up of each pair."""
        layer, experts, arrays = self._layers[number], self._experts, self.arrays
        tiles, correction = Tiles.of(bucket * experts.num_used, experts.num), layer.correction
        route = RouteExperts(
            scores=arrays.scores.address,
            correction=correction.array.address if correction is not None else 0,
            chosen=arrays.chosen.address,
            weights=arrays.weights.address,
            counts=self._counts.address,
            num=experts.num,
            num_used=experts.num_used,
            correction_kind=WEIGHT_KINDS[correction.dtype] if correction is not None else 0,
            sigmoid=experts.shares is ExpertShares.SIGMOID,
            wide_scores=experts.wide_scores,
            sum_to_1=experts.sum_to_1,
            rounds_weights=experts.rounds_weights,
            sum_eps=experts.sum_eps,
            factor=experts.factor,
            num_groups=experts.num_groups,
            num_groups_used=experts.num_groups_used,
        )
        group = GroupPairs(
            chosen=arrays.chosen.address,
            rows=arrays.rows.address,
            places=arrays.places.address,
            tiles=arrays.tiles.address,
            counts=self._counts.address,
            num=experts.num,
            num_used=experts.num_used,
            tile_rows=tiles.kernel.rows,
            num_tiles=tiles.num,
        )
        return [
            self._kernels.launch(EXPERTS, "route", (bucket,), _ROUTE_THREADS, route),
            self._kernels.launch(EXPERTS, "group_pairs", (experts.num,), _THREADS, group),
            self._product(number, x, arrays.inner, tiles, is_down=False),
        ]

    def down(self, number: int, out: Array, bucket: int, *, adds: bool) -> list[KernelLaunch]:
        """From the active numbers of each pair, and what the shared expert has made, to the rows of `out`."""
        layer, experts, arrays = self._layers[number], self._experts, self.arrays
        tiles, size = Tiles.of(bucket * experts.num_used, experts.num), self._spec.hidden_size
        adding = AddExperts(
            out=out.address,
            made=arrays.made.address,
            places=arrays.places.address,
            weights=arrays.weights.address,
            shared=arrays.shared.address if layer.down is not None else 0,
            shared_gate=arrays.shared_gate.address if layer.shared_gate is not None else 0,
            counts=self._counts.address,
            size=size,
            num_used=experts.num_used,
            adds=adds,
        )
        return [
            self._product(number, arrays.active, arrays.made, tiles, is_down=True),
            self._kernels.launch(EXPERTS, "add_experts", (bucket, -(-size // _THREADS)), _THREADS, adding),
        ]

    def _product(self, number: int, x: Array, out: Array, tiles: Tiles, *, is_down: bool) -> KernelLaunch:
        expert = self._layers[number].experts[0]
        matrix = matrices_of(expert.down if is_down else expert.gate_up)[0]
        return expert_product_launch(
            self._kernels,
            layout_of(matrix, self._spec.dtype),
            x,
            out,
            self._counts,
            tiles,
            parts=self._first_parts[number][is_down],
            num_parts=1 if is_down else 2,
            tile_table=self.arrays.tiles.address,
            rows=0 if is_down else self.arrays.rows.address,
        )
