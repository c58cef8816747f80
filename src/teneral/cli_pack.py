"""`teneral pack`: models, adapters and ONNX graphs; its options, and the calibration of its integers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from .cli_parser import source_options
from .cli_report import print_result
from .loader import errors as loading
from .loader.sources.open import model_address, open_source, open_store
from .loader.tools.progress_bar import ProgressBar

if TYPE_CHECKING:
    from .loader.sources.base import Source, Store
    from .loader.tools.pack.quantize_plan import Calibrate, MomentsOf, QuantizeOptions
    from .loader.tools.stated_files import RecordedReads


def run_pack(options: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from .loader.artifact import open_model
    from .loader.tools.pack.content import Base
    from .loader.tools.pack.pack import pack
    from .loader.tools.pack.plan import TierOptions
    from .loader.tools.pack.prune import PruneOptions
    from .loader.tools.stated_files import RecordedReads
    from .runtime.adapters.pack import is_adapter_folder
    from .runtime.onnx.pack import is_onnx_model, refuse_other_formats

    options.model = model_address(options.model)
    refuse_other_formats(options.model)
    if is_onnx_model(options.model, source_options(options)):
        return _pack_onnx(options)
    tiers = TierOptions(options.draft_bits, options.embed_bits, options.head_bits, options.sketch_bits)
    quantize = _quantize_options(options)
    keep_integers = quantize is None and not options.dequantize
    own = source_options(options)._replace(base=None)  # the base is no part of what is read
    # Or a link to a secret would be packed with the model.
    # Blocks of a GGUF file are not pruned; what they become is.
    confined = own._replace(outside_links=False, gguf_blocks=options.prune is None)
    reads = RecordedReads()
    around = reads.around if options.verify_files else None
    source = open_model(options.model, confined, keep_integers=keep_integers, around=around)
    store = open_store(options.artifact, own)
    if is_adapter_folder(source):
        return _pack_adapter(options, source, store, reads)
    _warn_if_refused(source)
    calibrate = _calibrator(options, source, quantize)
    with ProgressBar("packing", quiet=options.quiet) as bar:
        result = pack(
            source,
            store,
            tiers=tiers,
            quantize=quantize,
            calibrate=calibrate,
            prune=PruneOptions.from_flags(options.prune, options.prune_all),
            sparse=not options.dense,
            base=None if options.base is None else Base.at(options.base, own),
            force=options.force,
            threads=options.threads,
            progress=bar.update,
            reads=reads,
        )
    print_result(result, as_json=options.json)
    return 0


def _warn_if_refused(source: Source) -> None:
    """Say before the work that `teneral serve` will refuse a model. It is packed all the same: `load_into` fills any
    module.
    """
    from .loader.format.limits import MAX_SMALL_FILE_BYTES
    from .runtime.backends.describe import describe_model

    try:
        config, _ = source.read("config.json", max_bytes=MAX_SMALL_FILE_BYTES)
    except loading.TeneralError:
        return  # weights without a config pack, too
    refused = describe_model(config)["refused"]
    if refused is not None:
        print(f"teneral: warning: teneral serve does not take this model: {refused}", file=sys.stderr)


def _pack_adapter(options: argparse.Namespace, source: Source, store: Store, reads: RecordedReads) -> int:
    from .loader.sources.open import split_pin
    from .runtime.adapters.pack import pack_adapter

    what = "an adapter is packed as it is: it has no tiers, and is neither quantised nor pruned"
    _refuse_flags(options, what, "prune")
    if options.base is None:
        raise loading.UsageError(
            f"{options.model} is a LoRA adapter, which is packed with its base's digest",
            key="base",
            hint="Add --base with the artifact of its base.",
        )
    address, pin = split_pin(model_address(options.base))
    base = open_source(address, source_options(options)._replace(base=None))
    with ProgressBar("packing", quiet=options.quiet) as bar:
        result = pack_adapter(
            source,
            store,
            base,
            base_pin=pin,
            force=options.force,
            threads=options.threads,
            progress=bar.update,
            reads=reads,
        )
    print_result(result, as_json=options.json)
    return 0


def _refuse_flags(options: argparse.Namespace, what: str, *others: str) -> None:
    """Raise `UsageError` with this message where flags are given that change weights."""
    flags = ("draft_bits", "embed_bits", "head_bits", "sketch_bits", "quantize", "group_size", "calibrate")
    given = [name for name in (*flags, *others) if getattr(options, name) is not None]
    if given or options.asymmetric or options.dequantize:
        raise loading.UsageError(what, key=given[0] if given else "quantize", hint="Leave these flags out.")


def _pack_onnx(options: argparse.Namespace) -> int:
    from .runtime.onnx.pack import pack_onnx

    _refuse_flags(options, "an ONNX model is packed as it is: it has no tiers, and its own tools quantise it")
    with ProgressBar("packing", quiet=options.quiet) as bar:
        result = pack_onnx(
            options.model,
            open_store(options.artifact, source_options(options)),
            options=source_options(options),
            force=options.force,
            threads=options.threads,
            progress=bar.update,
        )
    print_result(result, as_json=options.json)
    return 0


def _quantize_options(options: argparse.Namespace) -> QuantizeOptions | None:
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


def _calibrator(
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
