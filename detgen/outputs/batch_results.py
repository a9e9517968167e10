"""Results in the form of the OpenAI batch API: a line for each request, made from its lines of `outputs.jsonl`.

They are a function of these lines, the prompts and the profile: ids are digests, and there are no times.
"""

from __future__ import annotations

import hashlib
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from typing import Any

from detgen.engine.pieces import Piece
from detgen.engine.request import NOT_FINITE, Request
from detgen.errors import OutputError
from detgen.outputs.directory import writing
from detgen.outputs.finished import beside, output_lines
from detgen.outputs.folder import OUTPUTS, OutputFolder
from detgen.outputs.identity import fingerprint
from detgen.outputs.lines import dump
from detgen.outputs.log_file import DigestedFile
from detgen.outputs.manifest import RESULTS
from detgen.outputs.records import Body, Line, ResponseError, ResultLine
from detgen.prompts import BadLine

_IMPOSSIBLE = -9999.0  # stands for the logarithm of 0, as in the API

_PARTS = ("content", "reasoning_content", "tool_calls")
_CALL = ("id", "type", "function")


class Results:
    """Makes the lines of a run's results.

    Args:
        profile: the run's profile, as in its manifest.
    """

    def __init__(self, profile: dict[str, Any]) -> None:
        self._model = profile["target"]["name"]
        self._fingerprint = f"fp_{fingerprint(profile)}"

    def line(self, item: Request | BadLine, lines: list[Line]) -> bytes:
        """Return the line of a request.

        Args:
            item: the request, or the bad line that took its place.
            lines: its lines of `outputs.jsonl`.

        Raises:
            KeyError, TypeError, ValueError: if these are not lines of a run.
        """
        digest = hashlib.blake2b(dump(list(map(digested, lines))).encode(), digest_size=16).hexdigest()
        error = next((line["error"] for line in lines if "error" in line), None)
        if error is None:
            if not isinstance(item, Request):
                raise ValueError(item.error)
            status, kind = 200, ""
            body: Body | dict[str, ResponseError] = self._body(item, lines, digest)
        else:
            status = 500 if NOT_FINITE in error else 400
            kind = "server_error" if status == 500 else "invalid_request_error"
            body = {"error": {"message": error, "type": kind, "param": None, "code": None}}
        result: ResultLine = {
            "id": f"batch_req_{digest}",
            "custom_id": str(item.id),
            "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
            "error": None if error is None else {"code": kind, "message": error},
        }
        return dump(result).encode() + b"\n"

    def _body(self, request: Request, lines: list[Line], digest: str) -> Body:
        chat = request.messages is not None
        prompt = lines[0]["prompt_tokens"]
        completion = sum(line["completion_tokens"] for line in lines)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{digest}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": self._model,
            "choices": [self._chat_choice(line) if chat else self._text_choice(line) for line in lines],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
            "system_fingerprint": self._fingerprint,
        }

    def _chat_choice(self, line: Line) -> dict[str, Any]:
        logprobs = None
        if "logprobs" in line:
            entries = [
                {
                    **_chat_token(entry["logprob"], entry["text"]),
                    "top_logprobs": [_chat_token(logprob, text) for _, logprob, text in entry["top"]],
                }
                for entry in line["logprobs"]
            ]
            logprobs = {"content": entries, "refusal": None}
        parts = {name: line[name] for name in _PARTS if name in line}
        if called := "tool_calls" in parts:  # the API has no place for what is wrong with a call
            parts["tool_calls"] = [{name: call[name] for name in _CALL} for call in parts["tool_calls"]]
        return {
            "index": line["sample"],
            "message": {"role": "assistant", "content": line["text"], "refusal": None, **parts},
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if called and line["finish_reason"] == "stop" else line["finish_reason"],
        }

    def _text_choice(self, line: Line) -> dict[str, Any]:
        logprobs = None
        if "logprobs" in line:
            entries = line["logprobs"]
            pieces = [Piece.of(entry["text"]) for entry in entries]
            logprobs = {
                "tokens": [_name(piece) for piece in pieces],
                "token_logprobs": [_possible(entry["logprob"]) for entry in entries],
                "top_logprobs": [_top(entry) for entry in entries],
                "text_offset": list(_offsets(pieces)),
            }
        return {
            "index": line["sample"],
            "text": line["text"],
            "logprobs": logprobs,
            "finish_reason": line["finish_reason"],
        }


def result_lines(profile: dict[str, Any], items: Iterable[Request | BadLine], lines: Iterable[Line]) -> Iterator[bytes]:
    """Yield the lines of a run's results.

    Args:
        profile: the run's profile, as in its manifest.
        items: its prompts.
        lines: lines of its `outputs.jsonl`.

    Raises:
        OutputError: if the lines do not belong to these prompts.
        PromptsError: if the prompts cannot be read.
    """
    results = Results(profile)
    for item, own in beside(items, lines):
        try:
            yield results.line(item, own)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise OutputError(f"{OUTPUTS}: the lines of prompt {item.index + 1} are not those of a run") from error


def write_results(
    folder: OutputFolder, manifest: dict[str, Any], sha256: str, items: Iterable[Request | BadLine]
) -> dict[str, Any]:
    """Write `results.jsonl` of a run whose `outputs.jsonl` is complete; readers see all of the file or none of it.

    Args:
        folder: the run's folder.
        manifest: the run's manifest.
        sha256: digest of `outputs.jsonl`.
        items: the prompts.

    Returns:
        "sha256" and "bytes".

    Raises:
        OutputError: if the file cannot be written, or as for `result_lines`.
        PromptsError: as for `result_lines`.
    """
    folder.check()
    directory = folder.directory
    with writing(folder.path / RESULTS), directory.reader(OUTPUTS) as outputs, directory.draft(RESULTS) as file:
        results = DigestedFile(file)
        for line in result_lines(manifest["profile"], items, output_lines(outputs, folder.outputs, sha256)):
            results.write(line)
        results.flush()
    return results.described()


def digested(line: Line) -> Line:
    """Return the part of a line that result ids are digests of: the line without keys that were introduced later."""
    kept = {name: value for name, value in line.items() if name != "stop_reason"}
    if "logprobs" in line:
        entries = [{name: value for name, value in each.items() if name != "text"} for each in line["logprobs"]]
        kept["logprobs"] = [
            {**each, "top": [pair[:2] for pair in each["top"]]} if "top" in each else each for each in entries
        ]
    return kept


def _chat_token(logprob: float | None, text: str | list[int]) -> dict[str, Any]:
    piece = Piece.of(text)
    return {"token": piece.text, "logprob": _possible(logprob), "bytes": list(piece.data)}


def _top(entry: dict[str, Any]) -> dict[str, float]:
    """Return log-probabilities of the chosen and the most likely tokens by name; the first of equal names counts."""
    found: dict[str, float] = {}
    for logprob, text in ((entry["logprob"], entry["text"]), *(each[1:] for each in entry["top"])):
        found.setdefault(_name(Piece.of(text)), _possible(logprob))
    return found


def _possible(logprob: float | None) -> float:
    return _IMPOSSIBLE if logprob is None else logprob


def _name(piece: Piece) -> str:
    """Return the name that the API gives a token where it does not list bytes."""
    return piece.text if piece.whole else f"bytes:{piece.text}"


def _offsets(pieces: list[Piece]) -> Iterator[int]:
    """Yield the offset of each token in the text, in characters; a token inside a character has that character's."""
    decoder, at = getincrementaldecoder("utf-8")("ignore"), 0
    for piece in pieces:
        yield at
        at += len(decoder.decode(piece.data))
