"""Groups come in forward order, and what is used as one matrix lies together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.loader.format.layout import group_tensors, is_expert, is_stacked

LLAMA_LAYER = """
input_layernorm.weight
self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight
self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias
self_attn.q_norm.weight self_attn.k_norm.weight
self_attn.o_proj.weight
post_attention_layernorm.weight
mlp.gate_proj.weight mlp.up_proj.weight
mlp.down_proj.weight
"""

LAYERS_IN_FORWARD_ORDER = {
    "llama, mistral, qwen": ("model.layers.0.", LLAMA_LAYER),
    "gemma": (
        "model.layers.0.",
        "input_layernorm.weight self_attn.q_proj.weight self_attn.o_proj.weight "
        "post_attention_layernorm.weight pre_feedforward_layernorm.weight mlp.gate_proj.weight "
        "mlp.down_proj.weight post_feedforward_layernorm.weight",
    ),
    "mixtral": (
        "model.layers.0.",
        "input_layernorm.weight self_attn.q_proj.weight post_attention_layernorm.weight "
        "block_sparse_moe.gate.weight",
    ),
    "experts in one tensor": (
        "model.layers.0.",
        "self_attn.o_proj.weight mlp.router.weight mlp.router.bias mlp.experts.gate_up_proj_bias "
        "mlp.experts.down_proj_bias",
    ),
    "latent attention": (
        "model.layers.0.",
        "input_layernorm.weight self_attn.q_a_proj.weight self_attn.kv_a_proj_with_mqa.weight "
        "self_attn.q_a_layernorm.weight self_attn.kv_a_layernorm.weight self_attn.q_b_proj.weight "
        "self_attn.kv_b_proj.weight self_attn.o_proj.weight",
    ),
    "quantised": (
        "model.layers.0.",
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.q_proj.weight_scale "
        "self_attn.k_proj.weight_scale self_attn.o_proj.weight self_attn.o_proj.weight_scale",
    ),
    "bert": (
        "bert.encoder.layer.0.",
        "attention.self.query.weight attention.self.key.weight attention.self.value.weight "
        "attention.self.query.bias attention.self.key.bias attention.self.value.bias "
        "attention.output.dense.weight attention.output.dense.bias attention.output.LayerNorm.weight "
        "attention.output.LayerNorm.bias intermediate.dense.weight intermediate.dense.bias "
        "output.dense.weight output.dense.bias output.LayerNorm.weight output.LayerNorm.bias",
    ),
    "gpt2": (
        "h.0.",
        "ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias "
        "ln_2.weight ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias "
        "attn.masked_bias",
    ),
    "t5 decoder": (
        "decoder.block.0.",
        "layer.0.layer_norm.weight layer.0.SelfAttention.q.weight layer.0.SelfAttention.k.weight "
        "layer.0.SelfAttention.v.weight layer.0.SelfAttention.o.weight layer.1.layer_norm.weight "
        "layer.1.EncDecAttention.q.weight layer.1.EncDecAttention.o.weight layer.2.layer_norm.weight "
        "layer.2.DenseReluDense.wi_0.weight layer.2.DenseReluDense.wi_1.weight "
        "layer.2.DenseReluDense.wo.weight",
    ),
    "whisper decoder": (
        "model.decoder.layers.0.",
        "self_attn_layer_norm.weight self_attn.q_proj.weight self_attn.k_proj.weight "
        "self_attn.out_proj.weight "
        "encoder_attn_layer_norm.weight encoder_attn.q_proj.weight encoder_attn.k_proj.weight "
        "encoder_attn.out_proj.weight final_layer_norm.weight fc1.weight fc2.weight",
    ),
    "torch.nn": (
        "encoder.layers.0.",
        "norm1.weight self_attn.in_proj_weight self_attn.in_proj_bias self_attn.out_proj.weight norm2.weight "
        "linear1.weight linear1.bias linear2.weight",
    ),
    "unknown names come last": (
        "layers.0.",
        "self_attn.q_proj.weight mlp.down_proj.weight zebra.weight aardvark.temperature zebra.bias",
    ),
}  # fmt: skip


def grouped(*names: str) -> dict[str, list[str]]:
    """Given in the reverse of an alphabetical order, which no model runs in."""
    return dict(group_tensors(dict.fromkeys(sorted(names, reverse=True), (1,))))


@pytest.mark.parametrize("family", LAYERS_IN_FORWARD_ORDER)
def test_a_layer_lies_in_the_order_in_which_it_runs(family: str) -> None:
    prefix, order = LAYERS_IN_FORWARD_ORDER[family]
    names = [prefix + rest for rest in order.split()]
    if family == "unknown names come last":
        assert grouped(*names)["layers.0"][:2] == names[:2]
    else:
        assert grouped(*names) == {"layers.0": names}


def test_a_decoder_is_embedding_layers_by_number_and_head() -> None:
    layers = [f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1, 2, 9, 10, 11)]
    groups = grouped("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight", *layers)
    assert list(groups) == ["embed", *(f"layers.{number}" for number in (0, 1, 2, 9, 10, 11)), "head"]
    assert groups["embed"] == ["model.embed_tokens.weight"]
    assert groups["head"] == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("embed", "head"),
    [
        ("wte.weight wpe.weight", "ln_f.weight"),
        ("word_embeddings.weight word_embeddings_layernorm.weight", "ln_f.bias"),
        ("gpt_neox.embed_in.weight", "embed_out.weight gpt_neox.final_layer_norm.weight"),
        ("tok_embeddings.weight", "norm.weight output.weight"),
        ("embeddings.word_embeddings.weight embeddings.LayerNorm.bias", "pooler.dense.weight cls.bias"),
        ("patch_embed.norm.weight cls_token norm_pre.weight", "norm.weight head.weight fc.bias"),
        ("vision_model.pre_layrnorm.weight", "vision_model.post_layernorm.weight visual_projection.weight"),
        ("model.rotary_emb.inv_freq mysterious.thing", "score.weight qa_outputs.bias"),
        (
            "model.embed_tokens_per_layer.weight model.per_layer_model_projection.weight "
            "model.per_layer_projection_norm.weight",
            "model.norm.weight",
        ),
        ("model.altup_projections.0.weight", "model.norm.weight model.altup_unembed_projections.2.weight"),
    ],
)  # fmt: skip
def test_tensors_outside_layers_are_needed_first_or_last(embed: str, head: str) -> None:
    groups = grouped(*embed.split(), *head.split(), "layers.0.fc1.weight")
    assert {name: sorted(members) for name, members in groups.items() if name != "layers.0"} == {
        "embed": sorted(embed.split()),
        "head": sorted(head.split()),
    }


def test_norms_stand_where_they_run() -> None:
    groups = grouped(
        "embeddings.LayerNorm.weight", "embeddings.position_embeddings.weight", "a_head.weight", "norm.weight"
    )
    assert groups["embed"] == ["embeddings.position_embeddings.weight", "embeddings.LayerNorm.weight"]
    assert groups["head"] == ["norm.weight", "a_head.weight"]


def test_an_encoder_runs_before_its_decoder_and_ends_with_its_norm() -> None:
    groups = grouped(
        "shared.weight",
        "decoder.block.0.layer.0.SelfAttention.q.weight",
        "decoder.final_layer_norm.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.block.1.layer.0.SelfAttention.q.weight",
        "encoder.final_layer_norm.weight",
        "lm_head.weight",
    )
    assert list(groups) == ["embed", "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "head"]
    assert groups["encoder.layers.1"][-1] == "encoder.final_layer_norm.weight"
    assert groups["head"] == ["decoder.final_layer_norm.weight", "lm_head.weight"]


def test_a_picture_is_seen_before_it_is_talked_about() -> None:
    groups = grouped(
        "language_model.model.layers.0.mlp.up_proj.weight",
        "multi_modal_projector.linear_1.weight",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
    )
    assert list(groups) == [
        "embed",
        "vision_tower.vision_model.encoder.layers.0",
        "language_model.model.layers.0",
    ]


def test_a_tower_ends_with_its_norm_and_needs_nothing_of_the_head() -> None:
    groups = grouped(
        "lm_head.weight",
        "model.connector.modality_projection.proj.weight",
        "model.text_model.embed_tokens.weight",
        "model.text_model.layers.0.mlp.up_proj.weight",
        "model.text_model.norm.weight",
        "model.vision_model.embeddings.patch_embedding.weight",
        "model.vision_model.encoder.layers.0.mlp.fc1.weight",
        "model.vision_model.encoder.layers.1.mlp.fc1.weight",
        "model.vision_model.post_layernorm.weight",
    )
    assert list(groups) == [
        "embed",
        "vision_model.encoder.layers.0",
        "vision_model.encoder.layers.1",
        "text_model.layers.0",
        "head",
    ]
    assert "model.connector.modality_projection.proj.weight" in groups["embed"]
    assert groups["vision_model.encoder.layers.1"][-1] == "model.vision_model.post_layernorm.weight"
    assert groups["head"] == ["model.text_model.norm.weight", "lm_head.weight"]


def test_stacks_that_differ_only_in_their_own_name_keep_it() -> None:
    groups = grouped("unet.down_blocks.0.conv.weight", "unet.up_blocks.0.conv.weight")
    assert list(groups) == ["unet.down_blocks.0", "unet.up_blocks.0"]


@pytest.mark.parametrize("module", ["block_sparse_moe", "mlp"])
def test_each_expert_has_a_group_behind_its_layer(module: str) -> None:
    weights = [
        f"layers.{layer}.{module}.experts.{expert}.{name}.weight"
        for layer in (0, 1)
        for expert in (2, 10)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    own = [f"layers.{layer}.{module}.gate.weight" for layer in (0, 1)]
    groups = grouped(*weights, *own, "layers.1.mlp.shared_expert.up_proj.weight")
    assert list(groups) == [
        "layers.0", "layers.0.experts.2", "layers.0.experts.10",
        "layers.1", "layers.1.experts.2", "layers.1.experts.10",
    ]  # fmt: skip
    assert groups["layers.0.experts.10"] == weights[3:6], "gate and up are neighbours"
    assert [name for name in groups if is_expert(name)] == [name for name in groups if "experts" in name]


@pytest.mark.parametrize("module", ["mlp.experts", "experts"])
def test_experts_of_one_tensor_have_a_group_behind_their_layer(module: str) -> None:
    names = [f"layers.0.{module}.{name}_proj" for name in ("gate_up", "down")]
    stacked = [f"{name}_{kind}" for name in names for kind in ("blocks", "scales")]
    groups = grouped(*stacked, *(f"{name}_bias" for name in names), "layers.0.mlp.router.weight")
    assert list(groups) == ["layers.0", "layers.0.experts"]
    assert sorted(groups["layers.0.experts"]) == sorted(stacked)
    assert is_expert("layers.0.experts")
    assert is_stacked("layers.0.experts")
    assert not is_stacked("layers.0.experts.1")
    assert list(grouped(*names)) == ["layers.0.experts"]


def test_granites_experts_have_one_too() -> None:
    stacked = [f"layers.0.block_sparse_moe.{name}_linear.weight" for name in ("input", "output")]
    own = [f"layers.0.shared_mlp.{name}_linear.weight" for name in ("input", "output")]
    groups = grouped(*stacked, *own, "layers.0.block_sparse_moe.router.layer.weight")
    assert list(groups) == ["layers.0", "layers.0.experts"]
    assert sorted(groups["layers.0.experts"]) == sorted(stacked)


def test_an_experts_scales_are_with_its_weights() -> None:
    groups = grouped("layers.0.mlp.experts.1.w2.weight", "layers.0.mlp.experts.1.w2.weight_scale")
    assert list(groups) == ["layers.0.experts.1"]


@pytest.mark.parametrize(
    "group", ["embed", "layers.1", "layers.experts", "experts.1", "layers.experts.1", "layers.0.experts.x"]
)
def test_other_groups_are_no_experts(group: str) -> None:
    assert not is_expert(group)


def test_blocks_within_a_layer_stay_in_it() -> None:
    groups = grouped("layers.3.blocks.0.fc1.weight", "layers.3.blocks.11.fc1.weight", "layers.3.norm1.weight")
    assert list(groups) == ["layers.3"]


def test_no_tensors_make_no_groups() -> None:
    assert group_tensors({}) == []


WORDS = st.sampled_from(
    ["model", "layers", "layer", "h", "blocks", "0", "7", "007", "9" * 30, "decoder", "encoder", "é", "",
     "self_attn", "cross_attn", "q_proj", "weight", "bias", "norm", "embed", "lm_head", "experts"]
)  # fmt: skip
NAMES = st.lists(st.one_of(st.lists(WORDS, max_size=7).map(".".join), st.text(max_size=12)), unique=True)


@given(names=NAMES, data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_name_stands_in_one_group_wherever_it_was_given(names: list[str], data: st.DataObject) -> None:
    groups = group_tensors(dict.fromkeys(names, ()))
    assert sorted(name for _, members in groups for name in members) == sorted(names)
    assert len({label for label, _ in groups}) == len(groups)
    assert all(members for _, members in groups)
    shuffled = data.draw(st.permutations(names))
    assert group_tensors(dict.fromkeys(shuffled, ())) == groups
