"""What a check tries: its prompts, and its settings in their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from detgen.check.axes import TITLES, Axis, Setting, alone
from detgen.check.covering import at_random, pairwise
from detgen.check.given_prompts import read_given
from detgen.check.pool import Pool, make_pool
from detgen.engine.request import Request
from detgen.errors import DEMO, CheckError
from detgen.models.folders import EMBEDDED
from detgen.params import SamplingParams
from detgen.prompts import open_prompts


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a check tries.

    Attributes:
        prompts: how many; where there are fewer embedded ones, they are repeated with another beginning.
        lengths: (requests, tokens each) of the first requests, the next ones, and so on; batches of 64 need many
            short ones. A user's line may set its own.
        longest: characters of a long neighbour.
        cut: characters to which all embedded prompts but the first are cut; None leaves them.
        random: random settings after the pairwise ones.
    """

    prompts: int
    lengths: tuple[tuple[int, int], ...]
    longest: int
    cut: int | None
    random: int


QUICK = Extent(66, ((1, 24), (3, 8), (12, 4), (1, 2)), 600, 40, 0)
FULL = Extent(96, ((4, 80), (12, 40), (1, 16)), 4000, None, 300)


def embedded_prompts(target: object) -> str:
    """The prompts that are embedded beside a target; for any that is not embedded, those of the usual one."""
    return str(EMBEDDED.get(str(target), DEMO) / "prompts.jsonl")


def read_pool(prompts: str | None, target: object, limit: int | None, extent: Extent) -> Pool:
    """The prompts of a check.

    Args:
        prompts: a user's, as `detgen run` takes them; they are used as they are. None takes the embedded ones.
        target: the model that they are for.
        limit: most prompts to read.
        extent: how many there may be, how many are needed of the embedded ones, and how long those may be.

    Raises:
        PromptsError: none can be read.
    """
    if prompts is not None:
        return read_given(prompts, min(limit or extent.prompts, extent.prompts), extent.lengths, extent.longest)
    items = open_prompts(embedded_prompts(target)).read(SamplingParams(), min(limit or extent.prompts, extent.prompts))
    requests = [item for item in items if isinstance(item, Request)]
    many = list(requests)
    for words in (f"{n}. " for n in itertools.count(1)):
        if len(many) >= extent.prompts:
            break
        many += [replace(r, prompt=f"{words}{r.prompt}") for r in requests]
    return make_pool(many[: extent.prompts], extent.lengths, extent.longest, extent.cut)


def read_axes(names: Iterable[str]) -> list[str]:
    """Names of axes as a user types them, as fields of `Setting`.

    Raises:
        CheckError: there is no such axis.
    """
    found = [name.replace("-", "_") for name in names]
    if unknown := [name for name in found if name not in TITLES]:
        names = ", ".join(TITLES).replace("_", "-")
        raise CheckError(f"there is no axis {unknown[0].replace('_', '-')!r}; the axes are {names}")
    return found


def select(
    axes: list[Axis], names: list[str], extent: Extent, seed: int
) -> tuple[list[Setting], int, Iterator[Setting]]:
    """What to try.

    Args:
        axes: all there are.
        names: of axes, each to be changed alone; none combines all axes.
        extent: how many random settings follow the pairwise ones.
        seed: of the selection.

    Returns:
        The settings in order, how many of them are the pairwise ones, and random settings without end.

    Raises:
        CheckError: an axis has one value only.
    """
    more = at_random(axes, seed)
    if missing := [name for name in names if name not in {a.name for a in axes}]:
        raise CheckError(f"the axis {missing[0].replace('_', '-')} has only one value here")
    if names:
        batch = max((v for a in axes if a.name == "batch" for v in a.values if v in (2, 3, 8)), default=8)
        return ordered([s for a in axes if a.name in names for s in alone(a, batch)], axes), 0, more
    pairs = ordered(pairwise(axes, seed), axes)
    return [*pairs, *ordered(list(itertools.islice(more, extent.random)), axes)], len(pairs), more


def ordered(settings: list[Setting], axes: list[Axis]) -> list[Setting]:
    """Settings in an order in which nobody waits for a model to be loaded.

    By quantization; of all but the first, those that need another process first: it loads the next model while the
    others are tried. Resumed runs load their own models and come last.
    """
    quants = next((list(a.values) for a in axes if a.name == "quant"), ["none"])

    def place(s: Setting) -> tuple[bool, int, bool]:
        return s.process == "resumed", quants.index(s.quant), s.quant != quants[0] and s.process == "this"

    return sorted(settings, key=place)
