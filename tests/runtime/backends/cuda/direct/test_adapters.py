"""Adapters on the direct path: merged models' logits, the same bits in any company, and copies that come and go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.adapters import SETS, load_adapter, merged, save_adapter
from tests.support.direct_engine import MIXTURES, TEXT, DirectModel, Stepper
from tests.support.direct_kernels import cuda, needs_double, needs_kernels
from tests.support.native_decoder import with_parameters_in
from tests.support.tiny_models import config_json, tiny_model

from teneral.runtime.adapters.loaded import LoadedAdapter
from teneral.runtime.backends.cuda.direct.adapters import DeviceAdapters
from teneral.runtime.models.decoder_config import DecoderConfig

pytestmark = needs_kernels

PROMPT = TEXT[:23]
# What adapters meet: norms behind projections, layers side by side, scaled sums, a shared expert, latents.
FAMILIES = ("llama", "qwen3", "gemma2", "cohere2", "granite", "qwen2_moe")
LATENTS = {"latents": {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"]}}


def load(folder: Path, oracle: Any, *, seed: int = 0, **options: Any) -> LoadedAdapter:
    base = DecoderConfig.from_json(config_json(oracle))
    return load_adapter(save_adapter(folder, oracle, seed=seed, **options), base)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return tiny_model("llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def model(oracle: Any) -> Iterator[DirectModel]:
    made = DirectModel.of(oracle)
    yield made
    made.close()


def run(model: DirectModel, name: str, adapter: Any, tokens: list[int]) -> np.ndarray:
    """The logits of a sequence by itself."""
    stepper = Stepper(model, adapters={name: adapter})
    logits = stepper.run({name: tokens})[name].copy()
    stepper.close()
    return logits


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        *(("llama", name) for name in SETS),
        *((family, "patterns") for family in FAMILIES[1:]),
        ("deepseek_v3", "latents"),
    ],
)
def test_logits_are_those_of_the_merged_model(family: str, modules: str, tmp_path: Path) -> None:
    """In fp16, as near to those in fp32 as the model's own without the adapter."""
    base = with_parameters_in(torch.float16, tiny_model(family, **MIXTURES.get(family, {})))
    adapter = load(tmp_path / "a", base, size=0.15, **(SETS | LATENTS)[modules])
    model = DirectModel.of(base)
    found, plain = run(model, "a", adapter, PROMPT), run(model, "a", None, PROMPT)
    model.close()
    with torch.no_grad():
        expected = merged(base, tmp_path / "a")(torch.tensor([PROMPT])).logits[0].numpy()
        without = base.float()(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(plain - expected).max() > 0.05  # the adapter matters
    size = np.linalg.norm(expected, axis=1)
    errors, known = (np.linalg.norm(a - b, axis=1) for a, b in ((found, expected), (plain, without)))
    assert np.median(errors / size) < 2 * np.median(known / size) + 1e-4


def test_rows_of_several_adapters_have_the_bits_that_they_have_alone(
    model: DirectModel, oracle: Any, tmp_path: Path
) -> None:
    """And those without one the bits of a model without adapters: in one step, in chunks, and as a graph."""
    names = ["queries and values", "mlp", "all linear", "one layer"]
    types = [torch.float32, torch.bfloat16]
    adapters = {
        name: load(tmp_path / str(seed), oracle, seed=seed, dtype=types[seed % 2], **SETS[name])
        for seed, name in enumerate(names)
    }
    texts = {name: TEXT[at : at + 40 + at] for at, name in enumerate((*names, "none"))}
    whole = {name: run(model, name, adapters.get(name), text) for name, text in texts.items()}
    assert np.abs(whole["mlp"][:30] - run(model, "none", None, texts["mlp"])[:30]).max() > 0.05
    stepper = Stepper(model, adapters=adapters)
    for first, end in pairwise((0, 7, 8, 29)):
        found = stepper.run({name: text[first:end] for name, text in texts.items()})
        for name, logits in found.items():
            np.testing.assert_array_equal(logits, whole[name][first:end], err_msg=name)
    for at in range(29, 40):
        found = stepper.run({name: [text[at]] for name, text in texts.items()})
        for name, logits in found.items():
            np.testing.assert_array_equal(logits[0], whole[name][at], err_msg=name)
    assert stepper.executor.num_graph_steps > 0
    stepper.close()


def test_stages_give_the_bits_of_a_whole_step(model: DirectModel, oracle: Any, tmp_path: Path) -> None:
    """Layer by layer, as adapters arrive, while other steps take the workspace and the slots."""
    one, two = (load(tmp_path / str(seed), oracle, seed=seed, **SETS["patterns"]) for seed in range(2))
    expected = run(model, "one", one, PROMPT)
    stepper = Stepper(model, adapters={"one": one, "two": two}, max_spans=1)
    executor, batch = stepper.executor, stepper.batch({"one": PROMPT})
    x = executor.embed(batch)
    for layer in range(3):
        x = executor.layers(executor.begin(batch, stepper.kv), layer, layer + 1, x)
        stepper.run({"two": [1, 2, 3]})
    np.testing.assert_array_equal(executor.logits(x, batch.logit_rows).numpy(), expected)
    stepper.close()


@needs_double
def test_copies_leave_for_others_and_with_their_adapters(
    model: DirectModel, oracle: Any, tmp_path: Path
) -> None:
    """With room for two at a time; what is used again is copied again."""
    loaded = [load(tmp_path / str(seed), oracle, seed=seed, **SETS["mlp"]) for seed in range(4)]
    expected = [run(model, "text", adapter, PROMPT) for adapter in loaded]
    stepper = Stepper(model, max_spans=2)
    memory, used = cuda().library.memory_in_use, set[int]()
    for turn, number in enumerate((0, 1, 2, 3, 2, 1, 0)):
        stepper.adapters[str(turn)] = loaded[number]
        np.testing.assert_array_equal(stepper.run({str(turn): PROMPT})[str(turn)], expected[number])
        used.add(memory())
    assert len(used) == 2  # with one of them, and from then on with two
    executor, on_host = stepper.executor, 2 * max(adapter.weights.size_bytes for adapter in loaded)
    copies = executor.adapter_bytes - sum(DeviceAdapters.table_bytes(3, num_slots=2, num_rows=512))
    assert on_host <= copies < 1.1 * on_host  # but for padding
    assert executor.adapter_bytes <= executor.step_bytes(2, copies) - executor.step_bytes(2)
    stepper.executor.drop_adapters()
    assert memory() < min(used)
    stepper.adapters["again"] = loaded[0]
    np.testing.assert_array_equal(stepper.run({"again": PROMPT})["again"], expected[0])
    assert memory() == min(used)
    stepper.adapters.clear()
    loaded.clear()
    stepper.run({"plain": PROMPT})  # after which the tables are those of no adapter
    gc.collect()
    stepper.adapters["small"] = load(tmp_path / "small", oracle, r=1, target_modules=["q_proj"])
    stepper.run({"small": PROMPT})
    assert memory() < min(used)
    stepper.close()
