"""The drafters by name. To add one, write a module with its name and add an entry here.

Imports neither torch nor the drafters, so that `--help` is fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from detgen.errors import EngineError

if TYPE_CHECKING:
    from detgen.drafters.model import ModelDrafter
    from detgen.drafters.protocol import Drafter
    from detgen.drafters.self import SelfDrafter
    from detgen.kernels.pass_cost import PassCost


class Entry(NamedTuple):
    """A drafter as the command line knows it; `make` in the module of its name is called with `Parts`.

    Attributes:
        draft_model: whether it uses a draft model.
        help: where its drafts come from, in a few words.
    """

    draft_model: Literal["required", "optional", "unused"]
    help: str


DRAFTERS = {
    "auto": Entry("optional", "ngram, self, model or none, as measured cost and acceptance say"),
    "self": Entry("unused", "the model itself, with its weights in fewer bits"),
    "model": Entry("required", "the draft model (--draft)"),
    "ngram": Entry("unused", "repeats in the prompt and the text so far, and in texts of the same form"),
    "grammar": Entry("unused", "what the form of a text forces, as all but none do"),
    "none": Entry("unused", "no drafts"),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine gives to the makers of drafters.

    Attributes:
        model: drafts with the draft model; None if there is none.
        target_cost: cost of canonical passes.
        most_rows: most rows of a canonical pass.
        draft_tokens: draft tokens per round, if the user set them; None leaves them to the drafter.
        own: drafts with the target's own weights in fewer bits; None if that cannot be.
    """

    model: ModelDrafter | None
    target_cost: PassCost
    most_rows: int
    draft_tokens: int | None
    own: SelfDrafter | None = None


def available(parts: Parts) -> list[str]:
    """Return the names of the drafters that can be made of these parts."""
    lacking = {"model": parts.model is None, "self": parts.own is None}
    return [name for name in DRAFTERS if not lacking.get(name)]


def make_drafter(name: str, parts: Parts) -> Drafter:
    """Make the drafter of this name.

    Raises:
        EngineError: if it needs a draft model and there is none, or the target cannot draft for itself.
    """
    if name == "self" and parts.own is None:
        raise EngineError(
            "drafter self needs a model that runs whole in detgen's own pass with weights of more than 8 bits, and"
            " memory for a copy of them in fewer bits; use auto, ngram or none"
        )
    if DRAFTERS[name].draft_model == "required" and parts.model is None:
        raise EngineError(f"drafter {name} needs a draft model, and this engine has none")
    return cast("Drafter", _module(name).make(parts))


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")


def drafter_of(wanted: str | Callable[[Mapping[str, Drafter]], object], parts: Parts) -> Drafter:
    """Make the drafter of a name, or the custom one that a function returns, given all others by name.

    All named drafters except "none" also draft the tokens that the form of a text forces.

    Raises:
        EngineError: if it needs a draft model and there is none, or the function does not return a drafter.
    """
    from detgen.drafters.protocol import Drafter

    if isinstance(wanted, str):
        named = make_drafter(wanted, parts)
        return named if wanted in ("none", "grammar") else _module("grammar").GrammarDrafter(named, wanted)
    made = wanted({name: make_drafter(name, parts) for name in available(parts)})
    if not isinstance(made, Drafter):
        kind = type(made).__name__
        raise EngineError(f"a custom drafter is derived from detgen.drafters.protocol.Drafter, and {kind} is not")
    return made
