"""The tables of a page, some with bars: what ran, and the numbers of a report, as rows.

The template formats the cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from detgen.engine.request import chunks_of
from detgen.params import SamplingParams
from detgen.report.counting import DEPTHS, HALVES, LOWEST, MOST_COMMITTED, STRETCH, THRESHOLDS
from detgen.report.output_lines import Lines
from detgen.report.reporting import Report, Shown
from detgen.report.run_comparison import Comparison
from detgen.report.streaming import Fields
from detgen.report.texts import Texts
from detgen.report.window_life import MOST_TOKENS, shown
from detgen.report.words import share

MOST_CHUNKS = 200  # chunks shown of a thinking model's request

_COUNTED = ("rounds", "drafted", "accepted", "corrected", "rolled_back", "bonus", "plain", "unverified")
_MOST_STRETCHES = 16  # rows of the table of stretches
_MOST_KINDS = 20  # errors, or thoughts
_REASONS = {"length": "length: the limit of tokens", "stop": "stop: the end of the text, or a stop string"}
_DEFAULTS = {**dict(SamplingParams()), "limit": None, "seed_per_line": False, "echo": False}
# Meanings of settings that are not given.
_UNSET = {"draft_tokens": "auto", "threads": "one per core", "kv_memory": "a share of what was free"}


class Bar(NamedTuple):
    """A cell with a bar: its length as a part of the longest one, from 0 to 1, and the words beside it."""

    part: float
    words: str


Cell = str | int | float | Bar | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of each row names it.

    Attributes:
        id: id in the page.
        caption: what it shows.
        head: names of the columns.
        rows: the cells; None where unknown.
    """

    id: str
    caption: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    @property
    def numeric(self) -> set[int]:
        """Return the indices of columns with numbers."""
        return {i for row in self.rows for i, cell in enumerate(row) if isinstance(cell, int | float)}


def pace(report: Report) -> list[Table]:
    """Return tables of tokens per round: in total, by round, and along the completions; none if each gave one."""
    rounds, committed = report.counts.verified()
    if rounds == committed:
        return []
    found = [
        Table("passes", "Rounds that the texts took", ("", "rounds"), _bars(
            [("without drafts, one a token", committed), ("this run", rounds)])),
        Table("round-numbers", "Verified rounds by the tokens that they committed", ("tokens", "rounds"),
              _bars(_rounds(report))),
    ]  # fmt: skip
    stretches = _stretches(report)
    most = max(mean for _, mean in stretches)
    if len(stretches) > 1:
        found.append(
            Table(
                "pace",
                "Tokens per round along the texts",
                ("tokens of the text", "tokens per round"),
                [(name, Bar(mean / most, f"{mean:.2f}")) for name, mean in stretches],
            )
        )
    return found


def _rounds(report: Report) -> list[tuple[str, int]]:
    """Return verified rounds by number of committed tokens."""
    counts = report.counts.committed.sum(0).tolist()
    counts[1] -= report.counts.drafts().total().unverified  # each was a round
    last = max((i for i, count in enumerate(counts) if count), default=0)
    return [(f"{i}{'+' if i == MOST_COMMITTED else ''}", counts[i]) for i in range(1, last + 1)]


def _stretches(report: Report) -> list[tuple[str, float]]:
    """Return tokens per round in stretches of the completions, joined until few are left."""
    table, size = report.counts.stretches, STRETCH
    while (table[_MOST_STRETCHES:, 0] > 0).any():
        table, size = table.reshape(-1, 2, 2).sum(1), size * 2
    return [
        (f"{i * size:,} to {(i + 1) * size - 1:,}" if i < len(table) - 1 else f"{i * size:,} on", made / rounds)
        for i, (rounds, made) in enumerate(table.tolist())
        if rounds
    ]


def drafters(report: Report) -> Table:
    """Return what became of tokens, by drafter."""
    drafts = report.counts.drafts()
    rows = [
        (name, *(getattr(s, key) for key in _COUNTED[:3]), share(s.accepted, s.drafted),
         *(getattr(s, key) for key in _COUNTED[3:]))
        for name, s in (*drafts.items(), ("all", drafts.total()))
    ]  # fmt: skip
    head = ("drafter", *_COUNTED[:3], "share", *(key.replace("_", " ") for key in _COUNTED[3:]))
    return Table("drafters", "Tokens by drafter; drafted = accepted + corrected + rolled back", head, rows)


def places(report: Report) -> Table | None:
    """Return drafted and accepted tokens by place in the draft; None if nothing was drafted."""
    rows = [
        (name, f"{i}{'+' if i == DEPTHS else ''}", drafted, accepted,
         Bar(accepted / drafted if drafted else 0.0, share(accepted, drafted)))
        for name, found in report.counts.by_depth().items()
        for i, (drafted, accepted) in enumerate(found, start=1)
    ]  # fmt: skip
    caption = "Drafted and accepted tokens by place in the draft, the first being 1"
    return Table("places", caption, ("drafter", "place", "drafted", "accepted", "share"), rows) if rows else None


def margins(report: Report) -> list[Table]:
    """Return tokens by margin, tokens with a small one, and the closest ties; none if no margin is known."""
    counts = report.counts
    if not counts.closest:
        return []
    near = zip(THRESHOLDS, counts.near.tolist(), counts.near_samples.tolist(), strict=True)
    small = [(f"below {t:g}", tokens, samples, share(samples, counts.samples)) for t, tokens, samples in near]
    closest: list[tuple[Cell, ...]] = []
    for record in counts.closest:
        line = report.lines.places.read((record["index"], record["sample"]))
        closest.append(
            (record["margin"], sample(record["index"] if line is None else line["id"], record["sample"]),
             record["position"], shown(record["token"], report.texts),
             shown(record["drafted"], report.texts) or None,
             _runner_up(line, record, report) or "not recorded")
        )  # fmt: skip
    return [
        Table("margin-numbers", "Tokens by margin: the further up, the closer the runner-up", ("margin", "tokens"),
              _bars(_halves(report))),
        Table("thresholds", "Tokens with a small margin, and samples that have one",
              ("margin", "tokens", "samples", "of all samples"), small),
        Table("closest", "The closest ties",
              ("margin", "request", "position", "chosen", "drafted there", "runner-up"), closest),
    ]  # fmt: skip


def _halves(report: Report) -> list[tuple[str, int]]:
    """Return tokens by margin, from the lowest occupied half power of ten to the highest."""
    found = report.counts.margins.tolist()
    occupied = [i for i, count in enumerate(found) if count]
    names = [f"{10 ** (LOWEST + i / 2):.2g} to {10 ** (LOWEST + (i + 1) / 2):.2g}" for i in range(HALVES)]
    names[0], names[-1] = f"below {10 ** (LOWEST + 0.5):.2g}", f"above {10 ** (LOWEST + (HALVES - 1) / 2):.2g}"
    return [(names[i], found[i]) for i in range(occupied[0], occupied[-1] + 1)] if occupied else []


def _runner_up(line: Fields | None, record: Fields, report: Report) -> str:
    """Return the most likely other token if the run wrote log-probabilities, else ""."""
    try:
        top = line["logprobs"][record["position"]]["top"]  # type: ignore[index]
        return next(shown(token, report.texts) for token, *_ in top if token != record["token"])
    except (KeyError, IndexError, TypeError, StopIteration, ValueError):
        return ""


def errors(lines: Lines) -> list[Table]:
    """Return errors by kind, and the first ones."""
    each = [(str(line.get("id")), line["index"], line["error"]) for line in lines.errors]
    more = lines.error_lines > len(each)
    return [
        Table("error-kinds", "Errors by what they say", ("error", "lines"), lines.kinds.most_common(_MOST_KINDS)),
        Table("error-lines", f"The first {len(each)} of {lines.error_lines:,} lines with an error" if more else
              "Lines with an error", ("request", "place in the input, from 0", "error"), each),
    ]  # fmt: skip


def reasons(lines: Lines) -> Table | None:
    """Return finish reasons; None if no sample has one."""
    rows = [(_REASONS.get(what, what), count) for what, count in sorted(lines.reasons.items())]
    return Table("reasons", "Why samples that have a text ended", ("reason", "samples"), rows) if rows else None


def thought_kinds(lines: Lines) -> Table:
    """Return the most frequent thoughts."""
    found = lines.thoughts.texts.most_common(_MOST_KINDS) if lines.thoughts else []
    return Table("thought-kinds", "The most frequent thoughts", ("thought", "times"), found)


def tokens(one: Shown, number: int) -> Table:
    """Return the tokens of a sample up to a limit."""
    cells = [(r.number, cell) for r in one.rounds for cell in r.cells]
    rows = [
        (c.position, round, c.text or None, c.token, c.word, c.guess or None, c.margin, c.logprob)
        for round, c in cells[:MOST_TOKENS]
    ]
    first = f"The first {MOST_TOKENS:,} tokens" if len(cells) > MOST_TOKENS else "Tokens"
    head = ("position", "round", "token", "its number", "what became of it", "drafted", "margin", "log-probability")
    return Table(f"tokens-{number}", f"{first}, those that were rolled back among them", head, rows)


def thoughts(one: Shown, texts: Texts, number: int) -> Table:
    """Return how a thinking model read a sample, chunk by chunk, or only its thoughts if that is unknown."""
    line, rows = one.line, list[tuple[Cell, ...]]()
    if one.prompt is None or texts.chunk is None:
        end = line["prompt_tokens"]
        rows += [(first, "prompt" if first < end else "completion", t) for first, t in line["thoughts"]]
        head: tuple[str, ...] = ("first token of the chunk", "where", "thought")
        return Table(f"thoughts-{number}", "Chunks after which the model thought", head, rows)
    found = chunks_of([*one.prompt, *line["token_ids"]], dict(line["thoughts"]), texts.chunk,
                      lambda part: texts.of_all(part) or "", keeps=texts.keeps)  # fmt: skip
    rows += [(f"{c.first}–{c.end - 1}", c.text, c.state, c.thought) for c in found[:MOST_CHUNKS]]
    head = ("tokens", "chunk", "read with the state of", "thought after it")
    first = f"The first {MOST_CHUNKS} of {len(found):,} chunks" if len(found) > MOST_CHUNKS else "Chunks"
    return Table(f"chunks-{number}", f"{first}: how the model read this request", head, rows)


def differences(found: Comparison, texts: Texts) -> list[Table]:
    """Return how samples of two runs differ, where they first do, and the first of them."""
    first = [
        (f"{1 << bits >> 1:,} to {(1 << bits) - 1:,}" if bits > 1 else str(bits), count)
        for bits, count in sorted(found.first.items())
    ]
    each: list[tuple[Cell, ...]] = []
    for d in found.kept:
        sides = [
            part
            for token, entry in zip(d.tokens, d.entries, strict=True)
            for part in (
                None if d.position is None else "(ended)" if token is None else shown(token, texts),
                None if entry is None else entry["margin"],
            )
        ]
        each.append((sample(*d.name), d.what, d.position, *sides, f"…{d.common}" if d.common else None, *d.texts))
    total = found.kinds.total()
    tables = [
        Table("kinds", "How samples differ", ("a sample …", "samples"), found.kinds.most_common()),
        Table("first", "Where the first different token is",
              ("position", "samples"), first),
        Table("differing", f"{'The first ' if total > len(each) else ''}{len(each)} of {total:,} samples that differ,"
              " in the order of the input; where a margin is small, rounding can decide",
              ("request", "how", "position", "first run", "its margin", "second run", "its margin", "both texts",
               "the first text goes on", "the second text goes on"), each),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def sample(id: object, number: int) -> str:
    """Return the name of a sample."""
    return f"{id}, sample {number}" if number else str(id)


def _bars(rows: list[tuple[str, int]]) -> list[tuple[str, Bar]]:
    """Return rows of a name and a count as rows with bars."""
    most = max((count for _, count in rows), default=0) or 1
    return [(name, Bar(count / most, f"{count:,}")) for name, count in rows]


def run(manifest: Fields) -> Table:
    """Return the facts about a run."""
    profile, given, draft = manifest["profile"], manifest["input"], manifest["draft"]
    target = profile["target"]
    quant = "" if target["quant"] == "none" else f", quantized: {target['quant']}"
    rows = [
        ("target model", target["name"]),
        ("digest of its files", target["digest"]),
        *([("digest of the adapter", target["adapter"])] if "adapter" in target else []),
        ("number format", f"{profile['dtype']}{quant}"),
        ("keys and values", profile["kv_dtype"]),
        ("arithmetic", profile["arithmetic"]),
        ("draft model", "none" if draft is None else f"{draft['name']}, {draft['digest']}"),
        ("input", f"{given['path']} ({given['format']})"),
        ("SHA-256 of the input", given["sha256"]),
        ("detgen", manifest["detgen"]),
        ("begun", manifest["created"]),
        ("status", manifest["status"]),
    ]
    rows += [
        (f"profile: {name}", _plain(value))
        for name, value in profile.items()
        if name not in ("target", "dtype", "kv_dtype", "arithmetic")
    ]
    rows += [(f"SHA-256 of {name}", known["sha256"]) for name, known in manifest.get("files", {}).items()]
    return Table("run", "The run", ("what", "value"), rows)


def parameters(manifest: Fields) -> Table:
    """Return the run's parameters, which decide how tokens are chosen."""
    rows = [
        (name, _plain(value), "yes" if _plain(value) == _plain(_DEFAULTS[name]) else "no")
        for name, value in manifest["parameters"].items()
    ]
    return Table("parameters", "Parameters of the run", ("parameter", "value", "default"), rows)


def settings(manifest: Fields) -> Table:
    """Return the settings of the engine."""
    rows = [(name, setting(name, value)) for name, value in manifest["settings"].items()]
    return Table("settings", "Settings of the engine, which change no output", ("setting", "value"), rows)


def setting(name: str, value: Any) -> str:
    """Return a setting as text."""
    return _UNSET.get(name, "none") if value is None else _plain(value)


def _plain(value: Any) -> str:
    """Return a value of a manifest as text."""
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value[:20])) + (", ..." if len(value) > 20 else "")
    return str(value)
