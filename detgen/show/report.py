"""How the command's results look: tables and lines on standard output, progress on standard error."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from detgen.audit.result import AuditResult
from detgen.check.axes import TITLES, name_value
from detgen.check.comparing import Tally
from detgen.check.probe_view import ProbeView
from detgen.check.session import Session
from detgen.explain.explaining import Finding
from detgen.show.display import Screen, clock

_INTERVAL = 10.0  # seconds between two lines of progress
_COLOURS = ("green", "yellow", "red", "magenta", "cyan", "blue")


class Progress:
    """Lines of progress on standard error.

    Args:
        quiet: show none.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Screen(stderr=True, highlight=False, quiet=quiet)
        self._started = self._shown = time.monotonic()

    def message(self, text: str) -> None:
        """Something worth a line."""
        self._console.print(Text(f"detgen: {text}"), soft_wrap=True)

    def tried(self, done: int, total: int | None, positions: int) -> None:
        """So many settings are done."""
        now = time.monotonic()
        if now - self._shown >= _INTERVAL:
            self._shown = now
            of = f"/{total}" if total is not None else ""
            elapsed = clock(now - self._started)
            self.message(f"{done}{of} settings, {positions:,} positions, {elapsed} elapsed")


def make_console() -> Console:
    """Standard output, never narrower than the tables where nobody looks."""
    console = Screen(highlight=False)
    return console if console.is_terminal else Screen(highlight=False, width=120)


def show_check(session: Session, console: Console) -> None:
    """The table of a check, what differs, and one line to quote."""
    result = session.result
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("axis")
    table.add_column("settings tried")
    for name in ("positions", "logits equal", "KV equal", "tokens that differ"):
        table.add_column(name, justify="right")
    for axis in session.axes:
        tried = result.tried.get(axis.name, set())
        names = " ".join(name_value(axis.name, v).replace(" ", " ") for v in axis.values if v in tried)
        if tried:
            table.add_row(TITLES[axis.name], names, *_cells(result.by_axis.get(axis.name, Tally())))
    table.add_section()
    table.add_row("all", f"{result.total.settings} settings", *_cells(result.total))
    console.print(table)
    console.print()
    for note in session.notes:
        console.print(Text(note), soft_wrap=True)
    chosen = f"each pair of values of two axes once (seed {session.seed})" if session.covering else "one axis at a time"
    if result.total.settings < session.covering:
        chosen = f"{result.total.settings} of {session.covering} settings that try {chosen}"
    pool = session.check.pool.requests
    tokens = f"{pool[0].params.max_tokens} to {pool[-1].params.max_tokens} new tokens each"
    stopped = (
        f"; {_count(result.stops + result.kills, 'run')} stopped and resumed" if result.stops + result.kills else ""
    )
    killed = f", {result.kills} of them by SIGKILL" if result.kills else ""
    line = f"{len(pool)} prompts of {tokens}; {chosen}{stopped}{killed}; {clock(result.seconds)}"
    console.print(Text(line, style="dim"), soft_wrap=True)
    for finding in session.findings:
        show_finding(finding, console)
    console.print(verdict(session), soft_wrap=True)


def _cells(tally: Tally) -> list[str]:
    return [
        f"{tally.positions:,}",
        _share(tally.logits_equal, tally.logits),
        _share(tally.entries_equal, tally.positions),
        f"{tally.tokens_different:,}",
    ]


def _share(equal: int, all_: int) -> str:
    return f"all {all_:,}" if equal == all_ else f"{equal:,} of {all_:,}"


def verdict(session: Session) -> Text:
    """The line to quote."""
    total = session.result.total
    tried = f"{total.settings} settings, {total.positions:,} positions"
    if not session.result.failures:
        return Text(f"{tried}: every bit equal", style="bold green")
    failed = len(session.result.failures)
    return Text(f"{tried}: {_count(failed, 'setting')} differ{'s' * (failed == 1)}", style="bold red")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def show_finding(finding: Finding, console: Console) -> None:
    """A difference, from the prompt to the module."""
    d = finding.difference
    rows = [("differs", d.what if finding.error is None else finding.error)]
    if finding.prompt:
        rows.append(("prompt", f"{d.id}, sample {d.sample}: {finding.prompt[:160]!r}"))
        where = f"token {d.place} of the completion" if d.place >= 0 else "within the prompt"
        rows.append(("position", f"{d.position} ({where})"))
        words = [f"{t} {w}" if t is not None else "none" for t, w in zip(d.tokens, finding.words, strict=True)]
        if d.place >= 0:
            rows.append(("tokens", f"reference {words[0]}, here {words[1]}"))
    for name, pair in zip(("logits, reference", "logits, here"), finding.logits, strict=False):
        rows.append((name, f"{pair[0]!r} and {pair[1]!r}"))
    rows.append(("found under", str(finding.first.setting)))
    rows.append(("smallest setting", f"{finding.case.setting} ({len(finding.case.watched)} prompts)"))
    rows.append(("compared with", str(finding.case.setting.reference())))
    if finding.origin is not None:
        rows.append(("first module", str(finding.origin)))
    width = max(len(name) for name, _ in rows)
    console.print()
    for name, value in rows:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), f"  {value}"), soft_wrap=True)
    console.print()


def show_audit(result: AuditResult, folder: str, console: Console) -> None:
    """Findings, then one line."""
    for line in result.other_profile:
        console.print(Text(f"another profile: {line}"), soft_wrap=True)
    if result.other_profile:
        share = f"{result.tolerance:g} of a row's largest logit"
        console.print(Text(f"bit equality is not promised; a margin within {share} is a tie"), soft_wrap=True)
    for finding in result.findings:
        style = "" if finding.kind == "tie" else "red"
        kind = finding.kind + " " if finding.kind in ("tie", "differs") else ""
        console.print(Text(f"{finding.where}: {kind}{finding.what}", style=style), soft_wrap=True)
    if result.faults + result.ties > len(result.findings):
        console.print(f"... and {result.faults + result.ties - len(result.findings):,} more")
    if result.unverified:
        console.print(f"{result.unverified:,} samples are of unverified requests and were not judged")
    if result.missing:
        console.print(f"the run was stopped: {result.missing:,} samples are not there yet")
    speed = result.tokens / result.seconds if result.seconds else 0.0
    own = result.run_speed
    beside = f" ({speed / own:.1f} times the run's own {own:,.0f})" if own and result.tokens else ""
    line = f"{folder}: {result.samples:,} samples, {result.tokens:,} tokens at {speed:,.0f} a second{beside}: "
    if not result.faults:
        ties = f", {result.ties:,} ties" if result.ties else ""
        console.print(Text(f"{line}nothing differs{ties}", style="bold green"), soft_wrap=True)
    else:
        counts = f"{result.faults:,} faults, {result.differing:,} of them tokens that differ, {result.ties:,} ties"
        console.print(Text(line + counts, style="bold red"), soft_wrap=True)


def show_probe(found: ProbeView, console: Console) -> None:
    """The grid of classes; each cell has a letter for each thread count."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rows", justify="right")
    for name in found.columns:
        table.add_column(name)
    for count in found.threads:
        table.add_column(f"ms, {count} thread{'s' if count > 1 else ''}", justify="right")
    for n in found.rows:
        letters = [[found.letters[n, count, name] for count in found.threads] for name in found.columns]
        cells = [Text(" ").join(Text(x, style=_colour(x)) for x in cell) for cell in letters]
        times = [f"{found.milliseconds[n, count]:.2f}" for count in found.threads]
        table.add_row(Text(str(n), style="bold" if n in found.canonical else "dim"), *cells, *times)
    console.print(table)
    console.print()
    threads = " and ".join(f"{n} thread{'s' if n > 1 else ''}" for n in found.threads)
    allowed = ", ".join(map(str, sorted(found.canonical)))
    console.print(
        Text(
            "Columns: the model's linear layers (inputs→outputs), attention, the whole pass and its time. "
            f"A letter is a class of equal bits, with {threads}. Canonical passes may have {allowed} of these rows."
        ),
        soft_wrap=True,
    )


def _colour(letter: str) -> str:
    return _COLOURS[(ord(letter) - ord("A")) % len(_COLOURS)]
