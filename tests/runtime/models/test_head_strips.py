"""The head in strips: logits of the rows that have arrived, while the others come, equal to the bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.load import patience_s
from tests.support.models import build_model
from tests.support.native import each_isa, loaded, threads
from tests.support.native_decoder import spec_of, weights_of, with_parameters_in
from tests.support.paced import Hold, PacedSource, reads_of
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.format import layout
from teneral.loader.format.manifest import FRAME_ELEMENTS, Manifest, Tier
from teneral.loader.load import link
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import RowParts
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.native.decoder import NativeDecoder
from teneral.runtime.models.decoder import Decoder, ForwardPass, Work
from teneral.runtime.tensors import DType
from teneral.runtime.weights import MAX_STRIPS, StreamedWeights

VOCAB_SIZE = 16 * 1024
PROMPT = prompt_of(9)
CONNECTIONS = 64  # more than the held reads take

each_head = pytest.mark.parametrize("tied", [True, False], ids=["tied", "head of its own"])


def same_bits(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


@each_isa
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])  # the latter's logits have a cap
@pytest.mark.parametrize("num_rows", [1, 3])
def test_strips_are_the_columns_of_the_logits(isa: str, dtype: DType, family: str, num_rows: int) -> None:
    kind = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}[dtype]
    of = with_parameters_in(kind, tiny_model(family, vocab_size=4099))
    spec = spec_of(of, dtype)
    executor = NativeDecoder(spec, weights_of(of), loaded(isa))
    assert executor.scores_in_strips
    x = np.random.default_rng(0).standard_normal((5, spec.hidden_size)).astype(np.float32)
    if dtype is DType.BF16:
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    rows = np.arange(num_rows)
    expected = executor.logits(x, rows)
    for num_threads in (1, 2):
        with threads(isa, num_threads):
            for bounds in ([0, 4099], [0, 1, 2, 7, 1000, 1001, 4099], [*list(range(0, 4099, 512)), 4099]):
                strips = [executor.strip(x, rows, first, end) for first, end in itertools.pairwise(bounds)]
                assert same_bits(np.concatenate(strips, axis=1), expected)


class Streamed:
    """A packed model under way, whose table's last parts are held back."""

    def __init__(
        self, decoder: Decoder, load: WeightLoad, manifest: Manifest, held: Hold, source: PacedSource
    ) -> None:
        self.decoder = decoder
        self.load = load
        self.manifest = manifest
        self.held = held
        self.source = source

    def begin(self, stepper: Stepper, work: dict[str, list[int]], tier: Tier = Tier.REFINE) -> ForwardPass:
        return self.decoder.begin(stepper.batch(work), stepper.kv, tier=tier)

    def to_the_held_strip(self, under_way: ForwardPass) -> int:
        """Advances as far as it can without what is held. Returns the number of strips that it has passed."""
        last = len(self.decoder.weights.head_strips) - 1
        while (stage := self.decoder.stages[under_way.stage]).work is not Work.STRIP or stage.strip < last:
            assert under_way.can_advance(patience_s(30))
            under_way.advance()
        assert not under_way.can_advance(0.5)
        return stage.strip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    return packed(tmp_path, monkeypatch, tied=getattr(request, "param", True))


def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tied: bool) -> Path:
    monkeypatch.setattr(layout, "FINE_PART_ELEMENTS", FRAME_ELEMENTS)
    # A load on a busy machine may not try more than it begins with.
    monkeypatch.setattr(link, "FIRST_CONNECTIONS", CONNECTIONS)
    shape = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": tied}
    plain = save_tiny("qwen2", tmp_path / "plain", dtype=torch.bfloat16, **shape)
    pack(open_source(str(plain)), open_store(str(tmp_path / "packed")))
    return tmp_path / "packed"


@contextmanager
def streamed(folder: Path, *, tied: bool, tier: Tier = Tier.REFINE) -> Iterator[Streamed]:
    """Of the head, the last row's parts of this tier are held back."""
    source = PacedSource(open_source(str(folder)))
    manifest = open_artifact(source)
    table = RowParts(manifest, "model.embed_tokens.weight" if tied else "lm_head.weight")
    last = [
        manifest.parts[number]
        for number in table.holding([VOCAB_SIZE - 1])
        if manifest.parts[number].tier is tier
    ]
    assert last
    held = source.hold(reads_of(manifest, *last))
    # Ranges of one part at most, and enough connections for what is not held.
    options = LoadOptions(on_demand=True, range_bytes=4096, connections=CONNECTIONS, order=Order.DRAFT_FIRST)
    config = json.loads(read_file(source, manifest, "config.json"))
    with closing(source), WeightLoad(source, manifest, options=options) as load:
        for group in manifest.groups:
            load.slab(group.index)[:] = 0xFF  # NaN
        decoder = build_model(config, StreamedWeights(load), backends=[NativeBackend()])
        load.start()
        yield Streamed(decoder, load, manifest, held, source)


def finish(under_way: ForwardPass) -> Any:
    while not under_way.is_done:
        under_way.advance()
    return under_way.logits


def exact(model: Streamed, *works: dict[str, list[int]]) -> Any:
    """The logits of these steps once all weights are exact: whole products."""
    for group in model.manifest.groups:
        model.load.wait(group.index, timeout_s=30)
    assert model.decoder.is_exact
    stepper = Stepper(model.decoder)
    return np.concatenate([finish(model.begin(stepper, work)) for work in works])


@each_head
def test_only_the_strip_that_lacks_a_part_is_left_when_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    with streamed(packed(tmp_path, monkeypatch, tied=tied), tied=tied) as model:
        num_strips = len(model.decoder.weights.head_strips)
        assert 4 <= num_strips <= MAX_STRIPS
        under_way = model.begin(Stepper(model.decoder), {"a": PROMPT})
        assert model.to_the_held_strip(under_way) == num_strips - 1
        assert not model.decoder.is_exact
        model.held.release()
        assert same_bits(finish(under_way), exact(model, {"a": PROMPT}))


@each_head
def test_a_pass_over_the_draft_takes_strips_as_its_tier_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    with streamed(packed(tmp_path, monkeypatch, tied=tied), tied=tied, tier=Tier.DRAFT) as model:
        num_strips = len(model.decoder.weights.head_strips)
        under_way = model.begin(Stepper(model.decoder), {"a": PROMPT}, Tier.DRAFT)
        assert model.to_the_held_strip(under_way) == num_strips - 1
        model.held.release()
        logits = finish(under_way)
        assert logits.shape == (len(PROMPT), VOCAB_SIZE)
        assert np.isfinite(logits).all()


def test_a_pass_that_finds_all_weights_there_computes_the_head_at_once(folder: Path) -> None:
    with streamed(folder, tied=True) as model:
        model.held.release()
        exact(model, {"a": PROMPT})
        names: list[str] = []
        stepper = Stepper(model.decoder)
        stepper.step({"a": PROMPT}, on_layer=lambda index, name, start_s, end_s: names.append(name))
        assert names == ["embed", "layers", "head"]


def test_a_pass_that_is_joined_at_a_strip_or_loses_a_sequence_there_gives_the_same_bits(folder: Path) -> None:
    one, two, three = {"one": PROMPT}, {"two": prompt_of(4, seed=1)}, {"three": prompt_of(6, seed=2)}
    with streamed(folder, tied=True) as model:
        stepper = Stepper(model.decoder)
        ahead, behind = model.begin(stepper, one | three), model.begin(stepper, two)
        assert model.to_the_held_strip(ahead) == model.to_the_held_strip(behind)
        both = ahead.joined(behind).without([1])  # without three
        model.held.release()
        assert same_bits(finish(both), exact(model, one, two))


def test_at_the_head_a_pass_with_strips_is_joined_with_one_without(folder: Path) -> None:
    one, two = {"one": PROMPT}, {"two": prompt_of(4, seed=1)}
    with streamed(folder, tied=True) as model:
        stepper = Stepper(model.decoder)
        ahead, behind = model.begin(stepper, one), model.begin(stepper, two)
        model.to_the_held_strip(ahead)
        model.held.release()
        expected = exact(model, one, two)
        for under_way in (ahead, behind):  # the second one finds all weights there
            while model.decoder.stages[under_way.stage].work is not Work.HEAD:
                under_way.advance()
        assert same_bits(finish(ahead.joined(behind)), expected)


def test_complete_weights_have_no_strips() -> None:
    of = tiny_model("qwen2", vocab_size=VOCAB_SIZE)
    assert weights_of(of).head_strips == ()
