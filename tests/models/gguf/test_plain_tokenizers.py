"""Tokenizers of plain decoders in GGUF files are those that transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import examples
from helpers.gguf_files import loaded
from helpers.plain_gguf import (
    CONTROL,
    LEARNED,
    MORE,
    NORMAL,
    ROWS,
    UNUSED,
    USER_DEFINED,
    file_of,
    made_of,
    pieces,
    vocabulary,
)
from hypothesis import given
from hypothesis import strategies as st

from detgen.errors import EngineError
from detgen.models.gguf import models as gguf_models
from detgen.models.gguf.header import read_header
from detgen.models.gguf.splits import WAYS
from detgen.models.gguf.tokenizer import tokenizer_facts
from detgen.models.kept_tokenizer import KeptTokenizer, facts_of
from detgen.models.loaded import LoadedModel
from detgen.models.loading import load_model

TOKENIZERS: dict[str, Callable[[Any], None]] = {
    **{
        f"split as {pre}": vocabulary(pre=pre, ggml__bos_token_id=258)
        for pre in {way: pre for pre, way in WAYS.items()}.values()
    },
    "nothing is special": vocabulary(types=[NORMAL] * 5),
    "all are": vocabulary(types=[CONTROL] * 5),
    "all are someone's": vocabulary(types=[USER_DEFINED] * 5),
    "tokens with names": vocabulary(
        ggml__bos_token_id=258, ggml__eos_token_id=259, ggml__unknown_token_id=262, ggml__padding_token_id=259
    ),
    "someone's with names": vocabulary(types=[USER_DEFINED] * 5, ggml__bos_token_id=258, ggml__eos_token_id=259),
    "plain ones with names": vocabulary(types=[NORMAL] * 5, ggml__bos_token_id=97, ggml__eos_token_id=257),
    "one that is not of letters has a name": vocabulary(ggml__eos_token_id=261),
    "begins": vocabulary(ggml__bos_token_id=258, ggml__eos_token_id=259, ggml__add_bos_token=True),
    "begins and ends": vocabulary(
        ggml__bos_token_id=258, ggml__eos_token_id=259, ggml__add_bos_token=True, ggml__add_eos_token=True
    ),
    "ends": vocabulary(ggml__eos_token_id=259, ggml__add_eos_token=True, ggml__add_bos_token=False),
    "begins with nothing": vocabulary(ggml__eos_token_id=259, ggml__add_bos_token=True),
    "a template": vocabulary(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"),
    "a token of GPT-2": vocabulary(more=["<|endoftext|>"], ggml__eos_token_id=ROWS),
    "ends of turns": vocabulary(ggml__eos_token_id=259, ggml__eot_token_id=258, ggml__eom_token_id=260),
    "what is for others": vocabulary(ggml__add_space_prefix=False, ggml__fim_pre_token_id=258),
}


TEXTS = (
    "The abc's 12345 <think>\n\n<|im_start|>a\u00e9 b\u20ac <unk>",
    *("", " ", "  the   abc aaaaa\t\u4e2d\u6587\u4e2d \U0001f600\x00", "[INST]the [INST] <s>a</s> <think>the\n\n\n"),
)


def check_tokenizers(path: Path, texts: Iterable[str] = TEXTS) -> None:
    """The tokenizer of a file is that of transformers: its state, and what becomes of texts."""
    header = read_header(path, "x")
    _, asked = gguf_models.settings(path, header)
    facts = tokenizer_facts(header, path)
    quick: Any = KeptTokenizer(facts, path, lambda: pytest.fail("it is loaded"))
    assert facts_of(quick, path) == facts_of(asked, path)
    assert gguf_models.ends(header, quick) == gguf_models.ends(header, asked)
    for text in texts:
        for special in (False, True):
            ids = [one(text, add_special_tokens=special).input_ids for one in (quick, asked)]
            assert ids[0] == ids[1]
        for skipped in (False, True):
            found = [one.decode(ids[0], skip_special_tokens=skipped) for one in (quick, asked)]
            assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3moe"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.gguf", kind, TOKENIZERS[name])
    check_tokenizers(path)
    assert made_of(path) is not None


def test_a_tokenizer_of_phi_4(tmp_path: Path) -> None:
    """Byte-level, of the architecture whose other files have pieces."""
    tokenizer = vocabulary(more=MORE, pre="dbrx", ggml__bos_token_id=258, ggml__eos_token_id=259)
    path = file_of(tmp_path / "model.gguf", "phi3", tokenizer)
    check_tokenizers(path)
    assert made_of(path) is not None


PIECES: dict[str, Callable[[Any], None]] = {
    "plain": pieces(),
    "the same scores": pieces(scores=lambda i: -float(i // 5)),
    "better ones last": pieces(scores=float),
    "none but bytes": pieces([]),
    "not all have names": pieces(ggml__padding_token_id=3),
    "others begin": pieces(begins=("<pad>", "<bos>", "<eos>", "<unk>", "<mask>"), ggml__unknown_token_id=3),
    "merges are said": pieces(ggml__merges=["\u2581 t", "h e", "\u2581t he", "a b"]),
    "no byte": pieces(begins=["<unk>", "<s>", "</s>", *LEARNED], learned=["d"], scores=lambda i: -1.0),
    "all it may say": pieces(
        ggml__pre="default",
        ggml__add_bos_token=True,
        ggml__add_eos_token=True,
        ggml__eot_token_id=4,
        chat_template="{{ messages }}",
    ),
    "begins with nothing": pieces(ggml__add_bos_token=False),
    "all are someone's": pieces(kinds=lambda _: USER_DEFINED),
    "all are special": pieces(kinds=lambda _: CONTROL),
    "all are unused": pieces(kinds=lambda _: UNUSED),
    "tokens twice": pieces((*LEARNED, "ab", "\u2581the")),
}


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma2", "gemma3"])
@pytest.mark.parametrize("name", PIECES)
def test_tokenizers_of_pieces_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.gguf", kind, PIECES[name])
    check_tokenizers(path)
    assert (made_of(path) is None) == (kind == "phi3")  # of which these are too few


@examples(100)
@given(
    kind=st.sampled_from(["llama", "phi3", "gemma2"]),
    learned=st.lists(st.text("ab \u2581", min_size=1, max_size=5), max_size=40, unique=True),
    scores=st.lists(st.floats(-9, 9, width=32) | st.sampled_from([0.0, -1.0]), min_size=40, max_size=40),
    texts=st.lists(st.text("ab \n\u20ac", max_size=20), max_size=5),
)
def test_whatever_the_pieces_are(
    tmp_path_factory: pytest.TempPathFactory, kind: str, learned: list[str], scores: list[float], texts: list[str]
) -> None:
    path = file_of(tmp_path_factory.mktemp("drawn") / "model.gguf", kind, pieces(learned, scores.__getitem__))
    check_tokenizers(path, texts)


def test_a_text_begins_as_the_family_has_it(tmp_path: Path, quickly: Callable[..., LoadedModel]) -> None:
    """Where a file does not say whether it does: Llama 3's do, and Qwen's do not."""
    for pre, begins in (("llama-bpe", True), ("qwen2", False)):
        path = file_of(tmp_path / f"{pre}.gguf", "llama", vocabulary(pre=pre, ggml__bos_token_id=258))
        for one in (quickly(path), loaded(path)):
            assert (one.tokenizer("a").input_ids[0] == 258) == begins


@pytest.mark.parametrize("pre", [None, "another"])
def test_a_way_that_is_not_known_is_refused(pre: str | None, tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.gguf", "llama", vocabulary(pre=pre))
    with pytest.raises(EngineError, match=r"tokenizer\.ggml\.pre"):
        load_model(path, "model.gguf", "auto", "none", role="target")
