"""A model over weights that a load still brings: built before the first byte, equal to the finished one."""

from __future__ import annotations

import json
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import DictWeights, build_model, embed
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.format import layout
from teneral.loader.format.manifest import FRAME_ELEMENTS, Tier
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import RowParts
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.backends.torch.tensors import to_torch
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.weights import StreamedWeights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_built_before_its_load_starts_computes_what_a_finished_one_does(tmp_path, dtype, packed):
    folder = save_tiny("qwen2", tmp_path / "plain", dtype=dtype)
    if packed:
        pack(open_source(str(folder)), open_store(str(tmp_path / "packed")))
        folder = tmp_path / "packed"
    source = open_source(str(folder))
    manifest = open_artifact(source)
    config = json.loads(read_file(source, manifest, "config.json"))

    with closing(source), WeightLoad(source, manifest) as load:
        decoder = build_model(config, StreamedWeights(load))
        assert isinstance(decoder, Decoder)
        load.start()
        ours = Stepper(decoder).step({"a": prompt_of(40)})["a"]

    finished = tiny_model("qwen2", dtype=dtype)
    expected = Stepper(build_model(config_json(finished), DictWeights(tensors_of(finished)))).step(
        {"a": prompt_of(40)}
    )["a"]
    # The load's adjacent matrices are multiplied as one, the others one by one, which rounds differently.
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def poison(load: WeightLoad) -> None:
    """Bit patterns that are NaN in every float dtype, and a token or a position nowhere."""
    for group in load.manifest.groups:
        load.slab(group.index)[:] = 0xFF


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_each_step_waits_for_the_rows_of_its_tokens_until_the_matrix_is_whole(
    tmp_path, monkeypatch, packed, seed, tied
):
    monkeypatch.setattr(layout, "FINE_PART_ELEMENTS", FRAME_ELEMENTS)
    shape = {"vocab_size": 8 * 1024, "tie_word_embeddings": tied}
    folder = save_tiny("qwen2", tmp_path / "plain", dtype=torch.bfloat16, **shape)
    if packed:
        pack(open_source(str(folder)), open_store(str(tmp_path / "packed")))
        folder = tmp_path / "packed"
    source = PacedSource(open_source(str(folder)))
    manifest = open_artifact(source)
    config = json.loads(read_file(source, manifest, "config.json"))
    table = RowParts(manifest, "model.embed_tokens.weight")
    prompt, later = [0, 1, 2, 1030, 1031], 8 * 1024 - 1
    asked = table.holding([*prompt, later])
    assert len(asked) < len(table.all)
    rest = source.hold(reads_of(manifest, *(manifest.parts[number] for number in table.all - asked)))
    source.delay(seed=seed, max_s=0.003)

    # Ranges that end with a part: what lies behind the rows that are asked for is held back.
    options = LoadOptions(on_demand=True, range_bytes=4096)
    with closing(source), WeightLoad(source, manifest, options=options) as load:
        poison(load)
        decoder = build_model(config, StreamedWeights(load))
        load.want_parts(asked)  # or all connections would wait for what is held back
        load.start()
        embeddings = to_torch(decoder.weights.embeddings.weight)
        decoder.weights.entry_gate(np.array(prompt))
        assert embeddings[prompt].isfinite().all()
        decoder.weights.entry_gate(np.array([later]))
        assert embeddings[later].isfinite().all()
        assert not embeddings.isfinite().all()
        rest.release()
        stepper = Stepper(decoder)
        ours = [stepper.step({"a": tokens})["a"] for tokens in (prompt, [later], [4000])]

    finished = tiny_model("qwen2", dtype=torch.bfloat16, **shape)
    stepper = Stepper(build_model(config_json(finished), DictWeights(tensors_of(finished))))
    for step, tokens in zip(ours, (prompt, [later], [4000]), strict=True):
        torch.testing.assert_close(step, stepper.step({"a": tokens})["a"], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("tier", [Tier.SKETCH, Tier.DRAFT])
def test_a_pass_over_the_draft_waits_for_its_rows_whatever_tiers_there_are(tmp_path, monkeypatch, tier):
    monkeypatch.setattr(layout, "FINE_PART_ELEMENTS", FRAME_ELEMENTS)
    folder = save_tiny("qwen2", tmp_path / "plain", dtype=torch.bfloat16, vocab_size=8 * 1024)
    pack(open_source(str(folder)), open_store(str(tmp_path / "packed")))
    source = PacedSource(open_source(str(tmp_path / "packed")))
    manifest = open_artifact(source)
    config = json.loads(read_file(source, manifest, "config.json"))
    rows = np.array([1, 8 * 1024 - 1])
    asked = RowParts(manifest, "model.embed_tokens.weight").holding(rows.tolist())
    held = source.hold(
        reads_of(
            manifest, *(part for part in manifest.parts if part.index in asked or part.tier is Tier.REFINE)
        )
    )
    options = LoadOptions(on_demand=True, connections=64, order=Order.DRAFT_FIRST)
    with closing(source), WeightLoad(source, manifest, options=options) as load:
        poison(load)
        decoder = build_model(config, StreamedWeights(load))
        load.start()
        timer = threading.Timer(0.1, held.release)
        timer.start()
        with decoder.weights.entry_gate.reading(rows, tier):
            assert held.released
            assert to_torch(decoder.weights.embeddings.weight)[rows].isfinite().all()
        timer.join()


def test_an_encoder_begins_with_the_words_of_its_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "FINE_PART_ELEMENTS", FRAME_ELEMENTS)
    shape = {"vocab_size": 8 * 1024}
    folder = save_tiny("bert", tmp_path / "plain", dtype=torch.float32, **shape)
    pack(open_source(str(folder)), open_store(str(tmp_path / "packed")))
    source = PacedSource(open_source(str(tmp_path / "packed")))
    manifest = open_artifact(source)
    config = json.loads(read_file(source, manifest, "config.json"))
    table = RowParts(manifest, "embeddings.word_embeddings.weight")
    tokens = [5, 6, 7, 8]
    needed = set(tokens)
    source.delay(seed=3, max_s=0.003)
    far = table.holding([5000]) - table.holding(needed)
    held = source.hold(reads_of(manifest, *(manifest.parts[number] for number in far)))

    options = LoadOptions(on_demand=True, range_bytes=4096)
    with closing(source), WeightLoad(source, manifest, options=options) as load:
        poison(load)
        encoder = build_model(config, StreamedWeights(load))
        load.want_parts({part.index for part in manifest.parts} - far)
        load.start()
        ours = embed(encoder, [tokens, tokens[:2]])
        assert not to_torch(encoder.weights.words)[5000].isfinite().all()
        held.release()

    finished = tiny_model("bert", dtype=torch.float32, **shape)
    whole = build_model(config_json(finished), DictWeights(tensors_of(finished)))
    expected = embed(whole, [tokens, tokens[:2]])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_what_the_loader_puts_side_by_side_is_used_as_one_matrix(tmp_path):
    folder = save_tiny("qwen2", tmp_path, dtype=torch.bfloat16)
    source = open_source(str(folder))
    manifest = open_artifact(source)
    config = json.loads(read_file(source, manifest, "config.json"))

    with closing(source), WeightLoad(source, manifest) as load:
        decoder = build_model(config, StreamedWeights(load))

    assert len(decoder.weights.layers) == 3
    for layer in decoder.weights.layers:
        assert len(layer.qkv.matrices()) == len(layer.gate_up.matrices()) == 1
