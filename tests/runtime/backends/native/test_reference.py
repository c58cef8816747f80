"""The executors in numpy give what the core gives."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.native import each_isa, loaded
from tests.support.native_decoder import NativeStepper, new_pool, quantized, spec_of, weights_of
from tests.support.native_encoder import encoder_spec_of, encoder_weights_of, text_batch
from tests.support.reference.models import ReferenceDecoder, ReferenceEncoder
from tests.support.tiny_models import tiny_config, tiny_model
from transformers import AutoModelForSequenceClassification

from teneral.runtime.backends.native.decoder import NativeDecoder
from teneral.runtime.backends.native.encoder import NativeEncoder
from teneral.runtime.tensors import DType

each_dtype = pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])


def alike(ours, theirs, dtype):
    tolerance = 1e-4 if dtype is DType.F32 else 0.03
    assert np.abs(ours - theirs).mean() <= tolerance * np.abs(theirs).mean()


@each_isa
@each_dtype
@pytest.mark.parametrize("int8", [False, True], ids=["model", "int8"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_decoders_in_numpy_agree_with_the_core(isa, dtype, int8, bits):
    of = tiny_model("qwen3", intermediate_size=128)
    spec, weights = spec_of(of, dtype), weights_of(of)
    if bits < 16:
        weights = quantized(weights, bits=bits)
    executors = NativeDecoder(spec, weights, loaded(isa)), ReferenceDecoder(spec, weights)
    steppers = [NativeStepper(executor, new_pool(spec, 16, 8, int8=int8)) for executor in executors]
    tokens = np.random.default_rng(0).integers(0, 256, 50).tolist()

    for work in ({"a": tokens[:20]}, {"a": tokens[20:21], "b": tokens[21:30]}, {"b": tokens[30:]}):
        ours, theirs = (stepper.step(work) for stepper in steppers)
        for name in work:
            alike(ours[name], theirs[name], dtype)


@each_isa
@each_dtype
@pytest.mark.parametrize("labels", [0, 3])
def test_encoders_in_numpy_agree_with_the_core(isa, dtype, labels):
    of = tiny_model("roberta")
    if labels:
        of = AutoModelForSequenceClassification.from_config(tiny_config("roberta", num_labels=labels))
    spec, weights = encoder_spec_of(of, dtype), encoder_weights_of(of)
    batch = text_batch([[5, 6, 7], [8], [9, 10] * 20])
    rows = [
        executor.finish(batch, executor.layers(batch, 0, 3, executor.embed(batch)))
        for executor in (NativeEncoder(spec, weights, loaded(isa)), ReferenceEncoder(spec, weights))
    ]

    assert rows[0].shape == rows[1].shape
    alike(*rows, dtype)


def test_a_row_in_numpy_has_the_same_bits_in_any_company():
    of = tiny_model("qwen2")
    spec = spec_of(of, DType.BF16)
    executor = ReferenceDecoder(spec, weights_of(of))
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    whole = NativeStepper(executor, new_pool(spec, 16, 8)).step({"a": tokens})["a"]
    cut = NativeStepper(executor, new_pool(spec, 16, 8))

    rows = [cut.step({"a": tokens[:7]})["a"], cut.step({"b": tokens[:3], "a": tokens[7:]})["a"]]

    assert (np.concatenate(rows) == whole).all()
