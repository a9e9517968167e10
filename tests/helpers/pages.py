"""A page of HTML, read strictly: every element that is opened is closed, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}


@dataclass
class Element:
    """An element, its attributes, and what is in it."""

    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    def all(self, tag: str | None = None, **attributes: str) -> Iterator[Element]:
        """The elements in it, in order, with a tag and attributes."""
        for part in self.inside:
            if isinstance(part, Element):
                if tag in (None, part.tag) and attributes.items() <= part.attributes.items():
                    yield part
                yield from part.all(tag, **attributes)

    def one(self, tag: str | None = None, **attributes: str) -> Element:
        """The only such element."""
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        """The text in it, titles left out."""
        return "".join(
            part if isinstance(part, str) else part.text
            for part in self.inside
            if isinstance(part, str) or part.tag not in ("title", "style")
        )

    def rows(self) -> list[list[str]]:
        """The cells of a table's body."""
        return [
            [cell.text.strip() for cell in row.inside if isinstance(cell, Element)]
            for row in self.one("tbody").all("tr")
        ]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}> at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def read_page(page: str) -> Element:
    """The root of a page."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> is never closed"
    return reader.open[0]
