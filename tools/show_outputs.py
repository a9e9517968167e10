"""Show the first texts of a finished run, each after the last lines of its prompt.

python tools/show_outputs.py OUTPUT_FOLDER PROMPTS.jsonl [HOW_MANY]
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.text import Text

PROMPT_LINES = 4


def main(folder: str, prompts: str, how_many: str = "3") -> None:
    """Print the texts; on a terminal, generated text stands out from the prompt."""
    console = Console(highlight=False)
    outputs, given = Path(folder) / "outputs.jsonl", Path(prompts)
    with outputs.open(encoding="utf-8") as output_lines, given.open(encoding="utf-8") as prompt_lines:
        for output_line, prompt_line in islice(zip(output_lines, prompt_lines, strict=True), int(how_many)):
            output, prompt = json.loads(output_line), json.loads(prompt_line)["prompt"]
            console.rule(f"{output['id']}: the prompt's end, and what was generated")
            ending = "".join(prompt.splitlines(keepends=True)[-PROMPT_LINES:])
            console.print(Text.assemble((ending, "dim"), (output["text"], "bold green")), soft_wrap=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
