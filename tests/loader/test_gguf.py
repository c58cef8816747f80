"""GGUF files as model directories: the numbers that gguf-py and transformers read from them, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.checkpoints import Contents, read_back
from tests.support.gguf_files import (
    HEADS,
    HIDDEN,
    KINDS,
    KV_HEADS,
    PIECES,
    RawTensor,
    float_tensors,
    gguf_file,
    metadata,
    random_blocks,
)
from tests.support.memory_store import MemoryStore
from tests.support.quantized import slow_dequantize
from tests.support.store_server import StoreServer
from tokenizers import Tokenizer

from teneral.loader.artifact import open_artifact, open_model
from teneral.loader.format.gguf import directory
from teneral.loader.format.gguf.blocks import BLOCK_TYPES, block_of_bytes
from teneral.loader.format.gguf.directory import GgufDirectory
from teneral.loader.format.gguf.model import Keeps
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize import to_float32
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.loader.tools.progress_bar import format_bytes
from teneral.loader.tools.unpack import unpack
from teneral.runtime.models.decoder_config import DecoderConfig

gguf = pytest.importorskip("gguf")

NAME = "model.gguf"
NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
EXACT = ("Q8_0", "Q4_0", "Q5_0")


def tensors_of(type_name: str, architecture: str = "llama", vocab_size: int = len(PIECES)) -> list[RawTensor]:
    """A tiny model with matrices of one type, where their rows fill its blocks; else of Q8_0."""
    found = []
    for index, tensor in enumerate(float_tensors(architecture, vocab_size=vocab_size)):
        kind = BLOCK_TYPES[NUMBERS[type_name]]
        if len(tensor.sizes) == 2:
            kind = kind if tensor.sizes[0] % kind.elements == 0 else BLOCK_TYPES[NUMBERS["Q8_0"]]
            blocks = random_blocks(kind, tensor.sizes[0] * tensor.sizes[1] // kind.elements, index)
            tensor = tensor._replace(type=NUMBERS[kind.name], data=blocks.tobytes())
        found.append(tensor)
    return found


def contents_of(source: Any) -> Contents:
    data, _ = source.read("model.safetensors", max_bytes=1 << 28)
    return read_back([data])


def numbers(contents: Contents, name: str) -> np.ndarray:
    """What a matrix or vector means, in fp32."""
    dtype, shape, data = contents[name]
    if len(shape) == 3:
        block = block_of_bytes(shape[2])
        assert block is not None
        return block.to_floats(np.frombuffer(data, np.uint8).reshape(-1, shape[2])).reshape(
            len(data) and shape[0], -1
        )
    if dtype in ("I8", "U8"):
        weight = np.frombuffer(data, np.int8 if dtype == "I8" else np.uint8).reshape(shape)
        _, scale_shape, scale = contents[f"{name}_scale"]
        return slow_dequantize(weight, np.frombuffer(scale, "<f2").astype(np.float32).reshape(scale_shape))
    return to_float32(np.frombuffer(data, np.uint8), dtype).reshape(shape)


def expected(tensor: RawTensor) -> np.ndarray:
    """By gguf-py, with the rows of q and k in transformers' order."""
    kind = gguf.GGMLQuantizationType(tensor.type)
    rows = np.frombuffer(tensor.data, np.uint8).reshape(*reversed(tensor.sizes[1:]), -1)
    values: np.ndarray = gguf.dequantize(rows, kind).astype(np.float32).reshape(tuple(reversed(tensor.sizes)))
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(tensor.name.split(".")[-2], 0)
    if not heads:
        return values
    pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def as_bf16(values: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_blocks_mean_what_ggufs_own_package_reads(name: str) -> None:
    kind = BLOCK_TYPES[NUMBERS[name]]
    blocks = random_blocks(kind, 300, seed=7)
    want = gguf.dequantize(blocks, gguf.GGMLQuantizationType(NUMBERS[name])).reshape(300, -1)
    got = kind.to_floats(blocks)
    np.testing.assert_array_equal(got.view(np.uint32), want.astype(np.float32).view(np.uint32))
    if kind.to_integers is not None:
        integers = kind.to_integers(blocks)
        np.testing.assert_array_equal(integers.levels * integers.scale[:, None], got)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("keeps", Keeps)
def test_tensors_are_the_same_numbers_or_these_rounded_to_bf16(name: str, keeps: Keeps) -> None:
    tensors = tensors_of(name)
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(), tensors)}), NAME, keeps=keeps)
    contents = contents_of(source)
    assert len({key for key in contents if not key.endswith("_scale")}) == len(tensors)
    for tensor in tensors:
        ours = hf_name(tensor.name)
        want = expected(tensor)
        is_kept = keeps is Keeps.BLOCKS or (keeps is Keeps.INTEGERS and name in EXACT)
        if name not in ("F32", "F16", "BF16") and not is_kept and len(want.shape) == 2:
            want = as_bf16(want)
        np.testing.assert_array_equal(numbers(contents, ours), want, err_msg=ours)


def hf_name(name: str) -> str:
    """Of a tensor of a Llama or Qwen2."""
    from teneral.loader.format.gguf.families import FAMILIES

    family = FAMILIES["llama"]
    outer = {**family.outer, "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{family.inner[kind]}.{suffix}"


def test_integers_take_the_layout_that_holds_the_same_numbers() -> None:
    for name, dtypes in (("Q8_0", {"I8"}), ("Q5_0", {"I8"}), ("Q4_0", {"I8", "U8"}), ("Q4_1", {"BF16"})):
        store = MemoryStore({NAME: gguf_file(metadata(), tensors_of(name))})
        source = GgufDirectory(store, NAME, keeps=Keeps.INTEGERS)
        found = {
            dtype
            for key, (dtype, shape, _) in contents_of(source).items()
            if len(shape) == 2 and not key.endswith("_scale")
        }
        assert found == dtypes  # of Q4_0: embeddings, and rows of 96, are no runs of 64
        assert any(line.startswith(f"{name}: ") for line in source.conversions())


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q5_1"])
def test_blocks_lie_as_in_the_file(name: str) -> None:
    file = gguf_file(metadata("qwen2"), tensors_of(name, "qwen2"))
    source = GgufDirectory(MemoryStore({NAME: file}), NAME)
    contents = contents_of(source)
    kept = [data for dtype, shape, data in contents.values() if len(shape) == 3]
    assert kept
    assert all(data in file for data in kept)
    assert any(line.startswith(f"{name}: ") and "as they are" in line for line in source.conversions())
    # Names, shapes and norms aside.
    assert source.stat("model.safetensors").size_bytes < 1.05 * len(file)


class CountingStore(MemoryStore):
    """Counts the bytes that are read of objects' ranges."""

    num_bytes = 0

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        self.num_bytes += len(buffer)
        return super().read_into(name, start, buffer, version=version)


@pytest.mark.parametrize("keeps", Keeps)
@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_the_share_of_the_network_is_what_is_read(name: str, keeps: Keeps) -> None:
    """Not the bytes that are made of it, which a load counts."""
    store = CountingStore({NAME: gguf_file(metadata(), tensors_of(name))})
    source = GgufDirectory(store, NAME, keeps=keeps)
    share, size_bytes = source.wire_share, source.stat(directory.WEIGHTS_NAME).size_bytes
    store.num_bytes = 0
    source.read_into(directory.WEIGHTS_NAME, 0, memoryview(bytearray(size_bytes)))
    assert store.num_bytes == pytest.approx(share * size_bytes, abs=1)
    if name.startswith("Q") and keeps is Keeps.FLOATS:
        assert share < 0.7


def test_floats_of_everything_where_integers_are_not_wanted() -> None:
    store = MemoryStore({NAME: gguf_file(metadata(), tensors_of("Q8_0"))})
    contents = contents_of(GgufDirectory(store, NAME, keeps=Keeps.FLOATS))
    assert {dtype for dtype, shape, _ in contents.values() if len(shape) == 2} == {"BF16"}
    target = MemoryStore()
    pack(GgufDirectory(store, NAME, keeps=Keeps.FLOATS), target, quantize=QuantizeOptions(8))
    assert any(tensor.dtype == "I8" for tensor in open_artifact(target).tensors)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_reads_the_same_weights_and_configuration(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    pieces = [chr(0x100 + number) for number in range(255)] + ["<|end|>"]
    more = {"tokenizer__ggml__tokens": pieces, "tokenizer__ggml__token_type": [1] * 255 + [3]}
    more |= {"tokenizer__ggml__merges": [], "tokenizer__ggml__eos_token_id": 255}
    tensors = tensors_of("Q4_0", architecture)
    embeddings = random_blocks(BLOCK_TYPES[8], 256 * HIDDEN // 32, 99)
    tensors[0] = RawTensor("token_embd.weight", (HIDDEN, 256), 8, embeddings.tobytes())
    empty_merges = b"\x09\0\0\0\x08\0\0\0" + bytes(8)
    file = gguf_file(
        metadata(architecture, **{**more, "tokenizer__ggml__merges": empty_merges, "general__name": "tiny"}),
        tensors,
    )
    (tmp_path / NAME).write_bytes(file)
    source = open_model(str(tmp_path / NAME))
    theirs = load_gguf_checkpoint(tmp_path / NAME)["config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**theirs))
    oracle = load_gguf_checkpoint(tmp_path / NAME, return_tensors=True, model_to_load=model)["tensors"]
    contents = contents_of(source)
    assert {name for name in contents if not name.endswith("_scale")} == oracle.keys() - {"lm_head.weight"}
    for name, parameter in oracle.items():
        if name == "lm_head.weight":
            continue  # tied
        want = parameter.float().numpy()
        want = as_bf16(want) if name.endswith("bias") else want
        np.testing.assert_array_equal(numbers(contents, name), want, err_msg=name)
    ours = json.loads(source.read("config.json", max_bytes=1 << 20)[0])
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "model_type")
    assert {key: ours[key] for key in keys} == pytest.approx({key: theirs[key] for key in keys})
    assert ours["rope_theta"] == theirs["rope_theta"]
    assert ours["tie_word_embeddings"] is True
    assert DecoderConfig.from_json(ours).qkv_bias is (architecture == "qwen2")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_of_the_weights_is_a_piece_of_the_whole(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["Q4_0", "Q4_1", "F16"]))
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(), tensors_of(kind))}), NAME)
    whole, info = source.read("model.safetensors", max_bytes=1 << 28)
    start = data.draw(st.integers(0, info.size_bytes - 1))
    length = data.draw(st.integers(1, min(9000, info.size_bytes - start)))
    part = bytearray(length)
    source.read_into("model.safetensors", start, memoryview(part), version=info.version)
    assert bytes(part) == whole[start : start + length]


def test_rows_are_read_and_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(), tensors_of("Q4_0"))}), NAME)
    whole, _ = source.read("model.safetensors", max_bytes=1 << 28)
    monkeypatch.setattr(directory, "_READ_ELEMENTS", 1000)
    monkeypatch.setattr(directory, "_STEP_ELEMENTS", 300)
    assert source.read("model.safetensors", max_bytes=1 << 28)[0] == whole


def test_memory_does_not_grow_with_the_file() -> None:
    """A matrix of 64 Mi elements, made in pieces, takes some tens of MiB, and not its 128."""

    class Zeros(MemoryStore):
        """A sound header, and zeros behind it."""

        def read_into(
            self, name: str, start: int, buffer: memoryview, *, version: str | None = None
        ) -> str | None:
            buffer[:] = bytes(len(buffer))
            part = header[start : start + len(buffer)]
            buffer[: len(part)] = part
            return version

        def stat(self, name: str) -> Any:
            return super().stat(name)._replace(size_bytes=len(header) + content_bytes)

    large = 1 << 20
    tensors = [
        each._replace(sizes=(64, large), type=8, data=b"") if each.name == "token_embd.weight" else each
        for each in float_tensors()
    ]
    content_bytes = large * 2 * 34 + sum(-(-len(each.data) // 32) * 32 for each in tensors)
    shift = large * 2 * 34
    at = 0
    placed = []
    for each in tensors:
        placed.append(each._replace(offset=at, data=b""))
        at += shift if each.name == "token_embd.weight" else -(-len(each.data) // 32) * 32
    header = gguf_file(metadata(), placed)
    source = GgufDirectory(Zeros({NAME: b""}), NAME, keeps=Keeps.FLOATS)
    info = source.stat("model.safetensors")
    buffer = bytearray(8 << 20)
    tracemalloc.start()
    try:
        for start in range(0, info.size_bytes - len(buffer), 4 * len(buffer)):
            source.read_into("model.safetensors", start, memoryview(buffer))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_packing_from_http_gives_what_packing_the_file_gives(tmp_path: Path) -> None:
    place = tmp_path / "root" / "models" / NAME
    place.parent.mkdir(parents=True)
    place.write_bytes(gguf_file(metadata(), tensors_of("Q4_0")))
    target = MemoryStore()
    with (
        StoreServer(tmp_path / "root") as server,
        closing(open_model(f"{server.url}/models/{NAME}")) as source,
    ):
        result = pack(source, target)
    assert "the same numbers" in result.render()
    unpack(target, tmp_path / "out")
    files = (path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors"))
    assert read_back(files) == contents_of(open_model(str(place)))


def tokenizer_of(**more: Any) -> Tokenizer:
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(**more), float_tensors())}), NAME)
    return Tokenizer.from_str(source.read("tokenizer.json", max_bytes=1 << 20)[0].decode())


def test_byte_level_vocabularies_keep_tokens_merges_and_special_tokens() -> None:
    tokenizer = tokenizer_of()
    assert tokenizer.encode("abc<|end|>ba").ids == [3, 2, 4, 1, 0]
    assert tokenizer.decode([3, 2, 4], skip_special_tokens=True) == "abc"
    opened = tokenizer_of(tokenizer__ggml__add_bos_token=True)
    assert opened.encode("ab").ids == [5, 3]
    assert opened.encode("ab", add_special_tokens=False).ids == [3]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 2024", ["it", "'s", " 2024"]),
        ("smollm", "it's 2024", ["it", "'s", " ", "2", "0", "2", "4"]),
        ("llama-bpe", "IT'S 2024\n\n x", ["IT", "'S", " ", "202", "4", "\n\n", " x"]),
        ("falcon-h1", "IT'S 2024\n\n x", ["IT", "'S", " ", "202", "4", "\n\n", " x"]),
        ("qwen2", "it's 2024\n\n x", ["it", "'s", " ", "2", "0", "2", "4", "\n\n", " x"]),
        ("qwen35", "क्या 20?\n", ["क्या", " ", "2", "0", "?\n"]),
        ("refact", "it's 2024", ["it", "'s", " ", "2", "0", "2", "4"]),
        ("dbrx", "IT'S 2024\n\n x", ["IT", "'S", " ", "202", "4", "\n\n", " x"]),
        ("gpt-4o", "HelloWORLD's 2024", ["Hello", "WORLD's", " ", "202", "4"]),
        ("llama4", "HelloWORLD's 2024", ["Hello", "WORLD's", " ", "202", "4"]),
        ("tekken", "HelloWorld 20", ["Hello", "World", " ", "2", "0"]),
    ],
)
def test_text_is_split_as_the_vocabularys_rules_say(pre: str, text: str, words: list[str]) -> None:
    splitter = tokenizer_of(tokenizer__ggml__pre=pre).pre_tokenizer
    assert [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)] == words


def test_sentence_pieces_merge_by_their_scores() -> None:
    pieces = ["<unk>", "<s>", "</s>", "<0x21>", "▁", "a", "b", "ab", "▁a", "▁ab"]
    tensors = [
        RawTensor("token_embd.weight", (HIDDEN, 10), 0, bytes(10 * HIDDEN * 4))
        if "embd" in each.name
        else each
        for each in float_tensors()
    ]
    more = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__tokens": pieces,
        "tokenizer__ggml__token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1],
        "tokenizer__ggml__scores": [0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -2.0, -1.0, -3.0],
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
    }
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(**more), tensors)}), NAME)
    tokenizer = Tokenizer.from_str(source.read("tokenizer.json", max_bytes=1 << 20)[0].decode())
    assert tokenizer.encode("ab b!").tokens == ["<s>", "▁ab", "▁", "b", "<0x21>"]
    assert tokenizer.decode(tokenizer.encode("ab b!").ids) == "ab b!"


def test_sentence_pieces_of_gemma4_merge_as_the_file_says() -> None:
    """By the order of its merges, not by scores; nothing is put before a text."""
    from transformers import GemmaTokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<0x21>", "▁", "a", "b", "ab", "▁a", "ba", "\n"]
    merges = ["b a", "a b", "▁ a"]
    rows = bytes(len(pieces) * HIDDEN * 4)
    tensors = [
        RawTensor("token_embd.weight", (HIDDEN, len(pieces)), 0, rows) if "embd" in each.name else each
        for each in float_tensors()
    ]
    more = {
        "tokenizer__ggml__model": "gemma4",
        "tokenizer__ggml__tokens": pieces,
        "tokenizer__ggml__token_type": [3, 3, 3, 3, 3, 6, *[1] * 7],
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__bos_token_id": 2,
        "tokenizer__ggml__eos_token_id": 1,
        "tokenizer__ggml__unknown_token_id": 3,
    }
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(**more), tensors)}), NAME)
    tokenizer = Tokenizer.from_str(source.read("tokenizer.json", max_bytes=1 << 20)[0].decode())
    oracle = GemmaTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    for text in ("aba ab", " a", "abab!\nba", "b<mask>a", "xyz", ""):
        ids = tokenizer.encode(text).ids
        assert ids == [2, *oracle(text, add_special_tokens=False).input_ids]
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_templates_and_ends_of_texts_come_along() -> None:
    more = {"tokenizer__chat_template": "{{ messages }}", "tokenizer__ggml__eot_token_id": 5}
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(**more), float_tensors())}), NAME)
    settings_json = json.loads(source.read("tokenizer_config.json", max_bytes=1 << 20)[0])
    assert settings_json["chat_template"] == "{{ messages }}"
    assert (settings_json["bos_token"], settings_json["eos_token"]) == ("<|start|>", "<|end|>")
    generation = json.loads(source.read("generation_config.json", max_bytes=1 << 20)[0])
    assert generation == {"bos_token_id": 5, "eos_token_id": [4, 5]}


def test_an_answer_in_channels_ends_by_its_own_tokens_and_not_with_each_message() -> None:
    tokens = ["<|return|>", "a", "b", "ab", "<|end|>", "<|call|>"]
    more = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__eos_token_id": 0}
    more |= {"tokenizer__ggml__eot_token_id": 4, "tokenizer__ggml__merges": ["a b"]}
    source = GgufDirectory(MemoryStore({NAME: gguf_file(metadata(**more), float_tensors())}), NAME)
    generation = json.loads(source.read("generation_config.json", max_bytes=1 << 20)[0])
    assert generation["eos_token_id"] == [0, 5]


@pytest.mark.parametrize(("factor", "high"), [(32.0, 4.0), (16.0, 1.0)], ids=["llama 3", "llama 4"])
def test_stretched_frequencies_of_llama_are_recognised(factor: float, high: float) -> None:
    head_dim = HIDDEN // HEADS
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    scaling["original_max_position_embeddings"] = 8192
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters={**scaling, "rope_theta": 500000.0}
    )
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    divisors = (plain / stretched.numpy()).astype("<f4")
    tensors = [RawTensor("rope_freqs.weight", (head_dim // 2,), 0, divisors.tobytes()), *float_tensors()]
    store = MemoryStore({NAME: gguf_file(metadata(llama__rope__freq_base=500000.0), tensors)})
    found = json.loads(GgufDirectory(store, NAME).read("config.json", max_bytes=1 << 20)[0])
    assert found["rope_scaling"] == scaling
    assert found["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("name", "keeps", "is_larger"),
    [("Q4_1", Keeps.FLOATS, True), ("Q4_1", Keeps.BLOCKS, False), ("F32", Keeps.BLOCKS, False)],
)
def test_sizes_are_compared_with_the_file_and_a_larger_artifact_is_not_advised(
    name: str, keeps: Keeps, is_larger: bool
) -> None:
    more = [f"piece{number}" for number in range(6000)]  # so that weights are most of the file
    vocabulary = {
        "tokenizer__ggml__tokens": [*PIECES, *more],
        "tokenizer__ggml__token_type": [*KINDS, *[1] * len(more)],
    }
    tensors = tensors_of(name, vocab_size=len(PIECES) + len(more))
    content = gguf_file(metadata(**vocabulary), tensors)
    result = pack(GgufDirectory(MemoryStore({NAME: content}), NAME, keeps=keeps), MemoryStore())
    assert result.source_bytes == len(content)
    assert (result.stored_bytes > len(content)) is is_larger
    assert result.is_larger_than_file is is_larger
    assert ("`teneral serve` takes it from any store" in result.render()) is is_larger
    assert result.render().startswith(f"packed {format_bytes(len(content))} into ")
