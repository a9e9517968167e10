"""What a run's samples come to."""

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

    As lm-evaluation-harness counts its multiple choices: of equal ones, the first is the best.

    Attributes:
        prompts: with an answer, all of whose completions have a score.
        right: whose answer is the most likely completion (the harness's acc).
        right_by_length: whose answer is the most likely one per character (its acc_norm); counted where all
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
    """Totals over what a run wrote.

    Attributes:
        prompts: all of them.
        samples: those that gave a text.
        errors: prompts that could not run, or of which a sample ended with an error.
        tokens: of the samples.
        prompt_tokens: of each prompt whose first sample gave a text.
        drafters: counts by drafter.
        answers: of scored prompts.
    """

    prompts: int = 0
    samples: int = 0
    errors: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    drafters: DraftCounts = field(default_factory=DraftCounts)
    answers: Answers = field(default_factory=Answers)

    def add(self, sample: Completion | Score) -> None:
        """Count a sample; a prompt's errors are counted by whoever knows all of its samples."""
        if sample.error is not None:
            return
        self.samples += 1
        self.tokens += len(sample.token_ids)
        self.prompt_tokens += sample.prompt_tokens if sample.sample == 0 else 0
        if isinstance(sample, Completion):
            self.drafters.add(sample.drafts)

    def summary(self) -> dict[str, Any]:
        """As a manifest has them: with the sum over all drafters, and the answers if there are any."""
        found = {**asdict(self), "total": asdict(self.drafters.total())}
        if self.answers == Answers():
            del found["answers"]
        return found
