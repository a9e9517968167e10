"""One sample that holds a slot: its tokens, how much of them is cached, and its acceptance log so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from detgen.engine.request import FinishReason, Request, TokenLogprobs, TokenRecord
from detgen.engine.stats import DraftCounts
from detgen.kernels.sampling import Choice


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A sample of a request while it runs.

    Attributes:
        request: what was asked.
        sample: which of its samples, from 0.
        tokens: prompt and committed tokens.
        prompt_length: tokens of the prompt.
        limit: most tokens of prompt and completion together.
        slot: where its KV entries are; -1 while it waits.
        cached: leading positions whose KV entries are canonical (for an unverified request: written).
        rounds: canonical passes that committed tokens of it.
        drafts: what was drafted for it, by drafter.
        acceptance: running share of accepted drafts by drafter, as (accepted, tried), old rounds fading.
        finish_reason: None while it runs.
        text: the completion's text, once it has finished.
    """

    request: Request
    sample: int
    tokens: list[int]
    prompt_length: int
    limit: int
    slot: int = -1
    cached: int = 0
    rounds: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    acceptance: dict[str, tuple[float, float]] = field(default_factory=dict)
    records: list[TokenRecord] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str = ""

    @property
    def deterministic(self) -> bool:
        """Whether canonical passes verify it."""
        return self.request.params.deterministic

    @property
    def reading(self) -> bool:
        """Whether prompt tokens but the last one still have to be read."""
        return self.cached < self.prompt_length - 1

    @property
    def generated(self) -> int:
        """Committed tokens of the completion."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.limit - len(self.tokens)

    def choice(self, ahead: int = 0) -> Choice:
        """How the token `ahead` places behind the next one is chosen."""
        if self.request.params.temperature == 0:
            return _GREEDY
        return replace(Choice.of(self.request.params, self.sample), position=self.generated + ahead)

    def choices(self, count: int) -> list[Choice]:
        """How the next `count` tokens are chosen."""
        if self.request.params.temperature == 0:
            return [_GREEDY] * count
        return [self.choice(i) for i in range(count)]


_GREEDY = Choice()
