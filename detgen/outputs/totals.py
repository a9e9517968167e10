"""Totals of a run's samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from detgen.engine.request import Completion
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.stats import DraftCounts


@dataclass(slots=True)
class Answers:
    """How often the completion that a scored prompt calls its `answer` is the best of its completions.

    Counted as in the multiple choices of lm-evaluation-harness: of equal completions, the first is the best.

    Attributes:
        prompts: prompts with an answer whose completions all have a score.
        right: prompts whose answer is the most likely completion (the harness's acc).
        right_by_length: prompts whose answer is the most likely one per character (its acc_norm); counted if all
            completions are texts.
        unknown: prompts whose `answer` is none of their completions, by number from 0 or by text.
    """

    prompts: int = 0
    right: int = 0
    right_by_length: int = 0
    unknown: int = 0

    def add(self, request: ScoreRequest, scores: Sequence[Score]) -> None:
        """Count the scores of a request, all of them in order."""
        given, choices = request.metadata.get("answer"), request.completions or ()
        if given is None or len(choices) < 2 or any(score.error is not None for score in scores):
            return
        answer = choices.index(given) if given in choices else given
        if type(answer) is not int or not 0 <= answer < len(choices):
            self.unknown += 1
            return
        self.prompts += 1
        logprobs = [score.logprob for score in scores]
        self.right += logprobs.index(max(logprobs)) == answer
        if all(isinstance(choice, str) and choice for choice in choices):
            each = [logprob / len(choice) for logprob, choice in zip(logprobs, choices, strict=True)]
            self.right_by_length += each.index(max(each)) == answer


@dataclass(slots=True)
class Totals:
    """Totals of what a run wrote.

    Attributes:
        prompts: all prompts.
        samples: samples with a text.
        errors: prompts that could not run, or with a sample that ended with an error.
        tokens: tokens of the samples.
        prompt_tokens: tokens of each prompt whose first sample has a text.
        drafters: counts by drafter.
        answers: counts of scored prompts with an answer.
    """

    prompts: int = 0
    samples: int = 0
    errors: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    drafters: DraftCounts = field(default_factory=DraftCounts)
    answers: Answers = field(default_factory=Answers)

    def add(self, sample: Completion | Score) -> None:
        """Count a sample; errors are counted per prompt, by the caller, who knows all of its samples."""
        if sample.error is not None:
            return
        self.samples += 1
        self.tokens += len(sample.token_ids)
        self.prompt_tokens += sample.prompt_tokens if sample.sample == 0 else 0
        if isinstance(sample, Completion):
            self.drafters.add(sample.drafts)

    def summary(self) -> dict[str, Any]:
        """Return the totals as in a manifest: with the sum over all drafters, and the answers if there are any."""
        found = {**asdict(self), "total": asdict(self.drafters.total())}
        if self.answers == Answers():
            del found["answers"]
        return found
