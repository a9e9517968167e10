"""What ran, as the manifest says it: whether its output is guaranteed, how far it is, and its settings."""

from __future__ import annotations

from typing import Any

from detgen.params import SamplingParams
from detgen.report.reporting import Report
from detgen.report.streaming import Fields
from detgen.report.tables import Table
from detgen.report.words import counted

_DEFAULTS = {**dict(SamplingParams()), "limit": None, "seed_per_line": False, "echo": False}
# What settings mean that are not given.
_UNSET = {"draft_tokens": "auto", "threads": "torch's choice", "kv_memory": "a share of what was free"}


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
    """What there is to know of a run that has not finished; nothing if it has."""
    manifest = report.manifest
    if manifest["status"] == "finished":
        return []
    state = "was interrupted" if manifest["status"] == "interrupted" else "is going on, or ended by a crash"
    total = manifest["input"]["prompts"]
    of = "" if total is None else f" of {total:,}"
    return [
        f"This run {state}: the page shows the prompts whose lines are written, {report.lines.prompts:,}{of}.",
        f"Its store has {counted(report.kept or 0, 'finished sample')}. Run the same command again to resume; then"
        " make the page again.",
    ]


def run(manifest: Fields) -> Table:
    """What was run."""
    profile, given, draft = manifest["profile"], manifest["input"], manifest["draft"]
    target = profile["target"]
    quant = "" if target["quant"] == "none" else f", quantized: {target['quant']}"
    rows = [
        ("target model", target["name"]),
        ("digest of its files", target["digest"]),
        ("number format", f"{profile['dtype']}{quant}"),
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
        if name not in ("target", "dtype", "arithmetic")
    ]
    rows += [(f"SHA-256 of {name}", known["sha256"]) for name, known in manifest.get("files", {}).items()]
    return Table("run", "The run", ("what", "value"), rows)


def parameters(manifest: Fields) -> Table:
    """How tokens were chosen."""
    rows = [
        (name, _plain(value), "yes" if _plain(value) == _plain(_DEFAULTS[name]) else "no")
        for name, value in manifest["parameters"].items()
    ]
    return Table("parameters", "Parameters of the run", ("parameter", "value", "default"), rows)


def settings(manifest: Fields) -> Table:
    """How the engine was set."""
    rows = [(name, setting(name, value)) for name, value in manifest["settings"].items()]
    return Table("settings", "Settings of the engine, which change no output", ("setting", "value"), rows)


def setting(name: str, value: Any) -> str:
    """A setting in words."""
    return _UNSET.get(name, "none") if value is None else _plain(value)


def _plain(value: Any) -> str:
    """A value of a manifest in words."""
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value[:20])) + (", ..." if len(value) > 20 else "")
    return str(value)
