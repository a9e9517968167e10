"""Writes the JSON lines of a run. Nothing in an output line depends on when or how its tokens were computed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from detgen.engine.answer import Answer
from detgen.engine.pieces import Pieces
from detgen.engine.request import Completion, Request, TokenRecord
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.outputs.records import ErrorLine, ScoreLine, TextLine, in_order
from detgen.params import GUIDES, PARAMETERS
from detgen.prompts import BadLine

_CONTENT = ("prompt", "messages", "token_ids", "tools", "chat_template_kwargs", "continue_final_message")
_OF_CHATS = ("tool_choice",)  # left out of the digests of other prompts, which stay as they were before
_LATER = {"parallel_tool_calls": True}  # part of a digest only with another value
_NO_NUMBER = frozenset(("nan", "inf", "-inf"))
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dump(value: object) -> str:
    """Return compact JSON that UTF-8 can encode: non-finite numbers become null, lone surrogates are escaped."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        text = _ENCODER.encode(_finite(value))
    # Python's error handler writes a lone surrogate as JSON does: "\ud800".
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def output_line(completion: Completion | Score, pieces: Pieces) -> str:
    """Return the line of `outputs.jsonl` of a sample, or of a request that could not run (which has sample 0).

    Args:
        completion: the sample.
        pieces: pieces of the target's tokenizer; used for log-probabilities.
    """
    request = completion.request
    if completion.error is not None:
        return _error_line(request.id, request.index, completion.sample, completion.error, request.metadata)
    if isinstance(completion, Score):
        return _score_line(completion, pieces)
    line: dict[str, Any] = {
        **_head(completion),
        **echoed(request),
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "seed": request.params.seed,
        "stop_reason": completion.stop_reason,
    }
    if completion.answer is not None:
        line |= _answered(completion, completion.answer)
    if completion.thoughts is not None:
        line["thoughts"] = [(thought.first, thought.text) for thought in completion.thoughts]
    if completion.logprobs is not None:
        line["logprobs"] = [
            {
                "token": token,
                "logprob": entry.logprob,
                "top": [(other, logprob, pieces.of(other).written) for other, logprob in entry.top],
                "text": pieces.of(token).written,
            }
            for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return _line(TextLine, line, request.metadata)


def _answered(completion: Completion, answer: Answer) -> dict[str, Any]:
    """Return the parts of an answer, as in an assistant's message of OpenAI's API.

    Ids of calls have nine letters or digits, as the templates of some models demand.
    """
    parts: dict[str, Any] = {"content": answer.content}
    if answer.reasoning_content is not None:
        parts["reasoning_content"] = answer.reasoning_content
    if answer.tool_calls:
        asked = dump([completion.request.id, completion.sample])
        parts["tool_calls"] = [
            {
                "id": hashlib.blake2b(f"{asked} {place}".encode(), digest_size=5).hexdigest()[:9],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                **({} if call.error is None else {"error": call.error}),
            }
            for place, call in enumerate(answer.tool_calls)
        ]
    return parts


def _score_line(score: Score, pieces: Pieces) -> str:
    """Return the line of a score."""
    request = score.request
    line: dict[str, Any] = {
        **_head(score),
        **scored(score),
        "logprob": score.logprob,
        "is_greedy": score.is_greedy,
        "token_ids": score.token_ids,
        "prompt_tokens": score.prompt_tokens,
        "completion_tokens": len(score.token_ids),
        "logprobs": [
            {"token": token, "logprob": logprob, "greedy": greedy, "text": pieces.of(token).written}
            for token, logprob, greedy in zip(score.token_ids, score.logprobs, score.greedy, strict=True)
        ],
    }
    return _line(ScoreLine, line, request.metadata)


def scored(score: Score) -> dict[str, Any]:
    """Return what the output line of a score repeats of its request, as in its input line."""
    request = score.request
    if request.completions is None:
        return {"text": request.prompt} if request.echo else {}
    return echoed(request) | ({"completion": request.completions[score.sample]} if request.echo else {})


def echoed(request: Request) -> dict[str, Any]:
    """Return what the output lines of a request repeat of it, as in its input line."""
    given = {"prompt": request.prompt, "messages": request.messages, "prompt_token_ids": request.token_ids}
    return {name: value for name, value in given.items() if value is not None} if request.echo else {}


def bad_line(bad: BadLine) -> str:
    """Return the line of `outputs.jsonl` of an input line that could not run."""
    return _error_line(bad.id, bad.index, 0, bad.error, bad.metadata)


def acceptance_lines(completion: Completion) -> str:
    """Return the lines of `acceptance.jsonl` of a sample."""
    return log_lines(completion.request.index, completion.sample, completion.records)


def log_lines(index: int, sample: int, records: Sequence[TokenRecord]) -> str:
    """Return an `AcceptanceLine` for each record of a sample.

    They are formatted here because there is one per token, and `dump` would take several times as long.
    """
    made = []
    for position, number, token, drafter, drafted, status, logprob, margin in _spelled(records):
        line = f'{{"index":{index},"sample":{sample},"position":{position},"round":{number}'
        if token is not None:
            line += f',"token":{token}'
        if drafter != "none":
            line += f',"drafter":"{drafter}"'
        if drafted is not None and (status != "accepted" or drafted != token):
            line += f',"drafted":{drafted}'
        line += f',"status":"{status}"'
        if logprob not in _NO_NUMBER:
            line += f',"logprob":{logprob}'
        if margin not in _NO_NUMBER:
            line += f',"margin":{margin}'
        made.append(line + "}\n")
    return "".join(made)


def _spelled(records: Sequence[TokenRecord]) -> Iterator[tuple[Any, ...]]:
    """Yield records with each float as the shortest decimal number that rounds to the same float32."""
    if not records:
        return iter(())
    import numpy as np  # the help of the command line does not need it

    *columns, logprobs, margins = zip(*records, strict=True)
    floats = (map(str, np.array(values, np.float32)) for values in (logprobs, margins))  # None becomes "nan"
    return zip(*columns, *floats, strict=True)


def request_digest(request: Request) -> str:
    """Return a digest of everything in a request that can change its output lines."""
    asked = {name: getattr(request, name) for name in Request.__slots__} | {"params": dict(request.params)}
    del asked["index"], asked["line"]  # the place in the input
    del asked["only"]  # the samples that are left to run
    if request.messages is None:
        for name in _OF_CHATS:
            del asked[name]
    for name, usual in {**_LATER, "form_key": None}.items():
        if asked[name] == usual:
            del asked[name]
    asked |= _guided_by(request)
    if isinstance(request, ScoreRequest):
        asked["completions"] = request.completions
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _guided_by(request: Request) -> dict[str, str]:
    """Return the library and the version that enforce a form, if the request asks for one."""
    return (
        {"llguidance": version("llguidance")}
        if request.tool_choice not in ("auto", "none") or any(getattr(request.params, name) for name in GUIDES)
        else {}
    )


def content_digest(request: Request) -> str | None:
    """Return a digest of what completions of a request depend on besides the profile; later runs find them by it.

    That is the prompt and the parameters except `n`, but not the id, the place in the input, or what output lines
    repeat. None if they depend on more (an unverified request), or if there are none (a request to score).
    """
    if isinstance(request, ScoreRequest) or not request.params.deterministic:
        return None
    params = {name: value for name, value in request.params if PARAMETERS[name].changes_text}
    # Keys keep their order, since a chat template may print an object as it is.
    names = _CONTENT if request.messages is None else (*_CONTENT, *_OF_CHATS)
    names = (*names, *(name for name, usual in _LATER.items() if getattr(request, name) != usual))
    asked = [{name: getattr(request, name) for name in names}, params | _guided_by(request)]
    text = json.dumps(asked, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _error_line(id: str | int, index: int, sample: int, error: str, metadata: dict[str, Any]) -> str:
    return _line(ErrorLine, {"id": id, "index": index, "sample": sample, "error": error}, metadata)


def _head(completion: Completion | Score) -> dict[str, Any]:
    return {"id": completion.request.id, "index": completion.request.index, "sample": completion.sample}


def _line(kind: type, values: dict[str, Any], metadata: dict[str, Any]) -> str:
    return dump(in_order(kind, {**values, "metadata": metadata} if metadata else values)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
