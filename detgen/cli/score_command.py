"""`detgen score`: a file of prompts and completions in, a folder of log-probabilities out.

What it does is in `detgen.run`, with which a run shares all but the lines and what the engine is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from detgen.cli.declared import command
from detgen.cli.run_command import Strict, go
from detgen.run import ScoreConfig

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

EPILOG = "\n".join(
    (
        "Examples:",
        "  [bold]detgen score questions.jsonl[/]",
        "  [bold]detgen score questions.jsonl -o scores --target models/large[/]",
        "  [bold]detgen score 'hf://NAME?split=test&column=text'[/]",
        "",
        "Exit status: 0 done, 1 no prompt could be scored (with --strict: some could not), 2 refused, 70 internal"
        " error, 130 interrupted.",
    )
)


@command
def score_command(config: ScoreConfig, strict: Strict = False, *, display: QuietDisplay) -> int:
    """Write the log-probabilities of given completions, or of whole texts, token by token and in sum.

    A line that cannot be scored becomes an error in the output; the rest are scored.
    """
    return go(config, display, strict=strict)
