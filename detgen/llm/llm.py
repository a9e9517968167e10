"""A model to call from Python, on the same engine as the command line, also with batches of a dataset."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from detgen.engine.asking import Prompt, requests_from, requests_of
from detgen.engine.config import EngineConfig
from detgen.engine.loading import load_engine
from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Scorable, Score, score_requests_of
from detgen.engine.showing import call
from detgen.engine.sources import unapplied
from detgen.engine.time_left import TimeLeft
from detgen.errors import PromptsError, QuantName, RequestError
from detgen.llm.results import Results
from detgen.params import SamplingParams
from detgen.progress import Progress
from detgen.prompts import BadLine
from detgen.prompts.dataset import check_columns, read_row
from detgen.prompts.record import parse_record
from detgen.show.progress_view import open_for_a_person

_Done = TypeVar("_Done", Completion, Score)


def requests_of_batch(batch: Mapping[str, list[Any]], params: SamplingParams) -> list[Request | BadLine]:
    """Return a request for each row.

    Raises:
        PromptsError: if there is no column of prompts, or the batch is a single row.
        RequestError: if a row asks for several samples.
    """
    check_columns("the dataset", batch, None, 'name one so: ds.rename_column("question", "prompt")')
    chats = batch.get("messages")
    if not all(isinstance(cells, list) for cells in batch.values()) or (chats and isinstance(chats[0], Mapping)):
        raise PromptsError("this is a single row, and many are run together: ds.map(llm, batched=True)")
    rows = [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]
    found = [parse_record(read_row(row), index=i, line=i + 1, number=i, defaults=params) for i, row in enumerate(rows)]
    for each in found:
        if isinstance(each, Request) and each.samples > 1:
            raise RequestError("a row of a dataset has one text: n must be 1; repeat the rows, each with a seed")
    return found


def columns_of(rows: Sequence[Request | BadLine], done: Iterable[Completion]) -> dict[str, list[Any]]:
    """Return the columns of the results. No cell is null, so that all batches have the same types."""
    completions = {each.request.index: each for each in done}
    found: dict[str, list[Any]] = {"text": [], "finish_reason": [], "completion_tokens": [], "error": []}
    for i, row in enumerate(rows):
        each = completions.get(i)
        error = row.error if isinstance(row, BadLine) else each.error if each is not None else None
        found["text"].append(each.text if each is not None and error is None else "")
        found["finish_reason"].append((each.finish_reason if each is not None else None) or "error")
        found["completion_tokens"].append(len(each.token_ids) if each is not None else 0)
        found["error"].append(error or "")
    return found


class LLM:
    """A loaded model. Its outputs depend only on the prompt, its parameters and its seed.

    A setting in the folder's generation_config.json that `generate` of transformers applies, but not detgen, is named
    in a warning.

    >>> from detgen import LLM
    >>> llm = LLM()
    >>> print(llm.generate("def add(a, b):", max_tokens=16)[0].text)

    Threads may share it: their calls take turns. At a terminal and in a notebook, progress is shown while a call runs.

    Args:
        target: folder, GGUF file or Hugging Face name of the model; None is the embedded one.
        draft: a smaller model with the same vocabulary, which drafts tokens and never changes a text.
        quant: none, q8, q4, q4_k, nf4 or int8, like `--target-quant`.
        settings: other fields of `EngineConfig` by name, such as dtype, batch_size, drafter or kv_memory.

    Raises:
        EngineError: if a model cannot be loaded; the message names the remedy.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        draft: str | Path | None = None,
        quant: QuantName = "none",
        **settings: Any,
    ) -> None:
        self._config = EngineConfig(target=target, draft=draft, target_quant=quant, **settings)
        with open_for_a_person() as display:
            self._engine = load_engine(self._config, display)
            found = unapplied(self._config, SamplingParams(), display)
        for text in found:
            warnings.warn(text, stacklevel=2)

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None, **sampling: Any
    ) -> Results[Completion]:
        """Complete prompts.

        Args:
            prompts: one or several of: a text, a list of token ids, a chat (a list of messages), a `Request`.
            params: how tokens are chosen; None for the defaults. Requests have parameters of their own.
            sampling: fields of `SamplingParams`; they replace those of `params`.

        Returns:
            The completions in the order of the prompts, samples of a prompt in order. A prompt that cannot run gives
            one with an `error`.

        Raises:
            RequestError: if a prompt is invalid, or a parameter is out of range or given for a `Request`.
            EngineError: if this thread is reading a stream of this model.
        """
        return self._all(self._engine.stream, requests_of(prompts, params, sampling))

    def stream(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[Completion]:
        """Complete prompts and yield each completion when it has finished.

        Args:
            prompts: as for `generate`; an iterator is read while the call runs, about one batch ahead.
            params: as for `generate`.
            sampling: as for `generate`.

        Yields:
            Completions in the order in which they finish; `request.index` is the position of the prompt.

        Raises:
            RequestError, EngineError: as for `generate`.
        """
        for finished in self._engine.stream(requests_from(prompts, params, sampling)):
            yield from finished

    def score(self, items: Scorable | Iterable[Scorable]) -> Results[Score]:
        """Return the log-probabilities of given completions, or of whole texts, as lm-evaluation-harness counts them.

        >>> [score] = llm.score(("def add(a, b):", " return a + b"))
        >>> score.logprob, score.is_greedy

        Args:
            items: one or several of: a text; a tuple of a prompt, as `generate` takes it, and a completion or a list of
                them, each a text or a list of token ids; a `ScoreRequest`.

        Returns:
            The scores in the order of the items, those of an item's completions in order. One that could not run has an
            `error`.

        Raises:
            RequestError: if an item is none of these.
            EngineError: if this thread is reading a stream of this model.
        """
        return self._all(self._engine.score_stream, [replace(request) for request in score_requests_of(items)])

    def __call__(
        self, batch: Mapping[str, list[Any]], params: SamplingParams | None = None, **sampling: Any
    ) -> dict[str, list[Any]]:
        """Complete the prompts of a batch of a dataset: `ds.map(llm, batched=True)`.

        The columns are those of a table for `detgen run`: `prompt`, `messages` or `prompt_token_ids`, and parameters by
        name. Parameters for all rows are given as `fn_kwargs={"max_tokens": 40}`. The datasets library finds cached
        results again, because they are the same in every run.

        Returns:
            The columns `text`, `finish_reason`, `completion_tokens` and `error`, which is empty without an error.

        Raises:
            PromptsError: if there is no column of prompts, or the batch is a single row.
            RequestError: if a row asks for several samples, or a parameter is out of range.
        """
        rows = requests_of_batch(batch, (params or SamplingParams()).with_(**sampling))
        done = self._all(self._engine.stream, [row for row in rows if isinstance(row, Request)])
        return columns_of(rows, done)

    def profile(self) -> dict[str, Any]:
        """Return all that outputs depend on besides the request: model files by digest, number formats, arithmetic."""
        return self._engine.profile()

    def __repr__(self) -> str:
        config = self._config
        return call("LLM", {"target": config.target, "draft": config.draft, "quant": config.target_quant})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a recipe to load the same files again; the datasets library identifies a function by its pickle."""
        return _again, (self._config, json.dumps(self.profile(), sort_keys=True))

    def _all(self, stream: Callable[[Iterable[Any]], Iterator[list[_Done]]], requests: list[Any]) -> Results[_Done]:
        """Return the results of all requests in order, showing progress meanwhile."""
        stats, time_left, started, done = self._engine.stats, TimeLeft(), time.monotonic(), list[_Done]()
        total, before = sum(request.samples for request in requests), stats.tokens
        for request in requests:
            time_left.ask(request, 0.0, stats)
        with open_for_a_person() as display:
            for finished in stream(requests):
                done += finished
                seconds = time.monotonic() - started
                time_left.spend(seconds, stats)
                for each in finished:
                    time_left.finish(each)
                tokens, left = stats.tokens - before, time_left.left(0, stats.live)
                figures = f"{tokens / seconds:,.0f} tokens/s", f"{stats.live} live"
                display.progress(
                    Progress(len(done), total, "samples", seconds, left, figures, tokens, tokens / seconds)
                )
        order = {id(request): i for i, request in enumerate(requests)}
        return Results(sorted(done, key=lambda each: (order[id(each.request)], each.sample)), self._engine.pieces)


def _again(config: EngineConfig, profile: str) -> LLM:
    """Load the same model in another process.

    Raises:
        EngineError: if its files have changed.
    """
    from detgen.errors import EngineError

    settings = {name: getattr(config, name) for name in EngineConfig.__slots__}
    llm = LLM(settings.pop("target"), draft=settings.pop("draft"), quant=settings.pop("target_quant"), **settings)
    if json.dumps(llm.profile(), sort_keys=True) != profile:
        raise EngineError(f"{llm!r} is not what it was: its files, or a version, have changed")
    return llm
