"""Tokenizers of strangers: what could take for ever is called within bounds, what is known is not held up by them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import invoke
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import PostProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from detgen.engine import bounded, tokenizing
from detgen.engine.bounded import Bounded
from detgen.engine.tokenizing import Tokenize
from detgen.errors import RequestError

CATASTROPHE = r"(x+x+)+y|[^x]+|x"
GROWTH: Normalizer = normalizers.Sequence([normalizers.Replace("x", "x" * 10)] * 12)


def tokenizer_of(**parts: Any) -> PreTrainedTokenizerFast:
    """The embedded tokenizer with other parts."""
    tokenizer = AutoTokenizer.from_pretrained("detgen/demo_models/target")
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    found: PreTrainedTokenizerFast = tokenizer
    return found


def split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def template(text: str) -> PostProcessor:
    return processors.TemplateProcessing(single=text, special_tokens=[("<|endoftext|>", 0)])


@pytest.mark.parametrize("name", ["target", "draft", "thinking"])
def test_the_embedded_tokenizers_are_known(demo_models: Any, name: str) -> None:
    """They are called in this process, and give what they give."""
    tokenizer = AutoTokenizer.from_pretrained(getattr(demo_models, name, demo_models.target.parent / name))
    tokenize = Tokenize(tokenizer, "x")
    assert not isinstance(tokenize._call, Bounded)
    for special in (True, False):
        assert tokenize("def f(", special=special) == tokenizer("def f(", add_special_tokens=special).input_ids


@pytest.mark.parametrize(
    ("parts", "known"),
    [
        ({"pre_tokenizer": split(max(tokenizing.PATTERNS, key=len))}, True),
        ({"pre_tokenizer": pre_tokenizers.Split(" ", "merged_with_previous")}, True),
        ({"pre_tokenizer": split(CATASTROPHE)}, False),
        ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), split("a+")])}, False),
        ({"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])}, True),
        ({"normalizer": normalizers.Replace("a", "aa")}, False),
        ({"normalizer": normalizers.Replace(Regex("(x+x+)+y"), "")}, False),
        ({"normalizer": normalizers.Prepend("a" * 100)}, False),
        ({"normalizer": normalizers.Sequence([normalizers.NFKC()] * 1000)}, False),
        ({"post_processor": template("<|endoftext|> $A <|endoftext|>")}, True),
        ({"post_processor": template("$A $A")}, False),
        ({"model": models.WordPiece({"a": 0}, max_input_chars_per_word=10**9, unk_token="a")}, False),
        ({"model": models.BPE({"a": 0}, [], continuing_subword_prefix="#" * 100)}, False),
    ],
)
def test_what_is_called_within_bounds(parts: dict[str, Any], known: bool) -> None:
    """All but the parts that are known to take time and memory in proportion to the text."""
    tokenizer = tokenizer_of(**parts)
    tokenize = Tokenize(tokenizer, "x")
    assert isinstance(tokenize._call, Bounded) is not known
    text = "a" * 20
    assert tokenize(text) == list(tokenizer(text).input_ids)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"pre_tokenizer": split(CATASTROPHE)}, "retry-limit"),  # a panic of the library
        ({"normalizer": GROWTH}, "it takes more than 10 seconds or 0 GiB of memory"),
    ],
)
def test_a_text_that_takes_too_much(
    parts: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is refused in one line, and the next text has its tokens; the library's own words reach no terminal."""
    monkeypatch.setattr(bounded, "_MEMORY", 200 << 20)
    tokenize = Tokenize(tokenizer_of(**parts), "the-model")
    for _ in range(2):
        with pytest.raises(RequestError) as refusal:
            tokenize("x" * 40)
        assert str(refusal.value).startswith("the tokenizer of the-model fails on this text: ")
        assert said in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert tokenize("def f(") == list(tokenizer_of(**parts)("def f(").input_ids)
    assert capfd.readouterr() == ("", "")


def test_what_a_known_tokenizer_raises() -> None:
    """It is the error of its text, too."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", 0.0)])))
    tokenize = Tokenize(tokenizer, "x")
    assert not isinstance(tokenize._call, Bounded)
    assert tokenize("a") == [0]
    with pytest.raises(RequestError, match=r"the tokenizer of x fails on this text: .*unk_id"):
        tokenize("b")


@pytest.mark.parametrize(("command", "more"), [("run", {}), ("score", {"completion": "!"})])
def test_good_prompts_are_not_lost(demo_models: Any, tmp_path: Path, command: str, more: dict[str, Any]) -> None:
    """A text that takes too long is an error in its place, as prompt and as chat."""
    model = Path(shutil.copytree(demo_models.draft, tmp_path / "model"))
    content = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": CATASTROPHE}
    (model / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": "x" * 40}]}
    lines = [{"prompt": text} | more for text in ("def f(", "x" * 40, "import os")] + [chat | more]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = invoke(command, str(prompts), "--target", str(model), "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.stderr
    outputs = [json.loads(line) for line in (tmp_path / "out/outputs.jsonl").read_text().splitlines()]
    assert ["retry-limit" in output.get("error", "") for output in outputs] == [False, True, False, True]
    assert not any("error" in outputs[i] for i in (0, 2))
