"""How byte-level vocabularies of GGUF files take texts, by what a file calls it (`tokenizer.ggml.pre`).

A file has no patterns, only a name for those that its vocabulary was made by; llama.cpp knows them, and so does this
table. Split in another way, the same text becomes other tokens, without a word. A name that is not here is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, pre_tokenizers

from detgen.models.gguf_header import Header

_KEY, _MODEL, BEGINS = (f"tokenizer.ggml.{name}" for name in ("pre", "model", "add_bos_token"))
# Architectures whose old files name nothing, and mean GPT-2's way.
_UNNAMED = {"gpt2", "starcoder2"}

_ENDINGS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA_3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}"
_QWEN_2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_MARKS}"
_QWEN_35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_BY_CASE = r"[^\r\n\p{{L}}\p{{N}}]?{0}*{1}+{2}|[^\r\n\p{{L}}\p{{N}}]?{0}+{1}*{2}"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT_4O = rf"{_BY_CASE.format(_UPPER, _LOWER, _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_REST}"
_TEKKEN = rf"{_BY_CASE.format(_UPPER, _LOWER, '')}|\p{{N}}|{_REST}"
_SEED = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|{_SPACES}"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
_CHINESE = "[一-龥ࠀ-一가-퟿]+"
_DIGITS = r"\p{N}"


class Way(NamedTuple):
    """How texts are taken.

    Attributes:
        splits: patterns; each splits what those before it left, and what it does not match stays a piece.
        whole: whether a piece that is an entry of the vocabulary is that token, whatever merges make of it.
        begins: whether a text begins with the token that begins texts, where a file does not say.
    """

    splits: tuple[str, ...]
    whole: bool = False
    begins: bool = False


WAYS = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais"), Way((_GPT_2,))),
    **dict.fromkeys(("trillion", "granite-docling", "exaone4"), Way((_GPT_2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Way((_DIGITS, _GPT_2))),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), Way((_DIGITS, _GPT_2))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2"), Way((_LLAMA_3,), whole=True, begins=True)),
    **dict.fromkeys(("falcon3", "falcon-h1", "midm-2.0"), Way((_LLAMA_3,), whole=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), Way((_LLAMA_3,))),
    **dict.fromkeys(("glm4", "glm5"), Way((_LLAMA_3,), whole=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), Way((_QWEN_2,))),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), Way((_QWEN_2,))),
    "qwen35": Way((_QWEN_35,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Way((_GPT_4O,))),
    "tekken": Way((_TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Way(_DEEPSEEK_3)),
    "deepseek-coder": Way((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, _DIGITS)),
    "seed-coder": Way((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Way((_BAILING,))),
    "falcon": Way((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Way((r" ?[^(\s|.,!?…。，、।۔،)]+",))),
}


def way_of(header: Header) -> Way | None:
    """How the vocabulary of a file takes texts; None if it is no byte-level one.

    Raises:
        ValueError: if the file does not say, or what it says is not known here.
    """
    if header.settings.get(_MODEL) != "gpt2":
        return None
    name = header.settings.get(_KEY, "gpt-2" if header.architecture in _UNNAMED else None)
    if name is None:
        raise ValueError(f"it does not say how texts are split ({_KEY}), as old files; convert the model again")
    if name not in WAYS:
        raise ValueError(f"its setting {_KEY} = {name} is not understood here; give the model as a folder")
    return WAYS[name]


def take_texts(tokenizer: Tokenizer, way: Way) -> None:
    """Have a byte-level tokenizer take texts in a way."""
    model: Any = tokenizer.model
    model.ignore_merges = way.whole
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in way.splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
