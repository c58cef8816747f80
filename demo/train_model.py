"""Train the demo model: a small Llama on the prose that every Python installation carries.

    python demo/train_model.py OUTPUT_DIRECTORY [--minutes 40]

The text is the docstrings of the standard library, the help topics of `pydoc` and Python's licence. The
tokenizer is a byte-level BPE trained on the same text. The result is a directory as Hugging Face writes it,
in bf16, of under 8 MB; `demo/model/` was made by this script.

It knows nothing of Teneral: it needs torch, tokenizers and safetensors only.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import re
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

VOCAB = 3072
HIDDEN = 192
LAYERS = 8
HEADS = 6
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 512
CONTEXT = 512  # what the model is trained on; the rope base leaves room for it
ROPE_THETA = 10_000.0
EPS = 1e-5
END = "<|end|>"


def docstrings(path: Path) -> Iterator[str]:
    """Every docstring of a source file, outermost first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=True)
            if text and len(text) > 40:
                yield text


def corpus() -> list[str]:
    """Documents, without repetitions, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "idle_test", "__pycache__"}
    documents: dict[str, None] = {}
    for path in sorted(library.rglob("*.py")):
        if not skip & set(path.relative_to(library).parts):
            documents.update(dict.fromkeys(docstrings(path)))
    from pydoc_data.topics import topics

    for topic in topics.values():
        documents[re.sub(r"\n[*=\-~^]{3,}\n", "\n", inspect.cleandoc(topic))] = None
    licence = library / "LICENSE.txt"
    if licence.exists():
        documents[licence.read_text(encoding="utf-8")] = None
    # Built-in functions and methods carry their documentation in C, where `ast` cannot see it.
    for owner in (str, bytes, list, dict, set, int, float, tuple, object, Exception, math, time):
        for name in dir(owner):
            text = inspect.getdoc(getattr(owner, name))
            if text and len(text) > 40:
                documents[text] = None
    return list(documents)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


class Layer(nn.Module):
    """One Llama layer, named as in a Hugging Face checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False),
                "k_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "v_proj": nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False),
                "o_proj": nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
                "up_proj": nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
                "down_proj": nn.Linear(INTERMEDIATE, HIDDEN, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        attn, mlp = self.self_attn, self.mlp

        def heads(projection: nn.Module, y: Tensor, count: int) -> Tensor:
            return projection(y).view(batch, length, count, HEAD_DIM).transpose(1, 2)

        y = self.input_layernorm(x)
        q = rotate(heads(attn["q_proj"], y, HEADS), cos, sin)
        k = rotate(heads(attn["k_proj"], y, KV_HEADS), cos, sin).repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = heads(attn["v_proj"], y, KV_HEADS).repeat_interleave(HEADS // KV_HEADS, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attn["o_proj"](y.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM))
        y = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


class Model(nn.Module):
    """Token embedding, layers, norm; the head is the embedding's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 / math.sqrt(2 * LAYERS) if "o_proj" in name or "down_proj" in name else 0.02
                nn.init.normal_(parameter, std=std)
        steps = torch.arange(CONTEXT).float()
        inverse = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.outer(steps, inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        length = tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def train(model: Model, stream: Tensor, held_out: Tensor, minutes: float, batch: int, length: int) -> None:
    """AdamW with a cosine that ends when the time does. Prints the loss on text that it has not seen."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    peak = 3e-3
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.95),
    )
    started, step, spent = time.monotonic(), 0, 0.0
    while spent < 1.0:
        spent = min(1.0, (time.monotonic() - started) / (60 * minutes))
        for group in optimizer.param_groups:
            group["lr"] = (
                peak * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * spent)))
            )
        begin = torch.randint(len(stream) - length - 1, (batch,))
        window = stream[begin[:, None] + torch.arange(length + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            unseen = evaluate(model, held_out, length)
            print(f"{spent:4.0%}  step {step}  loss {loss.item():.3f}  unseen {unseen:.3f}", flush=True)


@torch.no_grad()
def evaluate(model: Model, held_out: Tensor, length: int) -> float:
    rows = held_out[: len(held_out) // (length + 1) * (length + 1)].view(-1, length + 1)[:24]
    logits = model(rows[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


@torch.no_grad()
def sample(model: Model, tokenizer: Tokenizer, prompt: str, count: int = 60) -> str:
    tokens = tokenizer.encode(prompt).ids
    for _ in range(count):
        logits = model(torch.tensor([tokens[-CONTEXT:]]))[0, -1] / 0.7
        top = logits.topk(40)
        tokens.append(int(top.indices[torch.multinomial(top.values.softmax(-1), 1)]))
    return tokenizer.decode(tokens)


def save(model: Model, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    text = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": CONTEXT}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(text, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    documents = corpus()
    tokenizer = train_tokenizer(documents)
    end = tokenizer.token_to_id(END)
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(1)).tolist()
    encoded = [[end, *tokenizer.encode(documents[index]).ids] for index in order]
    cut = len(encoded) * 98 // 100
    stream = torch.tensor([token for document in encoded[:cut] for token in document])
    held_out = torch.tensor([token for document in encoded[cut:] for token in document])
    model = Model()
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{len(documents)} documents, {sum(map(len, documents)):,} characters, {len(stream):,} tokens, {size:,} weights"
    )
    train(model, stream, held_out, options.minutes, options.batch, options.length)
    save(model, tokenizer, options.directory)
    for prompt in ("Return the", "The module", "A class that", "Open a file and"):
        print("-", repr(sample(model, tokenizer, prompt)))


if __name__ == "__main__":
    main()
