"""A quantised model whose weights still arrive: it computes with nothing that is not there, and waits for no more."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import build_model, forward
from tests.support.native import widened
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_models import save_tiny

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.format import layout
from teneral.loader.format.manifest import FRAME_ELEMENTS, Tier
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.plan import RowParts
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.matrices import IntegerMatrix
from teneral.runtime.weights import StreamedWeights

KINDS = [QuantizeOptions(8), QuantizeOptions(4), QuantizeOptions(4, 32, asymmetric=True)]
TABLE = "model.embed_tokens.weight"


@pytest.fixture(params=KINDS, ids=["int8", "int4", "int4 asymmetric"])
def artifact(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with tied embeddings in many parts."""
    monkeypatch.setattr(layout, "FINE_PART_ELEMENTS", FRAME_ELEMENTS)
    shape = {"vocab_size": 8 * 1024, "intermediate_size": 128, "tie_word_embeddings": True}
    folder = save_tiny("qwen2", tmp_path / "plain", dtype=torch.bfloat16, **shape)
    pack(open_source(str(folder)), open_store(str(tmp_path / "packed")), quantize=request.param)
    return tmp_path / "packed"


def poison(load: WeightLoad) -> None:
    """Scales are NaN so, and integers not 0."""
    for group in load.manifest.groups:
        load.slab(group.index)[:] = 0xFF


def decoder_over(load: WeightLoad, source: PacedSource) -> Decoder:
    decoder = build_model(
        json.loads(read_file(source, load.manifest, "config.json")),
        StreamedWeights(load),
        backends=[NativeBackend()],
    )
    assert isinstance(decoder, Decoder)
    return decoder


def embedded(decoder: Decoder, rows: np.ndarray) -> np.ndarray:
    return widened(decoder.executor.embed(Stepper(decoder).batch({"a": rows.tolist()})))


def finished_logits(artifact: Path, steps: list[list[int]]) -> list[torch.Tensor]:
    source = PacedSource(open_source(str(artifact)))
    with closing(source), WeightLoad(source, open_artifact(source)) as load:
        load.start()
        load.join()
        stepper = Stepper(decoder_over(load, source))
        return [stepper.step({"a": tokens})["a"] for tokens in steps]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_decoder_built_before_its_load_starts_computes_what_a_finished_one_does(artifact, seed):
    steps = [prompt_of(30), [8 * 1024 - 1]]
    source = PacedSource(open_source(str(artifact)))
    source.delay(seed=seed, max_s=0.005)

    with closing(source), WeightLoad(source, open_artifact(source)) as load:
        poison(load)
        decoder = decoder_over(load, source)
        load.start()
        stepper = Stepper(decoder)
        ours = [stepper.step({"a": tokens})["a"] for tokens in steps]

    for logits, expected in zip(ours, finished_logits(artifact, steps), strict=True):
        assert torch.equal(logits, expected)


def test_a_step_begins_with_the_scales_and_the_rows_of_its_tokens(artifact):
    source = PacedSource(open_source(str(artifact)))
    manifest = open_artifact(source)
    table = RowParts(manifest, TABLE)
    rows, far = np.array([0, 1, 1030]), 8 * 1024 - 1
    asked = table.holding(rows.tolist())
    assert len(asked) < len(table.all)
    rest = source.hold(reads_of(manifest, *(manifest.parts[number] for number in table.all - asked)))

    options = LoadOptions(on_demand=True, range_bytes=4096)
    with closing(source), WeightLoad(source, manifest, options=options) as load:
        poison(load)
        decoder = decoder_over(load, source)
        load.want_parts(asked)
        load.start()
        gate = decoder.weights.entry_gate
        gate(rows)
        begun = embedded(decoder, rows)
        assert not gate.opens(np.array([far]), 0.0)
        rest.release()
        gate(np.array([far]))
        load.join()
        np.testing.assert_array_equal(begun, embedded(decoder, rows))
        assert np.isfinite(embedded(decoder, np.array([far]))).all()


def test_there_is_no_draft_so_a_pass_over_one_is_exact(artifact):
    steps = [prompt_of(12)]
    source = PacedSource(open_source(str(artifact)))

    with closing(source), WeightLoad(source, open_artifact(source)) as load:
        poison(load)
        decoder = decoder_over(load, source)
        load.start()
        stepper = Stepper(decoder)
        logits = forward(decoder, stepper.batch({"a": steps[0]}), stepper.kv, tier=Tier.DRAFT)

    assert torch.equal(logits, finished_logits(artifact, steps)[0])


def test_what_the_loader_puts_side_by_side_is_used_as_one_matrix(artifact):
    source = PacedSource(open_source(str(artifact)))

    with closing(source), WeightLoad(source, open_artifact(source)) as load:
        decoder = decoder_over(load, source)

    assert isinstance(decoder.weights.head.matrices()[0], IntegerMatrix)
    for layer in decoder.weights.layers:
        (qkv, *values), (gate_up,) = layer.qkv.matrices(), layer.gate_up.matrices()
        assert isinstance(qkv, IntegerMatrix)
        assert [value.bits for value in values] == ([8] if qkv.bits == 4 else [])
        assert isinstance(gate_up, IntegerMatrix)
