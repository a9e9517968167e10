"""What a check tries: its prompts, and its settings in their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from detgen.check.axes import TITLES, Axis, Setting, alone
from detgen.check.covering import at_random, pairwise
from detgen.check.pool import Pool, make_pool
from detgen.engine.request import Request, SamplingParams
from detgen.errors import DEMO, CheckError, PromptsError
from detgen.passes.folders import EMBEDDED
from detgen.progress import Observer
from detgen.prompts import BadLine, open_prompts


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a check tries.

    Attributes:
        prompts: how many; where there are fewer, they are repeated with another beginning.
        lengths: (requests, tokens each) of the first requests, the next ones, and so on; batches of 64 need many
            short ones.
        longest: characters of a long neighbour.
        cut: characters to which all prompts but the first are cut; None leaves them.
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


def read_pool(prompts: str, limit: int | None, extent: Extent, observer: Observer) -> Pool:
    """The prompts of a check.

    Args:
        prompts: as `detgen run` takes them.
        limit: most prompts to read.
        extent: how many are needed, and how long they may be.
        observer: is told what is left out.

    Raises:
        PromptsError: none can be read.
    """
    source = open_prompts(prompts)
    items = list(source.read(SamplingParams(), min(limit or FULL.prompts, FULL.prompts)))
    requests = [item for item in items if isinstance(item, Request)]
    bad = [item.error for item in items if isinstance(item, BadLine)]
    if not requests:
        raise PromptsError(f"no prompts in {source.given}: {bad[0] if bad else 'it is empty'}")
    if bad:
        observer.message(f"{len(bad)} of {len(items)} prompts cannot be read and are left out; {bad[0]}")
    many = list(requests)
    for words in (f"{n}. " for n in itertools.count(1)):
        if len(many) >= extent.prompts:
            break
        again = [replace(r, prompt=words + r.prompt) for r in requests if r.prompt is not None]
        many += again or [
            replace(r, prompt=f"{words}{(r.messages or r.token_ids or ('',))[0]}", messages=None, token_ids=None)
            for r in requests
        ]
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
        return ordered([s for a in axes if a.name in names for s in alone(a)], axes), 0, more
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
