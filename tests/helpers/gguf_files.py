"""GGUF files as llama.cpp's converter makes them, for tests: of a folder, its tokenizer in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from detgen.bench.peers.gguf_file import write_gguf

CONTROL, NORMAL = 3, 1


def plain_tokenizer(folder: Path) -> Path:
    """The folder, its tokenizer splitting texts as GPT-2's does, which GGUF files can say."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def made(
    folder: Path, path: Path, kind_of: Callable[[str], str] = lambda _: "F32", more: Callable[[Any], None] | None = None
) -> Path:
    """A GGUF file of a folder.

    Args:
        folder: of the model, with a byte-level tokenizer.
        path: of the file.
        kind_of: type of a matrix, by its name.
        more: writes further settings.
    """

    def vocabulary(writer: Any) -> None:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
        special = {token["id"] for token in content["added_tokens"]}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(sorted(ids, key=ids.__getitem__))
        writer.add_token_types([CONTROL if i in special else NORMAL for i in sorted(ids.values())])
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
        writer.add_eos_token_id(0)
        template = folder / "chat_template.jinja"
        if template.is_file():
            writer.add_chat_template(template.read_text(encoding="utf-8"))
        if more is not None:
            more(writer)

    write_gguf(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), path, kind_of, vocabulary)
    return path


def plain_model(folder: Path, path: Path) -> Path:
    """A copy of a model's folder, with a tokenizer that a GGUF file can hold."""
    shutil.copytree(folder, path)
    return plain_tokenizer(path)
