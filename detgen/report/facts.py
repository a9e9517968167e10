"""What ran, from the manifest."""

from __future__ import annotations

from typing import Any

from detgen.params import SamplingParams
from detgen.report.streaming import Fields
from detgen.report.tables import Table

_DEFAULTS = {**dict(SamplingParams()), "limit": None, "seed_per_line": False, "echo": False}
# What settings mean that are not given.
_UNSET = {"draft_tokens": "auto", "threads": "one a core", "kv_memory": "a share of what was free"}


def run(manifest: Fields) -> Table:
    """What was run."""
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
    """How tokens were chosen."""
    rows = [
        (name, _plain(value), "yes" if _plain(value) == _plain(_DEFAULTS[name]) else "no")
        for name, value in manifest["parameters"].items()
    ]
    return Table("parameters", "Parameters of the run", ("parameter", "value", "default"), rows)


def settings(manifest: Fields) -> Table:
    """The settings of the engine."""
    rows = [(name, setting(name, value)) for name, value in manifest["settings"].items()]
    return Table("settings", "Settings of the engine, which change no output", ("setting", "value"), rows)


def setting(name: str, value: Any) -> str:
    """A setting as text."""
    return _UNSET.get(name, "none") if value is None else _plain(value)


def _plain(value: Any) -> str:
    """A value of a manifest as text."""
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value[:20])) + (", ..." if len(value) > 20 else "")
    return str(value)
