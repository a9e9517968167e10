"""A sample that is judged, and what is wrong with it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from detgen.engine.request import TokenLogprobs
from detgen.engine.sequence import Sequence
from detgen.kernels.sampling import Choice
from detgen.verify.replay.thoughts import Claims


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token that is not what the canonical logits give.

    Attributes:
        position: index in the completion.
        token: what the run committed.
        expected: what the logits give.
        margin: score of the expected token less that of the committed one (logits at temperature 0, else perturbed
            log-probabilities); inf where a filter drops the committed one.
        tie: whether an error within the sample's tolerance explains the token.
    """

    position: int
    token: int
    expected: int
    margin: float
    tie: bool


@dataclass(slots=True)
class Audited:
    """A sample to be judged, and the verdict.

    Attributes:
        sequence: before its first token.
        tokens: its completion as the run wrote it, ids of the vocabulary.
        label: whatever the caller knows it by.
        logprobs: as the run wrote them, one per token; None if there are none.
        tolerance: error of another profile's logits, as a share of a row's largest; 0 where bit equality is promised.
        scores: log-probability and margin of each token as the acceptance log has them; None if it is not to be judged.
        thoughts: of a model that thinks, as the run wrote them; None if they are not to be judged.
        mismatches: filled by `judge`.
        wrong_logprobs: likewise, in words, and whether the tolerance explains it; of tokens that are right.
        wrong_scores: likewise, of the acceptance log.
        wrong_thoughts: likewise, what is wrong with the thoughts; no tolerance explains it.
    """

    sequence: Sequence
    tokens: list[int]
    label: str = ""
    logprobs: list[TokenLogprobs] | None = None
    tolerance: float = 0.0
    scores: list[tuple[float | None, float | None]] | None = None
    thoughts: Claims | None = None
    mismatches: list[Mismatch] = field(default_factory=list)
    wrong_logprobs: list[tuple[str, bool]] = field(default_factory=list)
    wrong_scores: list[tuple[str, bool]] = field(default_factory=list)
    wrong_thoughts: list[str] = field(default_factory=list)

    def choice(self, place: int) -> Choice:
        """How the token at a place of the completion is chosen."""
        return self.sequence.choice(place, self.tokens)
