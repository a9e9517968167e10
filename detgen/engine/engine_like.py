"""What a run and a worker need of an engine, be it loaded, described alone, or made of others."""

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
        """Whether the text of a chat has the day in it."""

    def chunks(self, request: Request, tokens: Sequence[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        """The request's prompt and the tokens of a completion in chunks, with thoughts by first position."""

    def stream(self, requests: Iterable[Request]) -> Iterator[list[Completion]]:
        """Run requests, read as slots become free; yields after each step what finished in it."""

    def score_stream(self, requests: Iterable[ScoreRequest]) -> Iterator[list[Score]]:
        """Score requests, likewise."""

    def profile(self) -> dict[str, Any]:
        """Everything that decides the bits of an output."""

    def draft_profile(self) -> dict[str, Any] | None:
        """The draft model, which decides none of them; None without one."""
