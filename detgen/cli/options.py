"""What commands share: exit codes, parsers of option values, and options."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Annotated

import typer

from detgen.drafters.registry import DRAFTERS
from detgen.errors import DTypeName, QuantName

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

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


def parse_device(text: str) -> str:
    """A device by torch's name, or `auto`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise typer.BadParameter(f"{text!r} is not one of auto, cpu, cuda, cuda:N (N a number)")
    return text


def parse_drafter(text: str) -> str:
    """A drafter by name."""
    if text not in DRAFTERS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(DRAFTERS)}")
    return text


def as_typed(error: Exception) -> str:
    """An error's message; a setting out of range is called by its option: `--batch-size must be ...`."""
    return re.sub(r"^[a-z_]+(?= must be )", lambda name: "--" + name[0].replace("_", "-"), str(error))


def same_command() -> str:
    """What was typed, without `--overwrite`, which would start over instead of resuming."""
    return shlex.join(["detgen", *(word for word in sys.argv[1:] if word != "--overwrite")])


Target = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        show_default="the embedded one",
        rich_help_panel="Models",
        help="The model whose text you want: a folder or a Hugging Face name.",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        show_default="the embedded one with the embedded target, else none",
        rich_help_panel="Models",
        help="A smaller model with the same vocabulary, to draft tokens. Never changes the text.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        parser=parse_device, metavar="auto|cpu|cuda|cuda:N", rich_help_panel="Models", help="Where the models run."
    ),
]
Dtype = Annotated[
    DTypeName,
    typer.Option(
        metavar="TYPE",
        rich_help_panel="Models",
        help="float32, bfloat16, float16 or auto: float32 on a CPU, the checkpoint's own type on CUDA.",
    ),
]
TargetQuant = Annotated[
    QuantName,
    typer.Option(metavar="none|nf4|int8", rich_help_panel="Models", help="Quantize the target with bitsandbytes."),
]
DraftQuant = Annotated[
    QuantName,
    typer.Option(metavar="none|nf4|int8", rich_help_panel="Models", help="Quantize the draft model with bitsandbytes."),
]
Drafter = Annotated[
    str,
    typer.Option(
        parser=parse_drafter,
        metavar="NAME",
        rich_help_panel="Drafting",
        help=f"Where drafts come from: {'; '.join(f'{name}: {d.help}' for name, d in DRAFTERS.items())}."
        " Never changes the text.",
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        parser=parse_draft_tokens,
        metavar="N|auto",
        show_default="auto",
        rich_help_panel="Drafting",
        help="Tokens that model and ngram draft per round; auto adapts.",
    ),
]
VerifyWindow = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel="Drafting", help="Tokens that self drafts between two verifications."),
]
BatchSize = Annotated[
    int, typer.Option(metavar="N", rich_help_panel="Resources", help="Most requests to run at a time.")
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", show_default="torch's choice", rich_help_panel="Resources", help="CPU threads."),
]
KvMemory = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        show_default="a share of what is free",
        rich_help_panel="Resources",
        help="Memory for the KV cache, such as 4GiB, 500MB or a number of bytes.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default="all", rich_help_panel="Run", help="Run only the first N prompts."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel="Run", help="Show only errors.")]
