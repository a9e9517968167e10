"""Tokenizers of GGUF files, byte-level and SentencePiece's, made as transformers does, but without it.

Each key of a file about its tokenizer has to be understood; otherwise transformers is asked. Tests compare the two
(`tests/models/gguf/test_plain_tokenizers.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, processors
from tokenizers.models import BPE

from detgen.models.byte_letters import byte_letters
from detgen.models.gguf.configs import LARGEST_GEMMAS, not_understood
from detgen.models.gguf.families import GGUF_FAMILIES
from detgen.models.gguf.header import Header, list_of
from detgen.models.gguf.sentencepiece import pairs_of, pieces_made
from detgen.models.gguf.splits import Way, take_texts, way_of
from detgen.models.kept_tokenizer import KeptTokenizer

_PREFIX, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_CONTROL, _USER = 3, 4  # types of tokens
# Tokens with a special role, in transformers' order, with their names in files.
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ADDED = ("bos", "eos")
_FLAGS = {f"add_{name}_token" for name in _ADDED}
_KNOWN = {
    *("model", "pre", "tokens", "token_type", "merges", *_FLAGS),
    *(f"{name}_token_id" for name in (*_NAMED.values(), "eot", "eom")),
    # For SentencePiece's alone, or unused.
    *("scores", "add_space_prefix", *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep"))),
}
_KINDS = ("gpt2", "llama")  # byte-level, and SentencePiece's
# Tokens for other kinds of models, and templates that a chat may ask for by name.
_UNUSED = {
    *(f"{_PREFIX}{name}_token_id" for name in ("mask", "cls", "seperator")),
    *("tokenizer.chat_templates", f"{_TEMPLATE}.tool_use", f"{_TEMPLATE}.rag"),
}


def own_tokenizer(header: Header, path: Path) -> KeptTokenizer:
    """Return the byte-level tokenizer that a file describes, where transformers would mistake some tokens.

    Raises:
        ValueError: if something is not understood; the message names it.
    """

    def load() -> None:
        raise AttributeError("transformers has no tokenizer for such a file")

    return KeptTokenizer(tokenizer_facts(header, path), path, load)


def tokenizer_facts(header: Header, path: Path) -> dict[str, Any]:
    """Return the facts from which `KeptTokenizer` is made.

    Raises:
        ValueError: if something is not understood.
        Exception: from the tokenizers library, if it cannot make the tokenizer.
    """
    family = GGUF_FAMILIES.get(header.architecture)
    # Whether the file alone decides which tokens stand for themselves. If not, as in transformers, tokens with other
    # characters than letters of bytes are spelled in these, and GPT-2's own is added.
    as_said = family is not None and not family.tokenized
    said, template = _said(header, _UNUSED if as_said else set())
    way, joins = way_of(header), "merges" if "merges" in said else "scores"
    tokens, types, joined = (list_of(path, header, _PREFIX + name) for name in ("tokens", "token_type", joins))
    if way is None:
        made = pieces_made(header.architecture, tokens, **{joins: joined})
    else:
        made = _bytes_made(tokens, types, joined, way, as_said=as_said)
    of_type = {kind: [x for x, own in zip(tokens, types, strict=True) if own == kind] for kind in (_CONTROL, _USER)}
    spelled = set(byte_letters())
    control = [x for x in of_type[_CONTROL] if way is None or as_said or spelled.issuperset(x)]
    made.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in control])
    used = [x for x in of_type[_USER] if made.token_to_id(x) is not None]
    made.add_tokens([AddedToken(x, normalized=False, special=False) for x in used])
    named = {name: tokens[said[key]] for name, of in _NAMED.items() if (key := f"{of}_token_id") in said}
    if header.architecture in LARGEST_GEMMAS:
        if way is not None:
            raise not_understood(_PREFIX + "model", said["model"])
        named["mask"] = "<mask>"  # no file says so
    once, there = list(dict.fromkeys(named.values())), {x.content for x in made.get_added_tokens_decoder().values()}
    made.add_tokens([AddedToken(text, special=True) for text in once if text not in there])
    if family is None and header.architecture != "llama":  # whose classes do that, such as Qwen's
        made.add_tokens([AddedToken(text, special=True) for text in once])
    ids = {name: made.token_to_id(text) for name, text in named.items()}
    begins = said.get("add_bos_token", way is None or way.begins), said.get("add_eos_token", False)
    adds = {name: named[name] for name, asked in zip(_ADDED, begins, strict=True) if asked and name in named}
    bos, eos = (adds.get(name, "") for name in _ADDED)
    single = f"{bos and f'{bos}:0 '}$A:0{eos and f' {eos}:0'}"
    made.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single}{bos and f' {bos}:1'} $B:1{eos and f' {eos}:1'}",
        special_tokens=[(text, ids[name]) for name, text in adds.items()],
    )
    return {
        "eos_token_id": ids.get("eos"),
        "bos_token_id": ids.get("bos"),
        "all_special_ids": list(dict.fromkeys(ids.values())),
        "chat_template": template,
        "special_tokens_map": {f"{name}_token": text for name, text in named.items()},
        "clean_up_tokenization_spaces": False,
        "response_template": None,
        "state": made,
    }


def _said(header: Header, unused: set[str]) -> tuple[dict[str, Any], str | None]:
    """Return a file's settings of its tokenizer, all understood except unused ones, and its chat template.

    Raises:
        ValueError: if something is not understood; the message names it.
    """
    found: dict[str, Any] = {}
    for key, value in header.settings.items():
        name = key.removeprefix(_PREFIX)
        if key in (_TEMPLATE, *unused) or not key.startswith("tokenizer."):
            continue
        id_ = type(value) is int and 0 <= value < len(header.settings[f"{_PREFIX}tokens"])
        if name not in _KNOWN or (name in _FLAGS and type(value) is not bool) or (name.endswith("_id") and not id_):
            raise not_understood(key, value)
        found[name] = value
    template = header.settings.get(_TEMPLATE)
    if (kind := found.get("model")) not in _KINDS or not isinstance(template, str | None):
        raise not_understood(_PREFIX + "model", kind)
    # Gemma's pieces have no space before a text, others have one; a file may say so.
    of_pieces = {"pre": "default", "add_space_prefix": header.architecture not in LARGEST_GEMMAS}
    for name, known in of_pieces.items() if kind == "llama" else ():
        if found.get(name, known) != known:
            raise not_understood(_PREFIX + name, found[name])
    return found, template


def _bytes_made(tokens: list[str], types: list[int], merges: list[str], way: Way, *, as_said: bool) -> Tokenizer:
    """Return a byte-level tokenizer without the tokens that the file calls special."""
    letters = byte_letters()
    spelled = set(letters)
    written = tokens
    if not spelled.issuperset("".join(tokens)):
        themselves = (_CONTROL, _USER) if as_said else ()
        written = [
            x if kind in themselves or spelled.issuperset(x) else "".join(letters[b] for b in x.encode())
            for x, kind in zip(tokens, types, strict=True)
        ]
    vocabulary = dict(zip(written, range(len(written)), strict=True))
    made = Tokenizer(
        BPE(vocabulary, pairs_of(merges), continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    take_texts(made, way)
    made.decoder = decoders.ByteLevel()
    if not as_said:
        made.add_tokens([AddedToken("<|endoftext|>", special=True)])  # GPT-2's own, even if a file has none
    return made
