"""The windows of a sample as figures: one window step by step, and all of them as stairs.

The first is the figure of LLM-42 (arXiv 2601.17768, figure 5): decode, verify, roll back, and the KV cache beside it,
filled with a window of the run.
"""

from __future__ import annotations

from xml.etree import ElementTree

from markupsafe import Markup

from detgen.report.svg import draw, figure, markup
from detgen.report.windows import Cell, Round

MOST_ROUNDS = 60  # of the stairs
MOST_POSITIONS = 160  # likewise

_CELL, _ROW = 13, 15  # a cell of the stairs
_LONGEST = 12  # characters of a token in a box
_PATTERNS = {"rolled_back": "hatch", "corrected": "check", "bonus": "check", "unverified": "dots"}
_BOXES = 8  # drafted tokens of the window that is drawn


def instructive(rounds: list[Round]) -> Round | None:
    """The round that shows most: drafts that stand, one that is wrong, and some behind it; None if nobody drafted."""
    drafted = [r for r in rounds if r.drafted]
    return max(
        drafted,
        key=lambda r: (
            bool(r.accepted) + bool(r.wrong) + bool(r.behind),
            len(r.drafted) <= _BOXES,
            min(len(r.drafted), _BOXES),
            -r.number,
        ),
        default=None,
    )


def window(shown: Round) -> Markup:
    """One round, step by step: committed, drafted, chosen by the pass, and what is left."""
    cells = shown.cells[: _BOXES + 1]
    widths = [max(len(_cut(c.text)), len(_cut(c.guess)), 8) * 8.4 + 16 for c in cells]
    left, gap, tall = 150, 6, 30
    starts = [left + 96 + sum(widths[:i]) + gap * i for i in range(len(cells))]
    right = starts[-1] + widths[-1]
    wrong = f"; the draft was wrong at position {shown.wrong.position}" if shown.wrong else ""
    label = f"Round {shown.number}, step by step{wrong}. The table below says the same in words."
    svg = figure(right + 10, 276, label, shrinks=False)
    names = ("committed before", "1. drafted", "2. the pass chose", "3. compared", "4. kept")
    for i, name in enumerate(names[1:]):
        draw(svg, "text", name, x=0, y=62 + i * 44, class_="step")
    draw(svg, "text", names[0], x=left, y=16, class_="axis")
    before = shown.before or "the prompt"
    _box(svg, left, 42, 84, tall, before, "kept", f"{before}, committed before this round")
    for cell, x, width in zip(cells, starts, widths, strict=True):
        if cell.drafted is not None:
            _box(svg, x, 42, width, tall, cell.guess, "drafted", f"position {cell.position}: {cell.guess} drafted")
        if cell.token is None:
            title = f"position {cell.position}: computed behind a wrong token or the end, not used"
            _box(svg, x, 86, width, tall, "—", "rolled_back", title)
        else:
            _box(svg, x, 86, width, tall, cell.text, cell.status, cell.title)
            _box(svg, x, 174, width, tall, cell.text, cell.status, cell.title)
        draw(svg, "text", f"{cell.sign} {cell.word}", x=x + width / 2, y=150, text_anchor="middle", class_="verdict")
    _box(svg, left, 174, 84, tall, before, "kept", f"{before}, committed before this round")
    _cache(svg, left, shown, cells, starts, widths)
    return markup(svg)


def _cache(
    svg: ElementTree.Element, left: float, shown: Round, cells: list[Cell], starts: list[float], widths: list[float]
) -> None:
    """The KV cache before and after the round is rolled back, as bars below the tokens."""
    draw(svg, "text", "KV cache", x=0, y=236, class_="step")
    draw(svg, "text", "then", x=0, y=262, class_="step")
    drafted = [i for i, cell in enumerate(cells) if cell.drafted is not None]
    full = starts[drafted[-1]] + widths[drafted[-1]] if drafted else left + 84
    stands = [i for i in drafted if cells[i].status == "accepted"]
    end = starts[stands[-1]] + widths[stands[-1]] if stands else left + 84
    draw(svg, "rect", title="entries of committed tokens", x=left, y=224, width=84, height=14, class_="kept")
    draw(svg, "rect", title="entries of drafted tokens, written by the pass", x=left + 84, y=224,
         width=max(full - left - 84, 0), height=14, class_="drafted")  # fmt: skip
    draw(svg, "rect", title="entries that stay", x=left, y=250, width=end - left, height=14, class_="accepted")
    if full > end:
        title = "entries that are forgotten: the length is set back"
        draw(svg, "rect", title=title, x=end, y=250, width=full - end, height=14, class_="rolled_back")
        draw(svg, "rect", title=title, x=end, y=250, width=full - end, height=14, class_="hatch")
        draw(svg, "text", "rolled back", x=(end + full) / 2, y=261, text_anchor="middle", class_="small")


def stairs(rounds: list[Round]) -> Markup:
    """All windows of a sample: a row for each round, at the positions where its tokens stand."""
    first = rounds[0].cells[0].position
    rows = [r for r in rounds[:MOST_ROUNDS] if r.cells[0].position - first < MOST_POSITIONS]
    last = max(cell.position for r in rows for cell in r.cells) - first
    across, left = min(last + 1, MOST_POSITIONS), 72
    size_ = left + across * _CELL + 4, len(rows) * _ROW + 24
    svg = figure(*size_, "The rounds of this request as stairs; the table below says the same in words", shrinks=False)
    for at in range(0, across, 10):
        draw(svg, "text", str(first + at), x=left + at * _CELL + _CELL / 2, y=12, text_anchor="middle", class_="tick")
    for i, shown in enumerate(rows):
        y = 20 + i * _ROW
        draw(svg, "text", f"{shown.number} {shown.drafter}", x=left - 6, y=y + 11, text_anchor="end", class_="tick")
        for cell in shown.cells:
            at = cell.position - first
            if at < across:
                x = left + at * _CELL
                _filled(svg, x, y, _CELL - 1, _ROW - 2, cell.status, cell.title)
                draw(svg, "text", cell.sign, x=x + 6, y=y + 10, text_anchor="middle", class_="sign")
    return markup(svg)


def _box(
    svg: ElementTree.Element, x: float, y: float, width: float, height: float, text: str, status: str, title: str
) -> None:
    _filled(svg, x, y, width, height, status, title)
    draw(svg, "text", _cut(text), x=x + width / 2, y=y + height / 2 + 5, text_anchor="middle", class_="token")


def _filled(svg: ElementTree.Element, x: float, y: float, width: float, height: float, status: str, title: str) -> None:
    """A box in the colour of a status, and in its pattern for those who do not see the colour."""
    draw(svg, "rect", title=title, x=x, y=y, width=width, height=height, class_=status)
    if status in _PATTERNS:
        draw(svg, "rect", x=x, y=y, width=width, height=height, class_=_PATTERNS[status])


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
