"""The windows of a sample, from its acceptance log: what each round drafted, chose, kept and rolled back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from detgen.report.streaming import Fields
from detgen.report.texts import Texts
from detgen.report.words import counted, visible

MOST_TOKENS = 1000  # tokens of a request that are shown one by one, or in words
MOST_ROUNDS = 60  # rounds of the stairs
LEAST_ROW, MOST_ROW = 12, 48  # positions per row of them
_ACROSS = 24  # positions per flight of them
BOXES = 8  # drafted tokens of a window that is drawn

# Sign and word for what became of a token.
SIGNS = {
    "accepted": ("✓", "accepted"),
    "corrected": ("≠", "corrected"),
    "bonus": ("+", "bonus"),
    "plain": ("•", "plain"),
    "rolled_back": ("✗", "rolled back"),
    "unverified": ("~", "unverified"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """An entry of the log: a place in the window.

    Attributes:
        position: index in the completion.
        status: the log's status.
        token, drafted: ids; None if none was committed or drafted.
        text, guess: their texts, with hidden characters made visible; `#` and the id if the text is unknown.
        margin, logprob: those of the committed token.
    """

    position: int
    status: str
    token: int | None
    drafted: int | None
    text: str
    guess: str
    margin: float | None
    logprob: float | None

    @property
    def sign(self) -> str:
        """The sign for the status."""
        return SIGNS[self.status][0]

    @property
    def word(self) -> str:
        """The status in words."""
        return SIGNS[self.status][1]

    @property
    def title(self) -> str:
        """Everything in a line."""
        if self.status == "rolled_back":
            return f"position {self.position}: {self.guess} was drafted and rolled back"
        said = f"position {self.position}: {self.text}, {self.word}"
        if self.status == "corrected":
            said += f" (drafted: {self.guess})"
        return said if self.margin is None else f"{said}, margin {self.margin:.4g}"


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a sample.

    Attributes:
        number: its number, from 0.
        drafter: who drafted.
        cells: its entries.
        before: text of the last committed token before it; "" at the beginning.
    """

    number: int
    drafter: str
    cells: list[Cell]
    before: str

    @property
    def drafted(self) -> list[Cell]:
        """The cells that were drafted."""
        return [cell for cell in self.cells if cell.drafted is not None]

    @property
    def committed(self) -> list[Cell]:
        """The cells that were committed."""
        return [cell for cell in self.cells if cell.token is not None]

    @property
    def accepted(self) -> int:
        """How many drafted tokens were accepted."""
        return sum(cell.status == "accepted" for cell in self.cells)

    @property
    def wrong(self) -> Cell | None:
        """The cell whose draft was wrong, or None."""
        return next((cell for cell in self.cells if cell.status == "corrected"), None)

    @property
    def after(self) -> list[Cell]:
        """The cells that were rolled back after the wrong token or the end."""
        return [cell for cell in self.cells if cell.status == "rolled_back"]

    def said(self) -> str:
        """Describe what happened in a sentence for someone who does not know detgen."""
        drafted, wrong, after = len(self.drafted), self.wrong, self.after
        if not drafted:
            only = self.cells[0]
            if only.status == "unverified":
                return f"The pass chose {only.text}; it is not guaranteed."
            return f"Nothing was drafted. The canonical pass chose {only.text}."
        drafts = f"The drafter {self.drafter} proposed {_tokens(drafted)}."
        if wrong is not None:
            right = f" {_first(self.accepted)}." if self.accepted else ""
            thrown = f", and {_tokens(len(after))} drafted after it {_are(after)} rolled back" if after else ""
            return (
                f"{drafts}{right} At position {wrong.position} the draft had {wrong.guess}, but the canonical pass"
                f" chose {wrong.text}{_lead(wrong)}: that is committed instead{thrown}."
            )
        if not self.committed:
            return f"{drafts} The log does not say what became of it."
        if after:
            return (
                f"{drafts} The text ends with {self.committed[-1].text}; {_tokens(len(after))} drafted after the end"
                f" {_are(after)} rolled back."
            )
        all_stand = "It stands" if drafted == 1 else "All of them stand"
        if self.cells[-1].status == "bonus":
            return f"{drafts} {all_stand}, and the pass added {self.cells[-1].text}: the bonus."
        return f"{drafts} {all_stand}, and the text ends there."


class Window(NamedTuple):
    """A row of the table of windows: one round, or several without drafts."""

    rounds: str
    drafter: str
    cells: list[Cell]
    said: str


def rounds_of(records: Iterable[Fields], texts: Texts) -> list[Round]:
    """Return the rounds of a sample.

    Args:
        records: its entries in the acceptance log.
        texts: texts of tokens.
    """
    found: list[Round] = []
    before = ""
    for number, own in groupby(records, key=itemgetter("round")):
        entries = list(own)
        found.append(Round(number, entries[0]["drafter"], [_cell(entry, texts) for entry in entries], before))
        cells = found[-1].cells
        before = next((cell.text for cell in reversed(cells) if cell.token is not None), before)
    return found


def instructive(rounds: list[Round]) -> Round | None:
    """Return the round that shows most: accepted, corrected and rolled-back tokens; None if nothing was drafted."""
    return max(
        (r for r in rounds if r.drafted),
        key=lambda r: (
            bool(r.accepted) + bool(r.wrong) + bool(r.after),
            len(r.drafted) <= BOXES,
            min(len(r.drafted), BOXES),
            -r.number,
        ),
        default=None,
    )


def stairs(rounds: list[Round]) -> list[list[Round]]:
    """Divide the first rounds into flights that are narrow enough for a small screen."""
    flights: list[list[Round]] = []
    for one in rounds[:MOST_ROUNDS]:
        if flights and one.cells[-1].position - flights[-1][0].cells[0].position < _ACROSS:
            flights[-1].append(one)
        else:
            flights.append([one])
    return flights


def windows(rounds: list[Round]) -> tuple[list[Window], int]:
    """Return the rounds of a sample as rows, joining those without drafts, and the number of rounds left out."""
    found: list[Window] = []
    cells = 0
    for i, one in enumerate(rounds):
        cells += len(one.cells)
        if cells > MOST_TOKENS:
            return found, len(rounds) - i
        if one.drafted or not i or rounds[i - 1].drafted:
            found.append(Window(str(one.number), one.drafter, one.cells, one.said()))
            continue
        first = found[-1].rounds.partition("–")[0]
        if one.cells[0].status == "unverified":
            said = "In each of these rounds, the pass chose one token; these are not guaranteed."
        else:
            said = "Nothing was drafted in these rounds. In each, the canonical pass chose one token."
        found[-1] = Window(f"{first}–{one.number}", one.drafter, [*found[-1].cells, *one.cells], said)
    return found, 0


def shown(token: object, texts: Texts) -> str:
    """Return a token as shown on the page: its text in quotes, or its number."""
    if token is None:
        return ""
    if type(token) is not int:
        return visible(str(token))  # from a damaged line
    text = texts.of(token)
    return f"#{token}" if text is None else f"“{visible(text)}”"


def _cell(record: Fields, texts: Texts) -> Cell:
    token, drafted = record["token"], record["drafted"]
    return Cell(
        position=record["position"],
        status=record["status"],
        token=token,
        drafted=drafted,
        text=shown(token, texts),
        guess=shown(drafted, texts),
        margin=record["margin"],
        logprob=record["logprob"],
    )


def _tokens(count: int) -> str:
    return counted(count, "token")


def _are(cells: list[Cell]) -> str:
    return "is" if len(cells) == 1 else "are"


def _first(count: int) -> str:
    return "The first one stands" if count == 1 else f"The first {count:,} stand"


def _lead(cell: Cell) -> str:
    return "" if cell.margin is None else f", by a margin of {cell.margin:.3g}"
