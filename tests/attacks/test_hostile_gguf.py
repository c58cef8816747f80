"""GGUF files made to crash, exhaust or mislead a reader: each is refused by name, at no cost."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import (
    ARRAY,
    TEXT,
    U32,
    RawTensor,
    float_tensors,
    gguf_file,
    metadata,
    text,
)
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import CheckpointError, TeneralError
from teneral.loader.format.gguf.directory import GgufDirectory
from teneral.loader.format.gguf.reader import MAX_HEADER_BYTES, read_gguf

NAME = "evil.gguf"
SMALL = RawTensor("x", (4,), 0, bytes(16))
PEAK_BYTES = 8 << 20  # for files of a few hundred bytes; the first read takes up to 1 MiB


def refuse(data: bytes, match: str) -> CheckpointError:
    store = MemoryStore({NAME: data})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=match) as caught:
            read_gguf(store, store.stat(NAME))
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert NAME in caught.value.where
    return caught.value


def refuse_model(match: str, tensors: list[RawTensor] | None = None, **more: Any) -> None:
    """A file that is sound, of a model that is not."""
    given_tensors = float_tensors() if tensors is None else tensors
    store = MemoryStore({NAME: gguf_file(metadata(**more), given_tensors)})
    with pytest.raises(CheckpointError, match=match):
        GgufDirectory(store, NAME).conversions()


@pytest.mark.parametrize("data", [b"", b"GGU", b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0" + bytes(15)])
def test_a_file_without_its_counts_is_refused(data: bytes) -> None:
    refuse(data, "has 0|has 3|has 8|has 23")


def test_other_magic_and_versions_are_refused() -> None:
    refuse(gguf_file({}, magic=b"GGML"), "not a GGUF file")
    refuse(gguf_file({}, version=1), "version 1 is not supported")
    refuse(gguf_file({}, version=4), "version 4 is not supported")
    refuse(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")


@pytest.mark.parametrize("count", [100_001, 1 << 32, (1 << 64) - 1])
def test_enormous_counts_are_refused_unread(count: int) -> None:
    refuse(gguf_file({}, num_tensors=count), "tensors, of 100000 allowed")
    refuse(gguf_file({}, num_keys=count), "keys of metadata, of 65536 allowed")


def test_counts_beyond_the_file_are_refused() -> None:
    refuse(gguf_file({}, num_tensors=1), "the file has")
    refuse(gguf_file({}, num_keys=65_536), "the file has")


@pytest.mark.parametrize("length", [1025, 1 << 40, (1 << 64) - 1])
def test_an_enormous_key_is_refused_unread(length: int) -> None:
    refuse(gguf_file({}, num_keys=1) + struct.pack("<Q", length), "a text claims")


@pytest.mark.parametrize("length", [(16 << 20) + 1, 1 << 63])
def test_an_enormous_text_is_refused_unread(length: int) -> None:
    refuse(gguf_file({"k": struct.pack("<IQ", TEXT, length)}), "a text claims")


def test_a_text_beyond_the_file_is_refused() -> None:
    refuse(gguf_file({"k": struct.pack("<IQ", TEXT, 1 << 20)}), "cut off")


@pytest.mark.parametrize("kind", [0, 4, 8, 7, 12])
@pytest.mark.parametrize("count", [(4 << 20) + 1, 1 << 60])
def test_an_enormous_array_is_refused_unread(kind: int, count: int) -> None:
    refuse(gguf_file({"k": struct.pack("<IIQ", ARRAY, kind, count)}), "elements of 'k'")


@pytest.mark.parametrize("kind", [0, 4, 7, 8, 12])
def test_an_array_beyond_the_file_is_refused(kind: int) -> None:
    refuse(gguf_file({"k": struct.pack("<IIQ", ARRAY, kind, 4 << 20)}), "cut off")


def test_arrays_of_arrays_are_refused_at_the_first_level() -> None:
    nested = struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 1000
    refuse(gguf_file({"k": nested}), "an array of arrays")


@pytest.mark.parametrize("kind", [13, 255, (1 << 32) - 1])
def test_unknown_types_of_metadata_are_refused(kind: int) -> None:
    refuse(gguf_file({"k": struct.pack("<I", kind) + bytes(8)}), f"unknown type {kind}")
    refuse(gguf_file({"k": struct.pack("<IIQ", ARRAY, kind, 1) + bytes(8)}), f"unknown type {kind}")


def test_a_key_that_occurs_twice_is_refused() -> None:
    twice = (text("k") + struct.pack("<II", U32, 1)) * 2
    refuse(gguf_file({}, num_keys=2) + twice, "'k' occurs twice")


def test_texts_that_are_no_utf_8_and_booleans_of_2_are_refused() -> None:
    refuse(gguf_file({"k": struct.pack("<I", TEXT) + text(b"\xff\xfe")}), "not UTF-8")
    refuse(gguf_file({"k": struct.pack("<IB", 7, 2)}), "neither true nor false")


@pytest.mark.parametrize("alignment", [0, 4, 7, 33, 1 << 21, -1])
def test_alignments_that_are_no_powers_of_two_are_refused(alignment: int) -> None:
    given_value = struct.pack("<Ii", 5, alignment)
    refuse(gguf_file({"general.alignment": given_value}, [SMALL]), "general.alignment is")


@pytest.mark.parametrize("dimensions", [0, 5, 1 << 31])
def test_numbers_of_dimensions_are_bounded(dimensions: int) -> None:
    entry = text("x") + struct.pack("<I", dimensions) + bytes(64)
    refuse(gguf_file({}, num_tensors=1) + entry, "dimensions, of 1 to 4 allowed")


@pytest.mark.parametrize("sizes", [(0,), (4, 0), (1 << 63, 2), ((1 << 22) + 1,), (1 << 20, 1 << 20, 1 << 20)])
def test_shapes_are_bounded(sizes: tuple[int, ...]) -> None:
    refuse(gguf_file({}, [SMALL._replace(sizes=sizes)]), "not a usable shape")


@pytest.mark.parametrize("kind", [4, 5, 9, 15, 16, 17, 24, 31, 40, (1 << 32) - 1])
def test_types_of_tensors_that_are_not_supported_are_refused(kind: int) -> None:
    error = refuse(gguf_file({}, [SMALL._replace(type=kind)]), f"of type {kind}, which is not supported")
    assert "Q4_K" in error.hint


def test_rows_that_fill_no_blocks_are_refused() -> None:
    refuse(gguf_file({}, [SMALL._replace(type=8)]), "blocks of 32")
    refuse(gguf_file({}, [RawTensor("x", (128,), 12, bytes(144))]), "blocks of 256")


@pytest.mark.parametrize("name", ["", "x" * 1025, "a\nb", "a\x1b[2J", "a\u202eb"])
def test_unusable_names_of_tensors_are_refused(name: str) -> None:
    refuse(gguf_file({}, [SMALL._replace(name=name)]), "not a usable tensor name|a text claims")


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        ((0, 0), "overlaps"),
        ((0, 16), "overlaps"),
        ((0, 64), "hole"),
        ((32, 64), "hole"),
        ((0, (1 << 64) - 1), "hole"),
        ((1, 33), "hole"),
    ],
)
def test_tensors_that_overlap_or_leave_holes_are_refused(offsets: tuple[int, int], match: str) -> None:
    tensors = [SMALL._replace(name=name, offset=at) for name, at in zip("xy", offsets, strict=True)]
    refuse(gguf_file({}, tensors), match)


def test_two_tensors_of_one_name_are_refused() -> None:
    refuse(gguf_file({}, [SMALL, SMALL]), "two tensors are called x")


def test_truncated_and_prolonged_files_are_refused() -> None:
    sound = gguf_file({}, [SMALL])
    refuse(sound[:-17], "cut off")
    refuse(sound + b"x", "belong to nothing")


def test_metadata_without_end_is_refused_before_it_is_read() -> None:
    class Endless(MemoryStore):
        """A file that claims to be enormous, of texts as long as they may be."""

        def read_into(
            self, name: str, start: int, buffer: memoryview, *, version: str | None = None
        ) -> str | None:
            assert start + len(buffer) <= 2 * MAX_HEADER_BYTES
            buffer[:] = bytes(len(buffer))
            head = b"GGUF" + struct.pack("<IQQ", 3, 0, 65_536) + text("k")
            head += struct.pack("<IIQ", ARRAY, TEXT, 4 << 20)
            if start < len(head):
                part = head[start : start + len(buffer)]
                buffer[: len(part)] = part
            return version

    store = Endless({NAME: b""})
    info = store.stat(NAME)._replace(size_bytes=1 << 50)
    with pytest.raises(CheckpointError, match=r"occurs twice|unknown type|allowed"):
        read_gguf(store, info)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_files_raise_errors_of_ours_only(data: st.DataObject) -> None:
    whole = bytearray(gguf_file(metadata(), float_tensors()))
    head = whole.index(b"ffn_down") + 64
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(whole), len(whole), data.draw(st.integers(0, len(whole)))]))
    directory = GgufDirectory(MemoryStore({NAME: bytes(whole[:end])}), NAME)
    try:
        for info in directory.list():
            directory.read(info.name, max_bytes=1 << 24)
    except TeneralError:
        pass


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"general__architecture": None}, "no general.architecture"),
        ({"llama__expert_count": 8}, "no llama.expert_used_count"),
        ({"llama__expert_count": 8, "llama__expert_used_count": 9}, "expert_used_count is"),
        ({"llama__expert_count": 1 << 15}, "expert_count is"),
        (
            {"llama__expert_count": 8, "llama__expert_used_count": 2, "llama__expert_shared_count": 1},
            "expert_shared_count is not supported",
        ),
        ({"split__count": 3}, "one of several files"),
        ({"llama__block_count": 1 << 30}, "llama.block_count is"),
        ({"llama__block_count": "1"}, "llama.block_count is"),
        ({"llama__embedding_length": 0}, "llama.embedding_length is"),
        ({"llama__attention__head_count": 0}, "head_count is"),
        ({"llama__attention__head_count_kv": 3}, "head_count_kv is"),
        ({"llama__attention__key_length": 1 << 20}, "key_length is"),
        (
            {"llama__attention__head_count": 1, "llama__attention__head_count_kv": 1},
            "does not consist of heads of 64 rows",
        ),
        ({"llama__rope__dimension_count": 16}, "differs"),
        ({"llama__rope__freq_base": float("nan")}, "freq_base is"),
        ({"llama__rope__scaling__type": "longrope"}, "stretched by 'longrope'"),
        ({"llama__attention__layer_norm_rms_epsilon": float("inf")}, "epsilon is"),
        ({"tokenizer__ggml__model": "bert"}, "of kind 'bert'"),
        ({"tokenizer__ggml__pre": "unheard-of"}, "rules 'unheard-of'"),
        ({"tokenizer__ggml__tokens": ["a"] * 6}, "'a' occurs twice"),
        ({"tokenizer__ggml__tokens": [str(n) for n in range(7)]}, "7 tokens, but the embeddings have 6"),
        ({"tokenizer__ggml__tokens": ["a" * 5000, *"bcdef"]}, "more than 4096 characters"),
        ({"tokenizer__ggml__tokens": 7}, "an array of texts"),
        ({"tokenizer__ggml__token_type": [1]}, "an array of 6 numbers"),
        ({"tokenizer__ggml__merges": ["ab"]}, "merge 'ab'"),
        ({"tokenizer__ggml__merges": ["a z"]}, "merge 'a z'"),
        ({"tokenizer__ggml__eos_token_id": 6}, "eos_token_id is"),
        ({"tokenizer__chat_template": 3}, "chat_template is"),
    ],
)
def test_models_that_are_not_supported_are_refused_by_name(more: dict[str, Any], match: str) -> None:
    refuse_model(match, **more)


def test_tensors_of_no_known_use_are_refused() -> None:
    for name in ("blk.0.attn_sinks.weight", "blk.1.attn_q.weight", "blk.00.attn_q.weight", "surprise"):
        refuse_model("of no known use", [*float_tensors(), SMALL._replace(name=name)])


def test_a_model_without_embeddings_is_refused() -> None:
    refuse_model("no matrix token_embd.weight", [each for each in float_tensors() if "embd" not in each.name])


def test_pieces_too_long_to_find_merges_for_are_refused() -> None:
    pieces = [f"{number:04}" + "x" * 4000 for number in range(64)]
    embeddings = RawTensor("token_embd.weight", (64, 64), 0, bytes(64 * 64 * 4))
    tensors = [embeddings if each.name == embeddings.name else each for each in float_tensors()]
    refuse_model(
        "too long to find merges",
        tensors,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=pieces,
        tokenizer__ggml__token_type=[1] * 64,
        tokenizer__ggml__scores=[0.0] * 64,
    )


@pytest.mark.parametrize(
    "name",
    ["blk.0.ffn_up.bias", "blk.0.attn_norm.bias", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q_norm.weight"],
)
def test_a_tensor_that_the_model_would_leave_out_is_refused(name: str) -> None:
    refuse_model("of no known use", [*float_tensors(), SMALL._replace(name=name)])


def test_a_bias_of_some_projections_only_is_refused() -> None:
    bias = RawTensor("blk.0.attn_q.bias", (64,), 0, bytes(256))
    refuse_model("some projections of the attention have a bias", [*float_tensors(), bias])


EXPERTS = {"llama__expert_count": 4, "llama__expert_used_count": 2}


@pytest.mark.parametrize("sizes", [(64, 96), (64, 96, 3), (64, 96, 2, 2)])
def test_experts_of_another_number_are_refused(sizes: tuple[int, ...]) -> None:
    kept = [tensor for tensor in float_tensors() if "ffn_" not in tensor.name or "norm" in tensor.name]
    stacked = RawTensor("blk.0.ffn_up_exps.weight", sizes, 0, bytes(4 * math.prod(sizes)))
    refuse_model("does not hold 4 experts", [*kept, stacked], **EXPERTS)


def test_more_experts_than_any_model_has_are_refused_before_they_are_listed() -> None:
    kept = [tensor for tensor in float_tensors() if "ffn_" not in tensor.name or "norm" in tensor.name]
    stacked = RawTensor("blk.0.ffn_up_exps.weight", (1, 1, 1024), 0, bytes(4096))
    more = {"llama__expert_count": 1024, "llama__expert_used_count": 2, "llama__block_count": 1024}
    refuse_model("too many", [*kept, stacked], **more)


@pytest.mark.parametrize(
    ("architecture", "more", "match"),
    [
        ("gemma2", {}, "no gemma2.attn_logit_softcapping"),
        ("gemma3", {}, "no gemma3.attention.sliding_window"),
        ("gemma3", {"gemma3__attention__sliding_window": 0}, "sliding_window is"),
        (
            "gemma3",
            {
                "gemma3__attention__sliding_window": 9,
                "gemma3__attention__sliding_window_pattern": struct.pack("<IIQ", ARRAY, 7, 2) + bytes(2),
            },
            "true or false for each layer",
        ),
        ("phi3", {}, "no phi3.attention.sliding_window"),
        ("phi3", {"phi3__attention__sliding_window": 0, "phi3__rope__dimension_count": 7}, "must be even"),
        (
            "phi3",
            {"phi3__attention__sliding_window": 0, "phi3__rope__dimension_count": 64},
            "dimension_count is",
        ),
        ("granite", {}, "no granite.attention.scale"),
        ("granite", {"granite__attention__scale": 0.0}, "attention.scale is"),
        ("olmo2", {"olmo2__attention__sliding_window": "x"}, "sliding_window"),
        ("qwen3moe", {}, "no qwen3moe.expert_feed_forward_length"),
        ("qwen3", {"qwen3__expert_count": 4}, "a mixture of experts of the architecture 'qwen3'"),
        ("qwen2", {}, "no biases, which this architecture needs"),
        ("granitehybrid", {}, "head_count_kv must have a number for each layer"),
        ("granitehybrid", {"granitehybrid__rope__scaling__finetuned": 3}, "finetuned is '3'"),
        ("falcon-h1", {}, "no falcon-h1.ssm.time_step_rank"),
        (
            "falcon-h1",
            {"falcon-h1__ssm__time_step_rank": 3, "falcon-h1__ssm__inner_size": 64},
            "3 heads of a layer with a state cannot share 64 values",
        ),
        ("nemotron_h", {}, "head_count_kv must have a number for each layer"),
        ("nemotron_h_moe", {"nemotron_h_moe__moe_latent_size": 8}, "moe_latent_size is not supported"),
        ("llama4", {}, "no llama4.expert_count"),
        ("llama4", {"llama4__attention__sliding_window": 0}, "sliding_window must be 8192"),
    ],
)
def test_settings_of_other_architectures_are_refused_by_their_keys(
    architecture: str, more: dict[str, Any], match: str
) -> None:
    store = MemoryStore({NAME: gguf_file(metadata(architecture, **more), float_tensors())})
    with pytest.raises(CheckpointError, match=match):
        GgufDirectory(store, NAME).conversions()
