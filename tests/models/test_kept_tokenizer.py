"""Tokenizers as they are kept do to every text what transformers' own do."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from inspect import signature
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, TokenizersBackend

from detgen.errors import DEMO
from detgen.models import kept_tokenizer
from detgen.models.chat_functions import CHAT_FUNCTIONS, chat_functions
from detgen.models.kept_tokenizer import KeptTokenizer, facts_of


def in_bytes(folder: Path, **settings: Any) -> Path:
    """A vocabulary of bytes with special and added tokens around a text; settings of its file cut and fill texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **settings).save_pretrained(
        folder
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def in_characters(folder: Path) -> Path:
    """A vocabulary of characters with bytes for the rest, as Llama has it."""
    entries = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "\u2581", "a", "b", "\u2581a"]
    tokenizer = Tokenizer(
        models.BPE({e: i for i, e in enumerate(entries)}, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def in_words(folder: Path) -> Path:
    """Words, of which a decoder that cleans up takes away spaces."""
    words = {word: i for i, word in enumerate(["[UNK]", "a", "b", ".", ",", "##c", "n't", "do"])}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=True
    ).save_pretrained(folder)
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "embedded": lambda _: DEMO / "target",
    "bytes": in_bytes,
    "cleaning bytes": lambda folder: in_bytes(folder, clean_up_tokenization_spaces=True),
    "characters": in_characters,
    "words": in_words,
}


@cache
def pair(kind: str) -> tuple[Any, KeptTokenizer, list[int]]:
    """A tokenizer of transformers, as it is kept, and a count of how often that has asked transformers."""
    folder = KINDS[kind](Path(mkdtemp()))
    own, asked = AutoTokenizer.from_pretrained(folder), []
    facts = json.loads(json.dumps(facts_of(own, folder)))

    def load() -> Any:
        asked.append(1)
        return own

    return AutoTokenizer.from_pretrained(folder), KeptTokenizer(facts, folder, load), asked


TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(["<s>", "</s>", "<tool>", " ", "a", "b .", "do n't", "é", "\n", "<|endoftext|>", "ac"])
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(text=TEXTS, special=st.booleans(), skipped=st.booleans(), cleaned=st.sampled_from([None, False, True]))
def test_texts_and_tokens(kind: str, text: str, special: bool, skipped: bool, cleaned: bool | None) -> None:
    """Back and forth."""
    own, kept, _ = pair(kind)
    ids = own(text, add_special_tokens=special).input_ids
    assert kept(text, add_special_tokens=special).input_ids == ids
    how = {"skip_special_tokens": skipped, "clean_up_tokenization_spaces": cleaned}
    assert kept.decode(ids, **how) == own.decode(ids, **how)
    for token in ids[:3]:
        assert kept.decode(token) == own.decode(token)
        assert kept.convert_ids_to_tokens(token) == own.convert_ids_to_tokens(token)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_knows(kind: str) -> None:
    """All that engines ask of tokenizers, most of it without transformers."""
    own, kept, asked = pair(kind)
    assert kept.get_vocab() == own.get_vocab()
    assert kept.added_tokens_decoder == own.added_tokens_decoder
    for name in ("eos_token_id", "bos_token_id", "all_special_ids", "chat_template"):
        assert getattr(kept, name) == getattr(own, name)
    assert kept.name_or_path == own.name_or_path
    assert kept.vocab_size == own.vocab_size
    assert len(asked) == 1  # once for all


def test_the_file_is_not_kept_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless transformers makes something else of it."""
    own = AutoTokenizer.from_pretrained(DEMO / "target")
    facts = facts_of(own, DEMO / "target")
    assert facts is not None
    assert facts["state"] is None
    monkeypatch.setattr(kept_tokenizer, "Tokenizer", None)  # without a file there is none to compare with
    elsewhere = facts_of(own, tmp_path)
    assert elsewhere is not None
    assert json.loads(elsewhere["state"])["model"]["vocab"]


def test_tokenizers_with_ways_of_their_own_are_not_kept() -> None:
    """Their classes, or their settings."""

    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **named: Any) -> str:
            return "something else"

    own = AutoTokenizer.from_pretrained(DEMO / "target")
    assert isinstance(own, TokenizersBackend)
    assert facts_of(Own(tokenizer_object=own.backend_tokenizer), DEMO) is None
    own.split_special_tokens = True
    assert facts_of(own, DEMO / "target") is None
    assert facts_of(object(), DEMO) is None


_SHOWN = (
    "{%- for m in messages %}{% if not m.content is defined %}{% continue %}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.reasoning_content }}{{ eos_token }}{% endfor %}"
    "{% generation %}{% endgeneration %}{% set n = namespace(found=false) %}{% if tools %}"
    "{{ tools | tojson(indent=1) }}{% endif %}{{ extra }}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{{ bos_token }}"
)
_CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- set ns = namespace(system="") %}
{%- for message in messages if message['role'] == 'user' %}{% set ns.system = ns.system ~ loop.index0 %}{% endfor %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + ns.system }}
{%- for message in messages %}
    {%- if 'tool_calls' in message and message.tool_calls %}{{- message.tool_calls | tojson(indent=4) }}{% endif %}
    {%- generation %}{{- message.content | trim + "<|eot_id|>" }}{% endgeneration %}
    {%- if loop.index == 2 %}{% break %}{% endif %}
{%- endfor %}
"""
_MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ message['content'] + eos_token }}{% endif %}
{% endfor %}"""
_GEMMA = """{{ bos_token }}{%- set first = messages[0].content | default('', true) -%}
{%- macro turn(role, content) -%}<start_of_turn>{{ role | replace('assistant', 'model') }}
{{ content.split('</think>')[-1] | trim }}<end_of_turn>
{% endmacro -%}
{%- for message in messages[::-1] | reverse -%}
    {{ turn(message.role, message.content) }}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}{{ dict(a=first) | tojson }}"""
TEMPLATES: list[Any] = [
    _SHOWN,
    _CHATML,
    _LLAMA,
    _MISTRAL,
    _GEMMA,
    {"default": _SHOWN, "tool_use": "{{ tools | tojson }}" + _SHOWN},
    {"other": _SHOWN},
    "{{ raise_exception('no') }}",
    "{{ ''.__class__ }}",
    "{{ messages.append(1) }}",
    "{% if %}",
    None,
]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=9) | st.none()},
        optional={"tool_calls": st.just([{"a": "<é>"}]), "thinking": st.text(max_size=3)},
    ),
    max_size=3,
)


@pytest.mark.parametrize("template", TEMPLATES, ids=str)
@examples(30)
@given(
    messages=MESSAGES,
    tools=st.sampled_from([None, [{"type": "function", "function": {"name": "f"}}]]),
    goes_on=st.booleans(),
    variables=st.sampled_from([{}, {"extra": "more"}, {"eos_token": "<end>"}]),
)
def test_chats_are_rendered_as_by_transformers(
    template: Any, messages: Any, tools: Any, goes_on: bool, variables: dict[str, str]
) -> None:
    """Text by text, error by error; the tokenizer of transformers is not loaded for it."""
    own, _, _ = pair("bytes")
    own.chat_template = template
    facts = json.loads(json.dumps(facts_of(own, Path("nowhere"))))
    kept = KeptTokenizer(facts, Path("nowhere"), lambda: pytest.fail("it is loaded"))

    def rendered(tokenizer: Any) -> str:
        try:
            source = tokenizer.get_chat_template(tools=tools)
            options = {"tools": tools, "add_generation_prompt": not goes_on, "continue_final_message": goes_on}
            return str(
                tokenizer.apply_chat_template(messages, tokenize=False, chat_template=source, **options, **variables)
            )
        except Exception as error:
            return repr(error)

    assert rendered(kept) == rendered(own)


def test_what_renders_chats_is_taken_out_of_transformers() -> None:
    """Without the rest; the rest is imported where its files are laid out in another way."""
    for name, function in chat_functions().items():
        own = getattr(PreTrainedTokenizerBase, name)
        assert function.__globals__ is not own.__globals__
        assert function.__code__.co_code == own.__code__.co_code
        assert [*signature(function).parameters] == [*signature(own).parameters]
    for name, unusual in (("find_spec", lambda _: None), ("_globals", lambda _: ["something else"])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"detgen.models.chat_functions.{name}", unusual)
            found = chat_functions.__wrapped__()
        assert found == {name: getattr(PreTrainedTokenizerBase, name) for name in CHAT_FUNCTIONS}
