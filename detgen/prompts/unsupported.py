"""Keys that change the text in other programs and that detgen does not have: lines with them are refused.

A key whose value changes nothing (null, empty, or listed here as neutral) is metadata, like unknown keys.
"""

from __future__ import annotations

from typing import Any

from detgen.engine.request import Request
from detgen.errors import RequestError
from detgen.params import PARAMETERS

_FORMAT = "detgen has structured_outputs with json, regex, choice or grammar"
_BEAMS = "detgen has no beam search"
_FILTER = "detgen has no such filter"
_BANS = "detgen has no lists of banned or forced tokens"
_TOOLS = "give tool_choice, which makes a model call a tool, or one of them"
_TEMPLATE = "give it in chat_template_kwargs"
_PROMPT = "detgen does not change prompts"
_TEXT = "detgen reads only text"
_NESTED = "give what it holds beside the prompt"

# Each with the values that change nothing, and the reason for refusing others, or the remedy.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "structural_tag": ((), _FORMAT),
    "json_schema": ((), _FORMAT),
    "regex": ((), _FORMAT),
    "grammar": ((), _FORMAT),
    "ebnf": ((), _FORMAT),
    "best_of": ((1,), "detgen does not choose among samples; ask for n of them"),
    "use_beam_search": ((False,), _BEAMS),
    "beam_search": ((False,), _BEAMS),
    "num_beams": ((0, 1), _BEAMS),
    "num_beam_groups": ((0, 1), _BEAMS),
    "beam_width": ((0, 1), _BEAMS),
    "diversity_penalty": ((0,), _BEAMS),
    "length_penalty": ((0, 1), _BEAMS),
    "penalty_alpha": ((0,), "detgen has no contrastive search"),
    "guidance_scale": ((0, 1), "detgen has no guidance by a second prompt"),
    "dola_layers": ((), "detgen does not contrast layers"),
    "typical_p": ((0, 1), _FILTER),
    "epsilon_cutoff": ((0,), _FILTER),
    "eta_cutoff": ((0,), _FILTER),
    "tfs": ((1,), _FILTER),
    "tfs_z": ((1,), _FILTER),
    "smoothing_factor": ((0,), _FILTER),
    "top_a": ((0,), _FILTER),
    "mirostat": ((0,), _FILTER),
    "xtc_probability": ((0,), _FILTER),
    "dynatemp_range": ((0,), _FILTER),
    "dry_multiplier": ((0,), "detgen has no such penalty; there is repetition_penalty"),
    "no_repeat_ngram_size": ((0,), "detgen has no such penalty; there is repetition_penalty"),
    "encoder_no_repeat_ngram_size": ((0,), "detgen has no such penalty; there is repetition_penalty"),
    "encoder_repetition_penalty": ((1,), "detgen has no such penalty; there is repetition_penalty"),
    "exponential_decay_length_penalty": ((), "detgen has no such penalty"),
    "bad_words": ((), _BANS),
    "bad_words_ids": ((), _BANS),
    "force_words_ids": ((), _BANS),
    "allowed_token_ids": ((), _BANS),
    "suppress_tokens": ((), _BANS),
    "begin_suppress_tokens": ((), _BANS),
    "forced_bos_token_id": ((), _BANS),
    "forced_eos_token_id": ((), _BANS),
    "sequence_bias": ((), _BANS),
    "logits_processor": ((), "detgen does not run code from its input"),
    "logits_processors": ((), "detgen does not run code from its input"),
    "custom_logit_processor": ((), "detgen does not run code from its input"),
    "watermark": ((False,), "detgen has no watermarks"),
    "watermarking_config": ((), "detgen has no watermarks"),
    "max_length": ((), "give max_tokens, which does not count the prompt"),
    "min_length": ((0,), "give min_tokens, which does not count the prompt"),
    "max_time": ((), "an output may not depend on time; give max_tokens"),
    "function_call": (("auto", "none"), _TOOLS),
    "functions": ((), "give tools"),
    "enable_thinking": ((), _TEMPLATE),
    "chat_template": ((), "detgen uses the model's own chat template"),
    "truncate_prompt_tokens": ((-1,), _PROMPT),
    "prefix": ((), "let the prompt begin with it"),
    "suffix": ((), "detgen only continues a prompt"),
    "system": ((), "give messages, the first with the role system"),
    "assistant_prefix": ((), "give messages, the last one the assistant's, and continue_final_message"),
    **dict.fromkeys(("multi_modal_data", "images", "image_data", "audio_data", "video_data"), ((), _TEXT)),
    "prompt_embeds": ((), "detgen reads only text and token ids"),
    "inputs_embeds": ((), "detgen reads only text and token ids"),
    "skip_special_tokens": ((True,), "token_ids in the output has the special tokens"),
    "include_stop_str_in_output": ((False,), "detgen ends a text before the stop string"),
    "return_full_text": ((False,), "give the option --echo"),
    "echo": ((False,), "give the option --echo, which writes prompts to outputs.jsonl"),
    "prompt_logprobs": ((False,), "detgen reports the logprobs of generated tokens only"),
    "sampling_params": ((), _NESTED),
    "generation_config": ((), _NESTED),
    "generation_kwargs": ((), _NESTED),
    "gen_kwargs": ((), _NESTED),
    "extra_body": ((), _NESTED),
}

# Keys of API requests; in other lines, they are names of data.
IN_BODY: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "results are written to a file"),
    "stream_options": ((), "results are written to a file"),
    "modalities": ((["text"],), "detgen writes only text"),
    "audio": ((), "detgen writes only text"),
    "web_search_options": ((), "detgen does not search the web"),
    "verbosity": (("medium",), "say in the prompt how long an answer should be"),
}

# Names in other programs: the name here, and the values that change nothing.
OTHER_NAMES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "stop_sequences": ("stop", ()),
    "stop_strings": ("stop", ()),
    "stop_words": ("stop", ()),
    "num_return_sequences": ("n", (1,)),
    "max_output_tokens": ("max_tokens", ()),
    "max_gen_toks": ("max_tokens", ()),
    "max_gen_len": ("max_tokens", ()),
    "n_predict": ("max_tokens", ()),
    "num_predict": ("max_tokens", ()),
    "min_new_tokens": ("min_tokens", (0,)),
    "top_logprobs": ("logprobs", (0,)),
    "repeat_penalty": ("repetition_penalty", (1,)),
}

_REMEDY = 'leave it out, or put it into "metadata" if it is not a setting'


def check_supported(record: dict[str, Any], request: Request) -> None:
    """Raise if a record asks for something that detgen does not do.

    Raises:
        RequestError: naming the key, the reason and the remedy.
    """
    for key, value in record.items():
        if key in PARAMETERS:
            continue
        if key in OTHER_NAMES:
            name, neutral = OTHER_NAMES[key]
            reason = f'{key} is called {name} here; rename it, or put it into "metadata" if it is not a setting'
        elif key in UNSUPPORTED or key.startswith("guided_"):
            neutral, why = UNSUPPORTED.get(key, ((), _FORMAT))
            reason = f"{key} is not supported: {why}; {_REMEDY}"
        else:
            continue
        if not _changes_nothing(value, neutral):
            raise RequestError(reason)
    _check_fitting(record, request)


def check_body(body: dict[str, Any]) -> None:
    """Raise if the body of a batch request asks for something that detgen does not do.

    Raises:
        RequestError: naming the key and the reason.
    """
    for key, (neutral, why) in IN_BODY.items():
        if not _changes_nothing(body.get(key), neutral):
            raise RequestError(f"{key} is not supported: {why}; leave it out")


def _check_fitting(record: dict[str, Any], request: Request) -> None:
    """Raise for keys that ask for something other than what is done anyway."""
    done = {
        "do_sample": (request.params.temperature > 0, "detgen samples if the temperature is above 0"),
        "add_generation_prompt": (not request.continue_final_message, "give continue_final_message"),
        "add_special_tokens": (request.messages is None, "give prompt_token_ids"),
    }
    for key, (value, reason) in done.items():
        if not _changes_nothing(record.get(key), (value,)):
            raise RequestError(f"{key} is supported only as {str(value).lower()} here: {reason}; {_REMEDY}")


def _changes_nothing(value: object, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value is null, empty or neutral. In a table, it may be text."""
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    if isinstance(value, str):
        return any(value.strip().lower() == str(each).lower() or _number(value) == each for each in neutral)
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
