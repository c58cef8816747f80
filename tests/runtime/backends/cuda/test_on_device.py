"""Tests that need a device: its kernels, graphs and tokens are those of the references."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest
import torch
from tests.support.decoding import oracle_greedy
from tests.support.device_engine import use_row_products
from tests.support.inspection import backend_of, kv_of, packer_of
from tests.support.kernel_cases import (
    TOLERANCE,
    attention,
    both,
    integer_case,
    pool_and_tables,
    shape,
    spans_of,
)
from tests.support.load import patience_s
from tests.support.models import build_model, dtype_of
from tests.support.reference_kernels import ReferenceKernels, device_exponentials
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.runtime.backends.choose import step_backend
from teneral.runtime.backends.cuda import decoder as decoder_module
from teneral.runtime.backends.cuda import variants as v
from teneral.runtime.backends.cuda.backend import TorchDeviceBackend
from teneral.runtime.backends.cuda.compile import compile_to
from teneral.runtime.backends.cuda.executor import CudaModelBackend
from teneral.runtime.backends.cuda.launch import BinaryLauncher, Driver
from teneral.runtime.backends.cuda.library import open_library
from teneral.runtime.backends.cuda.sampling import DeviceSampler
from teneral.runtime.backends.cuda.storage import DeviceKVStorage
from teneral.runtime.backends.cuda.warm_up import open_launcher
from teneral.runtime.backends.cuda.weights import DeviceTensor
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.sequence import Lane
from teneral.runtime.errors import CapacityError
from teneral.runtime.kv.storage import KVKind, PoolShape
from teneral.runtime.step import sampling
from teneral.runtime.step.batch import Epoch, Rows
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.step.state import SamplingState
from teneral.runtime.tensors import DType
from teneral.runtime.weights import DictWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.filterwarnings("default"),  # of libraries and a driver that are not ours to choose
]

TIMEOUT_S = patience_s(60)
NUM_TOKENS = 24
PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(3 + 30 * number)) for number in range(5)]
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7)


AHEAD, BY_TRITON = "compiled ahead", "compiled by Triton"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def launcher(tmp_path):
    """Makes a launcher for a shape."""

    def make(how, own):
        capability = torch.cuda.get_device_capability()
        if how == BY_TRITON:
            return open_launcher(torch.device("cuda:0"), None)[0]
        compile_to(tmp_path, v.variants_of(own), [capability[0] * 10 + capability[1]])
        library, message = open_library(tmp_path, capability)
        assert library is not None, message
        return BinaryLauncher([library], Driver(torch.device("cuda:0")), torch.device("cuda:0"))

    return make


@pytest.mark.parametrize(
    ("how", "dtype", "head_dim", "group"),
    [
        (AHEAD, BF16, 128, 4),
        (AHEAD, FP16, 80, 1),
        *[(BY_TRITON, BF16, head_dim, 4) for head_dim in (64, 80, 112, 256)],
        (BY_TRITON, BF16, 128, 7),
        (BY_TRITON, BF16, 96, 20),
        (BY_TRITON, FP16, 128, 4),
        (BY_TRITON, FP32, 64, 2),
    ],
)
def test_attention_is_that_of_the_reference(launcher, how, dtype, head_dim, group):
    own = shape(dtype=dtype, head_dim=head_dim, group=group, block_size=16)
    launch = launcher(how, own)
    for kv_heads, window, splits in ((1, 1 << 30, 1), (2, 100, 3), (8, 1 << 30, 64)):
        shares = [(0, 1), (700, 1), (33, 1), (0, 130), (250, 70), (15, 2)]
        heads, keys, values, tables = pool_and_tables(
            spans_of(shares, 16),
            kv_heads=kv_heads,
            head_dim=head_dim,
            group=group,
            block_size=16,
            dtype=dtype,
        )
        numbers = (kv_heads * group, kv_heads, window)
        expected = attention(ReferenceKernels(), own, heads, keys, values, tables, *numbers, 1)
        there = [each.cuda() for each in (heads, keys, values)]
        message = type(tables)(*(getattr(tables, name).cuda() for name in tables.__slots__))
        ours = attention(launch, own, *there, message, *numbers, splits)
        torch.testing.assert_close(ours.cpu(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("how", "dtype", "head_dim", "rotary", "has_norms"),
    [
        (AHEAD, BF16, 128, 128, True),
        (BY_TRITON, FP16, 80, 32, False),
        (BY_TRITON, FP32, 64, 64, True),
    ],
)
def test_what_is_done_with_rows_is_what_the_reference_does(launcher, how, dtype, head_dim, rotary, has_norms):
    torch.manual_seed(0)
    own = shape(
        dtype=dtype,
        head_dim=head_dim,
        rotary_dim=rotary,
        has_head_norms=has_norms,
        hidden_size=896,
        inner_size=4864,
        block_size=16,
    )
    launch = launcher(how, own)
    x, added, out = (torch.randn(33, 896).to(dtype) for _ in range(3))
    weight = torch.rand(896).to(dtype)
    for adds in (False, True):
        both(launch, v.norm_variant(own, adds=adds), (33,), [x, added, weight, out, 1e-6], [0, 3], "cuda")
    for num_in, adds in ((896, True), (4864, False)):
        arguments = [
            torch.randn(1, num_in),
            torch.randn(1001, num_in) / 60,
            torch.randn(1001),
            torch.zeros(1001),
        ]
        arguments = [*(each.to(dtype) for each in arguments), 1001]
        grid = (-(-1001 // v.product_rows(num_in)),)
        both(launch, v.product_variant(own.dtype, num_in, adds=adds), grid, arguments, [3], "cuda")
    product = (torch.randn(33, 2 * 4864) * 5).to(dtype)
    both(launch, v.gate_variant(own), (33, 5), [product, product[:, 4864:].contiguous()], [1], "cuda")
    heads = torch.randn(33, 14 + 4, head_dim).to(dtype)
    cos, sin = (torch.randn(33, rotary).to(dtype) for _ in range(2))
    norms = [torch.rand(head_dim).to(dtype) for _ in range(2)]
    pools = [torch.zeros(4, 16, 2, head_dim, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(64)[:33]
    slots[5] = -1
    arguments = [heads, cos, sin, *norms, *pools, slots, 14, 2, 1e-6]
    both(launch, v.place_variant(own), (33, -(-18 // v.PLACED_HEADS)), arguments, [0, 5, 6], "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("bits", "has_zero"), [(4, False), (4, True), (8, False)])
def test_few_rows_are_multiplied_with_integers(launcher, dtype, bits, has_zero):
    launch = launcher(BY_TRITON, shape(dtype=dtype))
    for num_in, group_size in ((4096, 128), (1024, 64), (1024, 32), (960, 960)):
        for num_rows in (1, 7, 33):
            case = integer_case(dtype, num_in, group_size, bits, has_zero, num_rows, num_out=1001)
            both(launch, *case, "cuda")


@pytest.mark.parametrize("how", [AHEAD, BY_TRITON])
def test_what_is_drawn_is_what_the_cpu_draws_with_the_same_numbers(launcher, how, monkeypatch):
    numbers = lambda seed, index, num: [device_exponentials(seed, index, np.arange(num))]  # noqa: E731
    monkeypatch.setattr(sampling, "exponentials", numbers)
    logits = torch.randn((12, 151_936), generator=torch.Generator().manual_seed(0)) * 3
    logits[6:] = logits[6:].bfloat16().float()
    params = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "min_p": 0.02},
        {"seed": 3, "top_k": 20, "top_p": 0.8, "temperature": 0.7},
        {"seed": 4, "top_p": 0.95},
        {"seed": -5, "top_p": 0.999, "temperature": 3.0},  # more than the best candidates
    ]
    states = [
        SamplingState(GenerationRequest("r", (1,), sampling=SamplingParams(**each))) for each in 2 * params
    ]
    sampler = DeviceSampler(torch.device("cuda:0"), launcher(how, shape()))
    ours = sampler.choose(logits.cuda(), states)
    assert [each.token for each in ours] == [
        each.token for each in sampling.choose_tokens(logits.cpu().numpy(), states)
    ]
    assert sampler.num_redraws > 0


def test_blocks_come_out_and_go_in_again():
    shape = PoolShape(3, 2, 64, num_blocks=8, block_size=16, dtype=DType.BF16)
    kv = DeviceKVStorage(shape, device=torch.device("cuda:0"))
    kv.data.copy_(torch.randn(kv.data.shape))
    before = kv.data[:, :, [5, 2]].clone()
    content = np.empty((2, DeviceKVStorage.block_bytes(shape)), np.uint8)
    kv.copy_out([5, 2], content)
    kv.copy_in([7, 0], content)
    assert torch.equal(kv.data[:, :, [7, 0]], before)


# A whole engine


def on_device(oracle):
    tensors = {name: tensor.cuda() for name, tensor in tensors_of(oracle).items()}
    weights = DictWeights(
        {name: DeviceTensor(dtype_of(own.dtype), own, "cuda:0") for name, own in tensors.items()}
    )
    return build_model(config_json(oracle), weights, backends=[CudaModelBackend()]), tensors


class Rig:
    def __init__(self, decoder, *, num_blocks=400, **options):
        options = {"block_size": 16, "max_context": 512, "max_running": 5, **options}
        kv_bytes = num_blocks * decoder.kv_block_bytes(options["block_size"])
        self.engine = Engine(
            decoder,
            ToyTokenizer(),
            options=EngineOptions(kv_bytes=kv_bytes, **options),
            make_backend=step_backend,
        )

    def say(self, prompts=PROMPTS, params=GREEDY, num_tokens=NUM_TOKENS):
        generations = [
            self.engine.submit(GenerationRequest(str(number), prompt, num_tokens, params))
            for number, prompt in enumerate(prompts)
        ]
        return [generation.result(TIMEOUT_S).tokens for generation in generations]

    def wait_for_graphs(self, number):
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.engine.statistics().device.num_graphs < number:
            assert time.monotonic() < deadline_s, self.engine.statistics().device
            time.sleep(0.01)

    def __enter__(self):
        self.engine.start()
        return self

    def __exit__(self, *_):
        assert self.engine.stop(TIMEOUT_S)
        self.engine.check_integrity()


FAMILIES = [
    ("llama", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 40}),
]


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_tokens_are_those_of_transformers_launched_and_recorded(family, overrides):
    oracle = tiny_model(family, **overrides)
    with torch.no_grad():
        expected = [tuple(oracle_greedy(oracle, prompt, NUM_TOKENS)) for prompt in PROMPTS]
    decoder, _ = on_device(oracle)
    with Rig(decoder) as rig:
        assert rig.say() == expected
        drawn = rig.say(params=SAMPLED)
        rig.wait_for_graphs(4)
        assert rig.say() == expected
        assert rig.say(params=SAMPLED) == drawn
        device = rig.engine.statistics().device
        assert device.graph_steps_total > NUM_TOKENS
        assert device.graph_bytes > 0
        use_row_products(decoder)
        assert [rig.say(prompts=[prompt])[0] for prompt in PROMPTS] == expected
        assert device.free_bytes > 0
    tight = {"max_step_tokens": 40, "max_prefill_tokens": 30, "max_context": 152}
    with Rig(decoder, block_size=4, num_blocks=60, **tight) as rig:
        assert rig.say() == expected
        assert rig.engine.statistics().preemptions_total > 0


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_prompt_alone_is_computed_by_torch_as_by_our_kernel(dtype, monkeypatch):
    oracle = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    decoder, _ = on_device(oracle.to(dtype))
    logits = []
    for min_rows in (decoder_module.MIN_SDPA_ROWS, 1 << 20):
        monkeypatch.setattr(decoder_module, "MIN_SDPA_ROWS", min_rows)
        with Rig(decoder) as rig:
            batch = packer_of(rig.engine).batch([Rows(lane_of(200), list(range(200)), 0, 200, 200)])
            logits.append(decoder.forward(batch, kv_of(rig.engine)).cpu())
    torch.testing.assert_close(*logits, atol=0.1, rtol=0.05)


def lane_of(num_tokens):
    lane = Lane(Epoch.EXACT, list(range(num_tokens)), SamplingState(GenerationRequest("r", (1,))))
    lane.blocks = tuple(range(100, 100 + -(-num_tokens // 16)))
    return lane


def test_weights_that_are_refined_in_place_are_those_of_a_recorded_step():
    exact, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    expected = {}
    with torch.no_grad():
        for name, oracle in (("draft", draft), ("exact", exact)):
            expected[name] = [tuple(oracle_greedy(oracle, prompt, NUM_TOKENS)) for prompt in PROMPTS]
    decoder, tensors = on_device(draft)
    with Rig(decoder, prefix_cache=False) as rig:
        assert rig.say() == expected["draft"]
        rig.wait_for_graphs(4)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for name, tensor in tensors_of(exact).items():
                tensors[name].copy_(tensor.cuda(), non_blocking=True)
        stream.synchronize()
        assert rig.say() == expected["exact"]
        assert rig.engine.statistics().device.graph_steps_total > NUM_TOKENS / 2


def test_memory_that_runs_out_fails_one_request():
    oracle = tiny_model("llama")
    decoder, _ = on_device(oracle)
    with Rig(decoder) as rig:
        expected = rig.say()
    rig = Rig(decoder)
    kernels = decoder.executor.kernels
    original, left = kernels.launch, [4]

    def launch(*arguments):
        left[0] -= 1
        if left[0] == 0:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        original(*arguments)

    kernels.launch = launch
    generations = [
        rig.engine.submit(GenerationRequest(str(number), prompt, NUM_TOKENS, GREEDY))
        for number, prompt in enumerate(PROMPTS)
    ]
    with rig:
        with pytest.raises(CapacityError):
            generations[4].result(TIMEOUT_S)
        assert [each.result(TIMEOUT_S).tokens for each in generations[:4]] == expected[:4]
        assert rig.engine.statistics().device.out_of_memory_total == 1


def test_a_model_without_kernels_is_computed_by_torch():
    oracle = tiny_model("llama")
    with torch.no_grad():
        expected = [tuple(oracle_greedy(oracle, prompt, NUM_TOKENS)) for prompt in PROMPTS]
    decoder, _ = on_device(oracle)
    with Rig(copy.copy(decoder), kv_dtype=KVKind.INT8) as rig:
        assert isinstance(backend_of(rig.engine).backend, TorchDeviceBackend)
        same = [ours[:8] == theirs[:8] for ours, theirs in zip(rig.say(), expected, strict=True)]
        assert sum(same) >= 3  # 8 bits are not exact
