"""Small ONNX models of real kinds, made node by node with random weights, and ONNX Runtime as the oracle of their
outputs.

`MODELS` has them by name; each call makes one with inputs that fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]


class Made(NamedTuple):
    """A model, and inputs for it."""

    model: onnx.ModelProto
    inputs: dict[str, Array]


class Net:
    """A graph that grows by a node at a time."""

    def __init__(self, opset: int = 17, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.domains: dict[str, int] = {"": opset}
        self._count = 0

    def name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}_{self._count}"

    def input(self, name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, shape: Sequence[int | str] | None, kind: int = TensorProto.FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, values: Array, prefix: str = "c") -> str:
        name = self.name(prefix)
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def weight(self, *shape: int, dtype: str = "f4", prefix: str = "w") -> str:
        scale = 1 / np.sqrt(np.prod(shape[1:]) if len(shape) > 1 else shape[0])
        return self.constant((self.rng.standard_normal(shape) * scale).astype(dtype), prefix)

    def op(
        self, kind: str, *inputs: str, outputs: int = 1, name: str = "", domain: str = "", **attributes: Any
    ) -> Any:
        names = [name] if name else [self.name(kind.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names[0] if len(names) == 1 else tuple(names)

    def conv(
        self, x: str, channels_in: int, channels: int, size: int = 3, *, stride: int = 1, groups: int = 1
    ) -> str:
        weight = self.weight(channels, channels_in // groups, size, size)
        return self.op("Conv", x, weight, pads=[size // 2] * 4, strides=[stride] * 2, group=groups)

    def batch_norm(self, x: str, channels: int) -> str:
        one = [self.constant(self.rng.uniform(0.5, 1.5, channels).astype("f4")) for _ in range(2)]
        return self.op("BatchNormalization", x, one[0], self.weight(channels), self.weight(channels), one[1])

    def linear(self, x: str, width: int, out: int, dtype: str = "f4") -> str:
        return self.op(
            "Add", self.op("MatMul", x, self.weight(width, out, dtype=dtype)), self.weight(out, dtype=dtype)
        )

    def norm(self, x: str, width: int) -> str:
        return self.op("LayerNormalization", x, self.weight(width), self.weight(width), axis=-1)

    def attention(self, x: str, width: int, heads: int) -> str:
        shape = self.constant(np.array([0, -1, heads, width // heads]))
        q, k, v = (
            self.op("Transpose", self.op("Reshape", self.linear(x, width, width), shape), perm=perm)
            for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        )
        scores = self.op("Mul", self.op("MatMul", q, k), self.constant(np.array(heads / width, "f4") ** 0.5))
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), v)
        mixed = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", mixed, self.constant(np.array([0, -1, width]))), width, width)

    def block(self, x: str, width: int, heads: int) -> str:
        x = self.op("Add", x, self.attention(self.norm(x, width), width, heads))
        hidden = self.linear(self.norm(x, width), width, 4 * width)
        half = self.op("Mul", hidden, self.constant(np.array(0.5, "f4")))
        erf = self.op("Erf", self.op("Mul", hidden, self.constant(np.array(2**-0.5, "f4"))))
        hidden = self.op("Mul", half, self.op("Add", erf, self.constant(np.array(1.0, "f4"))))
        return self.op("Add", x, self.linear(hidden, 4 * width, width))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "net", self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid(domain, version) for domain, version in self.domains.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def resnet(opset: int = 17) -> Made:
    net = Net(opset)
    x = net.op(
        "Relu", net.batch_norm(net.conv(net.input("pixels", ["batch", 3, 32, 32]), 3, 16, 7, stride=2), 16)
    )
    channels = 16
    for out, stride in ((16, 1), (32, 2), (64, 2)):
        y = net.op("Relu", net.batch_norm(net.conv(x, channels, out, stride=stride), out))
        y = net.batch_norm(net.conv(y, out, out), out)
        if channels != out or stride != 1:
            x = net.batch_norm(net.conv(x, channels, out, 1, stride=stride), out)
        x, channels = net.op("Relu", net.op("Add", x, y)), out
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    net.op("Gemm", x, net.weight(10, 64), net.weight(10), transB=1, name="logits")
    net.output("logits", ["batch", 10])
    return Made(net.model(), {"pixels": net.rng.standard_normal((2, 3, 32, 32)).astype("f4")})


def mobilenet() -> Made:
    net = Net()
    x, channels = net.conv(net.input("pixels", ["batch", 3, 32, 32]), 3, 16, stride=2), 16
    for out, stride in ((24, 2), (24, 1), (48, 2)):
        y = net.op("HardSwish", net.batch_norm(net.conv(x, channels, channels * 4, 1), channels * 4))
        y = net.conv(y, channels * 4, channels * 4, 3, stride=stride, groups=channels * 4)
        y = net.op("Clip", y, net.constant(np.array(0.0, "f4")), net.constant(np.array(6.0, "f4")))
        y = net.batch_norm(net.conv(y, channels * 4, out, 1), out)
        x, channels = (net.op("Add", x, y) if out == channels else y), out
    net.op("Gemm", net.op("Flatten", net.op("GlobalAveragePool", x)), net.weight(48, 7), name="logits")
    net.output("logits", ["batch", 7])
    return Made(net.model(), {"pixels": net.rng.standard_normal((1, 3, 32, 32)).astype("f4")})


def vit() -> Made:
    net = Net()
    width = 64
    x = net.op(
        "Conv",
        net.input("pixels", ["batch", 3, 32, 32]),
        net.weight(width, 3, 8, 8),
        strides=[8, 8],
        kernel_shape=[8, 8],
    )
    x = net.op("Transpose", net.op("Reshape", x, net.constant(np.array([0, width, -1]))), perm=[0, 2, 1])
    x = net.op("Add", x, net.weight(1, 16, width))
    for _ in range(3):
        x = net.block(x, width, 4)
    x = net.op("ReduceMean", net.norm(x, width), axes=[1], keepdims=0)
    net.op("MatMul", x, net.weight(width, 32), name="image_embeds")
    net.output("image_embeds", ["batch", 32])
    # With the shapes of all values, as exporters write them: fusions ask for them.
    return Made(
        onnx.shape_inference.infer_shapes(net.model()),
        {"pixels": net.rng.standard_normal((3, 3, 32, 32)).astype("f4")},
    )


def bert() -> Made:
    net = Net()
    width, vocab = 64, 500
    ids = net.input("input_ids", ["batch", "tokens"], TensorProto.INT64)
    mask = net.input("attention_mask", ["batch", "tokens"], TensorProto.INT64)
    table = net.weight(vocab, width, prefix="embeddings")
    x = net.norm(net.op("Gather", table, ids), width)
    for _ in range(2):
        x = net.block(x, width, 4)
    weights = net.op("Unsqueeze", net.op("Cast", mask, to=TensorProto.FLOAT), net.constant(np.array([2])))
    total = net.op("ReduceSum", net.op("Mul", x, weights), net.constant(np.array([1])), keepdims=0)
    count = net.op("ReduceSum", weights, net.constant(np.array([1])), keepdims=0)
    net.op("Div", total, count, name="sentence_embedding")
    # Tied to the embeddings: the first and the last segment use one matrix.
    net.op("MatMul", x, net.op("Transpose", table, perm=[1, 0]), name="logits")
    net.output("sentence_embedding", ["batch", width])
    net.output("logits", ["batch", "tokens", vocab])
    ids_in = net.rng.integers(0, vocab, (2, 9))
    return Made(
        net.model(), {"input_ids": ids_in, "attention_mask": (np.arange(9) < [[9], [5]]).astype("i8")}
    )


def whisper_encoder() -> Made:
    net = Net()
    width = 64
    x = net.input("mel", [1, 80, "frames"])
    for number, (channels, stride) in enumerate(((80, 1), (width, 2))):
        weight = net.weight(width, channels, 3)
        x = net.op("Conv", x, weight, net.weight(width), pads=[1, 1], strides=[stride], kernel_shape=[3])
        x = net.op("Mul", x, net.op("Sigmoid", x)) if number == 0 else net.op("Tanh", x)
    x = net.op("Transpose", x, perm=[0, 2, 1])
    for _ in range(2):
        x = net.block(x, width, 4)
    net.op("Identity", net.norm(x, width), name="states")
    net.output("states", [1, "steps", width])
    return Made(net.model(), {"mel": net.rng.standard_normal((1, 80, 40)).astype("f4")})


def detector() -> Made:
    """Boxes whose number depends on the picture: NonMaxSuppression, and an If that takes a weight from outside."""
    net = Net()
    x = net.input("pixels", [1, 3, "height", "width"])
    for channels, out in ((3, 16), (16, 32)):
        x = net.op("Relu", net.conv(x, channels, out, stride=2))
    boxes = net.op("Reshape", net.conv(x, 32, 4, 1), net.constant(np.array([1, 4, -1])))
    boxes = net.op("Sigmoid", net.op("Transpose", boxes, perm=[0, 2, 1]))
    scores = net.op("Sigmoid", net.op("Reshape", net.conv(x, 32, 5, 1), net.constant(np.array([1, 5, -1]))))
    limits = [net.constant(np.array([value], kind)) for value, kind in ((8, "i8"), (0.5, "f4"), (0.4, "f4"))]
    net.op("NonMaxSuppression", boxes, scores, *limits, name="selected")
    mean = net.op("ReduceMean", x, keepdims=0)
    pooled = net.op("ReduceMean", x, axes=[2, 3], keepdims=0)
    weight = net.weight(32, 32)
    branches = []
    for kind in ("MatMul", "Sub"):
        value = f"branch_{kind}"
        inner = helper.make_node("MatMul", [pooled, weight], [value])
        if kind == "Sub":
            inner = helper.make_node("Neg", [pooled], [value])
        out = helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, 32])
        branches.append(helper.make_graph([inner], kind, [], [out]))
    above = net.op("Greater", mean, net.constant(np.array(0.0, "f4")))
    net.op("If", above, then_branch=branches[0], else_branch=branches[1], name="scene")
    net.output("selected", ["found", 3], TensorProto.INT64)
    net.output("scene", [1, 32])
    return Made(net.model(), {"pixels": net.rng.standard_normal((1, 3, 40, 48)).astype("f4")})


def segmenter() -> Made:
    net = Net()
    image = net.input("pixels", ["batch", 3, 32, 32])
    down = [net.op("Relu", net.conv(image, 3, 16))]
    for channels, out in ((16, 32), (32, 64)):
        down.append(net.op("Relu", net.conv(down[-1], channels, out, stride=2)))
    x = down[-1]
    for skip, (channels, out) in zip(reversed(down[:-1]), ((64, 32), (32, 16)), strict=True):
        scales = net.constant(np.array([1, 1, 2, 2], "f4"))
        x = net.op("Resize", x, "", scales, mode="linear", coordinate_transformation_mode="half_pixel")
        x = net.op("Relu", net.conv(net.op("Concat", x, skip, axis=1), channels + out, out))
    net.op("ArgMax", net.conv(x, 16, 6, 1), axis=1, keepdims=0, name="classes")
    net.output("classes", ["batch", 32, 32], TensorProto.INT64)
    return Made(net.model(), {"pixels": net.rng.standard_normal((1, 3, 32, 32)).astype("f4")})


def tabular() -> Made:
    net = Net(opset=13)
    x = net.input("rows", ["n", 12])
    kind = net.op("Gather", net.weight(40, 8), net.input("kind", ["n"], TensorProto.INT32))
    x = net.op("Concat", x, kind, axis=1)
    for width, out in ((20, 64), (64, 64)):
        x = net.op("Relu", net.linear(x, width, out))
    scores = net.linear(x, 64, 3)
    net.op("Softmax", scores, axis=1, name="probabilities")
    net.op("Greater", scores, net.constant(np.array(0.0, "f4")), name="above")
    net.output("probabilities", ["n", 3])
    net.output("above", ["n", 3], TensorProto.BOOL)
    rows = net.rng.standard_normal((5, 12)).astype("f4")
    return Made(net.model(), {"rows": rows, "kind": net.rng.integers(0, 40, 5).astype("i4")})


def int8_qdq() -> Made:
    """Weights in int8, a scale for each channel, as quantisers write them: QuantizeLinear and DequantizeLinear."""
    net = Net()
    x, channels = net.input("pixels", ["batch", 3, 16, 16]), 3
    for out in (16, 32):
        scale, zero = net.constant(np.array(0.02, "f4")), net.constant(np.array(128, "u1"))
        x = net.op("DequantizeLinear", net.op("QuantizeLinear", x, scale, zero), scale, zero)
        weight = net.constant(net.rng.integers(-127, 128, (out, channels, 3, 3)).astype("i1"))
        scales = net.constant(net.rng.uniform(0.001, 0.01, out).astype("f4"))
        weight = net.op("DequantizeLinear", weight, scales, net.constant(np.zeros(out, "i1")), axis=0)
        x, channels = net.op("Relu", net.op("Conv", x, weight, pads=[1] * 4, kernel_shape=[3, 3])), out
    net.op("Flatten", net.op("GlobalAveragePool", x), name="features")
    net.output("features", ["batch", 32])
    return Made(net.model(), {"pixels": net.rng.standard_normal((2, 3, 16, 16)).astype("f4")})


def fp16() -> Made:
    net = Net(opset=20)
    x = net.input("x", ["n", 64], TensorProto.FLOAT16)
    for _ in range(3):
        x = net.op("Relu", net.linear(x, 64, 64, "f2"))
    net.op("Identity", x, name="y")
    net.output("y", ["n", 64], TensorProto.FLOAT16)
    return Made(net.model(), {"x": net.rng.standard_normal((4, 64)).astype("f2")})


def recurrent() -> Made:
    net = Net(opset=23)
    x = net.input("x", ["steps", 1, 32])
    y, hidden, _ = net.op(
        "LSTM",
        x,
        net.weight(1, 128, 32),
        net.weight(1, 128, 32),
        net.weight(1, 256),
        outputs=3,
        hidden_size=32,
    )
    net.op("Squeeze", y, net.constant(np.array([1])), name="states")
    net.op("Identity", hidden, name="last")
    net.output("states", None)
    net.output("last", [1, 1, 32])
    return Made(net.model(), {"x": net.rng.standard_normal((7, 1, 32)).astype("f4")})


def branches() -> Made:
    """Weights inside of an If's branches, of one name in several of them, and one that a branch returns."""
    net = Net()
    x = net.input("x", ["n", 48])
    zero = net.constant(np.array(0, "f4"))
    is_positive = net.op("Greater", net.op("ReduceSum", x, keepdims=0), zero)

    def weight() -> onnx.TensorProto:
        return numpy_helper.from_array(net.rng.standard_normal((48, 48)).astype("f4"), "w")

    def graph(nodes: list[onnx.NodeProto], output: str, *weights: onnx.TensorProto) -> onnx.GraphProto:
        value = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        return helper.make_graph(nodes, "branch", [], [value], list(weights))

    outer = net.linear(x, 48, 48)
    product = helper.make_node("MatMul", [outer, "w"], ["inner"])
    fixed = numpy_helper.from_array(net.rng.standard_normal((1, 48, 48)).astype("f4"), "fixed")
    nested = helper.make_node(
        "If", [is_positive], ["nested"],
        then_branch=graph([helper.make_node("MatMul", ["first", "w"], ["t"])], "t", weight()),
        else_branch=graph([], "fixed", fixed),
    )  # fmt: skip
    first = helper.make_node("MatMul", [outer, "w"], ["first"])
    for name, condition in (("y", is_positive), ("z", net.op("Not", is_positive))):
        net.op(
            "If", condition, name=name, then_branch=graph([first, nested], "nested", weight()),
            else_branch=graph([product], "inner", weight()),
        )  # fmt: skip
        net.output(name, None)
    return Made(net.model(), {"x": np.random.default_rng(2).standard_normal((3, 48)).astype("f4") + 1})


def attributes() -> Made:
    """Opset 11: axes and sizes are attributes, also in a branch, and a Softmax takes all later axes as one."""
    net = Net(opset=11)
    x = net.op("Softmax", net.input("x", ["n", 3, 16]), axis=1)
    left, right = net.op("Split", x, outputs=2, axis=2, split=[8, 8])
    y = net.op("Unsqueeze", net.op("MatMul", net.op("Sub", left, right), net.weight(8, 64)), axes=[1])
    low = net.constant(np.array(-0.5, "f4"))
    for _ in range(3):
        y = net.op("Clip", net.op("MatMul", y, net.weight(64, 64)), low)
    y = net.op("Squeeze", y, axes=[1])
    branches = []
    for kind in ("ReduceSum", "ReduceMax"):
        value = f"branch_{kind}"
        nodes = [
            helper.make_node("MatMul", [y, net.weight(64, 64)], [f"{kind}_product"]),
            helper.make_node(kind, [f"{kind}_product"], [value], axes=[1], keepdims=0),
        ]
        out = helper.make_tensor_value_info(value, TensorProto.FLOAT, None)
        branches.append(helper.make_graph(nodes, kind, [], [out]))
    is_sum = net.input("is_sum", [], TensorProto.BOOL)
    net.op("If", is_sum, then_branch=branches[0], else_branch=branches[1], name="y")
    net.output("y", ["n", 64])
    inputs = {"x": net.rng.standard_normal((2, 3, 16)).astype("f4"), "is_sum": np.array(True)}
    return Made(net.model(), inputs)


MODELS: dict[str, Callable[[], Made]] = {
    "attributes": attributes,
    "branches": branches,
    "resnet": resnet,
    "mobilenet": mobilenet,
    "vit": vit,
    "bert": bert,
    "whisper_encoder": whisper_encoder,
    "detector": detector,
    "segmenter": segmenter,
    "tabular": tabular,
    "int8_qdq": int8_qdq,
    "fp16": fp16,
    "recurrent": recurrent,
}


def save(made: Made, path: Path, *, external: bool = False) -> Path:
    """The model as a file, with its weights in another one where they are `external`."""
    model = onnx.ModelProto()
    model.CopyFrom(made.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.data", size_threshold=1024)
    else:
        onnx.save(model, path)
    return path


def expected(
    path: Path, inputs: dict[str, Array], *, while_loading: bool = False, threads: int = 1
) -> dict[str, Array]:
    """ONNX Runtime's own outputs of the file: as any program gets them, or without what needs the weights' values when
    a session is made: prepacking, and optimisations beyond the basic ones.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if while_loading:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))
