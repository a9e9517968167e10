"""What a page says in words: what ran, whether it is guaranteed, and rows of its tables."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from detgen.engine.chunks import chunks_of
from detgen.params import SamplingParams
from detgen.report.counting import Counts
from detgen.report.reporting import Report, Shown
from detgen.report.streaming import Fields
from detgen.report.texts import Texts, counted, harmless, visible
from detgen.report.window_life import Cell, Round

MOST_TOKENS = 1000  # of a request's tables
MOST_CHUNKS = 200  # of a request of a thinking model
MOST_TEXT = 20_000  # characters of a text

_DEFAULTS = {**dict(SamplingParams()), "limit": None, "seed_per_line": False, "echo": False}


# What settings mean that are not given.
_UNSET = {"draft_tokens": "auto", "threads": "torch's choice", "kv_memory": "a share of what was free"}


class Fact(NamedTuple):
    """A name and a value."""

    name: str
    value: str


class Window(NamedTuple):
    """A row of the table of windows: one round, or several in which nobody drafted."""

    rounds: str
    drafter: str
    cells: list[Cell]
    said: str


def guarantee(report: Report) -> tuple[str, list[str]]:
    """Whether the output is guaranteed, and why."""
    manifest, unverified = report.manifest, report.counts.drafts().total().unverified
    profile = manifest["profile"]
    said = [
        "The same prompts, model files and parameters give the same bytes again, whatever the batch size, the order of"
        " the prompts, the drafter, the number of threads, or interruptions. Each token that was kept was chosen by"
        " the canonical pass, in which a token's result does not depend on what else is computed beside it."
    ]
    if "versions" in profile:
        named = [f"{name} {version}" for name, version in profile["versions"].items()]
        named += [f"the device {profile['device']}"] if "device" in profile else []
        said.append(
            f"This holds for the profile of the run, which names {', '.join(named)}: elsewhere, other rounding may"
            " choose another token where two are nearly tied."
        )
    else:
        said.append(
            f"The profile names the arithmetic ({profile['arithmetic']}), the weights and the number format, and no"
            " processor: another machine gives the same bytes."
        )
    if unverified:
        said.append(f"Of unverified requests: {counted(unverified, 'token')}; nothing is promised of these.")
    return ("Yes, but for unverified requests" if unverified else "Yes"), said


def status(report: Report) -> list[str]:
    """What there is to know of a run that has not finished, or has no acceptance log."""
    manifest = report.manifest
    unlogged = (
        "This run has no acceptance log (--acceptance-log off): who drafted what, margins, and windows are missing."
    )
    said = [] if report.logged else [unlogged]
    if manifest["status"] == "finished":
        return said
    state = "was interrupted" if manifest["status"] == "interrupted" else "is going on, or ended by a crash"
    total = manifest["input"]["prompts"]
    of = "" if total is None else f" of {total:,}"
    return [
        *said,
        f"This run {state}: the page shows the prompts whose lines are written, {report.lines.prompts:,}{of}.",
        f"Its store has {counted(report.kept or 0, 'finished sample')}. Run the same command again to resume; then"
        " make the page again.",
    ]


def ran(manifest: Fields) -> list[Fact]:
    """What was run."""
    profile, given, draft = manifest["profile"], manifest["input"], manifest["draft"]
    target = profile["target"]
    facts = [
        Fact("target model", target["name"]),
        Fact("digest of its files", target["digest"]),
        Fact(
            "number format", profile["dtype"] + ("" if target["quant"] == "none" else f", quantized: {target['quant']}")
        ),
        Fact("arithmetic", profile["arithmetic"]),
        Fact("draft model", "none" if draft is None else f"{draft['name']}, {draft['digest']}"),
        Fact("input", f"{given['path']} ({given['format']})"),
        Fact("SHA-256 of the input", given["sha256"]),
        Fact("detgen", manifest["detgen"]),
        Fact("begun", manifest["created"]),
        Fact("status", manifest["status"]),
        Fact("resumed", "not recorded; a run that was resumed ends with the same bytes"),
    ]
    for name, value in profile.items():
        if name not in ("target", "dtype", "arithmetic"):
            facts.append(Fact(f"profile: {name}", _plain(value)))
    for name, known in manifest.get("files", {}).items():
        facts.append(Fact(f"SHA-256 of {name}", known["sha256"]))
    return facts


def parameters(manifest: Fields) -> list[tuple[str, str, bool]]:
    """Parameters of the run: name, value, and whether it is the default."""
    return [
        (name, _plain(value), _plain(_DEFAULTS[name]) == _plain(value))
        for name, value in manifest["parameters"].items()
    ]


def settings(manifest: Fields) -> list[Fact]:
    """Settings of the engine, on which no output depends."""
    return [Fact(name, setting(name, value)) for name, value in manifest["settings"].items()]


def setting(name: str, value: Any) -> str:
    """A setting in words."""
    return _UNSET.get(name, "none") if value is None else _plain(value)


def _plain(value: Any) -> str:
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value[:20])) + (", ..." if len(value) > 20 else "")
    return visible(str(value))


def windows(rounds: list[Round]) -> tuple[list[Window], int]:
    """The rounds of a sample as rows, those in which nobody drafted together; and how many rounds are left out."""
    found: list[Window] = []
    cells = 0
    for i, shown in enumerate(rounds):
        cells += len(shown.cells)
        if cells > MOST_TOKENS:
            return found, len(rounds) - i
        if shown.drafted or not i or rounds[i - 1].drafted:
            found.append(Window(str(shown.number), shown.drafter, shown.cells, shown.said()))
            continue
        first = found[-1].rounds.partition("–")[0]
        if shown.cells[0].status == "unverified":
            said = "The pass of each of these rounds chose one token; nothing is promised of these."
        else:
            said = "Nobody drafted in these rounds. The canonical pass of each chose one token."
        found[-1] = Window(f"{first}–{shown.number}", shown.drafter, [*found[-1].cells, *shown.cells], said)
    return found, 0


def text_of(text: object) -> str:
    """A text as the page shows it."""
    whole = harmless(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, indent=1))
    return whole if len(whole) <= MOST_TEXT else f"{whole[:MOST_TEXT]}\n[{len(whole) - MOST_TEXT:,} more characters]"


def chunks(shown: Shown, texts: Texts) -> list[tuple[str, ...]]:
    """The chunks of a sample, as `Chunk` describes them; none if the tokens of its prompt are not known."""
    if shown.prompt is None or texts.chunk is None:
        return []
    tokens = [*shown.prompt, *shown.line["token_ids"]]
    thoughts = dict(shown.line.get("thoughts", ()))
    found = chunks_of(
        tokens,
        thoughts,
        texts.chunk,
        lambda part: texts.of_all(part) or "",
        keeps=texts.keeps,
    )
    return [
        (f"{c.first}–{c.end - 1}", visible(c.text), *("–" if t is None else visible(t) for t in (c.state, c.thought)))
        for c in found
    ]


def thoughts(line: Fields) -> list[tuple[int, str, str]]:
    """The thoughts of a sample: where their chunks begin, in the prompt or behind it, and what was thought."""
    behind = line["prompt_tokens"]
    return [(first, "prompt" if first < behind else "completion", visible(t)) for first, t in line.get("thoughts", ())]


def share(part: float, whole: float) -> str:
    """A share in percent; a dash where there is nothing to share."""
    return f"{part / whole:.1%}" if whole else "–"


def per_round(counts: Counts) -> float:
    """Committed tokens of verified rounds, per round."""
    total = counts.drafts().total()
    rounds = total.rounds - total.unverified
    committed = total.accepted + total.corrected + total.bonus + total.plain
    return committed / rounds if rounds else 0.0
