"""The page in a real browser, headless: what it understands, light and dark, narrow, and printed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.pages import Element, read_page

from detgen.report.page import render
from detgen.report.reporting import read_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def page(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(read_report(finished)))
    return path


def browse(page: Path, *options: str) -> str:
    """What a headless browser prints of the page."""
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1000", "--hide-scrollbars")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [str(CHROMIUM), *fixed, profile, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def without_policy(page: Path) -> str:
    """The page for a script of this test to look at, which it would not let run."""
    return re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(), count=1)


def said(element: Element) -> list[str]:
    return element.text.split()


def test_a_browser_finds_the_elements_that_were_meant(page: Path) -> None:
    """It repairs nothing: tables, figures and texts are where the page has them."""
    meant, found = read_page(page.read_text()), read_page(browse(page, "--dump-dom"))
    for tag in ("table", "caption", "span", "section", "details", "tr", "td"):
        assert len(list(found.all(tag))) == len(list(meant.all(tag)))
    assert said(found.one("main")) == said(meant.one("main"))


@pytest.mark.parametrize(("scheme", "paper"), [(1, (255, 255, 255)), (0, (20, 24, 31))], ids=["light", "dark"])
def test_light_and_dark(page: Path, tmp_path: Path, scheme: int, paper: tuple[int, int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    shot = tmp_path / "shot.png"
    browse(page, f"--screenshot={shot}", "--window-size=1000,2500", f"--blink-settings=preferredColorScheme={scheme}")
    with image.open(shot) as picture:
        pixels = picture.convert("RGB")
        colours = pixels.getcolors(1 << 24)
        assert pixels.getpixel((2, 2)) == paper
    shares = {colour: count / (1000 * 2500) for count, colour in colours}
    assert 0.3 < shares[paper] < 0.99  # neither empty nor covered


def test_it_fits_a_narrow_window(page: Path) -> None:
    """Only what is meant to be scrolled is wider."""
    probe = page.with_name("narrow.html")
    script = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script></body>"
    probe.write_text(without_policy(page).replace("</body>", script))
    title = read_page(browse(probe, "--dump-dom", "--window-size=500,900")).one("head").one("title")
    wide, room = map(int, str(title.inside[0]).split())
    assert wide <= room


@pytest.mark.parametrize("width", [1280, 500])  # Chromium's windows are no narrower
def test_all_of_each_figure_is_seen(page: Path, width: int) -> None:
    """None is cut off, none has to be scrolled."""
    probe = page.with_name("figures.html")
    script = """<script>
    const all = [...document.querySelectorAll(".flow, .strip, .window, .stairs, .bar")];
    document.title = all.filter(picture =>
        picture.getBoundingClientRect().right > innerWidth || picture.scrollWidth > picture.clientWidth + 1
    ).length + " of " + all.length</script></body>"""
    probe.write_text(without_policy(page).replace("</body>", script))
    title = read_page(browse(probe, "--dump-dom", f"--window-size={width},900")).one("head").one("title").inside[0]
    wide, figures = map(int, str(title).split(" of "))
    assert (wide, figures > 5) == (0, True)


def test_it_prints(page: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    browse(page, f"--print-to-pdf={path}")
    assert path.read_bytes().startswith(b"%PDF")
    assert path.stat().st_size > 10_000


def test_what_is_folded_is_printed(page: Path, tmp_path: Path) -> None:
    sizes = []
    for name, rule in (("as it is", "details::details-content"), ("folded", "details::nothing")):
        copy, path = tmp_path / f"{name}.html", tmp_path / f"{name}.pdf"
        copy.write_text(page.read_text().replace("details::details-content", rule))
        browse(copy, f"--print-to-pdf={path}")
        sizes.append(path.stat().st_size)
    assert sizes[0] > 1.2 * sizes[1]


def test_nothing_of_a_run_takes_effect(hostile: Path, tmp_path: Path) -> None:
    """Not even where a browser follows no policy: no script runs, nothing is added, and all is as it was meant."""
    page = tmp_path / "hostile.html"
    page.write_text(render(read_report(hostile)))
    page.write_text(without_policy(page))
    meant, found = read_page(page.read_text()), read_page(browse(page, "--dump-dom"))
    assert said(found.one("main")) == said(meant.one("main"))
    assert found.one("head").one("title").inside == meant.one("head").one("title").inside
    assert [e.tag for e in found.one("body").all()] == [e.tag for e in meant.one("body").all()]
