"""Texts of tokens: as they stand in a text, visible, and only by the tokenizer of the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_files import made, plain_model
from tokenizers import Tokenizer, decoders, models

from detgen.errors import DEMO
from detgen.report.texts import Texts


def manifest(model: str | None = None) -> dict[str, Any]:
    return {"model": model, "profile": {"target": {"name": "the model"}}}


def test_the_embedded_model() -> None:
    texts, tokenizer = Texts(manifest()), Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    ids = tokenizer.encode("def add(a, b):\n    return a + b\n").ids
    assert "".join(str(texts.of(token)) for token in ids) == "def add(a, b):\n    return a + b\n"
    assert texts.encode("def add(a, b):\n    return a + b\n") == ids
    assert texts.of_all(ids[:3]) == tokenizer.decode(ids[:3])
    assert not texts.why


def test_the_tokenizer_of_a_gguf_file(demo_models: Any, tmp_path: Path) -> None:
    folder = plain_model(demo_models.draft, tmp_path / "model")
    texts, plain = Texts(manifest(str(made(folder, tmp_path / "m.gguf")))), Texts(manifest(str(folder)))
    ids = plain.encode("def add(a, b):\n    return a + b\n")
    assert ids is not None
    assert texts.encode("def add(a, b):\n    return a + b\n") == ids
    assert [texts.of(token) for token in ids] == [plain.of(token) for token in ids]
    assert not texts.why
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(40))
    assert "cannot be read here, so tokens are shown by their numbers" in Texts(manifest(str(tmp_path / "m.gguf"))).why


def test_a_thinking_model_tells_its_chunks() -> None:
    assert Texts(manifest("demo-thinking")).chunk == 4
    assert Texts(manifest()).chunk is None


def test_a_space_at_the_beginning_of_a_token_is_kept(tmp_path: Path) -> None:
    """Tokenizers in the manner of SentencePiece leave it out where a text begins."""
    tokenizer = Tokenizer(models.BPE({"▁the": 0, "▁": 1, "x": 2, "<0xE2>": 3}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = Texts(manifest(str(tmp_path)))
    assert [texts.of(i) for i in range(4)] == [" the", " ", "x", "<0xE2>"]
    assert texts.of(99) == "" or texts.of(99) is None


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"version": "1.0"}', "\x00"])
def test_without_a_tokenizer_there_are_numbers(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    texts = Texts(manifest(str(tmp_path)))
    assert (texts.of(3), texts.of_all([3]), texts.encode("x")) == (None, None, None)
    assert "tokens are shown by their numbers" in texts.why


@pytest.mark.parametrize("model", ["/nowhere/model", "nobody/none", "no such\x00name", "a\nb"])
def test_a_model_that_is_not_here(model: str) -> None:
    assert "is not on this machine" in Texts(manifest(model)).why


def test_another_tokenizer_is_not_used(tmp_path: Path) -> None:
    shutil.copy(DEMO / "target" / "tokenizer.json", tmp_path)
    texts = Texts(manifest(str(tmp_path)))
    ids = texts.encode("return x") or []
    texts.check({"token_ids": ids, "text": "return"})  # cut at a stop string
    assert texts.of(ids[0]) == "return"
    texts.check({"token_ids": ids, "text": "another"})
    assert texts.of(ids[0]) is None
    assert "gives other texts than the run's" in texts.why


def test_what_a_damaged_line_holds_is_no_token(tmp_path: Path) -> None:
    texts = Texts(manifest())
    for tokens in ([-1], [2**40], ["x"], [None]):
        assert texts.of_all(tokens) is None  # type: ignore[arg-type]
