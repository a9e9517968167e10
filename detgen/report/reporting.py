"""Make a report: read the folder once, choose what to show, keep what the page needs.

The requests asked for, or three chosen by rules, are shown window by window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from detgen.errors import OutputError
from detgen.outputs import KeptSamples, read_manifest_of_texts
from detgen.outputs.manifest import log_name
from detgen.report.counting import Counts, least_margins, longest_accepted, thrown_away
from detgen.report.log import Entries, Key, read_log
from detgen.report.output_lines import Lines, read_lines
from detgen.report.run_comparison import Comparison, compare
from detgen.report.streaming import Faults, Fields
from detgen.report.texts import Texts
from detgen.report.window_life import Round, rounds_of

_FIRST = ("the first of the run", "the second of the run", "the third of the run")  # as many as are shown
_Score = Callable[[Entries], np.ndarray]
_COUNTED = ("prompts", "samples", "errors", "tokens", "prompt_tokens")


@dataclass(slots=True)
class Chosen:
    """A sample to show, and why.

    Attributes:
        key: its key.
        why: reasons for choosing it, in words.
        records: its entries in the acceptance log.
    """

    key: Key
    why: list[str] = field(default_factory=list)
    records: list[Fields] = field(default_factory=list)


@dataclass(slots=True)
class _Rule:
    """Chooses the sample with the highest score, the first among equals."""

    why: str
    score: _Score
    best: float
    chosen: Chosen | None = None

    def see(self, entries: Entries) -> None:
        scores = self.score(entries)
        at = int(scores.argmax())
        if scores[at] > self.best:
            self.best = float(scores[at])
            self.chosen = Chosen(entries.key(at), [self.why], entries.of_sample(at))


def _closeness(entries: Entries) -> np.ndarray:
    """Return scores that are higher the closer the closest tie is."""
    found: np.ndarray = -np.nan_to_num(least_margins(entries), nan=np.inf)
    return found


class Choosing:
    """Reads the acceptance log once and keeps the entries of the samples to show.

    Args:
        asked: keys of the samples asked for; if there are any, no rule chooses.
        thoughtful: the sample of a thinking model with the most thoughts; None if there is none.
    """

    def __init__(self, asked: list[Key], thoughtful: Key | None = None) -> None:
        self._asked = {key: Chosen(key, ["asked for by its id"]) for key in asked}
        self._thoughtful = Chosen(thoughtful, ["the one with the most thoughts"]) if thoughtful else None
        self._first: list[Chosen] = []
        self._rules = [
            _Rule("the one with the most tokens thrown away", thrown_away, 0),
            _Rule("the one with the closest tie", _closeness, -np.inf),
            _Rule("the one with the most drafted tokens accepted in one round", longest_accepted, 1),
        ]

    def see(self, entries: Entries) -> None:
        """Look at the entries of some samples."""
        wanted = dict(self._asked)
        if not self._asked:
            for number, why in enumerate(_FIRST[len(self._first) :][: len(entries.samples)]):
                self._first.append(Chosen(entries.key(number), [why], entries.of_sample(number)))
            for rule in self._rules:
                rule.see(entries)
            if self._thoughtful is not None:
                wanted[self._thoughtful.key] = self._thoughtful
        for number, key in enumerate(entries.keys() if wanted else ()):
            if (chosen := wanted.get(key)) is not None:
                chosen.records = entries.of_sample(number)

    def chosen(self) -> list[Chosen]:
        """Return the samples to show: those asked for, or the first three chosen by the rules, each once."""
        if self._asked:
            return list(self._asked.values())
        found: dict[Key, Chosen] = {}
        for one in (self._thoughtful, *self._first[:1], *(rule.chosen for rule in self._rules), *self._first[1:]):
            if one is not None:
                found.setdefault(one.key, Chosen(one.key, [], one.records)).why.extend(one.why)
        return list(found.values())[: len(_FIRST)]


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample that is shown window by window.

    Attributes:
        key: its key.
        why: reasons for choosing it, in words.
        line: its output line.
        rounds: its rounds; none if it ended with an error.
        prompt: tokens of its prompt; None if the folder does not have them.
    """

    key: Key
    why: list[str]
    line: Fields
    rounds: list[Round]
    prompt: list[int] | None


@dataclass(slots=True)
class Report:
    """The contents of the page.

    Attributes:
        folder: the folder as given.
        manifest: manifest of the run.
        lines: totals of the output lines.
        counts: counts of the acceptance log.
        shown: samples that are shown window by window.
        texts: texts of tokens.
        faults: whatever is not as the run wrote it.
        kept: number of samples in the store of a run that has not finished, else None.
        other: the folder to compare with, its manifest, and the comparison.
    """

    folder: Path
    manifest: Fields
    lines: Lines
    counts: Counts
    texts: Texts
    shown: list[Shown] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    kept: int | None = None
    other: tuple[Path, Fields, Comparison] | None = None

    @property
    def logged(self) -> bool:
        """Whether the run has an acceptance log."""
        return log_name(self.manifest) is not None


def read_report(folder: Path, asked: Sequence[str] = (), against: Path | None = None) -> Report:
    """Read an output folder for a report.

    Args:
        folder: the output folder.
        asked: ids of the requests to show window by window; if empty, rules choose.
        against: another output folder to compare it with.

    Raises:
        OutputError: if a folder holds no run, cannot be read, or has no request with such an id.
    """
    manifest = read_manifest_of_texts(folder)
    faults = Faults()
    theirs = None if against is None else read_manifest_of_texts(against)
    lines = read_lines(folder, manifest, frozenset(asked), faults)
    if missing := [name for name in asked if name not in lines.asked]:
        raise OutputError(f"{lines.places.path} has no request with the id {missing[0]!r}; name one that it has")
    comparison, others = None, Faults()
    if against is not None and theirs is not None:
        comparison = compare((folder, against), (manifest, theirs), others)
    report = Report(folder, manifest, lines, Counts(), Texts(manifest), faults=faults)
    thoughtful = lines.thoughts.most[0] if lines.thoughts is not None and lines.thoughts.most[1] else None
    choosing = Choosing([key for name in asked for key in lines.asked[name]], thoughtful)
    for entries in read_log(folder, manifest, faults):
        report.counts.add(entries)
        choosing.see(entries)
        if comparison is not None:
            comparison.see(0, entries)
    if comparison is not None and against is not None and theirs is not None:
        for entries in read_log(against, theirs, others):
            comparison.see(1, entries)
        faults.take(others, str(against))
        report.other = against, theirs, comparison
    _check_totals(report)
    if report.logged:
        _show(report, choosing)
    if manifest["status"] != "finished":
        with KeptSamples(folder) as kept:
            report.kept = kept.count()
    return report


def _show(report: Report, choosing: Choosing) -> None:
    """Add the samples that are shown window by window to the report."""
    found = [(c, report.lines.places.read(c.key)) for c in choosing.chosen()]
    for _, line in found:
        if line is not None and "token_ids" in line:
            report.texts.check(line)
    whole = report.manifest["status"] == "finished"  # otherwise one file may be ahead of the other
    for chosen, line in found:
        if line is None:
            if whole:
                report.faults.add(
                    f"{log_name(report.manifest)}: prompt {chosen.key[0]} has entries, but no output line"
                )
            continue
        if whole and "error" not in line:
            tokens = [record["token"] for record in chosen.records if record["token"] is not None]
            if tokens != line["token_ids"]:
                report.faults.add(
                    f"{log_name(report.manifest)}: the tokens of prompt {chosen.key[0]} are not the output's"
                )
        rounds = rounds_of(chosen.records, report.texts)
        report.shown.append(Shown(chosen.key, chosen.why, line, rounds, _prompt(line, report.texts)))


def _prompt(line: Fields, texts: Texts) -> list[int] | None:
    """Return the tokens of a prompt that the output line repeats; None if unknown."""
    ids, prompt = line.get("prompt_token_ids"), line.get("prompt")
    if isinstance(prompt, str):
        ids = texts.encode(prompt)
    if isinstance(ids, list) and len(ids) == line.get("prompt_tokens"):
        return ids
    return None


def _check_totals(report: Report) -> None:
    """Compare the manifest's totals with those of the lines, if there are any totals."""
    said = report.manifest.get("summary")
    if said is None:
        return
    lines = report.lines
    given = (lines.prompts, lines.samples, lines.failed, lines.tokens, lines.prompt_tokens)
    for name, value in zip(_COUNTED, given, strict=True):
        if said[name] != value:
            report.faults.add(f"manifest.json: {name} is {said[name]:,}, the lines give {value:,}")
    if not report.logged:
        return
    drafts = report.counts.drafts()
    for name in sorted({*said["drafters"], *drafts}):
        counts = {key: getattr(drafts[name], key) for key in drafts[name].__slots__}
        if said["drafters"].get(name) != counts:
            report.faults.add(f"manifest.json: the counts of drafter {name} are not those of the log")
