"""Kernels compile without a device, and what was compiled is found, checked, and launched as it says."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest
import torch
from tests.support.load import patience_s

from teneral.runtime.backends.cuda import warm_up
from teneral.runtime.backends.cuda.compile import Compiler, compile_variant, count_parameters
from teneral.runtime.backends.cuda.launch import BinaryLauncher, LaunchError, parameters_for
from teneral.runtime.backends.cuda.library import INDEX, Binary, open_library
from teneral.runtime.backends.cuda.variants import (
    ModelShape,
    decode_stages,
    gate_variant,
    integer_variant,
    norm_variant,
    usual_variants,
    variants_of,
    why_not,
)

triton = pytest.importorskip("triton", reason="kernels are written in Triton, which is for Linux on x86_64")

# What a block may have on sm_86 and sm_89, the smallest of those meant.
SHARED_BYTES_OF_THE_SMALLEST = 99 << 10
LLAMA_8B = ModelShape(
    dtype="bf16",
    norm_dtype="bf16",
    hidden_size=4096,
    attended_size=4096,
    inner_size=14336,
    head_dim=128,
    rotary_dim=128,
    group=4,
    has_head_norms=False,
    activation="silu",
    block_size=16,
)


def with_shape(**changes) -> ModelShape:
    return ModelShape(**{**{name: getattr(LLAMA_8B, name) for name in ModelShape.__slots__}, **changes})


OTHERS = {
    "heads of 80, partly turned, in fp16": with_shape(
        dtype="fp16", norm_dtype="fp32", head_dim=80, rotary_dim=32, hidden_size=2560, activation="gelu"
    ),
    "heads of 256, with norms": with_shape(
        head_dim=256, rotary_dim=256, has_head_norms=True, group=2, activation="gelu_tanh"
    ),
    "fp32": with_shape(dtype="fp32", norm_dtype="fp32", head_dim=96, rotary_dim=96, activation="relu"),
}


@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 100))]
)
def test_all_of_a_models_kernels_compile_for_every_architecture(architecture):
    if architecture == 100 and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("this Triton knows no sm_100")
    for variant in variants_of(LLAMA_8B):
        binary, content = compile_variant(variant, architecture)
        assert content.startswith(b"\x7fELF")
        assert binary.shared_bytes <= SHARED_BYTES_OF_THE_SMALLEST, variant.key


@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 100))]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_integers_compile(architecture, bits):
    if architecture == 100 and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("this Triton knows no sm_100")
    for num_rows, group_size in ((1, 4096), (64, 32)):
        matrix = {"num_in": 4096, "num_out": 28_672, "group_size": group_size, "has_zero": bits == 4}
        variant = integer_variant("bf16", "bf16", bits=bits, num_rows=num_rows, **matrix)
        assert variant is not None
        binary, _ = compile_variant(variant, architecture)
        assert binary.shared_bytes <= SHARED_BYTES_OF_THE_SMALLEST, variant.key


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_other_shapes_compile(name):
    for variant in variants_of(OTHERS[name]):
        binary, _ = compile_variant(variant, 90)
        assert binary.shared_bytes <= SHARED_BYTES_OF_THE_SMALLEST, variant.key


def test_attention_of_one_token_comes_with_three_stages_and_with_five():
    stages = {each.num_stages for each in variants_of(LLAMA_8B) if each.kernel == "decode_attention"}
    assert stages == {3, 5}
    assert [decode_stages(architecture) for architecture in (80, 89, 90, 100)] == [3, 3, 5, 5]


def test_keys_tell_variants_apart():
    variants = {*usual_variants(), *(v for shape in OTHERS.values() for v in variants_of(shape))}
    assert len({variant.key for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"head_dim": 257}, "257"),
        ({"head_dim": 12}, "12"),
        ({"group": 65}, "65"),
        ({"hidden_size": 40_000}, "40000"),
        ({"activation": "swiglu"}, "swiglu"),
    ],
)
def test_a_missing_kernel_is_reported(changes, named):
    assert named in why_not(with_shape(**changes))
    assert why_not(LLAMA_8B) is None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The folder that the command has made, of one small model for sm_90."""
    folder = tmp_path_factory.mktemp("kernels")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "teneral.runtime.backends.cuda.compile", str(folder / "out")]
    result = subprocess.run(
        [*command, "--arch", "90", "--config", str(folder / "config.json")],
        capture_output=True,
        text=True,
        timeout=patience_s(110),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder / "out"


def test_what_was_compiled_is_found_by_its_architecture_and_its_variant(compiled):
    library, message = open_library(compiled, (9, 0))
    assert library is not None, message
    shape = with_shape(
        inner_size=512, attended_size=256, hidden_size=256, head_dim=64, rotary_dim=64, group=2
    )
    for variant in variants_of(shape):
        binary, content = library.find(variant)
        assert binary.key == variant.key
        assert content.startswith(b"\x7fELF")
    assert library.find(gate_variant(with_shape(activation="relu"))) is None
    for other in ((8, 0), (9, 1), (10, 0)):
        assert open_library(compiled, other) == (
            None,
            f"{compiled} has no kernels for sm_{other[0]}{other[1]}",
        )


def test_a_device_runs_what_was_compiled_for_an_older_one_of_its_kind(compiled, tmp_path):
    for architecture in (80, 86):
        (tmp_path / f"sm_{architecture}").mkdir()
        (tmp_path / f"sm_{architecture}" / INDEX).write_bytes((compiled / "sm_90" / INDEX).read_bytes())
    for capability, folder in (((8, 0), "sm_80"), ((8, 9), "sm_86"), ((8, 6), "sm_86")):
        library, _ = open_library(tmp_path, capability)
        assert library is not None
        assert library.folder.name == folder
    assert open_library(tmp_path, (9, 0))[0] is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda index: index.update(sources="0" * 16), "another version"),
        (lambda index: index.pop("binaries"), "binaries"),
        (lambda index: index["binaries"][0].update(key="../../x"), "is not a kernel"),
        (lambda index: index["binaries"][0].update(types=["*bf16", "char"]), "is not a kernel"),
        (lambda index: index["binaries"][0].update(num_parameters=99), "99 parameters"),
        (lambda index: index["binaries"][0].update(shared_bytes=1 << 30), "has invalid launch parameters"),
        (lambda index: index["binaries"][0].update(surprise=1), "surprise"),
    ],
)
def test_an_index_that_is_damaged_or_of_other_sources_is_not_used(compiled, tmp_path, damage, named):
    index = json.loads((compiled / "sm_90" / INDEX).read_text())
    damage(index)
    (tmp_path / "sm_90").mkdir()
    (tmp_path / "sm_90" / INDEX).write_text(json.dumps(index))
    library, message = open_library(tmp_path, (9, 0))
    assert library is None
    assert named in message


def test_no_folder_is_no_library(tmp_path):
    assert open_library(tmp_path / "none", (9, 0))[0] is None


def test_parameters_are_counted_behind_the_arguments_too():
    ptx = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 16 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .f32 kernel_param_2,
	.param .u64 .ptr .global .align 1 kernel_param_3
)
.reqntid 128
{ .reg .b32 %r<4>; ld.param.b32 %r1, [kernel_param_1]; }
"""
    assert count_parameters(ptx) == 4


class RecordingDriver:
    """Stands for libcuda: there is none here. Keeps what a launch hands over, read back through the addresses."""

    def __init__(self, types: list) -> None:
        self.types = types
        self.launches: list[tuple] = []
        self.loaded: list[str] = []

    def load(self, content, binary):
        self.loaded.append(binary.key)
        return ctypes.c_void_p(0x1234)

    def launch(self, function, x, y, z, bx, by, bz, shared, stream, parameters, extra):
        values = [kind.from_address(parameters[place]).value for place, kind in enumerate(self.types)]
        self.launches.append(((x, y, z), (bx, by, bz), shared, stream, values, extra))
        return 0


def test_a_launch_hands_over_what_the_kernel_takes(compiled, monkeypatch):
    library, _ = open_library(compiled, (9, 0))
    assert library is not None
    variant = norm_variant(with_shape(inner_size=512, attended_size=256, hidden_size=256), adds=True)
    word = ctypes.c_uint64
    num_scratch = library.binaries[variant.key].num_parameters - 5
    driver = RecordingDriver([word, word, word, word, ctypes.c_float, *[word] * num_scratch])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("S", (), {"cuda_stream": 77})())
    launch = BinaryLauncher([library], driver, torch.device("cuda:0"))
    launch.prepare([variant])
    tensors = [torch.zeros(64, dtype=torch.bfloat16) for _ in range(4)]

    launch(variant, (3,), *tensors, 0.5)

    binary = library.binaries[variant.key]
    [(grid, threads, shared, stream, values, extra)] = driver.launches
    assert (grid, threads) == ((3, 1, 1), (32 * binary.num_warps, 1, 1))
    assert (shared, stream, extra) == (binary.shared_bytes, 77, None)
    assert values == [*(tensor.data_ptr() for tensor in tensors), 0.5, *[0] * num_scratch]
    assert driver.loaded == [variant.key]


def test_what_lies_askew_or_was_not_compiled_is_not_launched(compiled, monkeypatch):
    library, _ = open_library(compiled, (9, 0))
    assert library is not None
    driver = RecordingDriver([])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("S", (), {"cuda_stream": 0})())
    launch = BinaryLauncher([library], driver, torch.device("cuda:0"))
    tensors = [torch.zeros(64, dtype=torch.bfloat16) for _ in range(4)]
    askew = torch.zeros(65, dtype=torch.bfloat16)[1:]
    shape = with_shape(inner_size=512, attended_size=256, hidden_size=256)
    with pytest.raises(LaunchError, match="not a multiple of 16"):
        launch(norm_variant(shape, adds=True), (3,), askew, *tensors[1:], 0.5)
    with pytest.raises(LaunchError, match="was not compiled"):
        launch(gate_variant(with_shape(activation="relu")), (3, 1), *tensors[:2])
    assert not driver.launches


def test_there_is_room_for_every_parameter():
    binary = Binary("k", "k", ("*bf16", "i32", "fp32", "*i64"), 6, 4, 0)
    values, addresses = parameters_for(binary)
    assert [type(value) for value in values] == [
        ctypes.c_uint64,
        ctypes.c_int32,
        ctypes.c_float,
        *[ctypes.c_uint64] * 3,
    ]
    assert [addresses[place] for place in range(6)] == [ctypes.addressof(value) for value in values]


def test_who_has_all_binaries_imports_no_triton():
    program = (
        "import sys, teneral.runtime.backends.cuda.backend, teneral.runtime.backends.cuda.compile as compile; "
        "compile.Compiler(90); "
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'triton'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(110), check=True
    )
    assert result.stdout.strip() == "[]"


def test_without_triton_and_without_binaries_there_is_nothing_to_launch(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(warm_up, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="no kernels for sm_90; Triton is not installed"):
        warm_up.open_launcher(torch.device("cuda:0"), tmp_path)


def test_what_a_folder_lacks_is_compiled(compiled, monkeypatch):
    """Sources are asked in order, and each variant once."""
    library, _ = open_library(compiled, (9, 0))
    driver = RecordingDriver([])
    launch = BinaryLauncher([library, Compiler(90)], driver, torch.device("cuda:0"))
    variants = [gate_variant(with_shape(inner_size=512, activation=name)) for name in ("silu", "relu")]
    assert library.find(variants[1]) is None
    launch.prepare(variants)
    launch.prepare(variants)
    assert driver.loaded == [variant.key for variant in variants]
