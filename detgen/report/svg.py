"""Charts as inline SVG, coloured by the page's style sheet. Patterns, signs and strokes tell things apart without it.

Text goes in as data and is escaped by the XML library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle
from xml.etree import ElementTree

from markupsafe import Markup

_WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 18, 46
_STROKES = (("", "circle"), ("6 4", "square"), ("2 3", "triangle"), ("8 3 2 3", "diamond"))


def figure(width: float, height: float, label: str) -> ElementTree.Element:
    """An empty drawing, which becomes smaller where there is less room.

    Args:
        width: in pixels.
        height: likewise.
        label: what it is called for those who do not see it.
    """
    size = {"viewBox": f"0 0 {_n(width)} {_n(height)}", "style": f"max-width:{_n(width)}px"}
    return ElementTree.Element("svg", {**size, "role": "img", "aria-label": label})


def draw(parent: ElementTree.Element, tag: str, text: str = "", title: str = "", **attributes: object) -> None:
    """Add an element; numbers are rounded, `class_` is `class`, and `_` in names is `-`.

    Args:
        parent: what to add it to.
        tag: its kind.
        text: in it.
        title: what is shown when the pointer is on it.
        attributes: of it.
    """
    given = {
        name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else _n(value)  # type: ignore[arg-type]
        for name, value in attributes.items()
    }
    element = ElementTree.SubElement(parent, tag, given)
    element.text = text or None
    if title:
        ElementTree.SubElement(element, "title").text = title


def markup(element: ElementTree.Element) -> Markup:
    """The drawing as a part of the page."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))


def _n(value: float) -> str:
    """A number in few characters, the same everywhere."""
    return f"{value:.1f}".removesuffix(".0")


def ticks(most: float, steps: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its value, the value in words, and what is shown when the pointer is on it."""

    name: str
    value: float
    words: str
    title: str = ""


def bars(label: str, rows: Sequence[Bar], most: float) -> Markup:
    """Horizontal bars, a line each.

    Args:
        label: what the chart shows.
        rows: at least one.
        most: value of a bar of full length.
    """
    height, name_width, words_width = 26, 110, 250
    room = _WIDTH - name_width - words_width
    svg = figure(_WIDTH, height * len(rows) + 4, label)
    for i, row in enumerate(rows):
        y = i * height
        draw(svg, "text", row.name, x=name_width - 8, y=y + 18, text_anchor="end")
        draw(svg, "rect", x=name_width, y=y + 4, width=room, height=height - 8, class_="track")
        length = room * row.value / most if most else 0
        draw(svg, "rect", title=row.title, x=name_width, y=y + 4, width=length, height=height - 8, class_="bar")
        draw(svg, "text", row.words, x=name_width + room + 8, y=y + 18)
    return markup(svg)


def columns(label: str, bins: Sequence[Bar], x_title: str, y_title: str) -> Markup:
    """A histogram: a column for each of the bins, their names below."""
    height = 240
    svg = figure(_WIDTH, height, label)
    scale = ticks(max(b.value for b in bins))
    bottom = height - _BOTTOM
    _y_axis(svg, scale, bottom, y_title, percent=False)
    step = (_WIDTH - _LEFT - _RIGHT) / len(bins)
    every = math.ceil(len(bins) / 20)
    for i, b in enumerate(bins):
        x = _LEFT + i * step
        tall = (bottom - _TOP) * b.value / scale[-1]
        if b.value:
            draw(svg, "rect", title=b.title or f"{b.name}: {b.words}", x=x + 1, y=bottom - max(tall, 1),
                 width=step - 2, height=max(tall, 1), class_="bar")  # fmt: skip
            if every == 1:
                draw(svg, "text", f"{b.value:,.0f}", x=x + step / 2, y=bottom - tall - 4, text_anchor="middle",
                     class_="small")  # fmt: skip
        if i % every == 0:
            draw(svg, "text", b.name, x=x + step / 2, y=bottom + 15, text_anchor="middle", class_="tick")
    _x_title(svg, x_title, height)
    return markup(svg)


def lines(label: str, series: dict[str, list[tuple[float, float]]], x_title: str, y_title: str, *,
          percent: bool = False, from_: float = 0.0) -> Markup:  # fmt: skip
    """Lines with marks, which differ in shape and stroke.

    Args:
        label: what the chart shows.
        series: points (x, y) by the name of the line, at least one.
        x_title: of the horizontal axis, which begins at `from_`.
        y_title: of the vertical axis, which begins at 0.
        percent: whether y is a share, shown in percent.
        from_: lowest x.
    """
    height, legend = 260, 22 if len(series) > 1 else 0
    svg = figure(_WIDTH, height + legend, label)
    bottom = height - _BOTTOM
    points = [point for line in series.values() for point in line]
    scale = ticks(1.0 if percent else max(y for _, y in points))
    _y_axis(svg, scale, bottom, y_title, percent=percent)
    right = max(max(x for x, _ in points), from_ + 1)
    room = _WIDTH - _LEFT - _RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + room * (x - from_) / (right - from_), bottom - (bottom - _TOP) * y / scale[-1]

    for x in ticks(right, 10):
        if from_ <= x <= right:
            draw(svg, "text", f"{x:g}", x=place(x, 0)[0], y=bottom + 15, text_anchor="middle", class_="tick")
    across = count(_LEFT, 140)
    for (name, line), (dashes, mark) in zip(series.items(), cycle(_STROKES), strict=False):
        at = [place(x, y) for x, y in line]
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in at)
        draw(svg, "polyline", points=path, class_="line", stroke_dasharray=dashes or "none")
        for (x, y), (px, py) in zip(line, at, strict=True):
            value = f"{y:.1%}" if percent else f"{y:.2f}"
            _mark(svg, mark, px, py, f"{name}, {x:g}: {value}")
        if legend:
            start = next(across)
            draw(svg, "line", x1=start, y1=height + 10, x2=start + 30, y2=height + 10, class_="line",
                 stroke_dasharray=dashes or "none")  # fmt: skip
            _mark(svg, mark, start + 15, height + 10, name)
            draw(svg, "text", name, x=start + 38, y=height + 14)
    _x_title(svg, x_title, height)
    return markup(svg)


def _mark(svg: ElementTree.Element, shape: str, x: float, y: float, title: str) -> None:
    if shape == "circle":
        draw(svg, "circle", title=title, cx=x, cy=y, r=3.5, class_="mark")
        return
    corners = {
        "square": ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        "triangle": ((0, -4), (4, 3), (-4, 3)),
        "diamond": ((0, -5), (4, 0), (0, 5), (-4, 0)),
    }[shape]
    draw(svg, "polygon", title=title, points=" ".join(f"{_n(x + a)},{_n(y + b)}" for a, b in corners), class_="mark")


def _y_axis(svg: ElementTree.Element, scale: list[float], bottom: float, title: str, *, percent: bool) -> None:
    for value in scale:
        y = bottom - (bottom - _TOP) * value / scale[-1]
        draw(svg, "line", x1=_LEFT, y1=y, x2=_WIDTH - _RIGHT, y2=y, class_="grid")
        words = f"{value:.0%}" if percent else f"{value:,g}" if value < 1e6 else f"{value:.3g}"
        draw(svg, "text", words, x=_LEFT - 6, y=y + 4, text_anchor="end", class_="tick")
    middle = (_TOP + bottom) / 2
    draw(svg, "text", title, x=12, y=middle, text_anchor="middle", transform=f"rotate(-90 12 {_n(middle)})",
         class_="axis")  # fmt: skip


def _x_title(svg: ElementTree.Element, title: str, height: float) -> None:
    draw(svg, "text", title, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=height - 8, text_anchor="middle", class_="axis")
