"""What commands share: exit codes, parsers of option values, and options."""

from __future__ import annotations

import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from detgen.drafters.registry import DRAFTERS, WITHDRAWN
from detgen.errors import DTypeName, QuantName
from detgen.failing import limit_reached

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # an internal error ends with 70, see `detgen.failing`

# What number formats are called elsewhere.
DTYPE_NAMES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}

_UNITS = {"": 1} | {
    letter.lower() + suffix: base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def parse_size(text: str) -> int:
    """Bytes from `4GiB`, `500MB`, `2.5g` (as GiB) or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = match and _UNITS.get("" if match[2] == "b" else match[2])
    size = round(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not an amount of memory such as 4GiB, 500MB or 1073741824")
    return size


def parse_draft_tokens(text: str) -> int | None:
    """A number of tokens, or None for `auto`."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither auto nor a whole number of at least 1")
    return int(text)


def parse_chunks(text: str) -> int | str:
    """A number of chunks, `auto` or `off`."""
    if text in ("auto", "off"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not one of auto, off, CHUNKS (a whole number of at least 1)")
    return int(text)


def parse_cache(text: str) -> Path | str:
    """A folder, or `auto`."""
    if not text:
        raise typer.BadParameter("'' is neither auto nor a folder")
    return text if text == "auto" else Path(text)


def parse_device(text: str) -> str:
    """A device by torch's name, or `auto`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise typer.BadParameter(f"{text!r} is not one of auto, cpu, cuda, cuda:N (N a number)")
    return text


def parse_dtype(text: str) -> str:
    """A number format by torch's name or a short one."""
    name = DTYPE_NAMES.get(text, text)
    if name not in get_args(DTypeName):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join((*get_args(DTypeName), *DTYPE_NAMES))}")
    return name


def parse_drafter(text: str) -> str:
    """A drafter by name."""
    if text in WITHDRAWN:
        raise typer.BadParameter(WITHDRAWN[text])
    if text not in DRAFTERS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(DRAFTERS)}")
    return text


def named(path: Path | None) -> Path | None:
    """A file or folder to write; not `-`, which elsewhere is standard output."""
    if path == Path("-"):
        raise typer.BadParameter("'-' is no name for it; nothing is written to standard output")
    return path


def as_typed(error: Exception) -> str:
    """An error's message and the limit of the system behind it, if there is one.

    A setting out of range is called by its option: `--batch-size must be ...`.
    """
    said = re.sub(r"^[a-z_]+(?= must be )", lambda name: "--" + name[0].replace("_", "-"), str(error))
    limit = limit_reached(error)
    return said if limit is None or limit in said else f"{said} ({limit})"


def same_command() -> str:
    """What was typed, without `--overwrite`, which would start over instead of resuming."""
    return " ".join(["detgen", *(_quoted(word) for word in sys.argv[1:] if word != "--overwrite")])


def _quoted(word: str) -> str:
    """A word as a shell takes it; with characters that cannot be shown, as Bash, Zsh and newer shells do: $'...'."""
    if word.isprintable():
        return shlex.quote(word)
    shown = "".join(
        c if c.isprintable() and c not in "'\\" else "".join(f"\\x{b:02x}" for b in os.fsencode(c)) for c in word
    )
    return f"$'{shown}'"


# Options by their panel of the help.
model_option = partial(typer.Option, rich_help_panel="Models")
drafting_option = partial(typer.Option, rich_help_panel="Drafting")
resource_option = partial(typer.Option, rich_help_panel="Resources")
run_option = partial(typer.Option, rich_help_panel="Run")

Target = Annotated[
    str | None,
    model_option(
        "--target",
        "--model",
        metavar="MODEL",
        show_default="the embedded one",
        help="The model whose text you want: a folder, a GGUF file, a Hugging Face name, or demo-thinking, the"
        " embedded one that thinks while it reads.",
    ),
]
Draft = Annotated[
    str | None,
    model_option(
        metavar="MODEL",
        show_default="the embedded one with the embedded target, else none",
        help="A smaller model with the same vocabulary, to draft tokens. Never changes the text.",
    ),
]
Device = Annotated[str, model_option(parser=parse_device, metavar="auto|cpu|cuda|cuda:N", help="Where the models run.")]
Dtype = Annotated[
    DTypeName,
    model_option(
        parser=parse_dtype,
        metavar="TYPE",
        autocompletion=lambda: list(get_args(DTypeName)),
        help="How weights are kept: float32 (f32), bfloat16 (bf16), float16 (f16) or auto, as the checkpoint has them."
        " A CPU computes in float32 with any of them, CUDA in the same.",
    ),
]
_QUANTS = "q8 and q4 keep weights in groups of 32; nf4 and int8 are bitsandbytes'. All: the same bits on every CPU."
TargetQuant = Annotated[QuantName, model_option(metavar="none|q8|q4|nf4|int8", help=f"Quantize the target. {_QUANTS}")]
DraftQuant = Annotated[
    QuantName, model_option(metavar="none|q8|q4|nf4|int8", help="Quantize the draft model, likewise.")
]
TrustRemoteCode = Annotated[
    bool,
    model_option(
        "--trust-remote-code",
        help="Run Python code that comes with a model. It can do whatever you can; read it first.",
    ),
]
Drafter = Annotated[
    str,
    drafting_option(
        parser=parse_drafter,
        metavar="NAME",
        help=f"Where drafts come from: {'; '.join(f'{name}: {d.help}' for name, d in DRAFTERS.items())}."
        " Never changes the text.",
    ),
]
DraftTokens = Annotated[
    int | None,
    drafting_option(
        parser=parse_draft_tokens,
        metavar="N|auto",
        show_default="auto",
        help="Tokens that model and ngram draft per round; auto adapts.",
    ),
]
BatchSize = Annotated[int, resource_option(metavar="N", help="Most requests to run at a time.")]
Threads = Annotated[int | None, resource_option(metavar="N", show_default="torch's choice", help="CPU threads.")]
Workers = Annotated[
    int | None,
    resource_option(
        metavar="N",
        show_default="one process",
        help="Processes that work side by side: one per GPU, or each with a share of the cores (--threads is the"
        " number of each). Needs detgen\\[ray]. Never changes the text.",
    ),
]
Ray = Annotated[
    str | None,
    resource_option(
        metavar="ADDRESS",
        show_default=False,
        help="Work on a Ray cluster that this machine is part of: HOST:PORT, or auto. Without --workers, one per GPU of"
        " the cluster, or one per node if it has none.",
    ),
]
KvMemory = Annotated[
    int | None,
    resource_option(
        parser=parse_size,
        metavar="SIZE",
        show_default="a share of what is free",
        help="Memory for the KV cache, such as 4GiB, 500MB or a number of bytes.",
    ),
]
PrefixCache = Annotated[
    Literal["on", "off"],
    resource_option(
        metavar="on|off",
        help="Read the beginning that prompts share once and keep it for later prompts. Never changes the text.",
    ),
]
SpeculativePrefill = Annotated[
    str,  # or a number
    resource_option(
        parser=parse_chunks,
        metavar="auto|off|CHUNKS",
        help="Chunks of a prompt to read ahead, for a model that thinks while it reads, such as demo-thinking; auto"
        " adapts. Never changes the text.",
    ),
]
Limit = Annotated[int | None, run_option(metavar="N", min=1, show_default="all", help="Run only the first N prompts.")]
Quiet = Annotated[bool, run_option("--quiet", "-q", help="Show only errors.")]
Overwrite = Annotated[bool, run_option("--overwrite", help="Start over: delete what an earlier run wrote.")]
