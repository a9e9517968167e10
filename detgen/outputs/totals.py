"""What a run's samples come to."""

from __future__ import annotations

from dataclasses import dataclass, field

from detgen.engine.request import Completion
from detgen.engine.score_requests import Score
from detgen.engine.stats import DraftCounts


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
    """

    prompts: int = 0
    samples: int = 0
    errors: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    drafters: DraftCounts = field(default_factory=DraftCounts)

    def add(self, sample: Completion | Score) -> None:
        """Count a sample; a prompt's errors are counted by whoever knows all of its samples."""
        if sample.error is not None:
            return
        self.samples += 1
        self.tokens += len(sample.token_ids)
        self.prompt_tokens += sample.prompt_tokens if sample.sample == 0 else 0
        if isinstance(sample, Completion):
            self.drafters.add(sample.drafts)
