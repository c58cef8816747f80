"""Steps of the direct path, bit by bit: in any company, chunks and stages; and models that it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.direct_engine import BLOCK_SIZE, NUM_BLOCKS, TEXT, DirectModel, Stepper
from tests.support.direct_kernels import needs_kernels
from tests.support.native_decoder import quantized, weights_of, with_parameters_in
from tests.support.quantized import slow_dequantize
from tests.support.tiny_models import tiny_model

from teneral.runtime.backends.cuda.direct.device import OutOfMemoryError
from teneral.runtime.backends.cuda.direct.executor import DirectExecutor
from teneral.runtime.backends.cuda.direct.refusals import refusal
from teneral.runtime.errors import ModelError
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.matrices import DecoderWeights, IntegerMatrix, Projection, StoredProjection
from teneral.runtime.step.batch import StepBatch
from teneral.runtime.tensors import DType, Tensor, to_float32

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def model() -> Iterator[DirectModel]:
    made = DirectModel.of(tiny_model("llama", dtype=torch.bfloat16))
    yield made
    made.close()


@pytest.fixture
def stepper(model: DirectModel) -> Iterator[Stepper]:
    made = Stepper(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(model: DirectModel) -> np.ndarray:
    """The logits of each place of the text, read in one step."""
    made = Stepper(model)
    logits = made.run({"text": TEXT[:450]})["text"].copy()
    made.close()
    return logits


def test_logits_are_as_near_to_fp32_as_those_of_transformers(whole: np.ndarray) -> None:
    oracle = with_parameters_in(torch.bfloat16, tiny_model("llama"))
    text = torch.tensor([TEXT[:450]])
    with torch.no_grad():
        in_bf16 = oracle(text).logits[0].float().numpy()
        exact = oracle.float()(text).logits[0].numpy()
    assert np.linalg.norm(whole - exact) < 1.2 * np.linalg.norm(in_bf16 - exact)


def test_a_text_has_the_same_bits_in_chunks_of_any_size(stepper: Stepper, whole: np.ndarray) -> None:
    """Up to single tokens behind contexts of two splits."""
    for name, cuts in {"a": (0, 300, 450), "b": (0, 1, 17, 64, 255, 258, 449, 450)}.items():
        found = [stepper.run({name: TEXT[first:end]})[name] for first, end in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(found), whole)


def test_a_text_has_the_same_bits_in_company_and_as_a_graph(stepper: Stepper, whole: np.ndarray) -> None:
    stepper.run({"long": TEXT[:440], "short": TEXT[:30]})
    executor = stepper.executor
    for at in range(10):
        work = {
            "other": TEXT[50 + at : 51 + at],
            "long": TEXT[440 + at : 441 + at],
            "short": TEXT[30 + at : 31 + at],
        }
        found = stepper.run(work)
        np.testing.assert_array_equal(found["long"][0], whole[440 + at])
        np.testing.assert_array_equal(found["short"][0], whole[30 + at])
    assert executor.num_graphs == 1
    assert executor.num_graph_steps == 3


def test_states_are_the_inputs_of_the_head(model: DirectModel, stepper: Stepper, whole: np.ndarray) -> None:
    """Of more rows than there is room for logits, too."""
    executor, batch = stepper.executor, stepper.batch({"text": TEXT[:60]})
    x = executor.layers(executor.begin(batch, stepper.kv), 0, 3, executor.embed(batch))
    rows = np.array([59, *range(50), 3])
    states = executor.states(x, rows)
    assert (states.shape, states.dtype) == ((len(rows), 64), np.float32)
    head = model.decoder.weights.head.matrices()[0].weight.on_host()
    logits = states.astype(np.float64) @ to_float32(head, DType.BF16).astype(np.float64).T
    np.testing.assert_allclose(logits, whole[rows], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(executor.logits(x, rows[:3]).numpy(), whole[rows[:3]])


_mixtures = itertools.count()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mixture_of_steps_gives_the_same_bits(
    stepper: Stepper, whole: np.ndarray, data: st.DataObject
) -> None:
    # Not drawn: the stepper goes on with a text of the same name, also one of an example before.
    names = [f"mixture-{next(_mixtures)}" for _ in range(3)]
    done = dict.fromkeys(names, 0)
    for _ in range(4):
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        work = {name: TEXT[done[name] : done[name] + data.draw(st.integers(1, 20))] for name in chosen}
        found = stepper.run(work)
        for name in chosen:
            end = done[name] + len(work[name])
            np.testing.assert_array_equal(found[name], whole[done[name] : end])
            done[name] = end


def test_stages_give_the_bits_of_a_whole_step(stepper: Stepper, whole: np.ndarray) -> None:
    """Layer by layer, with rows selected and joined between them, and other passes in between."""
    executor, text = stepper.executor, TEXT[:40]
    work = {"one": text[:20], "two": text[:10], "three": text[:15]}
    batch = stepper.batch(work)
    x = executor.embed(batch)
    x = executor.layers(executor.begin(batch, stepper.kv), 0, 1, x)
    between = stepper.run({"between": text})["between"]  # takes the workspace
    np.testing.assert_array_equal(between, whole[:40])
    x = executor.layers(executor.begin(batch, stepper.kv), 1, 2, x)
    kept = executor.select(x, np.r_[0:20, 30:45])
    less = StepBatch(
        *(each[np.r_[0:20, 30:45]] for each in (batch.tokens, batch.positions, batch.slots)),
        (batch.spans[0], replace(batch.spans[2], start=20)),
        np.arange(35),
    )
    late = stepper.batch({"late": text[:5]})
    y = executor.layers(executor.begin(late, stepper.kv), 0, 2, executor.embed(late))
    both = StepBatch(
        np.concatenate([less.tokens, late.tokens]),
        np.concatenate([less.positions, late.positions]),
        np.concatenate([less.slots, late.slots]),
        (*less.spans, replace(late.spans[0], start=35)),
        np.array([19, 34, 39]),
    )  # fmt: skip
    joined = executor.join([kept, y])
    joined = executor.layers(executor.begin(both, stepper.kv), 2, 3, joined)
    logits = executor.logits(joined, both.logit_rows).numpy()
    np.testing.assert_array_equal(logits, whole[[19, 14, 4]])
    some = executor.logits(joined, np.array([38, 0])).numpy()  # rows that the batch does not name
    np.testing.assert_array_equal(some, whole[[3, 0]])
    assert len(executor.logits(joined, np.array([], np.int64))) == 0


def test_keys_and_values_of_int8(model: DirectModel, whole: np.ndarray) -> None:
    """Near to the logits over floats; the same bits in chunks, and in company."""
    made = Stepper(model, kind=KVKind.INT8)
    logits = made.run({"text": TEXT[:300]})["text"].copy()
    made.close()
    differs = np.linalg.norm(logits - whole[:300]) / np.linalg.norm(whole[:300])
    assert 0 < differs < 0.05
    stepper = Stepper(model, kind=KVKind.INT8)
    for first, end in itertools.pairwise((0, 1, 17, 256, 299, 300)):
        found = stepper.run({"text": TEXT[first:end], "other": TEXT[2 * first : 2 * first + 9]})["text"]
        np.testing.assert_array_equal(found, logits[first:end])
    stepper.close()


@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (4, 32)])
def test_models_of_integers(model: DirectModel, bits: int, group_size: int) -> None:
    """The same bits in any chunks, and the logits of the numbers that the integers stand for."""
    oracle = tiny_model("llama", dtype=torch.bfloat16, intermediate_size=128)
    on_host = quantized(weights_of(oracle), bits=bits, group_size=group_size)
    own = DirectModel.of(oracle)
    stored = _on_device(own, on_host)
    assert refusal(own.decoder.spec, stored) is None
    stepper = Stepper(own, DirectExecutor(own.decoder.spec, stored, own.device))
    one = stepper.run({"one": TEXT[:40]})["one"]
    parts = [stepper.run({"two": TEXT[first:end]})["two"] for first, end in ((0, 7), (7, 8), (8, 40))]
    np.testing.assert_array_equal(np.concatenate(parts), one)
    expected = _reference(oracle, on_host)
    assert np.linalg.norm(one - expected) < 0.03 * np.linalg.norm(expected)
    stepper.close()
    own.close()


def _on_device(model: DirectModel, weights: DecoderWeights) -> DecoderWeights:
    """The model's own weights, with these integers in its layers."""

    def put(projection: Projection | None) -> StoredProjection:
        assert projection is not None
        return StoredProjection(tuple(_matrix_on_device(model, part) for part in projection.matrices()))

    own = model.decoder.weights
    layers = tuple(
        replace(
            layer,
            qkv=put(other.qkv),
            output=put(other.output),
            gate_up=put(other.gate_up),
            down=put(other.down),
        )
        for layer, other in zip(own.layers, weights.layers, strict=True)
    )
    return replace(own, layers=layers)


def _matrix_on_device(model: DirectModel, matrix: Any) -> IntegerMatrix:
    def put(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else model.put(tensor)

    return IntegerMatrix(
        model.put(matrix.weight), model.put(matrix.scale), put(matrix.zero), put(matrix.bias)
    )


def _reference(oracle: Any, weights: DecoderWeights) -> np.ndarray:
    """transformers' logits, with the numbers that the integers stand for."""
    wide = oracle.float()
    with torch.no_grad():
        for layer, own in zip(weights.layers, wide.model.layers, strict=True):
            attention, mlp = own.self_attn, own.mlp
            for projection, modules in (
                (layer.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.output, (attention.o_proj,)),
                (layer.gate_up, (mlp.gate_proj, mlp.up_proj)),
                (layer.down, (mlp.down_proj,)),
            ):
                assert projection is not None
                numbers = np.concatenate([_numbers(part) for part in projection.matrices()])
                sizes = [len(module.weight) for module in modules]
                for module, part in zip(modules, torch.from_numpy(numbers).split(sizes), strict=True):
                    module.weight.copy_(part)
        logits: np.ndarray = wide(torch.tensor([TEXT[:40]])).logits[0].numpy()
    return logits


def _numbers(matrix: Any) -> np.ndarray:
    scale = matrix.scale.array.astype(np.uint32)
    return slow_dequantize(matrix.weight.array, (scale << 16).view(np.float32))


class TestRefusals:
    def reason(self, model: Decoder, **fields: Any) -> str | None:
        return refusal(replace(model.spec, **fields), model.weights)

    def test_what_kernels_lack_is_refused_by_name(self, model: DirectModel) -> None:
        decoder = model.decoder
        assert self.reason(decoder) is None
        for field, value in (("dtype", DType.F32), ("head_dim", 20), ("sinks", True)):
            assert f"does not implement {field}" in str(self.reason(decoder, **{field: value}))

    def test_matrices_in_another_dtype_are_refused(self, model: DirectModel) -> None:
        reason = self.reason(model.decoder, dtype=DType.F16)
        assert reason == "the device's direct path does not take embeddings in bfloat16"


class TestBounds:
    """What would read outside is refused on the host."""

    @pytest.mark.parametrize(
        ("field", "value", "why"),
        [
            ("tokens", 320, r"a token of a step is outside \[0, 320\)"),
            ("tokens", -1, r"a token of a step is outside \[0, 320\)"),
            ("slots", NUM_BLOCKS * BLOCK_SIZE, r"a slot of a step is outside \[0, 1600\)"),
            ("logit_rows", 9, r"a row of logits of a step is outside \[0, 3\)"),
        ],
    )
    def test_ids_that_nothing_has(self, stepper: Stepper, field: str, value: int, why: str) -> None:
        batch = stepper.batch({"a": TEXT[:3]})
        numbers = getattr(batch, field).copy()
        numbers[1] = value
        with pytest.raises(ModelError, match=why):
            stepper.executor.run(replace(batch, **{field: numbers}))

    def test_blocks_that_are_not_there(self, stepper: Stepper) -> None:
        batch = stepper.batch({"a": TEXT[:3]})
        span = replace(batch.spans[0], blocks=(NUM_BLOCKS,))
        with pytest.raises(ModelError, match="a block of a step is outside the pool's 400"):
            stepper.executor.run(replace(batch, spans=(span,)))
        with pytest.raises(ModelError, match="a sequence of 3 tokens has 0 blocks of 4"):
            stepper.executor.run(replace(batch, spans=(replace(span, blocks=()),)))

    def test_steps_that_are_too_large(self, stepper: Stepper) -> None:
        with pytest.raises(ModelError, match="a step has 17 sequences, more than the 16"):
            stepper.run({str(number): [1] for number in range(17)})
        with pytest.raises(ModelError, match="a step has 513 rows, more than the 512"):
            stepper.run({"a": [1] * 400, "b": [1] * 113})

    def test_memory_that_is_not_there(self, model: DirectModel) -> None:
        with pytest.raises(OutOfMemoryError, match="allocating"):
            model.executor.new_kv(1 << 20, 64, KVKind.MODEL)
