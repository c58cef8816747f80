"""Layer groups, places in slabs, and the stretches that parts are made of: from names, dtypes and
shapes.

The order inside a group becomes the order in memory: q, k and v lie next to each other, and so do
gate and up, so that a model can take them as one matrix without a copy. No name is an error: one
that says nothing only comes a little earlier or later than it might. The result depends on the
names, not on their order.

Pure functions. The packer and the reader of plain safetensors share them, so a model has the same
slabs whichever way it comes. Nothing here knows files, planes or codecs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, takewhile
from typing import NamedTuple

from .manifest import (
    FRAME_ELEMENTS,
    MAX_PART_DECODED_BYTES,
    MAX_PART_ELEMENTS,
    MAX_PART_SEGMENTS,
    Encoding,
    Group,
    Tensor,
    align,
    place_tensors,
    tensor_bytes,
)

EMBED, HEAD = "embed", "head"

# What runs in a layer, step after step. Tensors of one step, in one module, are neighbours: their
# weights in the order of the step's entries, then their biases. An entry lists the names that one
# thing goes by.
_ATTENTION_STEPS = (
    (
        "input_layernorm attention_norm attn_norm layer_norm self_attn_layer_norm encoder_attn_layer_norm "
        "sa_layer_norm layernorm_before ln_1 ln_attn norm1 norm_1 layer_norm1",
    ),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_a_layernorm", "kv_a_layernorm"),
    (
        "q q_proj q_b_proj q_lin wq query to_q",
        "k k_proj kv_b_proj k_lin wk key to_k",
        "v v_proj v_lin wv value to_v",
        "qkv qkv_proj Wqkv query_key_value c_attn in_proj W_pack",
    ),
    ("q_norm q_layernorm", "k_norm k_layernorm"),
    (
        "o o_proj out_proj out_lin wo attn.c_proj attn.proj attention.dense self_attention.dense "
        "attention.output.dense crossattention.output.dense",
    ),
    ("attention.output.LayerNorm crossattention.output.LayerNorm",),
)
_MLP_STEPS = (
    (
        "post_attention_layernorm",
        "pre_feedforward_layernorm ffn_norm layernorm_after final_layer_norm ln_2 norm2 norm_2 layer_norm2",
    ),
    ("mlp.gate block_sparse_moe.gate feed_forward.gate router mlp.router shared_expert_gate",),
    (
        "gate_proj w1 wi_0",
        "up_proj w3 wi wi_1 fc1 c_fc lin1 linear1 intermediate.dense dense_h_to_4h",
        "gate_up_proj",
    ),
    ("down_proj w2 fc2 mlp.c_proj lin2 linear2 output.dense dense_4h_to_h DenseReluDense.wo",),
    ("post_feedforward_layernorm output_layer_norm output.LayerNorm",),
)


def _index_steps(steps: tuple[tuple[str, ...], ...], first: int) -> dict[str, tuple[int, int]]:
    """Name → (number of its step, place in the step)."""
    return {
        name: (first + number, place)
        for number, step in enumerate(steps)
        for place, names in enumerate(step)
        for name in names.split()
    }


_CROSS_ATTENTION_AT = len(_ATTENTION_STEPS)  # it runs the same steps again, after self-attention
_MLP_AT = 2 * len(_ATTENTION_STEPS)
_UNKNOWN = _MLP_AT + len(_MLP_STEPS), 0
_STEPS = _index_steps(_ATTENTION_STEPS, 0) | _index_steps(_MLP_STEPS, _MLP_AT)
_MAX_STEP_WORDS = 3
_MAX_STACK_DEPTH = 8
_MAX_WORDS = 32  # of a name are looked at; real names have up to 15

_CROSS_ATTENTION = re.compile(r"encoder_attn|cross_?att|EncDec")
_CONTAINER = re.compile(r"(?:\w+_)?(?:layers?|blocks?|resblocks|h)")
_EARLY_STACK = re.compile(r"vision|visual|image|audio|encoder|down_blocks")
_LATE_STACK = re.compile(r"decoder|up_blocks")
_NUMBER = re.compile(r"([0-9]+)")
_EXPERTS = re.compile(r"(.*\.[0-9]+)\.experts(\.[0-9]+)?(?:-[0-9]+)?", re.DOTALL)
# All experts of a layer, one in each row. Biases are small, and stay in their layer.
_STACKED = re.compile(
    r"(?:.*\.)?(?:experts\.(?:gate_up|down)_proj(?:_blocks|_scales)?"
    r"|block_sparse_moe\.(?:input|output)_linear\.weight)",
    re.DOTALL,
)
# A connector is small, and between an encoder's last layer and a decoder's first.
_STEM = re.compile(
    r"(?<!un)emb(?!ed_out)|patch|stem|ln_pre|norm_pre|pre_?la?ye?rnorm|connector|\bper_layer_", re.IGNORECASE
)
_NORM = re.compile(r"norm|\bln_", re.IGNORECASE)
_OUTPUT = re.compile(
    r"head|embed_out|unemb|pooler|classifier|score|logits|qa_outputs|_projection\b|proj_out|\bcls\b|^output\b|^fc\b"
)

_SortKey = tuple[object, ...]


class _LayerPlace(NamedTuple):
    """The place of a layer's tensor in its model: "model.layers", 3, "mlp.up_proj.weight"."""

    stack: str
    number: int
    rest: str


def group_tensors(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, list[str]]]:
    """Groups in forward order, each with its tensors in slab order; every name stands in exactly
    one.

    They are called "embed", "layers.0", "layers.1", … and "head"; where a model has several stacks
    of layers, "encoder.layers.0" and so on. Each expert of a mixture has a group of its own behind
    its layer's: "layers.0.experts.0". Tensors that hold all experts of a layer have one:
    "layers.0.experts". Groups without tensors are left out.
    """
    layers: dict[tuple[str, int], list[str]] = defaultdict(list)
    stacked: dict[tuple[str, int], list[str]] = defaultdict(list)
    experts: dict[tuple[str, int], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    last_number: dict[str, int] = defaultdict(int)  # by stack
    others: list[str] = []
    for name in shapes:
        if place := _locate(name):
            expert = _expert_number(place)
            of_layer = (place.stack, place.number)
            if _STACKED.fullmatch(place.rest):
                stacked[of_layer].append(name)
            else:
                (layers[of_layer] if expert is None else experts[of_layer][expert]).append(name)
            last_number[place.stack] = max(last_number[place.stack], place.number)
        else:
            others.append(name)
    stacks = sorted(last_number, key=_stack_key)
    labels = _label_stacks(stacks)
    # "vision_model.post_layernorm" is behind "vision_model.encoder.layers", too.
    ended_by = {stack.rpartition(".")[0].removesuffix(".encoder"): stack for stack in stacks[:-1]}
    ended_by |= {stack.rpartition(".")[0]: stack for stack in stacks[:-1]}
    embed: list[str] = []
    head: list[str] = []
    for name in others:
        is_inner = _NORM.search(name) or _OUTPUT.search(name)
        if _STEM.search(name) or not is_inner or _norms_positions(name, shapes):
            embed.append(name)
        elif stack := _find_ended_stack(name, ended_by):
            layers[stack, last_number[stack]].append(name)
        else:
            head.append(name)
    groups = [(EMBED, sorted(embed, key=lambda name: (bool(_NORM.search(name)), _natural(name))))]
    rank = {stack: index for index, stack in enumerate(stacks)}
    for stack, number in sorted({*layers, *stacked, *experts}, key=lambda layer: (rank[layer[0]], layer[1])):
        label = f"{labels[stack]}.{number}"
        groups.append((label, sorted(layers.get((stack, number), ()), key=_layer_key)))
        groups.append((f"{label}.experts", sorted(stacked.get((stack, number), ()), key=_layer_key)))
        for expert, names in sorted(experts.get((stack, number), {}).items()):
            groups.append((f"{label}.experts.{expert}", sorted(names, key=_layer_key)))
    groups.append((HEAD, sorted(head, key=lambda name: (not _NORM.search(name), _natural(name)))))
    return [(label, names) for label, names in groups if names]


def _norms_positions(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """True for the norm of a table of relative positions, which the first layer needs (DeBERTa)."""
    module, _, _ = name.rpartition(".LayerNorm.")
    return bool(module) and f"{module}.rel_embeddings.weight" in shapes


def _locate(name: str) -> _LayerPlace | None:
    """The outermost numbered layer that the tensor belongs to: nested blocks stay in theirs."""
    words = name.split(".", _MAX_WORDS)
    for index in range(1, len(words) - 1):
        if _is_number(words[index]) and _CONTAINER.fullmatch(words[index - 1]):
            return _LayerPlace(".".join(words[:index]), int(words[index]), ".".join(words[index + 1 :]))
    return None


def _expert_number(place: _LayerPlace) -> int | None:
    """The expert of a mixture that the tensor belongs to; None: it is the layer's own."""
    words = place.rest.split(".", _MAX_WORDS)
    for before, word in pairwise(words[:-1]):
        if before == "experts" and _is_number(word):
            return int(word)
    return None


def is_expert(group: str) -> bool:
    """True of the name of a group that holds one expert, or all of a layer: a step needs an expert only
    where a token has chosen it.
    """
    return layer_of(group) is not None


def is_stacked(group: str) -> bool:
    """True of the name of a group whose tensors hold all experts of a layer, one in each row."""
    found = _EXPERTS.fullmatch(group)
    return found is not None and found[2] is None


def layer_of(expert: str) -> str | None:
    """The name of the layer's group whose expert, or experts, have this one; None of other groups."""
    found = _EXPERTS.fullmatch(expert)
    return None if found is None else found[1]


def _stack_key(stack: str) -> _SortKey:
    """Encoders run before decoders."""
    rank = 2 if _LATE_STACK.search(stack) else 0 if _EARLY_STACK.search(stack) else 1
    return rank, _natural(stack)


def _label_stacks(stacks: list[str]) -> dict[str, str]:
    """Short names that tell the stacks apart: "layers", or "encoder.layers" and "decoder.layers"."""
    parents = {stack: stack.split(".")[:-1] for stack in stacks}
    # The words that the first and the last in order begin with, all begin with.
    ends = zip(min(parents.values(), default=[]), max(parents.values(), default=[]), strict=False)
    num_common = len(list(takewhile(lambda pair: pair[0] == pair[1], ends)))
    labels = {stack: ".".join([*words[num_common:], "layers"]) for stack, words in parents.items()}
    if len(set(labels.values())) == len(stacks):
        return labels
    return {stack: stack for stack in stacks}


def _find_ended_stack(name: str, ended_by: Mapping[str, str]) -> str | None:
    """The stack that this runs right after: "encoder.layers" for "encoder.norm.weight".

    `ended_by` has the stacks by the modules that they are in.
    """
    words = name.split(".", _MAX_STACK_DEPTH)[:-1]
    prefixes = (".".join(words[:depth]) for depth in range(len(words), 0, -1))
    return next((ended_by[prefix] for prefix in prefixes if prefix in ended_by), None)


def _layer_key(name: str) -> _SortKey:
    place = _locate(name)
    if place is None:  # the final norm of a stack
        return (float("inf"), _natural(name))
    module, kind = _split_kind(place.rest)
    words = module.split(".")
    # T5 numbers what runs in a layer: layer.0 is self-attention, the last one the MLP.
    sublayer = int(words[1]) if words[0] == "layer" and len(words) > 1 and _is_number(words[1]) else 0
    step, member = _find_step(words)
    if step < _CROSS_ATTENTION_AT and _CROSS_ATTENTION.search(module):
        step += _CROSS_ATTENTION_AT
    return sublayer, step, _natural(".".join(words[:-1])), kind, member, _natural(name)


def _split_kind(rest: str) -> tuple[str, tuple[bool, str]]:
    """The module that a tensor belongs to, and what it is there; weights sort before everything
    else.
    """
    for kind in ("weight", "bias"):
        for separator in "._":
            if rest.endswith(separator + kind):
                return rest[: -len(kind) - 1], (kind != "weight", kind)
    module, _, kind = rest.rpartition(".")
    if _find_step(rest.split(".")) != _UNKNOWN:  # a bare parameter, such as experts.gate_up_proj
        return rest, (False, "")
    return module, (True, kind)


def _find_step(words: list[str]) -> tuple[int, int]:
    """By the last words of a module's name; the longest run of them that is known decides."""
    for num_words in range(_MAX_STEP_WORDS, 0, -1):
        if found := _STEPS.get(".".join(words[-num_words:])):
            return found
    return _UNKNOWN


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _natural(name: str) -> _SortKey:
    """Under it "expert.10" comes after "expert.9"; only equal names have equal keys."""
    pieces = _NUMBER.split(name, _MAX_WORDS)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], name


FINE_PART_ELEMENTS = 1024 * 1024
MAX_FINE_PARTS = 256
MAX_CUT_ROWS = 512  # of a tensor; where there are more, several share parts

DtypeAndShape = tuple[str, tuple[int, ...]]


class Stretch(NamedTuple):
    """Elements [start, start + count) of a tensor."""

    tensor: Tensor
    start: int
    count: int  # type: ignore[assignment]  # shadows a method of tuples that is not used

    @property
    def offset_bytes(self) -> int:
        """Counted from the tensor's first byte."""
        return self.start * self.tensor.element_bytes

    @property
    def size_bytes(self) -> int:
        return self.count * self.tensor.element_bytes


def arrange_tensors(
    tensors: Mapping[str, DtypeAndShape],
    encoding_of: Callable[[str, str, tuple[int, ...]], Encoding],
    given: Iterable[tuple[str, Iterable[str]]] | None = None,
) -> tuple[tuple[Group, ...], tuple[Tensor, ...]]:
    """Groups in forward order, and all tensors, numbered group by group in slab order.

    `encoding_of` takes a tensor's name, dtype and shape. Groups that are `given` take the place of those that follow
    from the names; names without a tensor are left out.
    """
    if given is None:
        found = group_tensors({name: shape for name, (_, shape) in tensors.items()})
    else:
        found = [(group, [name for name in names if name in tensors]) for group, names in given]
    groups: list[Group] = []
    placed: list[Tensor] = []
    for group_index, (group_name, names) in enumerate((group, names) for group, names in found if names):
        offsets, slab_bytes = place_tensors([tensor_bytes(*tensors[name]) for name in names])
        first = len(placed)
        for name, offset in zip(names, offsets, strict=True):
            dtype, shape = tensors[name]
            encoding = encoding_of(name, dtype, shape)
            placed.append(Tensor(len(placed), name, dtype, shape, group_index, encoding, offset))
        groups.append(Group(group_index, group_name, tuple(range(first, len(placed))), slab_bytes))
    return tuple(groups), tuple(placed)


def fine_part_elements(tensors: Iterable[Tensor]) -> int:
    """How many elements a part should hold where parts had better be small: of embeddings, whose
    rows are asked for one by one, and of what comes last, since nothing hides the time that its
    decoding takes.

    A group of any size has some 256 of them at most, or the manifest would grow too long.
    """
    share = -(-sum(tensor.num_elements for tensor in tensors) // MAX_FINE_PARTS)
    wanted = max(FINE_PART_ELEMENTS, -(-share // FRAME_ELEMENTS) * FRAME_ELEMENTS)
    return min(wanted, MAX_PART_ELEMENTS)


def cut_parts(
    tensors: Iterable[Tensor], *, max_elements: int = MAX_PART_ELEMENTS
) -> Iterator[tuple[Stretch, ...]]:
    """The stretches of consecutive parts, each filled greedily with these tensors in order as far
    as a part may reach, and up to `max_elements`, at least a frame's.

    A tensor is cut only at multiples of `FRAME_ELEMENTS`, so that every part starts its own frames.
    Tensors without elements are in no part.
    """
    part: list[Stretch] = []
    room_elements, room_bytes = max_elements, MAX_PART_DECODED_BYTES
    for tensor in tensors:
        start = 0
        while start < tensor.num_elements:
            count = tensor.num_elements - start
            fitting = min(room_elements, room_bytes // tensor.element_bytes)
            if count > fitting:
                count = fitting - fitting % FRAME_ELEMENTS
            if count == 0 or len(part) == MAX_PART_SEGMENTS:
                yield tuple(part)
                part = []
                room_elements, room_bytes = max_elements, MAX_PART_DECODED_BYTES
                continue
            part.append(Stretch(tensor, start, count))
            start += count
            room_elements -= count
            room_bytes -= count * tensor.element_bytes
    if part:
        yield tuple(part)


def cut_group(
    group: str, tensors: Iterable[Tensor], *, max_elements: int = MAX_PART_ELEMENTS
) -> Iterator[tuple[Stretch, ...]]:
    """The stretches of the parts of a group's tensors: as `cut_rows` where it `is_stacked`, else as
    `cut_parts`.
    """
    return cut_rows(tensors) if is_stacked(group) else cut_parts(tensors, max_elements=max_elements)


def cut_rows(tensors: Iterable[Tensor]) -> Iterator[tuple[Stretch, ...]]:
    """The stretches of consecutive parts such that each row, an expert, can be read by itself.

    Cuts are at multiples of `FRAME_ELEMENTS`, as in `cut_parts`. So the frame in which two rows meet is
    a part of its own, which both need, and what lies between two such frames is one row's alone.
    """
    for tensor in tensors:
        if not tensor.num_elements:
            continue
        num_rows, end = tensor.shape[0], tensor.num_elements
        row_elements = end // num_rows
        cuts = {0, end}
        for row in range(0, num_rows, -(-num_rows // MAX_CUT_ROWS)):
            begin = row * row_elements
            cuts |= {begin - begin % FRAME_ELEMENTS, min(end, align(begin, FRAME_ELEMENTS))}
        most = min(MAX_PART_ELEMENTS, MAX_PART_DECODED_BYTES // tensor.element_bytes)
        for first, last in pairwise(sorted(cuts)):
            for start in range(first, last, most):
                yield (Stretch(tensor, start, min(most, last - start)),)
