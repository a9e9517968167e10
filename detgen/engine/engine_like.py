"""The interface that runs and workers need from an engine, whether it is loaded, only described, or made of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from detgen.engine.request import Chunk, Completion, Request
    from detgen.engine.score_requests import Score, ScoreRequest
    from detgen.engine.stats import EngineStats


class EngineLike(Protocol):
    """What a run needs of `detgen.engine.Engine`."""

    @property
    def stats(self) -> EngineStats:
        """Running totals."""

    @property
    def thinks(self) -> bool:
        """Whether the model thinks while it reads."""

    @property
    def dated(self) -> bool:
        """Whether the text of a chat contains the date."""

    def chunks(self, request: Request, tokens: Sequence[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        """Return the request's prompt and a completion in chunks, given the thoughts by first position."""

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """Run requests, read as slots become free; yield what finished after each step."""

    def score_stream(self, requests: Iterable[ScoreRequest]) -> Iterator[list[Score]]:
        """Score requests in the same way."""

    def profile(self) -> dict[str, Any]:
        """Return everything that decides the bits of an output."""

    def draft_profile(self) -> dict[str, Any] | None:
        """Return the same of the draft model, which decides none of them; None without one."""
