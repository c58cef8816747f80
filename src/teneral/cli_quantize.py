"""The options of `pack --quantize`, and the calibration of its integers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from .loader import errors as loading

if TYPE_CHECKING:
    from .loader.sources.base import Source
    from .loader.tools.pack.quantize_plan import Calibrate, MomentsOf, QuantizeOptions


def quantize_options(options: argparse.Namespace) -> QuantizeOptions | None:
    from .loader.tools.pack.quantize_plan import QuantizeOptions

    if options.quantize is not None:
        int8 = None if options.int8 is None else tuple(filter(None, options.int8.split(",")))
        return QuantizeOptions(
            int(options.quantize.removeprefix("int")), options.group_size, options.asymmetric, int8
        )
    if options.group_size is not None or options.asymmetric or options.int8 is not None:
        raise loading.UsageError(
            "--group-size, --asymmetric and --int8 say how to quantise",
            key="quantize",
            hint="Add --quantize int4.",
        )
    return None


def calibrator(
    options: argparse.Namespace, source: Source, quantize: QuantizeOptions | None
) -> Calibrate | None:
    """A function that lets the model read the text of `--calibrate`, or one of its own; None for weights that are
    chosen without.
    """
    is_int4 = quantize is not None and quantize.bits == 4
    if (options.calibrate is not None or options.no_calibrate) and not is_int4:
        raise loading.UsageError(
            "--calibrate is for int4: other weights are not chosen by what they do",
            key="calibrate",
            hint="Add --quantize int4, or leave it out.",
        )
    if not is_int4 or options.no_calibrate:
        return None
    from .runtime.quality.text import read_text

    text = None if options.calibrate is None else read_text(options.calibrate)

    def calibrate(names: Collection[str]) -> MomentsOf | None:
        from .loader.tools.progress_bar import ProgressBar
        from .runtime.errors import ModelError
        from .runtime.quality.calibration import MAX_UNASKED_BYTES, calibrate, weight_bytes

        if text is None and weight_bytes(source) > MAX_UNASKED_BYTES:
            print(
                "not calibrated: a model of this size takes long; --calibrate FILE does it", file=sys.stderr
            )
            return None
        try:
            with ProgressBar("reading", quiet=options.quiet) as bar:
                calibration = calibrate(
                    source,
                    text,
                    names,
                    max_tokens=options.calibrate_tokens,
                    threads=options.threads,
                    progress=bar.update,
                    note=(lambda line: None)
                    if options.quiet
                    else (lambda line: print(line, file=sys.stderr)),
                )
        except (loading.InsufficientMemoryError, ModelError) as error:
            if text is not None:
                raise
            print(f"not calibrated: {error}", file=sys.stderr)
            return None
        return calibration.inputs_of

    return calibrate
