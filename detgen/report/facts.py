"""What a page says in words: whether the output is guaranteed, how far the run is, what its windows did."""

from __future__ import annotations

import json
from typing import NamedTuple

from detgen.report.reporting import Report
from detgen.report.tables import MOST_TOKENS
from detgen.report.texts import counted, harmless
from detgen.report.window_life import Cell, Round

MOST_TEXT = 20_000  # characters of a text


class Window(NamedTuple):
    """A row of the table of windows: one round, or several in which nobody drafted."""

    rounds: str
    drafter: str
    cells: list[Cell]
    said: str


def guarantee(report: Report) -> tuple[str, list[str]]:
    """Whether the output is guaranteed, and why."""
    manifest, unverified = report.manifest, report.counts.drafts().total().unverified
    profile = manifest["profile"]
    said = [
        "The same prompts, model files and parameters give the same bytes again, whatever the batch size, the order of"
        " the prompts, the drafter, the number of threads, or interruptions. Each token that was kept was chosen by"
        " the canonical pass, in which a token's result does not depend on what else is computed beside it."
    ]
    if "versions" in profile:
        named = [f"{name} {version}" for name, version in profile["versions"].items()]
        named += [f"the device {profile['device']}"] if "device" in profile else []
        said.append(
            f"This holds for the profile of the run, which names {', '.join(named)}: elsewhere, other rounding may"
            " choose another token where two are nearly tied."
        )
    else:
        said.append(
            f"The profile names the arithmetic ({profile['arithmetic']}), the weights and the number format, and no"
            " processor: another machine gives the same bytes."
        )
    if unverified:
        said.append(f"Of unverified requests: {counted(unverified, 'token')}; nothing is promised of these.")
    return ("Yes, but for unverified requests" if unverified else "Yes"), said


def status(report: Report) -> list[str]:
    """What there is to know of a run that has not finished; nothing if it has."""
    manifest = report.manifest
    if manifest["status"] == "finished":
        return []
    state = "was interrupted" if manifest["status"] == "interrupted" else "is going on, or ended by a crash"
    total = manifest["input"]["prompts"]
    of = "" if total is None else f" of {total:,}"
    return [
        f"This run {state}: the page shows the prompts whose lines are written, {report.lines.prompts:,}{of}.",
        f"Its store has {counted(report.kept or 0, 'finished sample')}. Run the same command again to resume; then"
        " make the page again.",
    ]


def windows(rounds: list[Round]) -> tuple[list[Window], int]:
    """The rounds of a sample as rows, those in which nobody drafted together; and how many rounds are left out."""
    found: list[Window] = []
    cells = 0
    for i, shown in enumerate(rounds):
        cells += len(shown.cells)
        if cells > MOST_TOKENS:
            return found, len(rounds) - i
        if shown.drafted or not i or rounds[i - 1].drafted:
            found.append(Window(str(shown.number), shown.drafter, shown.cells, shown.said()))
            continue
        first = found[-1].rounds.partition("–")[0]
        if shown.cells[0].status == "unverified":
            said = "The pass of each of these rounds chose one token; nothing is promised of these."
        else:
            said = "Nobody drafted in these rounds. The canonical pass of each chose one token."
        found[-1] = Window(f"{first}–{shown.number}", shown.drafter, [*found[-1].cells, *shown.cells], said)
    return found, 0


def text_of(text: object) -> str:
    """A text as the page shows it."""
    whole = harmless(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, indent=1))
    return whole if len(whole) <= MOST_TEXT else f"{whole[:MOST_TEXT]}\n[{len(whole) - MOST_TEXT:,} more characters]"
