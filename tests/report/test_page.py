"""What the page says, beside the files that it was made from; and that it is a page that anyone can read."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import Element, read_page

from detgen.report.page import check_place, render, write
from detgen.report.reporting import read_report
from detgen.report.window_life import SIGNS

Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def page(finished: Path) -> Element:
    return read_page(render(read_report(finished)))


@pytest.fixture(scope="module")
def asked(finished: Path, outputs: Log) -> Element:
    """The page with every request on it."""
    return read_page(render(read_report(finished, list(dict.fromkeys(str(line["id"]) for line in outputs)))))


def of(log: Log, id: object, sample: int = 0) -> Log:
    return [entry for entry in log if (entry["id"], entry["sample"]) == (id, sample)]


def section(page: Element, title: str) -> Element:
    """The part of the page about a request."""
    return next(s for s in page.all("section") if any(h.text.startswith(title) for h in direct(s, "h3")))


def direct(element: Element, tag: str) -> list[Element]:
    return [part for part in element.inside if isinstance(part, Element) and part.tag == tag]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_totals_are_those_of_the_lines(page: Element, outputs: Log, log: Log) -> None:
    cards = {card.one("dt").text: card.one("dd").text for card in page.one(id="totals").all("div")}
    texts = [line for line in outputs if "error" not in line]
    assert number(cards["prompts"]) == len({line["index"] for line in outputs})
    assert number(cards["samples (texts)"]) == len(texts)
    assert number(cards["errors"].removeprefix("✗ ")) == len(outputs) - len(texts) == 2
    assert number(cards["tokens written"]) == sum(len(line["token_ids"]) for line in texts)
    assert number(cards["roll-backs"]) == sum(entry["status"] == "corrected" for entry in log) > 0
    verified = [entry for entry in log if entry["status"] != "unverified"]
    rounds = {(entry["index"], entry["sample"], entry["round"]) for entry in verified}
    committed = sum(entry["token"] is not None for entry in verified)
    assert cards["tokens per round"] == f"{committed / len(rounds):.2f}"
    assert cards["guaranteed?"] == "Yes, but for unverified requests"


def test_drafters_are_those_of_the_manifest(page: Element, finished: Path) -> None:
    known = json.loads((finished / "manifest.json").read_text())["summary"]
    head = [cell.text for cell in page.one(id="drafters").one("thead").all("th")]
    assert head == ["drafter", "rounds", "drafted", "accepted", "share", "corrected", "rolled back", "bonus", "plain",
                    "unverified"]  # fmt: skip
    rows = {row[0]: row[1:] for row in page.one(id="drafters").rows()}
    names = ("rounds", "drafted", "accepted", "corrected", "rolled_back", "bonus", "plain", "unverified")
    assert rows.keys() == {*known["drafters"], "all"}
    for drafter, row in rows.items():
        counts = known["total"] if drafter == "all" else known["drafters"][drafter]
        assert [number(cell) for i, cell in enumerate(row) if i != 3] == [counts[name] for name in names]


def test_places_in_the_draft(page: Element, log: Log) -> None:
    drafted: Counter[tuple[str, str]] = Counter()
    accepted: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[int, int, int], int] = {}
    for entry in log:
        start = first.setdefault((entry["index"], entry["sample"], entry["round"]), entry["position"])
        key = entry["drafter"], str(entry["position"] - start + 1)
        drafted[key] += entry["drafted"] is not None
        accepted[key] += entry["status"] == "accepted"
    rows = page.one(id="places").rows()
    assert len(rows) == 4
    for name, place, tried, right, _ in rows:
        assert (number(tried), number(right)) == (drafted[name, place], accepted[name, place])
    assert sum(number(row[2]) for row in rows) == sum(entry["drafted"] is not None for entry in log)


def test_margins(page: Element, log: Log) -> None:
    judged = [e for e in log if e["status"] not in ("unverified", "rolled_back") and e["margin"] is not None]
    for name, tokens, samples, _ in page.one(id="thresholds").rows():
        below = [e for e in judged if e["margin"] < float(name.removeprefix("below "))]
        assert number(tokens) == len(below)
        assert number(samples) == len({(e["index"], e["sample"]) for e in below})
    assert sum(number(row[1]) for row in page.one(id="margin-numbers").rows()) == sum(e["margin"] > 0 for e in judged)
    closest = sorted(judged, key=lambda e: e["margin"])[:20]
    rows = page.one(id="closest").rows()
    assert [row[0] for row in rows] == [f"{e['margin']:.4g}" for e in closest]
    assert [number(row[2]) for row in rows] == [e["position"] for e in closest]
    runners_up = {row[1]: row[5] for row in rows}
    assert all((row == "not recorded") == (id != "last") for id, row in runners_up.items())


def test_rounds_by_tokens(page: Element, log: Log) -> None:
    made: Counter[tuple[int, int, int]] = Counter()
    for entry in log:
        if entry["status"] != "unverified":
            made[entry["index"], entry["sample"], entry["round"]] += entry["token"] is not None
    by_size = Counter(made.values())
    assert {int(row[0]): number(row[1]) for row in page.one(id="round-numbers").rows() if row[1] != "0"} == by_size


def test_it_says_which_tokens_were_rolled_back_and_why(asked: Element, log: Log) -> None:
    """Each correction of the log has a row: where, what was drafted, what the pass chose, and what lay behind."""
    here = section(asked, "Request greedy")
    entries = of(log, "greedy")
    wrong = [e for e in entries if e["status"] == "corrected"]
    assert wrong
    titles = {c.attributes["title"] for c in here.all("span") if "title" in c.attributes}
    rows = {row[0]: row for row in windows(here)}
    for entry in wrong:
        behind = [e for e in entries if e["round"] == entry["round"] and e["status"] == "rolled_back"]
        _, drafter, chips, said = rows[str(entry["round"])]
        assert drafter == "ngram"
        found = re.search(r"the draft had (“.*”), but the canonical pass chose (“.*”), by a margin of (\S+): ", said)
        assert found
        guess, chosen, margin = found.groups()
        assert guess != chosen
        assert margin == f"{entry['margin']:.3g}"
        assert (f"{len(behind)} token" in said.partition(margin)[2]) == bool(behind)
        assert chips.count("✗") == len(behind) + 1
        assert any(f"(drafted: {guess})" in title and chosen in title for title in titles)


def windows(part: Element) -> list[list[str]]:
    return next(t for t in part.all("table") if t.attributes.get("class") == "windows").rows()


@pytest.mark.parametrize(("id", "sample"), [("greedy", 0), ("sampled", 0), ("sampled", 1), ("stopped", 0)])
def test_every_token_is_in_a_table_and_in_the_windows(asked: Element, log: Log, id: str, sample: int) -> None:
    here = section(asked, f"Request {id}" + (f", sample {sample}" if sample else ""))
    entries = of(log, id, sample)
    (table,) = (t for t in here.all("table") if t.attributes.get("id", "").startswith("tokens-"))
    rows = table.rows()
    assert [(int(r[0]), int(r[1]), r[3], r[4]) for r in rows] == [
        (e["position"], e["round"], "–" if e["token"] is None else f"{e['token']:,}", SIGNS[e["status"]][1])
        for e in entries
    ]
    signs = Counter(c.text.strip()[0] for c in here.all("span") if c.attributes.get("class", "").startswith("chip"))
    wrong = sum(e["status"] == "corrected" for e in entries)
    for status, (sign, _) in SIGNS.items():
        extra = wrong if status == "rolled_back" else 0  # the wrong guess stands beside what was chosen instead
        assert signs[sign] == sum(e["status"] == status for e in entries) + extra


def test_prompts_and_texts_are_as_the_run_wrote_them(asked: Element, outputs: Log) -> None:
    for line in outputs:
        if line["id"] == "greedy":
            here = section(asked, "Request greedy")
            assert [pre.text for pre in here.all("pre")] == [line["prompt"], line["text"]]


def test_an_error_that_is_asked_for(asked: Element, outputs: Log) -> None:
    error = next(line["error"] for line in outputs if line["id"] == "too long")
    assert error in section(asked, "Request too long").text


def test_errors(page: Element, outputs: Log) -> None:
    errors = [line for line in outputs if "error" in line]
    assert [row[0] for row in page.one(id="error-lines").rows()] == [line["id"] for line in errors]
    assert [row[2] for row in page.one(id="error-lines").rows()] == [line["error"] for line in errors]
    assert all(number(row[1]) == 1 for row in page.one(id="error-kinds").rows())


def test_rules_choose_requests(page: Element, log: Log) -> None:
    thrown: Counter[tuple[str, int]] = Counter()
    for entry in log:
        thrown[entry["id"], entry["sample"]] += entry["status"] in ("corrected", "rolled_back")
    most = next(key for key, count in thrown.items() if count == max(thrown.values()))
    closest = min(
        (e for e in log if e["margin"] is not None and e["status"] != "unverified"), key=lambda e: e["margin"]
    )
    for id, why in (
        (log[0]["id"], "the first of the run"),
        (most[0], "the one with the most tokens thrown away"),
        (closest["id"], "the one with the closest tie"),
    ):
        assert why in section(page, f"Request {id}").text


def test_nothing_of_the_run_becomes_markup(asked: Element) -> None:
    """Neither an id, nor a prompt, nor a text, nor an error."""
    assert not list(asked.all("script"))
    assert not list(asked.all("b"))
    assert not list(asked.all("i"))
    assert any("<script>alert(1)</script>" in h.text for h in asked.all("h3"))
    assert any(row[0] == "broken<i>" for row in asked.one(id="error-lines").rows())
    assert not [name for e in asked.all() for name in e.attributes if name.startswith("on")]


def test_it_needs_nothing_from_elsewhere(page: Element) -> None:
    for element in page.all():
        for name in ("src", "href", "xlink:href", "data", "action", "srcset"):
            assert element.attributes.get(name, "#").startswith("#")
        assert element.tag not in ("link", "img", "iframe", "object", "embed", "base")
    style = page.one("style").inside[0]
    assert isinstance(style, str)
    assert "@import" not in style
    assert "url(" not in style
    policy = page.one("meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")


def test_it_can_be_read_without_a_pointer_or_eyes(page: Element) -> None:
    """Landmarks, headings in order, captions, scopes, names of figures, and what scrolls can be reached by keys."""
    assert page.one("html").attributes["lang"] == "en"
    assert [len(list(page.all(tag))) for tag in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    levels = [int(e.tag[1]) for e in page.all() if re.fullmatch(r"h[1-6]", e.tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [e.attributes["id"] for e in page.all() if "id" in e.attributes]
    assert len(set(ids)) == len(ids)
    for element in page.all():
        if element.tag == "a":
            assert element.attributes["href"].removeprefix("#") in ids
        assert element.attributes.get("aria-labelledby", ids[0]) in ids
        if element.tag == "table":
            assert element.one("caption").text.strip()
            assert all(th.attributes.get("scope") in ("col", "row") for th in element.all("th"))
        if element.attributes.get("class") == "scroll":
            assert element.attributes["tabindex"] == "0"
            assert element.attributes["aria-label"]
        if element.tag == "details":
            assert len(direct(element, "summary")) == 1


def test_colour_is_never_alone(asked: Element) -> None:
    """Each chip and each cell of the stairs has its sign, and each slot of a window a word beside it."""
    for chip in asked.all("span"):
        if chip.attributes.get("class", "").startswith("chip"):
            assert chip.text.strip()[0] in {sign for sign, _ in SIGNS.values()}
    steps = [td for table in asked.all("table", **{"class": "stairs"}) for td in table.all("td") if td.text]
    assert [td.text for td in steps] == [SIGNS[td.attributes["class"]][0] for td in steps] != []
    verdicts = list(asked.all("td", **{"class": "verdict"}))
    assert {td.text for td in verdicts} >= {"✓ accepted", "≠ corrected", "✗ rolled back", "+ bonus"}


def test_it_opens_with_pictures(page: Element, log: Log) -> None:
    """What ran, how fast, how many drafts stood, three requests with their windows; words after."""
    names = [section.attributes["aria-labelledby"] for section in direct(page.one("main"), "section")]
    assert names == ["errors", "ran", "speed", "acceptance", "requests", "words", "margins", "terms"]
    assert [h.text for h in page.one("ol", id="totals").all("h3")] == ["Read", "Drafted", "Verified", "Written"]
    assert len(list(page.one("section", **{"aria-labelledby": "requests"}).all("section"))) == 3
    passes = dict(page.one(id="passes").rows())
    rounds = number(passes["this run"])
    assert rounds == len({(e["id"], e["sample"], e["round"]) for e in log if e["status"] != "unverified"})
    assert number(passes["without drafts, one a token"]) > rounds
    widths = [float(bar.attributes["style"].removeprefix("--part:")) for bar in page.one(id="passes").all("span")]
    assert widths == [1.0, pytest.approx(rounds / number(passes["without drafts, one a token"]), abs=1e-4)]
    wrong = [e["status"] for e in log if e["drafted"] is not None]
    parts = [
        (part.attributes["class"], int(part.attributes["style"].removeprefix("flex-grow:")))
        for part in page.one("div", **{"class": "strip"}).all("span")
    ]
    assert dict(parts) == Counter(wrong)


def test_a_window_step_by_step(asked: Element, log: Log) -> None:
    """Drafted, chosen, compared, kept, and what of the KV cache stays: as the log has the round."""
    here = section(asked, "Request greedy")
    table = here.one("table", **{"class": "window"})
    caption = re.match(r"Round (\d+), step by step; the draft was wrong at position (\d+)", table.one("caption").text)
    assert caption
    entries = [e for e in of(log, "greedy") if e["round"] == int(caption[1])]
    first, *rows = table.rows()
    assert first[5:] == ["written", "stays"]
    assert len(rows) == len(entries)
    for row, entry in zip(rows, entries, strict=True):
        assert int(row[0]) == entry["position"]
        assert bool(row[1]) == (entry["drafted"] is not None)
        assert (row[2] == "not used") == (row[4] == "") == (entry["token"] is None)
        assert row[3] == " ".join(SIGNS[entry["status"]])
        cache = {"accepted": ["written", "stays"], "bonus": ["", ""]}
        assert row[5:] == cache.get(entry["status"], ["written", "✗ set back"])


def test_pictures_shrink_on_a_small_screen(page: Element) -> None:
    """None has a width of its own that is larger; what may be wider can be scrolled."""
    style = str(page.one("style").inside[0])
    assert not [width for width in re.findall(r"min-width:\s*([\d.]+)rem", style) if float(width) > 20]
    for table in page.all("table", **{"class": "stairs"}):
        across = int(table.attributes["style"].removeprefix("--across:"))
        assert across <= 24 + 24
    inside = [table for box in page.all("div", **{"class": "scroll"}) for table in box.all("table")]
    assert all(t in inside or t.attributes.get("class") in ("stairs", "window") for t in page.all("table"))


def test_errors_stand_at_the_top(page: Element, finished: Path) -> None:
    sections = [section.attributes["aria-labelledby"] for section in page.one("main").all("section")]
    assert sections[0] == "errors"
    assert page.one(id="errors").text == "✗ Errors"
    assert page.one("section", **{"aria-labelledby": "errors"}).attributes["class"] == "banner"
    assert "✗ 2" in page.one(id="totals").text


def test_the_same_folder_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    sizes = [write(read_report(finished), tmp_path / name) for name in ("a.html", "b.html", "a.html")]
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert sizes == [(tmp_path / "a.html").stat().st_size] * 3
    check_place(tmp_path / "a.html")  # a page may be written over
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_profile_that_names_versions_promises_nothing_elsewhere(out: Path) -> None:
    def words(**profile: object) -> str:
        manifest = json.loads((out / "manifest.json").read_text())
        manifest["profile"] |= profile
        (out / "manifest.json").write_text(json.dumps(manifest))
        return " ".join(read_page(render(read_report(out))).one("section", **{"aria-labelledby": "words"}).text.split())

    assert "no processor: another machine gives the same bytes." in words()
    versions = words(versions={"torch": "2.12", "triton": "<b>"}, device="a GPU")
    assert "names torch 2.12, triton <b>, the device a GPU: elsewhere, rounding may differ" in versions
