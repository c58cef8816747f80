"""Ahead-of-time compiler of the kernels, for machines that then need neither Triton nor a compiler:

    python -m teneral.runtime.backends.cuda.compile OUT [--arch 80,90,100] [--config config.json …] [--block-size 16]

Needs Triton, but no device. Writes a folder for each architecture, with a binary for each variant
(`variants.py`) and an index of their launch parameters (`library.py` reads both). `serve
--kernel-dir OUT` uses them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .library import INDEX, Binary, architecture_folder
from .variants import KERNELS, Variant, is_aligned, power_of_2, sources_digest, usual_variants, variants_of

ALIGNMENT_BYTES = 16
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)")


class Compiler:
    """A `Source` of binaries for one architecture, compiled on demand. Triton keeps them in its own
    cache.
    """

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def find(self, variant: Variant) -> tuple[Binary, bytes]:
        return compile_variant(variant, self._architecture)


def compile_variant(variant: Variant, architecture: int) -> tuple[Binary, bytes]:
    """Compile one variant, which takes about a second. Raises Triton's errors."""
    import triton
    from triton.backends.compiler import GPUTarget

    types = dict(variant.signature)
    source = _source(triton.jit(function_of(variant)), types, dict(variant.constants))
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    metadata = compiled.metadata
    _require_plain(variant, metadata)
    num_parameters = count_parameters(compiled.asm["ptx"])
    if not len(types) <= num_parameters <= len(types) + 2:
        raise RuntimeError(
            f"{variant.key} has {num_parameters} parameters, which do not match {sorted(types)}"
        )
    binary = Binary(
        key=variant.key,
        name=metadata.name,
        types=tuple(kind for _, kind in variant.signature),
        num_parameters=num_parameters,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
    )
    return binary, compiled.asm["cubin"]


def _source(function: Any, types: dict[str, str], constants: dict[str, int]) -> Any:
    """Triton's `ASTSource`, in the form that the installed version takes."""
    from triton.compiler import ASTSource

    places = {name: place for place, name in enumerate(function.arg_names)}
    aligned = [places[name] for name, kind in types.items() if is_aligned(name, kind)]
    if "constexprs" not in inspect.signature(ASTSource).parameters:  # up to 3.2
        from triton.backends.compiler import AttrsDescriptor

        hints = AttrsDescriptor.from_hints(dict.fromkeys(aligned, ALIGNMENT_BYTES))
        return ASTSource(fn=function, signature=types, constants=constants, attrs=hints)
    return ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in function.arg_names},
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", ALIGNMENT_BYTES]] for place in aligned},
    )


def function_of(variant: Variant) -> Any:
    """The kernel's Python function. Imports Triton's language."""
    kernel = KERNELS[variant.kernel]
    return getattr(import_module(f"{__package__}.kernels.{kernel.module}"), kernel.name)


def count_parameters(ptx: str) -> int:
    """The number of the entry's parameters.

    The arguments may be followed by addresses of scratch memory, which are not used.
    """
    entry = ptx[ptx.index(".entry") :]
    return len(_PARAMETER.findall(entry[: entry.index(")")]))


def _require_plain(variant: Variant, metadata: Any) -> None:
    """Raise for kernels with scratch memory or clusters, which the launcher does not support."""
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, name, 0):
            raise RuntimeError(f"{variant.key} needs {name}")
    clusters = getattr(metadata, "num_ctas", 1), getattr(metadata, "launch_cooperative_grid", False)
    if clusters != (1, False):
        raise RuntimeError(f"{variant.key} needs an unsupported launch: {clusters}")


def compile_to(out: Path, variants: Iterable[Variant], architectures: Sequence[int]) -> int:
    """Compile the variants into OUT, replacing its folders of these architectures. Returns the
    number of binaries.
    """
    import triton

    num_binaries = 0
    for architecture in architectures:
        folder = architecture_folder(out, architecture)
        folder.mkdir(parents=True, exist_ok=True)
        binaries: list[Binary] = []
        for variant in variants:
            binary, content = compile_variant(variant, architecture)
            (folder / binary.file_name).write_bytes(content)
            binaries.append(binary)
        index = {
            "sources": sources_digest(),
            "architecture": architecture,
            "triton": triton.__version__,
            "binaries": [binary.to_json() for binary in binaries],
        }
        partial = folder / f"{INDEX}.{os.getpid()}"
        partial.write_text(json.dumps(index, indent=1))
        partial.replace(folder / INDEX)
        num_binaries += len(binaries)
    return num_binaries


def variants_of_config(path: Path, block_size: int) -> tuple[Variant, ...]:
    """The variants of the model that a config.json describes, with norms stored in its dtype and in
    fp32.
    """
    from ...models.decoder_config import DecoderConfig
    from .variants import shape_of_config

    config = DecoderConfig.from_json(json.loads(path.read_text()))
    found: dict[Variant, None] = {}
    for shape in shape_of_config(config, block_size):
        found.update(dict.fromkeys(variants_of(shape)))
    return tuple(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m teneral.runtime.backends.cuda.compile", description=__doc__
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="80,90,100", help="compute capabilities, 90 for 9.0")
    parser.add_argument(
        "--config", type=Path, action="append", help="config.json of a model; may be repeated"
    )
    parser.add_argument("--block-size", type=int, default=16)
    given = parser.parse_args(arguments)
    if given.block_size != power_of_2(given.block_size):
        parser.error("--block-size must be a power of 2")
    variants: dict[Variant, None] = {}
    for path in given.config or ():
        variants.update(dict.fromkeys(variants_of_config(path, given.block_size)))
    if not given.config:
        variants.update(dict.fromkeys(usual_variants(given.block_size)))
    num_binaries = compile_to(given.out, variants, [int(number) for number in given.arch.split(",")])
    sys.stdout.write(f"{num_binaries} kernels in {given.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
