"""How byte-level vocabularies of GGUF files split texts, by the name in the file (`tokenizer.ggml.pre`).

A file names the patterns with which its vocabulary was made, but does not contain them; llama.cpp knows them, and so
does this table. With other patterns, the same text would silently become other tokens, so unknown names are refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from detgen.models.gguf.configs import not_understood
from detgen.models.gguf.header import Header

_KEY, MODEL = (f"tokenizer.ggml.{name}" for name in ("pre", "model"))
BEGINS, PREFIXED = (f"tokenizer.ggml.add_{name}" for name in ("bos_token", "space_prefix"))
# Architectures whose old files give no name and mean GPT-2's way.
_UNNAMED = {"gpt2", "starcoder2"}

_ENDINGS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_AFTER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA_3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_AFTER}"
_QWEN_2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_AFTER}"
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
_LETTERS_BUT_HAN = (rf"[{of[1:-1]}&&[^\p{{Han}}]]" for of in (_UPPER, _LOWER))
_KIMI_2 = rf"\p{{Han}}+|{_BY_CASE.format(*_LETTERS_BUT_HAN, _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_AFTER}"
_WORDS, _MARK = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r" ?[^\s\p{L}\p{N}]+"
_EXAONE_MOE = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_MARK}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
_POWERS = "".join(rf"\s{{{2**i}}}(?!\S)|" for i in range(9, 1, -1))
_JAIS_2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_MARK}[\r\n]*|\s*[\r\n]+|{_POWERS}\s{{1,2}}(?!\S)|\s{{1}}"
_MINICPM_5 = r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORD}|\p{{N}}+|{_AFTER}"
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK_3[2],
)
# Letters in DeepSeek's first tokenizers: of scripts with upper and lower case; other letters are East Asian.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"

_EAST_ASIAN = f"[{_ASIAN}]+"
_DIGITS = r"\p{N}"


class Way(NamedTuple):
    """How texts become pieces.

    Attributes:
        splits: patterns, applied in order to what earlier ones have split; what a pattern does not match stays a piece.
        whole: whether a piece that is in the vocabulary becomes that token regardless of merges.
        begins: whether a text begins with the BOS token, unless the file says otherwise.
        composed: whether letters and their marks are composed first (NFC).
    """

    splits: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composed: bool = False


WAYS = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "jais"), Way((_GPT_2,))),
    **dict.fromkeys(("trillion", "granite-docling", "exaone4"), Way((_GPT_2,))),
    "olmo": Way((_GPT_2,), composed=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), Way((_DIGITS, _GPT_2))),
    "command-r": Way((_DIGITS, _GPT_2), composed=True),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), Way((_DIGITS, _GPT_2))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2"), Way((_LLAMA_3,), whole=True, begins=True)),
    **dict.fromkeys(("falcon3", "falcon-h1", "midm-2.0"), Way((_LLAMA_3,), whole=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), Way((_LLAMA_3,))),
    **dict.fromkeys(("glm4", "glm5"), Way((_LLAMA_3,), whole=True)),
    "qwen2": Way((_QWEN_2,), composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), Way((_QWEN_2,))),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), Way((_QWEN_2,))),
    "qwen35": Way((_QWEN_35,), composed=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Way((_GPT_4O,))),
    "tekken": Way((_TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Way(_DEEPSEEK_3)),
    "deepseek-llm": Way((r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", _EAST_ASIAN, _DIGITS)),
    "deepseek-coder": Way((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGITS)),
    "seed-coder": Way((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Way((_BAILING,))),
    "kimi-k2": Way((_KIMI_2,), whole=True),
    "exaone-moe": Way((_EXAONE_MOE,)),
    "jais-2": Way((_JAIS_2,)),
    "minicpm5": Way(_MINICPM_5, whole=True),
    "afmoe": Way(_AFMOE),
    "falcon": Way((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Way((r" ?[^(\s|.,!?…。，、।۔،)]+",))),
}


def way_of(header: Header) -> Way | None:
    """Return how the vocabulary of a file splits texts; None if it is not byte-level.

    Raises:
        ValueError: if the file gives no name, or an unknown one.
    """
    if header.settings.get(MODEL) != "gpt2":
        return None
    name = header.settings.get(_KEY, "gpt-2" if header.architecture in _UNNAMED else None)
    if name is None:
        raise ValueError(f"it does not say how its texts are split ({_KEY}); convert the model again")
    if name not in WAYS:
        raise not_understood(_KEY, name)
    return WAYS[name]


def take_texts(tokenizer: Tokenizer, way: Way) -> None:
    """Have a byte-level tokenizer split texts in a certain way."""
    model: Any = tokenizer.model
    model.ignore_merges = way.whole
    if way.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in way.splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])


def begin_without_space(tokenizer: Tokenizer) -> None:
    """Have a tokenizer like SentencePiece's add no space before texts; transformers always adds one."""
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
