"""Specs of models; an executor refuses a field that it does not know."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import asdict, replace
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.native.library import library
from teneral.runtime.backends.cuda.executor import CudaModelBackend
from teneral.runtime.backends.cuda.implemented import IMPLEMENTED as DEVICE_KERNELS
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.encoder_config import EncoderConfig
from teneral.runtime.models.executor import any_value, one_of, refusal_of
from teneral.runtime.models.rotary import Rotary
from teneral.runtime.models.spec import Activation, DecoderSpec, EncoderSpec
from teneral.runtime.tensors import DType

ROTARY = tuple(f"rotary.{name}" for name in Rotary.__struct_fields__)
FIELDS = {
    DecoderSpec: (*(name for name in DecoderSpec.__struct_fields__ if name != "rotary"), *ROTARY),
    EncoderSpec: EncoderSpec.__struct_fields__,
}


def decoder_spec() -> DecoderSpec:
    return DecoderSpec.of(DecoderConfig.from_json(config_json(tiny_model("qwen3"))), DType.BF16)


def encoder_spec() -> EncoderSpec:
    return EncoderSpec.of(EncoderConfig.from_json(config_json(tiny_model("bert"))), DType.F32)


@pytest.mark.parametrize("spec", [decoder_spec(), encoder_spec()], ids=["decoder", "encoder"])
def test_a_spec_is_taken_when_all_of_its_fields_are_implemented(spec):
    assert refusal_of(spec, dict.fromkeys(FIELDS[type(spec)], any_value), "it") is None


@pytest.mark.parametrize("spec", [decoder_spec(), encoder_spec()], ids=["decoder", "encoder"])
def test_a_field_that_is_not_listed_is_refused_by_name(spec):
    for missing in FIELDS[type(spec)]:
        listed = dict.fromkeys((name for name in FIELDS[type(spec)] if name != missing), any_value)
        assert refusal_of(spec, listed, "it") == f"it does not know {missing}"


def test_a_new_field_of_the_rotary_embedding_is_refused():
    spec = decoder_spec()
    mirrored = msgspec.defstruct("Mirrored", [("mirrored", bool, False)], bases=(Rotary,), frozen=True)
    rotary = mirrored(**asdict(spec.rotary))

    refusal = refusal_of(replace(spec, rotary=rotary), dict.fromkeys(FIELDS[DecoderSpec], any_value), "it")

    assert refusal == "it does not know rotary.mirrored"


def test_a_value_that_is_not_implemented_is_refused_with_the_value():
    listed = {**dict.fromkeys(FIELDS[DecoderSpec], any_value), "activation": one_of(Activation.SILU)}
    assert refusal_of(decoder_spec(), listed, "it") is None

    relu = replace(decoder_spec(), activation=Activation.RELU)

    assert refusal_of(relu, listed, "it") == "it does not implement activation = relu"


def test_a_rotary_table_in_pieces_is_the_table():
    rotary = decoder_spec().rotary
    whole = rotary.tables(0, 9_000)

    for begin, end in [(0, 1), (4_095, 4_097), (8_000, 9_000)]:
        for piece, table in zip(rotary.tables(begin, end), whole, strict=True):
            np.testing.assert_array_equal(piece, table[begin:end])


# -- every way to compute


class NewerDecoder(DecoderSpec, frozen=True):
    softcap: float = 0.0


class NewerEncoder(EncoderSpec, frozen=True):
    turns: bool = False


def newer(spec: DecoderSpec | EncoderSpec) -> NewerDecoder | NewerEncoder:
    kind = NewerDecoder if isinstance(spec, DecoderSpec) else NewerEncoder
    return kind(**asdict(spec))


BACKENDS = [TorchBackend(), CudaModelBackend(), ReferenceBackend()]
if library() is not None:
    BACKENDS.append(NativeBackend())


def built(family: str):
    oracle = tiny_model(family)
    return build_model(config_json(oracle), DictWeights(tensors_of(oracle)))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
def test_every_backend_refuses_what_it_does_not_know(backend):
    decoder, encoder = built("qwen3"), built("bert")
    assert backend.refuses_decoder(decoder.spec, decoder.weights) is None
    assert backend.refuses_encoder(encoder.spec, encoder.weights) is None

    assert "does not know softcap" in backend.refuses_decoder(newer(decoder.spec), decoder.weights)
    assert "does not know turns" in backend.refuses_encoder(newer(encoder.spec), encoder.weights)
    for spec, weights, refuses in (
        (decoder.spec, decoder.weights, backend.refuses_decoder),
        (encoder.spec, encoder.weights, backend.refuses_encoder),
    ):
        assert "activation = cubic" in refuses(replace(spec, activation="cubic"), weights)
        assert "dtype = I8" in refuses(replace(spec, dtype=DType.I8), weights)


def test_a_devices_kernels_refuse_what_they_do_not_know():
    assert refusal_of(decoder_spec(), DEVICE_KERNELS, "kernels") is None
    assert refusal_of(newer(decoder_spec()), DEVICE_KERNELS, "kernels") == "kernels does not know softcap"
