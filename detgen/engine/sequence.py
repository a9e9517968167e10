"""One sample while it runs: its tokens, how the next ones are chosen, and its results at the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from detgen.engine.request import NOT_FINITE, FinishReason, Request, TokenLogprobs, TokenRecord
from detgen.engine.stats import DraftCounts
from detgen.engine.structure import Masks, Structure
from detgen.kernels.penalties import Adjuster, Adjustment, Growing, Penalties
from detgen.kernels.sampling import Choice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A sample of a request while it runs.

    Attributes:
        request: the request.
        sample: which of its samples, from 0.
        tokens: prompt and committed tokens.
        prompt_length: tokens of the prompt.
        limit: maximum number of tokens of prompt and completion together.
        eos: token ids that end a sequence, unless its request ignores them.
        structure: the form of its text; None for any text.
        ending: token ids that end this sequence.
        order: its place among all sequences.
        slot: its slot; -1 while it waits.
        keys: keys of its whole blocks, as far as they were needed (see `BlockManager.keys`).
        passed: number of later sequences that were admitted before it because it did not fit.
        rounds: number of passes that committed its tokens, up to the last time that it had a slot.
        drafts: counts of its draft tokens, by drafter, set when it finishes.
        acceptance: running (accepted, tried) draft tokens by drafter; old rounds fade.
        records: its acceptance log, set when it finishes.
        thoughts: for a thinking model, the thought after each full chunk of the tokens that went through passes (all
            but the last token); () if it is empty. Set when it finishes.
        states: float32 [chunk, hidden], the state added to each chunk, including the last, partial one; set when it
            finishes under a trace.
        logprobs: one entry per committed token if the request asks for them.
        finish_reason: None while it runs.
        text: the completion's text, set when it finishes.
        stop_reason: the stop that ended it, set when it finishes; see `Completion`.
        error: why it ended, if the finish reason is "error".
    """

    request: Request
    sample: int
    tokens: list[int]
    prompt_length: int
    limit: int
    eos: frozenset[int] = frozenset()
    structure: Structure | None = None
    ending: frozenset[int] = field(init=False)
    order: int = -1
    slot: int = -1
    keys: list[bytes] = field(default_factory=list)
    passed: int = 0
    rounds: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    acceptance: dict[str, tuple[float, float]] = field(default_factory=dict)
    records: list[TokenRecord] = field(default_factory=list)
    thoughts: list[tuple[int, ...]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str = ""
    stop_reason: str | int | None = None
    error: str | None = None
    _adjuster: Adjuster | None = field(init=False, repr=False)
    _masks: Masks | None = field(init=False, repr=False)
    _penalized: bool = field(init=False, repr=False)
    _first: Choice = field(init=False, repr=False)  # how its first token is chosen, without adjustments

    def __post_init__(self) -> None:
        params = self.request.params
        self.ending = self.eos if not params.ignore_eos else frozenset()
        self.ending = self.ending.union(params.stop_token_ids)
        penalties = Penalties.of(params, self.eos | self.ending)
        self._first = Choice.of(params, self.sample) if params.temperature > 0 else GREEDY
        self._masks = None if self.structure is None else Masks(self.structure)
        self._adjuster = None
        self._penalized = penalties != _NO_PENALTIES
        if self._penalized or self._masks is not None:
            self._adjuster = Adjuster(penalties, self.tokens[: self.prompt_length], self._masks)

    @property
    def choosy(self) -> bool:
        """Whether its tokens are sampled, or chosen from adjusted logits."""
        return self.request.params.temperature > 0 or self.adjusted

    @property
    def adjusted(self) -> bool:
        """Whether its tokens are chosen from adjusted logits."""
        return self._adjuster is not None

    @property
    def masked(self) -> bool:
        """Whether whole masks are needed: it has a form, and its tokens are not just the best that it allows."""
        return self._masks is not None and (self.request.params.temperature > 0 or self._penalized)

    @property
    def least(self) -> int:
        """The number of tokens before one may end it; 0 with a form, which may leave nothing but an end."""
        return self.request.params.min_tokens if self.structure is None else 0

    @property
    def deterministic(self) -> bool:
        """Whether its tokens are verified."""
        return self.request.params.deterministic

    @property
    def asked_from(self) -> int:
        """The position of the first token whose logits are wanted when it is read: the last one."""
        return len(self.tokens) - 1

    @property
    def generated(self) -> int:
        """Committed tokens of the completion."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """The number of tokens that it may still generate."""
        return self.limit - len(self.tokens)

    def break_off(self, position: int, fault: str = "") -> None:
        """End it with an error at this position, from 0: `fault`, or by default that results are not finite."""
        ahead = position - self.prompt_length
        where = f"token {ahead} of the completion" if ahead >= 0 else f"token {position} of the prompt"
        self.finish_reason = "error"
        self.error = fault or f"the model's hidden states or logits {NOT_FINITE} at position {position} ({where})"

    def learn(self, drafter: str, accepted: int, tried: int) -> None:
        """Note how many of a drafter's tokens were compared with canonical choices, and how many agreed."""
        hits, tries = self.acceptance.get(drafter, (0.0, 0.0))
        self.acceptance[drafter] = (hits * _FADE + accepted, tries * _FADE + tried)

    def choice(self, ahead: int = 0, draft: list[int] | tuple[int, ...] = ()) -> Choice:
        """Return how the token `ahead` positions after the next one is chosen, given `ahead` tokens of `draft`."""
        adjustment = self.adjustment(ahead, draft)
        if self._first is GREEDY:
            return GREEDY if adjustment is None else Choice(adjustment=adjustment)
        return replace(self._first, position=self.generated + ahead, adjustment=adjustment)

    def adjustment(self, ahead: int = 0, draft: list[int] | tuple[int, ...] = ()) -> Adjustment | None:
        """Return how that token's logits are adjusted; None if they are not."""
        if self._adjuster is None:
            return None
        return self._adjuster.after([*self.tokens[self.prompt_length :], *draft[:ahead]])

    def growing(self) -> Growing | None:
        """Return how its next tokens are adjusted, for text without a form; None if they are not."""
        return None if self._adjuster is None else self._adjuster.growing(self.tokens[self.prompt_length :])

    def forced(self, most: int) -> list[int]:
        """Return the next tokens that its form forces, at most `most`; none without a form."""
        if self._masks is None or not most:
            return []
        return self._masks.forced(self.tokens[self.prompt_length :], most)

    def make_masks(self, draft: list[int]) -> None:
        """Compute the masks after the last token and after each token of the draft."""
        if self._masks is not None:
            for i in range(len(draft) + 1):
                mask = self._masks.after([*self.tokens[self.prompt_length :], *draft[:i]])
                if mask is not None:
                    _ = mask.bits

    def fails(self, draft: list[int]) -> bool:
        """Return whether computing a mask for this draft has failed."""
        mask = None if self._masks is None else self._masks.after([*self.tokens[self.prompt_length :], *draft])
        return mask is not None and bool(mask.error)

    def fault(self, draft: list[int]) -> str:
        """Return why no mask can be computed after the draft; "" if it can."""
        adjustment = None if self.structure is None else self.adjustment(len(draft), draft)
        if self.structure is None or adjustment is None or adjustment.mask is None:
            return ""
        _ = adjustment.mask.bits
        if not adjustment.mask.error:
            return ""
        key = self.request.form_key or self.structure.name
        return f"{key} fails at token {self.generated + len(draft)}: {adjustment.mask.error}"


_FADE = 0.8  # weight of past rounds, relative to the next one, in the running acceptance
GREEDY = Choice()
_NO_PENALTIES = Penalties()
