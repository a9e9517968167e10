"""How `detgen verify-determinism` shows what it compared and what differs."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from detgen.show.screen import clock, open_output
from detgen.verify.explain.explaining import Explanation
from detgen.verify.perturb.axes import TITLES
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.generation_digests import Tally
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.prompts import COPY


def show_check(check: Check, found: list[Explanation], saved: list[str]) -> None:
    """Print the table of a check, the differences, and one line to quote.

    Args:
        check: a check that has run.
        found: explained differences.
        saved: for each, a line about the file that replays it.
    """
    console, result = open_output(), check.result
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("axis")
    table.add_column("settings tried")
    thinks = result.total.chunks > 0
    chunks = ["chunks equal"] if thinks else []
    for name in ("positions", "logits equal", "KV equal", *chunks, "tokens that differ"):
        table.add_column(name, justify="right")
    for axis, values in check.axes.items():
        tried, tally = result.of_axis(axis, values)
        names = " ".join(name.replace(" ", "\u00a0") for name in tried)
        if tried:
            table.add_row(TITLES[axis], names, *_cells(tally or Tally(), thinks=thinks))
    table.add_section()
    table.add_row("all", f"{result.total.settings} settings", *_cells(result.total, thinks=thinks))
    console.print(table)
    console.print()
    for note in result.notes:
        console.print(Text(note), soft_wrap=True)
    if left_out := check.left_out():
        untried = "; ".join(f"{TITLES[axis]} {', '.join(names)}" for axis, names in left_out.items())
        console.print(Text(f"not tried: {untried}"), soft_wrap=True)
    chosen = f"each pair of values of two axes once (seed {check.seed})" if result.pairs else "one axis at a time"
    if result.done < len(result.selected):
        chosen = f"{result.done} of {len(result.selected)} settings that try {chosen}"
    if further := result.total.settings - result.done:
        chosen += f", and {_count(further, 'random setting')}"
    killed = f"; {_count(result.kills, 'run')} killed and resumed" if result.kills else ""
    preempted = f"; {_count(result.preemptions, 'sequence')} preempted and replayed" if result.preemptions else ""
    line = f"{_prompts(check.pool)}; {chosen}{killed}{preempted}; {clock(result.seconds)}"
    console.print(Text(line, style="dim"), soft_wrap=True)
    for explanation in found:
        _show(explanation, console)
    console.print(_verdict(check), soft_wrap=True)
    for text in saved:
        console.print(Text(text), soft_wrap=True)


def _prompts(pool: Pool) -> str:
    """Describe how many prompts were used of how many, and how long the texts are."""
    lengths = [r.params.max_tokens for r in pool.requests]
    tokens = (
        f"{max(lengths)} to {min(lengths)} new tokens each" if len({*lengths}) > 1 else f"{lengths[0]} new tokens each"
    )
    copies = sum(str(r.id).startswith(COPY) for r in pool.requests)
    used = len(pool.requests) - copies
    of = f" of {pool.given:,}" if pool.given not in (None, used) else ""
    repeated = f", repeated to {len(lengths)} requests for batches," if copies else ""
    return f"{used}{of} prompts{repeated} of {tokens}"


def show_replay(found: Explanation | None) -> None:
    """Print the difference that showed again, or a line that says that it did not."""
    console = open_output()
    if found is None:
        console.print("every bit equal: the difference did not show again")
    else:
        _show(found, console)


def _cells(tally: Tally, *, thinks: bool) -> list[str]:
    return [
        f"{tally.positions:,}",
        _share(tally.logits_equal, tally.logits),
        _share(tally.entries_equal, tally.positions),
        *([_share(tally.chunks_equal, tally.chunks)] if thinks else []),
        f"{tally.tokens_different:,}",
    ]


def _share(equal: int, all_: int) -> str:
    if not all_:  # chains keep no logits
        return "-"
    return f"all {all_:,}" if equal == all_ else f"{equal:,} of {all_:,}"


def _verdict(check: Check) -> Text:
    """Return the line to quote."""
    total, failed = check.result.total, len(check.result.failures)
    tried = f"{total.settings} settings, {total.positions:,} positions"
    if not failed:
        return Text(f"{tried}: every bit equal", style="bold green")
    return Text(f"{tried}: {_count(failed, 'setting')} differ{'s' * (failed == 1)}", style="bold red")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _show(found: Explanation, console: Console) -> None:
    """Print a difference, from the prompt to the module."""
    d = found.difference
    rows = [("differs", d.what if found.error is None else found.error)]
    if found.prompt:
        rows.append(("prompt", f"{d.id}, sample {d.sample}: {found.prompt[:160]!r}"))
        where = f"token {d.place} of the completion" if d.place >= 0 else "within the prompt"
        rows.append(("position", f"{d.position} ({where})"))
        words = [f"{t} {w}" if t is not None else "none" for t, w in zip(d.tokens, found.words, strict=True)]
        if d.place >= 0:
            rows.append(("tokens", f"reference {words[0]}, here {words[1]}"))
    for name, pair in zip(("logits, reference", "logits, here"), found.logits, strict=False):
        rows.append((name, f"{pair[0]!r} and {pair[1]!r}"))
    rows.append(("found under", str(found.first.setting)))
    rows.append(("smallest setting", f"{found.case.setting} ({len(found.case.watched)} prompts)"))
    rows.append(("compared with", str(found.case.setting.reference())))
    if found.origin is not None:
        rows.append(("first module", str(found.origin)))
    width = max(len(name) for name, _ in rows)
    console.print()
    for name, value in rows:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), f"  {value}"), soft_wrap=True)
    console.print()
