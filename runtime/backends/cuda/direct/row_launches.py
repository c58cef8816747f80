"""Launches of operations on rows that decoders and encoders share."""

from __future__ import annotations

from .....loader.device.driver.base import KernelLaunch
from ....models.fields import Norm
from ....models.matrices import Projection, Tensor
from ....models.spec import Activation
from .arguments import Gate, NormRows
from .memory import Array
from .products import WEIGHT_KINDS, Mode, Output, matrices_of, product_launch
from .program import Kernels
from .refusals import ACTIVATIONS, NORMS
from .sources import ROWS

THREADS = 256
HEAD_THREADS, HEADS_PER_BLOCK = 128, 4
SEES_ALL = 1 << 30  # a window that no context reaches


class RowLaunches:
    """Makes launches for at most `num_rows`; a step's counts have the number that there is. Reads no weights."""

    def __init__(self, kernels: Kernels, counts: Array, norm: Norm, norm_eps: float) -> None:
        self._kernels = kernels
        self._counts = counts
        self._norm_kind = NORMS.index(norm)
        self._norm_eps = norm_eps

    def _norm(
        self,
        weight: Tensor,
        x: Array,
        out: Array,
        num_rows: int,
        *,
        bias: Tensor | None = None,
        rows: int = 0,
        output: Output = Output.ROWS,
    ) -> KernelLaunch:
        """out[i] = norm(x[rows[i]]), or without `rows`, an address, norm(x[i])."""
        arguments = NormRows(
            x=x.address,
            weight=weight.array.address,
            bias=bias.array.address if bias is not None else 0,
            out=out.address,
            rows=rows,
            counts=self._counts.address,
            count=output,
            size=weight.shape[-1],
            x_stride=x.shape[1],
            out_stride=out.shape[1],
            weight_kind=WEIGHT_KINDS[weight.dtype],
            bias_kind=WEIGHT_KINDS[bias.dtype] if bias is not None else 0,
            kind=self._norm_kind,
            eps=self._norm_eps,
        )
        return self._kernels.launch(ROWS, "norm_rows", (num_rows,), THREADS, arguments)

    def _gate(
        self,
        product: Array,
        out: Array,
        num_rows: int,
        activation: Activation,
        *,
        is_open: bool = False,
        output: Output = Output.ROWS,
    ) -> KernelLaunch:
        """out = activation(first half of the product) * second half; or, if it is open, activation(product)."""
        gate = Gate(
            product=product.address,
            out=out.address,
            counts=self._counts.address,
            count=output,
            size=out.shape[1],
            kind=ACTIVATIONS[activation],
            is_open=is_open,
        )
        grid = num_rows, -(-out.shape[1] // THREADS)
        return self._kernels.launch(ROWS, "gate", grid, THREADS, gate)

    def _product(
        self,
        projection: Projection,
        x: Array,
        out: Array,
        bucket: int,
        mode: Mode = Mode.STORE,
        output: Output = Output.ROWS,
    ) -> list[KernelLaunch]:
        """Matrices of one input write side by side."""
        launches: list[KernelLaunch] = []
        column = 0
        for matrix in matrices_of(projection):
            launches.append(
                product_launch(
                    self._kernels,
                    matrix,
                    x,
                    out,
                    self._counts,
                    bucket=bucket,
                    column=column,
                    mode=mode,
                    output=output,
                )
            )
            column += matrix.num_out
        assert column == out.shape[1]
        return launches
