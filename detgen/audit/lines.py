"""The lines of a run: their order, and everything about them except the choice of their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detgen.audit.judging import Audited
from detgen.audit.result import AuditResult
from detgen.engine import Engine
from detgen.engine.request import Request, TokenLogprobs
from detgen.engine.sequence import Sequence
from detgen.errors import RequestError
from detgen.outputs import dump, echoed, read_entries
from detgen.prompts import BadLine


class Lines:
    """Reads and checks them.

    Args:
        engine: knows how a request begins and ends.
        result: takes the findings.
    """

    def __init__(self, engine: Engine, result: AuditResult) -> None:
        self._engine, self.result = engine, result

    def read(self, folder: Path, *, stopped: bool) -> Iterator[tuple[str, Any]]:
        """The output lines in order, each with its place, then those that only the journal of a stopped run has.

        Args:
            folder: the output folder.
            stopped: the run has not finished.
        """
        last = (-1, -1)
        path = folder / "outputs.jsonl"
        if path.is_file():
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if stopped and not line.endswith(b"\n"):
                        break  # torn by a kill; the journal has it
                    try:
                        parsed = json.loads(line)
                        last = (parsed["index"], parsed["sample"])
                    except (ValueError, TypeError, KeyError):
                        self.result.add(f"outputs.jsonl:{number}", "is not an output line", "line")
                        continue
                    yield f"outputs.jsonl:{number}", parsed
        journal = folder / "journal.jsonl"
        if stopped and journal.is_file():
            entries = {(e.index, e.sample): e.output for e in read_entries(journal)}
            for key in sorted(k for k in entries if k > last):
                yield "journal.jsonl", json.loads(entries[key])

    def expected(self, item: Request | BadLine) -> list[tuple[Sequence | str, str]]:
        """For each line of a prompt a sequence before its first token, or an error; and its place in words."""
        if isinstance(item, BadLine):
            return [(item.error, f"prompt {item.index}, sample 0")]
        try:
            sequences = self._engine.sequences(item)
        except RequestError as error:
            return [(str(error), f"prompt {item.index}, sample 0")]
        return [(seq, f"prompt {item.index}, sample {seq.sample}") for seq in sequences]

    def check(
        self, where: str, line: Any, expected: Sequence | str, label: str, item: Request | BadLine
    ) -> Audited | None:
        """Check a line except for the choice of its tokens; None if they cannot be judged.

        Args:
            where: file and line number.
            line: the parsed line.
            expected: what `expected` says of it.
            label: likewise.
            item: the prompt.
        """
        place = f"prompt {line.get('index')}, sample {line.get('sample')}"
        if place != label or line.get("id") != item.id:
            self.result.add(
                where, f"is {place} (id {line.get('id')!r}), but {label} (id {item.id!r}) comes here", "line"
            )
            return None
        if isinstance(expected, str):
            if not str(line.get("error", "")).endswith(expected):
                self.result.add(where, f"should be the error {expected!r}", "line")
            return None
        if "error" in line:
            self.result.add(where, f"is an error, but the prompt can run: {line['error']}", "line")
            return None
        tokens = line.get("token_ids")
        known = range(self._engine.vocabulary)
        if not isinstance(tokens, list) or not tokens or not all(type(t) is int and t in known for t in tokens):
            self.result.add(where, "has no tokens, or tokens that are not in the vocabulary", "line")
            return None
        if len(tokens) > expected.remaining:
            self.result.add(where, f"has {len(tokens):,} tokens, but may have {expected.remaining:,} at most", "line")
            return None
        if not expected.deterministic:
            self.result.unverified += 1
            return None
        self.result.samples += 1
        self.result.tokens += len(tokens)
        for name, want in self._fields(expected, tokens).items():
            if line.get(name) != want:
                what = f"{name} is {line.get(name)!r}, its tokens give {want!r}"
                self.result.add(where, what[:300], "line")
        tolerance = self.result.tolerance if self.result.other_profile else 0.0
        return Audited(expected, tokens, where, self._logprobs(where, line, expected, tokens), tolerance)

    def _logprobs(self, where: str, line: Any, seq: Sequence, tokens: list[int]) -> list[TokenLogprobs] | None:
        """The log-probabilities of a line; None if there are none, which is a finding if the request wants them."""
        wanted = seq.request.params.logprobs
        entries = line.get("logprobs")
        if wanted is None and entries is None:
            return None
        try:
            if wanted is None or [e["token"] for e in entries] != tokens:
                raise ValueError
            return [
                TokenLogprobs(_number(e["logprob"]), tuple((int(t), _number(p)) for t, p in e["top"])) for e in entries
            ]
        except (ValueError, TypeError, KeyError):
            self.result.add(where, "does not have logprobs for each token", "line")
            return None

    def _fields(self, seq: Sequence, tokens: list[int]) -> dict[str, Any]:
        """The other fields of a line as its tokens determine them."""
        stopping = self._engine.stopping
        prompt = list(seq.tokens)
        early = self._ends_early(seq, tokens)
        seq.finish_reason = None
        if not early:
            stopping.ends(seq, tokens)
        seq.tokens += tokens
        fields = {
            "text": stopping.text(seq),
            "finish_reason": seq.finish_reason,
            "prompt_tokens": seq.prompt_length,
            "completion_tokens": seq.generated,
            "seed": seq.request.params.seed,
            "metadata": json.loads(dump(seq.request.metadata)) or None,
            **json.loads(dump(echoed(seq.request))),
        }
        seq.tokens[:] = prompt
        return fields

    def _ends_early(self, seq: Sequence, tokens: list[int]) -> bool:
        """Whether the sequence ends before its last token; only stop strings need trying token by token."""
        stopping = self._engine.stopping
        params = seq.request.params
        if params.stop:
            return any(stopping.ends(seq, tokens[:count]) for count in range(1, len(tokens)))
        return not seq.ending.isdisjoint(tokens[params.min_tokens : -1])


def _number(value: float | None) -> float:
    """A log-probability as a line spells it: null is minus infinity."""
    return -math.inf if value is None else float(value)
