"""GGUF files of plain decoders with random weights, and of tokenizers of both kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from detgen.models.byte_letters import byte_letters
from detgen.models.gguf.header import read_header
from detgen.models.gguf.plain import Plain, plain_model
from helpers.gguf_files import written

EXPERTS = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 96}
# Kinds of decoders, and what their files say besides.
KINDS: dict[str, dict[str, Any]] = {
    **{"llama": {}, "qwen2": {}, "qwen3": {}},
    "phi3": {"rope.scaling.original_context_length": 256},
    "gemma2": {"attention.sliding_window": 40},
    "gemma3": {"attention.sliding_window": 40},
    "mixtral": EXPERTS | {"architecture": "llama", "expert_feed_forward_length": None},
    "qwen3moe": EXPERTS,
    "qwen2moe": EXPERTS | {"expert_shared_feed_forward_length": 64},
}
NAMES = ("<|im_start|>", "<|im_end|>", "<think>", "a\u00e9 b", "<unk>")
ROWS = 258 + len(NAMES)
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def vocabulary(
    types: Iterable[int] = (CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, NORMAL),
    pre: str | None = "gpt-2",
    model: str = "gpt2",
    more: Iterable[str] = (),
    **said: Any,
) -> Callable[[Any], None]:
    """Writes a tokenizer: all letters, a few merges, `NAMES` with these types, then others; settings by their names."""

    def write(writer: Any) -> None:
        tokens = [*byte_letters(), "ab", "abc", *NAMES, *more]
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([NORMAL] * 258 + [*types] + [CONTROL] * (len(tokens) - 258 - len(NAMES)))
        writer.add_token_merges(["a b", "ab c"])
        say(writer, said)

    return write


def say(writer: Any, said: dict[str, Any]) -> None:
    """Write settings of a tokenizer."""
    of = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for name, value in said.items():
        of[type(value)]("tokenizer." + name.replace("__", "."), value)


UNKNOWN, UNUSED, BYTE = 2, 5, 6
LEARNED = (
    *("\u2581", *"abceht", "\u4e2d", "\u6587", "\u2581t", "he", "\u2581the", "ab", "abc", "bc", "\u2581a"),
    *("\u2581\u2581", "\u2581\u2581\u2581\u2581", "\n\n", "  ", "th", "\u2581th", "aa", "aaaa", "aaa"),
    *("\u4e2d\u6587", "[INST]", "<think>"),
)


def pieces(
    learned: Iterable[str] = LEARNED,
    scores: Callable[[int], float] = lambda i: -float(i),
    kinds: Callable[[str], int] = lambda text: {"[INST]": CONTROL, "<think>": USER_DEFINED}.get(text, NORMAL),
    begins: Iterable[str] = ("<unk>", "<s>", "</s>"),
    **said: Any,
) -> Callable[[Any], None]:
    """Writes a tokenizer of SentencePiece's kind: `begins`, bytes, what has been learned."""
    first, of_bytes = list(begins), [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*first, *of_bytes, *learned]

    def write(writer: Any) -> None:
        types = [UNKNOWN if text == "<unk>" else CONTROL for text in first]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [scores(i) for i in range(len(tokens) - 259)])
        writer.add_token_types(types + [BYTE] * 256 + [kinds(text) for text in tokens[len(first) + 256 :]])
        say(writer, {"ggml__bos_token_id": 1, "ggml__eos_token_id": 2, "ggml__unknown_token_id": 0} | said)

    return write


def rows_of(tokenizer: Callable[[Any], None]) -> int:
    """How many tokens one has that is written."""
    tokens: list[list[str]] = []
    writer = MagicMock()
    writer.add_token_list = tokens.append
    tokenizer(writer)
    return len(tokens[0])


MORE = [f"x{i}" for i in range(32064 - ROWS)]  # tokens, as Phi-3's padding token asks for
MANY = vocabulary(more=MORE)
GEMMAS = pieces(
    begins=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
    ggml__bos_token_id=2,
    ggml__eos_token_id=1,
    ggml__unknown_token_id=3,
    ggml__padding_token_id=0,
)


def tensors(kind: str, sizes: dict[str, Any], *, tied: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Random ones, by their names, as a file has them."""
    random = np.random.default_rng(3)
    hidden, inner, experts = (sizes.get(name) for name in ("embedding_length", "feed_forward_length", "expert_count"))
    own, shared = (sizes.get(f"expert_{of}feed_forward_length", inner) for of in ("", "shared_"))
    size = sizes["attention.key_length"]
    wide, narrow = (size * sizes[f"attention.head_count{kv}"] for kv in ("", "_kv"))

    def made(name: str, *shape: int) -> tuple[str, np.ndarray]:
        noise = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            return name, 0.1 * noise + np.float32(name.endswith("weight"))
        return name, noise * np.float32(1.5 / math.sqrt(shape[-1]))

    rows = sizes["vocab_size"]
    attention = [("attn_q", wide, hidden), ("attn_k", narrow, hidden), ("attn_v", narrow, hidden)]
    forward = [("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner)]
    norms = [("attn_norm", hidden), ("ffn_norm", hidden)]
    if kind == "phi3":
        attention, forward[:2] = [("attn_qkv", wide + 2 * narrow, hidden)], [("ffn_up", 2 * inner, hidden)]
    if experts:
        forward = [("ffn_gate_inp", experts, hidden), ("ffn_down_exps", experts, hidden, own)]
        forward += [(f"ffn_{of}_exps", experts, own, hidden) for of in ("gate", "up")]
    if kind == "qwen2moe":
        forward += [("ffn_gate_inp_shexp", hidden), ("ffn_down_shexp", hidden, shared)]
        forward += [(f"ffn_{of}_shexp", shared, hidden) for of in ("gate", "up")]
    if kind.startswith("gemma"):
        norms += [("post_attention_norm", hidden), ("post_ffw_norm", hidden)]
    if kind in ("qwen3", "qwen3moe", "gemma3"):
        norms += [("attn_q_norm", size), ("attn_k_norm", size)]
    yield made("token_embd.weight", rows, hidden)
    for i in range(sizes["block_count"]):
        for name, *shape in (*attention, ("attn_output", hidden, wide), *forward, *norms):
            yield made(f"blk.{i}.{name}.weight", *shape)
            if kind in ("qwen2", "qwen2moe") and name in ("attn_q", "attn_k", "attn_v"):
                yield made(f"blk.{i}.{name}.bias", shape[0])
    yield made("output_norm.weight", hidden)
    if not tied:
        yield made("output.weight", rows, hidden)


def file_of(
    path: Path,
    kind: str = "llama",
    tokenizer: Callable[[Any], None] | None = None,
    *,
    tied: bool = False,
    types: tuple[str, ...] = ("F32",),
    without: str = "",
    more: Iterable[tuple[str, np.ndarray]] = (),
    **said: Any,
) -> Path:
    """A file of an architecture; settings by their names, `__` for a dot, None for none."""
    sizes = {
        **{"block_count": 2, "context_length": 256, "embedding_length": 128, "feed_forward_length": 192},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": ROWS},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4},
        **KINDS[kind],
    }
    tokenizer = tokenizer or {"phi3": MANY, "gemma2": GEMMAS, "gemma3": GEMMAS}.get(kind) or vocabulary()
    sizes["vocab_size"] = rows_of(tokenizer)
    sizes |= {name.replace("__", "."): value for name, value in said.items()}
    size = sizes["embedding_length"] // sizes["attention.head_count"]
    heads = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size)
    known = {name: value for name, value in sizes.items() if value is not None}
    usual = heads | {"vocab_size": rows_of(tokenizer), "attention.head_count_kv": 2}
    there = [x for x in tensors(kind, usual | known, tied=tied or kind.startswith("gemma")) if x[0] != without]
    order = {name: types[i % len(types)] for i, (name, _) in enumerate(there)}
    architecture = sizes.pop("architecture", kind)
    return written(
        path,
        architecture,
        heads | sizes,
        [*there, *more],
        tokenizer,
        lambda name: order.get(name, "F32"),
    )


def made_of(path: Path) -> Plain | None:
    return plain_model(read_header(path, "x"), path)
