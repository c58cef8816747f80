"""From a store through a load onto a device to tokens, with the weights where the load placed them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.direct_engine import OrderedDevice
from tests.support.direct_kernels import needs_double, open_device
from tests.support.early_rig import packed_tiny
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_models import tiny_model

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.format.manifest import Tier
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.sources.open import open_source
from teneral.runtime.backends.cuda.direct.executor import DirectExecutor, DirectModelBackend
from teneral.runtime.backends.cuda.direct.weights import DirectWeights, tensor_at
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.batch import SequenceSpan, StepBatch
from teneral.runtime.tensors import DType

pytestmark = needs_double

TEXT = np.arange(7, 40, 2)


class Loading:
    """A model over a load onto the device, whose refine tier is held back."""

    def __init__(self, artifact: Path) -> None:
        self.device = open_device()
        self.placing = OrderedDevice(self.device)
        source = PacedSource(open_source(str(artifact)))
        manifest = open_artifact(source)
        refining = [part for part in manifest.parts if part.tier is Tier.REFINE]
        self.hold = source.hold(reads_of(manifest, *refining))
        self.load = DeviceLoad.in_threads(
            source, manifest, lambda: self.placing, options=LoadOptions(order=Order.DRAFT_FIRST)
        )
        config = json.loads(read_file(source, manifest, "config.json"))
        weights = DirectWeights(self.load, self.device)
        model = build_model(config, weights, [DirectModelBackend(self.device)])
        assert isinstance(model, Decoder)
        self.model = model
        self.kv: Any = model.new_kv(20, 4, kind=KVKind.MODEL)

    def logits(self, tier: Tier) -> np.ndarray:
        """Of the whole text, (T, vocab)."""
        rows = np.arange(len(TEXT))
        span = SequenceSpan(0, len(TEXT), len(TEXT), tuple(range(5)))
        batch = StepBatch(TEXT, rows, rows, (span,), rows)
        found: np.ndarray = self.model.forward(batch, self.kv, tier=tier).numpy()
        return found

    def close(self) -> None:
        self.hold.release()
        self.load.close()
        executor = self.model.executor
        assert isinstance(executor, DirectExecutor)
        executor.close()
        self.kv.close()


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Loading]:
    made = Loading(packed_tiny(tmp_path, dtype=torch.bfloat16))
    yield made
    made.close()


def test_drafts_and_exact_weights_are_read_where_they_were_placed(loading: Loading) -> None:
    draft = loading.logits(Tier.DRAFT)
    assert loading.placing.num_recorded > 0  # what refines waits for what read
    assert not loading.model.is_exact
    loading.hold.release()
    exact = loading.logits(Tier.REFINE)
    assert loading.placing.num_ordered > 0
    with torch.no_grad():
        expected = tiny_model("llama", dtype=torch.bfloat16, hidden_size=64, num_hidden_layers=3).float()(
            torch.from_numpy(TEXT)[None]
        ).logits[0].numpy()  # fmt: skip
    assert np.linalg.norm(exact - expected) < 0.03 * np.linalg.norm(expected)
    assert np.linalg.norm(draft - expected) > np.linalg.norm(exact - expected)
    assert loading.model.is_exact


def test_matrices_that_lie_together_are_one(loading: Loading) -> None:
    """Queries, keys and values: three names in the store, one product."""
    layer = loading.model.weights.layers[0]
    assert len(layer.qkv.matrices()) == 1
    weight = layer.qkv.matrices()[0].weight
    assert weight.shape == (128, 64)
    loading.hold.release()
    loading.logits(Tier.REFINE)
    stored = tiny_model("llama", dtype=torch.bfloat16, hidden_size=64, num_hidden_layers=3)
    attention = stored.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    expected = torch.cat(parts).detach().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(weight.on_host(), expected)


def test_tensors_apart_are_not_stacked() -> None:
    device = open_device()
    first, behind, apart = (tensor_at(device, address, (2, 8), DType.BF16) for address in (0, 32, 96))
    stacked = first.stacked_with([behind])
    assert stacked is not None
    assert (stacked.shape, stacked.array.address) == ((4, 8), 0)
    assert first.stacked_with([apart]) is None
    assert first.stacked_with([tensor_at(device, 32, (2, 8), DType.F16)]) is None
    assert first.is_at(tensor_at(device, 0, (1,), DType.U8))
    assert not first.is_at(behind)
