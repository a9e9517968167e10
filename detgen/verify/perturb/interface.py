"""The configuration of a check, from which the options of `detgen verify-determinism` are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from detgen.declaring import Option, Part
from detgen.engine.config import EngineConfig
from detgen.errors import CheckError
from detgen.verify.perturb.axes import TITLES


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """What to check and how thoroughly.

    Attributes:
        prompts: any prompts that `detgen run` takes; None takes the embedded ones.
        engine: the models.
        full: longer texts, and many random settings after the pairwise ones.
        minutes: time for everything, filled with random settings; None takes as long as the other settings take.
        axis: names of axes, each changed alone; if empty, all axes are combined.
        limit: most prompts to read.
        seed: seed of the selection.
    """

    prompts: Annotated[
        str | None,
        Option("PROMPTS", positional=True, default="the embedded ones"),
        "Prompts in any format that detgen run takes. They run in full, chats as chats, with their own parameters;"
        " at most 66 of them, 96 with --full. Lines without max_tokens generate 2 to 24 tokens.",
    ] = None
    engine: Annotated[
        EngineConfig,
        Part(
            *("target", "draft", "device", "dtype", "kv_dtype", "adapter"),
            *("target_quant", "draft_quant", "trust_remote_code"),
            *("threads", "kv_memory"),
        ),
    ] = field(default_factory=EngineConfig)
    full: Annotated[
        bool,
        Option(None, "--full/--quick", default="quick"),
        "Longer texts and many random settings, or only the settings that combine each pair of values.",
    ] = False
    minutes: Annotated[
        float | None,
        Option("N"),
        "End within N minutes and a few seconds, with as many settings as fit; if something differs, finding out"
        " where may take longer. If there is no time for all prompts, fewer prompts or tokens are used, and a line"
        " says so.",
    ] = None
    axis: Annotated[
        tuple[str, ...],
        Option("NAME"),
        f"Change only this axis; may be given several times: {', '.join(TITLES).replace('_', '-')}."
        " speculative-prefill is for models that think.",
    ] = ()
    limit: Annotated[int | None, Option("N", default="all"), "Use only the first N prompts."] = None
    seed: Annotated[int, Option("N", panel="Expert"), "Seed that selects the settings to try."] = 0

    def __post_init__(self) -> None:
        """Raise CheckError if a number is out of range."""
        for name, least in (("minutes", 0.01), ("limit", 1), ("seed", 0)):
            if (given := getattr(self, name)) is not None and given < least:
                raise CheckError(f"{name} must be a number of at least {least}, got {given}")
