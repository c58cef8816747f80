"""Models of the newer families while their weights arrive: plain, in tiers, quantised."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import build_model, forward
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_models import DISTINCT_NATIVE, save_tiny

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.format.manifest import Tier
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.matrices import DenseMatrix, IntegerMatrix
from teneral.runtime.weights import StreamedWeights

KINDS = {"packed": None, "int8": QuantizeOptions(8), "int4": QuantizeOptions(4)}
# Groups of 64 columns, and biases of whole lines of memory, between which no gap is left
SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    **{
        key: {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
        for key in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next")
    },
    "lfm2_moe": {"moe_intermediate_size": 64},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "glm4_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "ernie4_5": {"head_dim": 32},
    **{key: {"moe_intermediate_size": 64} for key in ("deepseek_v2", "deepseek_v3", "ernie4_5_moe")},
}
# The experts of gpt-oss are not taken apart.
QUANTISED = [family for family in DISTINCT_NATIVE if family != "gpt_oss"]

pytestmark = pytest.mark.skipif(library() is None, reason="the native libraries are not built here")
each_family = pytest.mark.parametrize("family", DISTINCT_NATIVE)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A family's artifact of a kind, packed once."""

    @functools.cache
    def plain(family: str) -> str:
        folder, sizes = tmp_path_factory.mktemp("plain"), SIZES.get(family, {})
        return str(save_tiny(family, folder, dtype=torch.bfloat16, intermediate_size=128, **sizes))

    @functools.cache
    def pack_once(family: str, kind: str, draft_bits: int | None = None) -> Path:
        folder = tmp_path_factory.mktemp("packed")
        tiers = None if draft_bits is None else TierOptions(draft_bits=draft_bits)
        pack(open_source(plain(family)), open_store(str(folder)), quantize=KINDS[kind], tiers=tiers)
        return folder

    return pack_once


@contextmanager
def arriving(
    artifact: Path, options: LoadOptions | None = None
) -> Iterator[tuple[Any, PacedSource, Decoder]]:
    """A load that is not started, whose memory holds NaN, and the model over it."""
    source = PacedSource(open_source(str(artifact)))
    source.delay(seed=1, max_s=0.003)
    manifest = open_artifact(source)
    with closing(source), WeightLoad(source, manifest, options=options or LoadOptions()) as load:
        for group in manifest.groups:
            load.slab(group.index)[:] = 0xFF
        config = json.loads(read_file(source, manifest, "config.json"))
        decoder = build_model(config, StreamedWeights(load), backends=[NativeBackend()])
        assert isinstance(decoder, Decoder)
        yield load, source, decoder


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for kind in KINDS for family in (DISTINCT_NATIVE if kind == "packed" else QUANTISED)],
)
def test_a_decoder_built_before_its_load_starts_computes_what_a_finished_one_does(packed, family, kind):
    artifact, prompt = packed(family, kind), prompt_of(40)

    with arriving(artifact) as (load, _, decoder):
        load.start()
        ours = Stepper(decoder).step({"a": prompt})["a"]
        layer = decoder.weights.layers[1]
        mlp = next(each for each in decoder.weights.layers[1:] if each.experts or each.gate_up)
        gate_up = mlp.experts[1].gate_up if mlp.experts else mlp.gate_up
        qkv, matrices = layer.qkv.matrices(), [*layer.qkv.matrices(), *gate_up.matrices()]
    with arriving(artifact) as (load, _, decoder):
        load.start()
        load.join()
        expected = Stepper(decoder).step({"a": prompt})["a"]

    assert torch.equal(ours, expected)
    assert ours.isfinite().all()
    parts_of_gate_up = 2 if family == "gpt_oss" else 1  # whose rows alternate
    # The matrix for latents is a neighbour of the one for low-rank queries, and not of the one for whole queries.
    num_parts = 2 if family == "deepseek_v2" else len({each.weight.dtype for each in qkv})
    assert len(qkv) == num_parts, "of one dtype: stored as one matrix, or as neighbours"
    assert len(matrices) - len(qkv) == parts_of_gate_up
    assert all(isinstance(each, DenseMatrix if kind == "packed" else IntegerMatrix) for each in matrices)


@pytest.mark.parametrize("family", QUANTISED)
def test_integers_stay_close_to_the_floats(packed, family):
    prompt, rows = prompt_of(40), {}
    for kind in KINDS:
        with arriving(packed(family, kind)) as (load, _, decoder):
            load.start()
            rows[kind] = Stepper(decoder).step({"a": prompt})["a"]

    size = rows["packed"].abs().mean()
    assert 0 < (rows["int8"] - rows["packed"]).abs().mean() < 0.2 * size
    assert 0 < (rows["int4"] - rows["packed"]).abs().mean() < 0.8 * size


@each_family
def test_a_pass_over_the_draft_is_near_the_exact_one_that_follows(packed, family):
    # Of a mixture there is no draft unless it is asked for.
    artifact, prompt = packed(family, "packed", 3), prompt_of(40)
    options = LoadOptions(connections=64, order=Order.DRAFT_FIRST)

    with arriving(artifact, options) as (load, source, decoder):
        manifest = load.manifest
        held = source.hold(reads_of(manifest, *(part for part in manifest.parts if part.tier is Tier.REFINE)))
        load.start()
        stepper = Stepper(decoder)
        draft = forward(decoder, stepper.batch({"a": prompt}), stepper.kv, tier=Tier.DRAFT)
        assert not held.released
        held.release()
        exact = Stepper(decoder).step({"a": prompt})["a"]

    assert draft.isfinite().all()
    assert 0 < (draft - exact).abs().mean() < 0.8 * exact.abs().mean()
