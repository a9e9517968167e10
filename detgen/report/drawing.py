"""The windows of a sample as figures: one window step by step, and all of them as stairs.

The first is the figure of LLM-42 (arXiv 2601.17768, figure 5): decode, verify, roll back, and the KV cache beside it,
filled with a window of the run.
"""

from __future__ import annotations

from xml.etree import ElementTree

from markupsafe import Markup

from detgen.report.svg import draw, figure, markup
from detgen.report.window_life import Cell, Round

MOST_ROUNDS = 60  # of the stairs

_CELL, _ROW = 13, 15  # a cell of the stairs
_ACROSS = 24  # positions of a flight of them
_LONGEST_ROW = 48  # positions of a round that are drawn
_LONGEST = 10  # characters of a token in a box
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
    """One round, step by step: committed, drafted, chosen by the pass, and what is left. A row for each position."""
    cells = shown.cells[: _BOXES + 1]
    wide = max(len(_cut(text)) for cell in cells for text in (cell.text, cell.guess, " " * 8)) * 8.4 + 12
    left, gap, tall = 40, 6, 30
    drafted, chosen = left, left + wide + gap
    compared = chosen + wide + gap
    kept = compared + 92
    cache = kept + wide + 4 * gap
    wrong = f"; the draft was wrong at position {shown.wrong.position}" if shown.wrong else ""
    label = f"Round {shown.number}, step by step{wrong}. The table below says the same in words."
    tops = [24 + i * (tall + gap) for i in range(len(cells) + 1)]
    svg = figure(cache + 102, tops[-1] + tall + 4, label)
    for x, name in ((drafted, "1. drafted"), (chosen, "2. chosen"), (compared, "3. compared"), (kept, "4. kept")):
        draw(svg, "text", name, x=x, y=14, class_="step")
    before = shown.before or "the prompt"
    for x in (drafted, kept):
        _box(svg, x, tops[0], wide, tall, before, "kept", f"{before}, committed before this round")
    for cell, y in zip(cells, tops[1:], strict=True):
        draw(svg, "text", str(cell.position), x=left - gap, y=y + 20, text_anchor="end", class_="tick")
        if cell.drafted is not None:
            _box(svg, drafted, y, wide, tall, cell.guess, "drafted", f"position {cell.position}: {cell.guess} drafted")
        if cell.token is None:
            title = f"position {cell.position}: computed behind a wrong token or the end, not used"
            _box(svg, chosen, y, wide, tall, "—", "rolled_back", title)
        else:
            _box(svg, chosen, y, wide, tall, cell.text, cell.status, cell.title)
            _box(svg, kept, y, wide, tall, cell.text, cell.status, cell.title)
        draw(svg, "text", f"{cell.sign} {cell.word}", x=compared, y=y + 20, class_="verdict")
    _cache(svg, cache, cells, tops, tall)
    return markup(svg)


def _cache(svg: ElementTree.Element, left: float, cells: list[Cell], tops: list[int], tall: int) -> None:
    """The KV cache before and after the round is rolled back, as bars beside the tokens."""
    wide, then = 30, left + 68
    draw(svg, "text", "KV cache", x=left, y=14, class_="step")
    draw(svg, "text", "then", x=then, y=14, class_="step")
    top, first = tops[0], tops[0] + tall
    drafted = [i for i, cell in enumerate(cells, start=1) if cell.drafted is not None]
    full = tops[drafted[-1]] + tall if drafted else first
    stands = [i for i in drafted if cells[i - 1].status == "accepted"]
    end = tops[stands[-1]] + tall if stands else first
    draw(svg, "rect", title="entries of committed tokens", x=left, y=top, width=wide, height=tall, class_="kept")
    draw(svg, "rect", title="entries of drafted tokens, written by the pass", x=left, y=first, width=wide,
         height=full - first, class_="drafted")  # fmt: skip
    draw(svg, "rect", title="entries that stay", x=then, y=top, width=wide, height=end - top, class_="accepted")
    if full > end:
        title = "entries that are rolled back: the length is set back"
        _filled(svg, then, end, wide, full - end, "rolled_back", title)
        draw(svg, "text", "✗", x=then + wide / 2, y=(end + full) / 2 + 5, text_anchor="middle", class_="token")


def stairs(rounds: list[Round]) -> list[Markup]:
    """The first windows of a sample: a row for each round, at the positions where its tokens stand.

    In flights that are narrow enough for a small screen.
    """
    flights: list[list[Round]] = []
    for shown in rounds[:MOST_ROUNDS]:
        if flights and shown.cells[-1].position - flights[-1][0].cells[0].position < _ACROSS:
            flights[-1].append(shown)
        else:
            flights.append([shown])
    return [_flight(rows) for rows in flights]


def _flight(rows: list[Round]) -> Markup:
    first = rows[0].cells[0].position
    across = min(max(cell.position for r in rows for cell in r.cells) - first + 1, _LONGEST_ROW)
    left = 72
    label = f"Rounds {rows[0].number} to {rows[-1].number} as stairs; the table below says the same in words"
    svg = figure(left + max(across, _ACROSS) * _CELL + 4, len(rows) * _ROW + 24, label)
    for at in (0, *(at for at in range(-first % 10, across, 10) if at > 2)):
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
