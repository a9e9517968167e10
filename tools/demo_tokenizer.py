"""The tokenizer of the demo models: byte-level BPE trained on the library's source."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 1024

# Newlines and indentation are split from words, so that a prompt that ends
# with either gives the same tokens as the text it was taken from.
SPLIT = r"\n+| {2,}|[^\s\p{L}\p{N}]?\p{L}+| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"

# A conversation reads as a Python file: requests, tools and their results are comments, answers are code. The models
# were not trained to call tools; where a call is required, the grammar gives its form.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}"
    "{{ '# Tool: ' ~ (tool.function or tool) | tojson ~ '\\n' }}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'user', 'tool'] %}"
    "{{ '# ' ~ (message['content'] | trim | replace('\\n', '\\n# ')) ~ '\\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% if message['content'] or not message['tool_calls'] %}"
    "{{ (message['content'] | trim) ~ '\\n\\n' }}"
    "{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n{\"name\": ' ~ call.function.name | tojson ~ ', \"arguments\": ' }}"
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>\\n' }}"
    "{% endfor %}"
    "{% else %}"
    "{{ raise_exception('unknown role: ' ~ message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train the BPE merges on the texts; the end-of-text token has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def hugging_face_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer for saving in the standard folder layout."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
