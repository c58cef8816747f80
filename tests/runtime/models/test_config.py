"""config.json from anywhere: what is meant is read, what is not is refused by the name of its key."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.runtime.backends.torch.layers import activation
from teneral.runtime.errors import ModelError
from teneral.runtime.models import spec
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.encoder_config import EncoderConfig, is_encoder
from teneral.runtime.models.fields import ACTIVATIONS
from teneral.runtime.models.rope_config import RopeType

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
ROBERTA = {**BERT, "model_type": "roberta", "architectures": ["RobertaModel"], "max_position_embeddings": 514}


def without(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in keys}


# -- decoders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", -1),
        ("vocab_size", 1 << 40),
        ("vocab_size", 10**4000),
        ("vocab_size", "320"),
        ("vocab_size", 320.0),
        ("vocab_size", True),
        ("vocab_size", [320]),
        ("hidden_size", 0),
        ("hidden_size", 66),
        ("hidden_size", 8),
        ("intermediate_size", {}),
        ("num_hidden_layers", 100_000),
        ("num_attention_heads", -4),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 8),
        ("num_key_value_heads", 0),
        ("head_dim", 3),
        ("head_dim", 1 << 20),
        ("head_dim", 15),
        ("max_position_embeddings", 1 << 40),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", math.inf),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", "1e-6"),
        ("hidden_act", "mish"),
        ("hidden_act", 7),
        ("attention_bias", "yes"),
        ("mlp_bias", 1),
        ("tie_word_embeddings", "true"),
        ("rope_theta", math.nan),
        ("rope_theta", 0.0),
        ("rope_theta", 10**400),
        ("partial_rotary_factor", 2.0),
        ("partial_rotary_factor", 0.0),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", "linear"),
        ("rope_scaling", []),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [1]),
    ],
)
def test_a_decoders_wrong_value_is_refused_by_its_key(key, value):
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_json({**LLAMA, key: value})

    assert key in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    ],
)  # fmt: skip
def test_a_decoders_missing_key_is_named(key):
    with pytest.raises(ModelError, match=f"has no {key}"):
        DecoderConfig.from_json(without(LLAMA, key))


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "proportional", "factor": 2.0}, "proportional"),
        ({"rope_type": "longrope", "factor": 2.0}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [True] * 8, "long_factor": [1.0] * 8}, "short_factor"),
        ({"type": "mrope"}, "mrope"),
        ({"rope_type": 5}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": math.nan}, "factor"),
        ({"rope_type": "linear", "factor": -2.0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0},
            "high_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 0}, "original_max"),
        ({"rope_type": "yarn", "factor": 8.0, "beta_fast": "x"}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 8.0, "attention_factor": math.inf}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 8.0, "truncate": 1}, "truncate"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_wrong_rope_is_refused_by_its_key(spelling, rope, named):
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_json({**LLAMA, spelling: rope})

    assert named in caught.value.message


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "parameters",
    [{"rope_type": "default", "rope_theta": 1e4}, {**YARN, "factor": 4.0}, {"rope_theta": 1e4}, {}],
)
def test_two_spellings_of_a_rope_that_differ_are_refused(parameters):
    both = {**LLAMA, "rope_parameters": parameters, "rope_scaling": YARN}
    with pytest.raises(ModelError, match="contradict each other"):
        DecoderConfig.from_json(both)


@pytest.mark.parametrize("scaling", [YARN, None, {}, {**YARN, "type": "yarn"}])
def test_two_spellings_of_a_rope_that_agree_are_one(scaling):
    parameters = {**YARN, "rope_theta": 5e5}
    config = DecoderConfig.from_json({**LLAMA, "rope_parameters": parameters, "rope_scaling": scaling})
    assert config == DecoderConfig.from_json({**LLAMA, "rope_parameters": parameters})


def test_an_unknown_rope_type_is_refused_with_the_supported_ones():
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_json({**LLAMA, "rope_scaling": {"rope_type": "proportional"}})

    assert all(kind in caught.value.hint for kind in RopeType if kind is not RopeType.PROPORTIONAL)


@pytest.mark.parametrize(
    "data",
    [
        {**LLAMA, "model_type": "gptj"},
        {**LLAMA, "architectures": ["LlamaForTokenClassification"]},
        {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
        {**LLAMA, "model_type": 3},
        without(LLAMA, "model_type", "architectures"),
        {**without(LLAMA, "model_type"), "architectures": ["GPTJForCausalLM"]},
        {**LLAMA, "model_type": "x" * 100_000},
        {},
    ],
)
@pytest.mark.parametrize("read", [DecoderConfig.from_json, is_encoder])
def test_an_unknown_architecture_is_refused_with_the_supported_ones(read, data):
    with pytest.raises(ModelError) as caught:
        read(data)

    assert "LlamaForCausalLM" in caught.value.hint or "llama" in caught.value.hint
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("data", [[], None, "llama", 7])
def test_a_config_that_is_no_object_is_refused(data):
    with pytest.raises(ModelError, match=r"config\.json"):
        is_encoder(data)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_encoders_are_refused(key):
    with pytest.raises(ModelError, match="quantised") as caught:
        EncoderConfig.from_json({**BERT, key: {"quant_method": "gptq", "bits": 4}})
    assert key in caught.value.message


def test_the_architecture_alone_says_the_family():
    assert DecoderConfig.from_json(without(QWEN2, "model_type")).family == "qwen2"
    assert DecoderConfig.from_json(without(QWEN2, "architectures")).family == "qwen2"


def test_null_counts_as_absent():
    config = DecoderConfig.from_json({**LLAMA, "head_dim": None, "rope_scaling": None, "hidden_act": None})

    assert config == DecoderConfig.from_json(LLAMA)


def test_both_spellings_of_rope_mean_the_same():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    version_4 = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}
    version_5 = {**LLAMA, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 5e5}}

    config = DecoderConfig.from_json(version_4)

    assert config == DecoderConfig.from_json(version_5)
    assert (config.rope.theta, config.rope.factor, config.rope.original_max_positions) == (5e5, 8.0, 64)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            2048,
        ),
    ],
)
def test_the_context_follows_the_ropes_stretching(rope, expected):
    assert DecoderConfig.from_json({**LLAMA, "rope_scaling": rope}).max_context == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({**LLAMA, "sliding_window": 7}, (None, None)),
        (MISTRAL, (4096, 4096)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({**MISTRAL, "sliding_window": 7}, (7, 7)),
        ({**MISTRAL, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}, (None, 7)),
        ({**QWEN2, "sliding_window": 7}, (None, None)),
        ({**QWEN2, "sliding_window": 7, "use_sliding_window": True}, (None, None)),
        ({**QWEN2, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7)),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (
            {
                **QWEN2,
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (7, None),
        ),
    ],
)
def test_each_layer_has_its_window(data, expected):
    assert DecoderConfig.from_json(data).windows == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": "full_attention"},
        {"layer_types": [["full_attention"], ["full_attention"]]},
        {"sliding_window": -1, "use_sliding_window": True},
        {"sliding_window": 0.5},
    ],
)
def test_invalid_windows_are_refused(changes):
    with pytest.raises(ModelError, match=next(iter(changes))):
        DecoderConfig.from_json({**QWEN2, **changes})


def test_every_activation_that_is_accepted_can_be_computed():
    assert all(spec.activation_of(name) for name in (*ACTIVATIONS, "tanh"))
    assert all(callable(activation(name)) for name in spec.Activation)


# -- encoders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 65),
        ("max_position_embeddings", 0),
        ("type_vocab_size", 0),
        ("layer_norm_eps", math.nan),
        ("hidden_act", "xielu"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
    ],
)
def test_an_encoders_wrong_value_is_refused_by_its_key(key, value):
    with pytest.raises(ModelError) as caught:
        EncoderConfig.from_json({**BERT, key: value})

    assert key in caught.value.message


def test_a_classifier_of_tokens_is_no_encoder():
    with pytest.raises(ModelError, match="BertForTokenClassification"):
        EncoderConfig.from_json({**BERT, "architectures": ["BertForTokenClassification"]})


def test_a_classifier_has_its_labels_in_the_order_of_its_scores():
    classifier = {**BERT, "architectures": ["BertForSequenceClassification"]}
    assert EncoderConfig.from_json(classifier).labels == ("LABEL_0", "LABEL_1")
    names = {"1": "b", "0": "a", "2": "c"}
    assert EncoderConfig.from_json({**classifier, "id2label": names}).labels == ("a", "b", "c")
    assert EncoderConfig.from_json({**BERT, "id2label": names}).labels == ()


@pytest.mark.parametrize("names", [{}, [], "ab", {"0": 1}, {"1": "a"}, {"0": "a", "x": "b"}])
def test_labels_that_are_no_names_of_scores_are_refused(names):
    with pytest.raises(ModelError, match="id2label"):
        EncoderConfig.from_json(
            {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": names}
        )


def test_robertas_positions_leave_out_those_of_padding():
    config = EncoderConfig.from_json(ROBERTA)

    assert (config.position_offset, config.max_tokens) == (2, 512)


def test_a_position_table_without_room_for_a_token_is_refused():
    with pytest.raises(ModelError, match="max_position_embeddings"):
        EncoderConfig.from_json({**ROBERTA, "max_position_embeddings": 2})


def test_the_shortest_of_the_stated_lengths_counts():
    assert EncoderConfig.from_json(BERT, sentence_bert={"max_seq_length": 128}).max_tokens == 128
    assert EncoderConfig.from_json(BERT, sentence_bert={"max_seq_length": 9_999}).max_tokens == 512
    assert EncoderConfig.from_json(BERT, sentence_bert={"max_seq_length": None}).max_tokens == 512


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": "", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("listed", "pooling", "expected"),
    [
        (None, None, ("mean", True)),
        (modules("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True}, ("mean", False)),
        (
            modules("Transformer", "Pooling", "Normalize"),
            {
                "pooling_mode_cls_token": True,
                "pooling_mode_mean_tokens": False,
                "pooling_mode_max_tokens": False,
            },
            ("cls", True),
        ),
        (modules("Transformer", "Pooling"), {"pooling_mode": "cls"}, ("cls", False)),
        (modules("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, ("max", False)),
        (modules("Transformer", "Pooling"), {"pooling_mode_lasttoken": True}, ("lasttoken", False)),
    ],
)
def test_pooling_is_what_the_sentence_transformers_files_say(listed, pooling, expected):
    config = EncoderConfig.from_json(BERT, modules=listed, pooling=pooling)

    assert (config.pooling, config.normalize) == expected


@pytest.mark.parametrize(
    ("listed", "pooling", "named"),
    [
        (modules("Transformer", "Pooling", "Asym"), None, "Asym"),
        (modules("Transformer", "Pooling", "Dense"), None, "path"),
        (modules("Transformer", "Pooling", "Normalize", "Dense"), None, "Normalize must be the last"),
        (modules("Pooling", "Transformer"), None, "Transformer must come first"),
        ({"idx": 0}, None, "modules.json"),
        (["Transformer"], None, "modules.json"),
        ([{"idx": 0}], None, "type"),
        ([{"type": 7}], None, "type"),
        (None, {"pooling_mode": ["mean", "max"]}, "pooling_mode"),
        (None, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "2 pooling modes"),
        (None, {"pooling_mode_mean_tokens": False}, "0 pooling modes"),
        (None, {"pooling_mode_mean_tokens": "yes"}, "pooling_mode_mean_tokens"),
        (None, {"pooling_mode": "median"}, "median"),
        (None, [], "1_Pooling/config.json"),
    ],
)
def test_pooling_that_is_not_supported_is_refused_by_name(listed, pooling, named):
    with pytest.raises(ModelError) as caught:
        EncoderConfig.from_json(BERT, modules=listed, pooling=pooling)

    assert named in caught.value.message


# -- anything ----------------------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), base=st.sampled_from([LLAMA, QWEN2, MISTRAL, BERT, ROBERTA]), value=anything)
def test_any_value_in_any_place_gives_a_config_or_a_model_error(data, base, value):
    more = ["rope_scaling", "rope_parameters", "sliding_window", "layer_types", "head_dim", "pad_token_id"]
    changed = {**base, data.draw(st.sampled_from([*base, *more])): value}
    try:
        config = (EncoderConfig if is_encoder(changed) else DecoderConfig).from_json(changed)
    except ModelError:
        return
    assert 1 <= config.num_layers <= 1024


def test_reading_a_config_imports_no_torch():
    code = (
        "import sys, json; from teneral.runtime.models.decoder_config import DecoderConfig; "
        "DecoderConfig.from_json(json.loads(sys.argv[1])); "
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(LLAMA)], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
