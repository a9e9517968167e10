"""Whatever prompts, texts, ids, tokens and names hold: the page shows it, and nothing of it takes effect."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

from helpers.hostile import ALL
from helpers.pages import read_page

from detgen.report.page import render
from detgen.report.reporting import read_report
from detgen.report.words import harmless, visible

TAGS = [
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "a",
    "header",
    "nav",
    "main",
    "section",
    "footer",
    "h1",
    "h2",
    "h3",
    "h4",
    "p",
    "ul",
    "ol",
    "li",
    "dl",
    "dt",
    "dd",
    "div",
    "span",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "figure",
    "figcaption",
    "details",
    "summary",
    "pre",
    "code",
    "strong",
    "em",
    "bdi",
]
ATTRIBUTES = [
    "lang",
    "charset",
    "name",
    "content",
    "http-equiv",
    "href",
    "id",
    "class",
    "title",
    "style",
    "role",
    "tabindex",
    "scope",
    "colspan",
    "open",
    "aria-label",
    "aria-labelledby",
    "aria-hidden",
]


def test_nothing_of_it_becomes_markup(hostile: Path, finished: Path) -> None:
    """No element and no attribute but the page's own; styles are lengths, links lead into the page."""
    ids = [json.loads(line)["id"] for line in (hostile / "outputs.jsonl").read_text().splitlines()]
    report = read_report(hostile, list(dict.fromkeys(ids)), against=finished)
    assert not report.faults.count
    page = read_page(render(report))
    inside = list(page.one("html").all())
    assert {element.tag for element in inside} <= {*TAGS}
    assert {name for element in inside for name in element.attributes} <= {*ATTRIBUTES}
    assert len(list(page.all("style"))) == len(list(page.all("title"))) == 1
    assert "document.title" not in str(page.one("style").inside)
    for element in inside:
        style = element.attributes.get("style", "--part:0").replace("flex-grow:", "--part:")
        assert style.partition(":")[0] in ("--part", "--across")
        assert float(style.partition(":")[2]) >= 0
        assert element.attributes.get("href", "#").startswith("#")


def test_it_is_all_shown(hostile: Path) -> None:
    """Letter by letter, what is hidden by its number; a line that is too long is cut."""
    ids = [json.loads(line)["id"] for line in (hostile / "outputs.jsonl").read_text().splitlines()]
    source = render(read_report(hostile, list(dict.fromkeys(ids))))
    page = read_page(source)
    for text in (e.text for e in page.all("pre")):
        assert harmless(ALL) in text or text.startswith("a" * 20_000)
    assert visible(ALL) in page.one(id="closest").text
    assert any(visible(ALL) in td.text for td in page.all("td"))
    assert not {c for c in source if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn")} - {"\n"}
    assert source.encode()
    assert "a" * 20_001 not in source
    assert all(value in page.text for value in ("{{ 7 * 7 }}", "{% include 'page.css' %}", "{# gone #}"))


def test_the_same_hostile_folder_gives_the_same_bytes(hostile: Path) -> None:
    assert render(read_report(hostile)) == render(read_report(hostile))
