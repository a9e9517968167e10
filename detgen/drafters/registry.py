"""The drafters by name. To add one, write its file and add an entry here.

Imports neither torch nor the drafters, so that `--help` is fast.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from detgen.errors import EngineError

if TYPE_CHECKING:
    from detgen.drafters.model import ModelDrafter
    from detgen.drafters.protocol import Drafter
    from detgen.drafters.self import FastPath
    from detgen.passes.cost import PassCost


class Entry(NamedTuple):
    """A drafter as the command line knows it.

    Attributes:
        factory: "module:function", called with `Parts`; None for no drafts.
        draft_model: whether it uses a draft model.
        help: where its drafts come from, in a few words.
    """

    factory: str | None
    draft_model: Literal["required", "optional", "unused"]
    help: str


DRAFTERS = {
    "auto": Entry("detgen.drafters.auto:make", "optional", "ngram, model or none, as measured cost and acceptance say"),
    "model": Entry("detgen.drafters.model:make", "required", "the draft model (--draft)"),
    "self": Entry("detgen.drafters.self:make", "unused", "the target's own fast path"),
    "ngram": Entry("detgen.drafters.ngram:make", "unused", "repeats in the prompt and the text so far"),
    "none": Entry(None, "unused", "no drafts"),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine gives to the factories of drafters.

    Attributes:
        model: drafts with the draft model; None if there is none.
        fast: the target's own fast path.
        target_cost: cost of canonical passes.
        most_rows: most rows of a canonical pass.
        draft_tokens: draft tokens per round, if the user set them; None leaves them to the drafter.
        verify_window: tokens that the fast path decodes between verifications.
    """

    model: ModelDrafter | None
    fast: FastPath
    target_cost: PassCost
    most_rows: int
    draft_tokens: int | None
    verify_window: int


def make_drafter(name: str, parts: Parts) -> Drafter | None:
    """The drafter of this name; None for "none".

    Raises:
        EngineError: if it needs a draft model and there is none.
    """
    entry = DRAFTERS[name]
    if entry.factory is None:
        return None
    if entry.draft_model == "required" and parts.model is None:
        raise EngineError(f"drafter {name} needs a draft model, and this engine has none")
    module, _, function = entry.factory.partition(":")
    return cast("Drafter", getattr(importlib.import_module(module), function)(parts))


def make_drafters(parts: Parts) -> dict[str, Drafter]:
    """All drafters that can be made of these parts, by name."""
    names = [name for name, entry in DRAFTERS.items() if parts.model or entry.draft_model != "required"]
    made = {name: make_drafter(name, parts) for name in names}
    return {name: drafter for name, drafter in made.items() if drafter is not None}
