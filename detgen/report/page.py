"""The page: charts and tables of a report, put into the template. The same report gives the same bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

import detgen
from detgen.errors import OutputError
from detgen.outputs import open_plain
from detgen.outputs.directory import Directory
from detgen.report import drawing, facts
from detgen.report.counting import DEPTHS, HALVES, LOWEST, MOST_COMMITTED, STRETCH, THRESHOLDS
from detgen.report.output_lines import kind_of
from detgen.report.reporting import Report
from detgen.report.svg import Bar, bars, columns, lines
from detgen.report.texts import counted, harmless, visible
from detgen.report.window_life import SIGNS, shown

MARK = '<meta name="generator" content="detgen report">'  # by which a page is known as one
_HERE = Path(__file__).parent


def check_place(path: Path) -> None:
    """See that a page can be written to a place without destroying something else.

    Raises:
        OutputError: there is another file.
    """
    try:
        with open(open_plain(path), "rb") as file:
            head = file.read(1000)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another file with -o") from None
    if head and MARK.encode() not in head:
        raise OutputError(f"{path} is no page of detgen report; choose another file with -o")


def write(report: Report, path: Path) -> int:
    """Write the page, in the place of a former one; its size in bytes.

    Raises:
        OutputError: it cannot be written.
    """
    page = render(report).encode()
    try:
        place = Directory(path.parent)
        try:
            place.write(path.name, page)
        finally:
            place.close()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another file with -o") from None
    return len(page)


def render(report: Report) -> str:
    """The page as HTML."""
    drafts = report.counts.drafts()
    context = {
        "mark": Markup(MARK),
        "style": Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        "version": detgen.__version__,
        "report": report,
        "name": report.folder.name or str(report.folder),
        "counts": report.counts,
        "lines": report.lines,
        "manifest": report.manifest,
        "drafts": drafts,
        "total": drafts.total(),
        "guarantee": facts.guarantee(report),
        "status": facts.status(report),
        "facts": facts,
        "drawing": drawing,
        "signs": SIGNS,
        "kind_of": kind_of,
        "per_round": facts.per_round(report.counts),
        "acceptance": _acceptance(report),
        "depths": _depths(report),
        "by_depth": report.counts.by_depth(),
        "last_depth": DEPTHS,
        "margins": _margins(report),
        "margin_chart": _margin_chart(report),
        "thresholds": _thresholds(report),
        "closest": [_closest(report, record) for record in report.counts.closest],
        "rounds": _rounds(report),
        "round_chart": _round_chart(report),
        "most_committed": MOST_COMMITTED,
        "pace": _pace(report),
        "texts": report.texts,
        "token": lambda token: shown(token, report.texts),
    }
    return _template().render(context).strip() + "\n"


def _harmless(value: object) -> object:
    """What the page shows: whatever a name or a file holds, no control character, and nothing that is no Unicode."""
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _template() -> Template:
    """The template, compiled once a process."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters.update(n="{:,}".format, of=counted, share=facts.share, visible=visible, text=facts.text_of)
    return environment.get_template("page.html")


def _acceptance(report: Report) -> Markup | None:
    """Accepted shares, by drafter."""
    rows = [
        Bar(
            name,
            stats.accepted,
            f"{facts.share(stats.accepted, stats.drafted)} of {counted(stats.drafted, 'drafted token')}",
        )
        for name, stats in report.counts.drafts().items()
        if stats.drafted
    ]
    if not rows:
        return None
    shares = [
        Bar(row.name, row.value / report.counts.drafts()[row.name].drafted, row.words, f"{row.name}: {row.words}")
        for row in rows
    ]
    return bars("Share of drafted tokens that were accepted, by drafter", shares, 1.0)


def _depths(report: Report) -> Markup | None:
    """Accepted shares, by the place in the draft."""
    series = {
        name: [(float(i), accepted / drafted) for i, (drafted, accepted) in enumerate(places, start=1) if drafted]
        for name, places in report.counts.by_depth().items()
    }
    if not series:
        return None
    return lines("Accepted share of drafted tokens, by place in the draft", series, "place in the draft",
                 "accepted", percent=True, from_=1.0)  # fmt: skip


def _margins(report: Report) -> list[tuple[str, int]]:
    """Tokens by margin, from the lowest occupied half power of ten to the highest."""
    found = report.counts.margins.tolist()
    occupied = [i for i, count in enumerate(found) if count]
    if not occupied:
        return []
    span = range(occupied[0], occupied[-1] + 1)
    names = [f"{10 ** (LOWEST + i / 2):.2g} to {10 ** (LOWEST + (i + 1) / 2):.2g}" for i in range(HALVES)]
    names[0], names[-1] = f"below {10 ** (LOWEST + 0.5):.2g}", f"above {10 ** (LOWEST + (HALVES - 1) / 2):.2g}"
    return [(names[i], found[i]) for i in span]


def _margin_chart(report: Report) -> Markup | None:
    rows = [Bar(name.split(" ")[0] if name[0].isdigit() else name, count, counted(count, "token"),
                f"margin {name}: {counted(count, 'token')}") for name, count in _margins(report)]  # fmt: skip
    if not rows:
        return None
    return columns("Tokens by their margin", rows, "margin (from; each column covers half a power of ten)", "tokens")


def _thresholds(report: Report) -> list[tuple[str, int, int]]:
    """Margins, and how many tokens and samples have one below."""
    counts = report.counts
    near, samples = counts.near.tolist(), counts.near_samples.tolist()
    return [(f"{t:g}", near[i], samples[i]) for i, t in enumerate(THRESHOLDS)]


def _closest(report: Report, record: dict[str, object]) -> dict[str, object]:
    """A close tie, with what else is known of the place."""
    line = report.lines.places.read((record["index"], record["sample"]))  # type: ignore[arg-type]
    id = line["id"] if line is not None else f"prompt {record['index']}"
    return {**record, "id": id, "runner_up": _runner_up(line, record, report)}


def _runner_up(line: dict[str, object] | None, record: dict[str, object], report: Report) -> str:
    """The most likely other token, where the run wrote log-probabilities; empty if it did not."""
    try:
        top = line["logprobs"][record["position"]]["top"]  # type: ignore[index]
        return next(shown(token, report.texts) for token, *_ in top if token != record["token"])
    except (KeyError, IndexError, TypeError, StopIteration, ValueError):
        return ""


def _rounds(report: Report) -> list[tuple[str, int]]:
    """Verified rounds by the tokens that they committed."""
    counts = report.counts.committed.sum(0).tolist()
    counts[1] -= report.counts.drafts().total().unverified  # each of which was a round
    last = max((i for i, count in enumerate(counts) if count), default=0)
    return [(f"{i}{'+' if i == MOST_COMMITTED else ''}", counts[i]) for i in range(1, last + 1)]


def _round_chart(report: Report) -> Markup | None:
    rows = [
        Bar(
            name, count, counted(count, "round"), f"{name} token{'' if name == '1' else 's'}: {counted(count, 'round')}"
        )
        for name, count in _rounds(report)
    ]
    return columns("Rounds by the tokens that they committed", rows, "tokens of a round", "rounds") if rows else None


def _pace(report: Report) -> Markup | None:
    """Tokens per round along the completions, in stretches that are joined until few are left."""
    table = report.counts.stretches
    size = STRETCH
    while (table[32:, 0] > 0).any():
        table, size = table.reshape(-1, 2, 2).sum(1), size * 2
    points = [(i * size + size / 2, made / rounds) for i, (rounds, made) in enumerate(table.tolist()) if rounds]
    if len(points) < 2:
        return None
    end = ", the last one to the end" if table[-1, 0] else ""
    label = f"Tokens per round along the completions, in stretches of {size} tokens{end}"
    return lines(label, {"all rounds": points}, "position in the completion", "tokens per round")
