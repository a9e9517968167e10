"""Choosing tokens: argmax of the logits, or of perturbed log-probabilities.

Promise: the token chosen for a row is a function of the row's logits, its parameters, its seed, its sample, its
position and the tokens before it (`penalties`).

Adding Gumbel noise to the logits and taking the argmax samples from their softmax (Maddison et al., "A* sampling",
2014, section 2); the noise is counter-based (`noise`), and a drafter that uses the same noise agrees with the target as
often as the two distributions allow (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from detgen.errors import RequestError
from detgen.kernels import choosing
from detgen.kernels.allowed import best_allowed
from detgen.kernels.filters import floor_of, kept, leading, sample_plain, scaled, words_of
from detgen.kernels.logprobs import has_kernels
from detgen.kernels.noise import gumbel
from detgen.kernels.penalties import Adjustment, Growing, adjusted, adjusted_row
from detgen.params import PARAMETERS, SamplingParams
from detgen.program.arrays import Array, array, tensor

_DRAWN = {name: parameter for name, parameter in PARAMETERS.items() if parameter.drawn}
FILTERS = {name: parameter for name, parameter in _DRAWN.items() if parameter.drawn and parameter.drawn.filter}
# The arrays of `Choices`, and their types.
ARRAYS: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(parameter.drawn.dtype) for name, parameter in _DRAWN.items() if parameter.drawn},
    **dict.fromkeys(("sample", "position"), np.dtype("uint64")),
}

if TYPE_CHECKING:

    class _Declared:
        """Has what `SamplingParams` declares."""

        def __init__(self, *args: Any, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    class _Numbers(_Declared): ...

    class _Arrays(_Declared): ...

else:
    _NUMBERS = [(name, parameter.kind, field(default=parameter.default)) for name, parameter in _DRAWN.items()]
    _Numbers = make_dataclass("_Numbers", _NUMBERS, frozen=True, slots=True)
    _Arrays = make_dataclass("_Arrays", [(name, np.ndarray) for name in _DRAWN], frozen=True, slots=True, eq=False)


@dataclass(frozen=True, slots=True)
class Choice(_Numbers):
    """How to choose one row's token: the parameters of its request that kernels take, its sample and its position.

    The adjustment applies first: it changes the row's logits as the parameters and the tokens before the row require.
    """

    sample: int = 0
    position: int = 0
    adjustment: Adjustment | None = field(default=None, compare=False)

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **values: Any) -> None: ...

    @classmethod
    def of(cls, params: SamplingParams, sample: int) -> Choice:
        """Return how a sample's first token is chosen."""
        return cls(**{name: getattr(params, name) for name in _DRAWN}, sample=sample)

    @property
    def filtered(self) -> bool:
        """Whether a filter may drop tokens."""
        return any(getattr(self, name) != parameter.default for name, parameter in FILTERS.items())


def check_filters(params: SamplingParams, device: str) -> None:
    """Raise if a request uses a filter that a device, "cpu" or "cuda", does not support.

    Raises:
        RequestError: names the filter.
    """
    for name, parameter in FILTERS.items():
        if getattr(params, name) != parameter.default and name not in _known(device):
            raise RequestError(f"{name} is not supported on {device}; leave it out, or give {parameter.default:g}")


def _known(device: str) -> Collection[str]:
    """Return the names of the filters that a device supports, among others."""
    if device != "cuda":
        return choosing.KNOWN
    from detgen.kernels.triton.sampling_kernels import KNOWN

    return KNOWN


@dataclass(frozen=True, slots=True, eq=False)
class Choices(_Arrays):
    """How to choose the tokens of many rows: the fields of `Choice` as arrays with an entry per row (`ARRAYS`).

    `adjustments` is None if no row has one. `likely`, int64 [rows], says how many of the most likely tokens are wanted,
    too; None if no row wants any. For passes in one call, in which sequences go on with what they choose, `growing`
    takes the place of `adjustments`. `given`, int64 [rows], are tokens whose log-probabilities are wanted instead of
    those of the chosen tokens; None for the chosen ones.
    """

    sample: np.ndarray
    position: np.ndarray
    adjustments: Sequence[Adjustment | None] | None = None
    growing: Sequence[Growing | None] | None = None
    likely: np.ndarray | None = None
    given: np.ndarray | None = None

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **values: Any) -> None: ...

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Choices:
        """Combine single choices."""
        adjustments = [c.adjustment for c in choices]
        arrays: dict[str, Any] = {
            name: np.array([getattr(c, name) for c in choices], dtype) for name, dtype in ARRAYS.items()
        }
        return cls(**arrays, adjustments=adjustments if any(a is not None for a in adjustments) else None)

    @classmethod
    def largest(cls, given: np.ndarray) -> Choices:
        """Choose the largest logit of each row, with `given` tokens."""
        return cls(**{name: np.zeros(len(given), dtype) for name, dtype in ARRAYS.items()}, given=given)

    def __len__(self) -> int:
        return len(self.temperature)

    def __getitem__(self, row: int) -> Choice:
        adjustment = self.adjustments[row] if self.adjustments is not None else None
        return Choice(**{name: getattr(self, name)[row].item() for name in ARRAYS}, adjustment=adjustment)

    def only_masked(self) -> np.ndarray:
        """Which rows take the best logit that a mask allows, bool [rows]."""
        adjustments = self.adjustments or [None] * len(self)
        masked = np.fromiter((a is not None and a.only_mask for a in adjustments), bool, len(self))
        found: np.ndarray = masked & (self.temperature == 0)
        return found

    def how(self) -> dict[str, np.ndarray]:
        """Return the arguments of kernels: the arrays, and the floor, which is the logarithm of min_p."""
        floors = np.full(len(self), -np.inf)
        for i in np.flatnonzero(self.min_p).tolist():
            floors[i] = floor_of(self.min_p[i])
        return {**{name: getattr(self, name) for name in ARRAYS}, "floor": floors}

    def choose(self, logits: Array) -> Chosen:
        """Choose from logits in this way; see `choose`."""
        return choose(logits, self)

    def take(self, rows: np.ndarray) -> Choices:
        """Return the choices of some rows, int64 [n], without adjustments."""
        likely = None if self.likely is None else self.likely[rows]
        return Choices(*(getattr(self, name)[rows] for name in ARRAYS), likely=likely)

    @property
    def most(self) -> int:
        """The largest number of most likely tokens that a row wants."""
        return 0 if self.likely is None else int(self.likely.max(initial=0))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen tokens of some rows.

    Attributes:
        tokens: int64 [rows], on CUDA if the logits are.
        leads: float64 [rows], each token's lead over the runner-up, in perturbed log-probability or in (adjusted)
            logits; inf if there is none, anything where logits are not finite.
        logprobs: float32 [rows], log-probabilities of the tokens; None if they are not known yet.
    """

    tokens: Array
    leads: np.ndarray
    logprobs: np.ndarray | None = None


def choose(logits: Array, choices: Sequence[Choice] | Choices | None) -> Chosen:
    """Choose the best entry of each row's `scores`; ties go to the lowest id.

    Args:
        logits: float32 [rows, vocabulary], adjusted meanwhile where choices say so.
        choices: one per row; None if all rows take the best logit.
    """
    if (device := on_device(logits)) is not None:
        if choices is not None and not isinstance(choices, Choices):
            choices = Choices.of(choices)
        from detgen.kernels.triton.launching import fetched

        on_cuda = tensor(logits)
        packed = device.choose_by(on_cuda, choices)
        found = device.unpack(fetched(packed))
        tokens = packed[:, 3].long()
        broken = np.flatnonzero(~found.finite)
        if len(broken):
            at = tensor(broken).to(on_cuda.device)
            tokens[at] = on_cuda[at].argmax(-1)  # whose logit is not finite either
        return Chosen(tokens, found.leads, found.logprobs)
    logits = array(logits)
    if choices is None:
        return Chosen(*choosing.best(logits))
    if not isinstance(choices, Choices):
        if all(c.temperature == 0 and c.adjustment is None for c in choices):
            return Chosen(*choosing.best(logits))
        choices = Choices.of(choices)
    if choices.adjustments is None:
        return _choose(logits, choices)
    masked = choices.only_masked()
    if masked.any():
        return _choose_masked(logits, choices, masked)
    with adjusted(logits, choices.adjustments) as changed:
        return _choose(changed, choices)


def on_device(logits: Array) -> Any:
    """Return the kernels that choose from logits on CUDA; None if the logits are elsewhere."""
    if not has_kernels(logits):
        return None
    from detgen.kernels.triton import sampling_kernels

    return sampling_kernels


def _choose_masked(logits: np.ndarray, choices: Choices, masked: np.ndarray) -> Chosen:
    """Like `choose`, where the rows marked in `masked` take the best logit that their mask allows."""
    adjustments = choices.adjustments or ()
    masks = [None if a is None else a.mask for a in adjustments]
    plain = (choices.temperature == 0) & np.fromiter((a is None for a in adjustments), bool, len(choices))
    if (masked | plain).all():
        found = best_allowed(logits, None, masks)
        return Chosen(found.tokens, found.leads, found.logprobs)
    rows, others = np.flatnonzero(masked), np.flatnonzero(~masked)
    some = best_allowed(logits, rows, [masks[i] for i in rows.tolist()])
    rest = choose(logits[others], [choices[i] for i in others.tolist()])
    tokens, leads = np.empty(len(choices), np.int64), np.empty(len(choices))
    tokens[rows], tokens[others] = some.tokens, rest.tokens
    leads[rows], leads[others] = some.leads, rest.leads
    return Chosen(tokens, leads)


def _choose(logits: np.ndarray, choices: Choices) -> Chosen:
    """Like `choose`, for logits that are adjusted already."""
    sampled = np.flatnonzero(choices.temperature > 0)
    if len(sampled) == len(choices):
        tokens, ahead = _sample(logits, sampled, choices)
        return Chosen(tokens, ahead)
    tokens, leads = choosing.best(logits)
    if len(sampled):
        tokens[sampled], leads[sampled] = _sample(logits, sampled, choices.take(sampled))
    return Chosen(tokens, leads)


def scores(logits: Array, choice: Choice) -> np.ndarray:
    """Return the scores whose argmax is chosen: logits at temperature 0, else filtered logits / temperature plus noise.

    The logits are adjusted first. Filters apply in the order temperature, top_k, top_p, min_p; ties in top_k and top_p
    go to the lower token id. A broken model's row, whose largest logit is not finite, stays as it is.

    Args:
        logits: float32 [vocabulary].
        choice: how the row's token is chosen.

    Returns:
        float64 [vocabulary].
    """
    row = adjusted_row(array(logits), choice.adjustment)
    peak = row.max()
    if not choice.temperature or not np.isfinite(peak):
        return row.astype(np.float64)
    ids = kept(row, choice)
    found = np.full(len(row), -np.inf)
    found[ids] = scaled(row[ids], peak, choice.temperature) + gumbel(words_of(choice, ids))
    return found


def _sample(logits: np.ndarray, sampled: np.ndarray, choices: Choices) -> tuple[np.ndarray, np.ndarray]:
    """Return the best entries of sampled rows, int64 [n], and their leads; few entries' scores are computed.

    Args:
        logits: float32 [rows, vocabulary].
        sampled: int64 [n], the sampled rows.
        choices: one per sampled row, with temperatures above 0.
    """
    drawn = choosing.draw(logits, sampled, choices.how())
    told = drawn.found > 0
    some, counts = np.flatnonzero(told), drawn.found[told]
    tokens, ahead = np.empty(len(sampled), np.int64), np.empty(len(sampled))
    if len(some):
        at = np.repeat(some, counts)
        score = scaled(logits[sampled[at], drawn.ids], drawn.peaks[at], choices.temperature[at]) + gumbel(drawn.words)
        best, ahead[some] = leading(score, np.cumsum(counts) - counts, counts)
        tokens[some] = drawn.ids[best]
    for i in np.flatnonzero(~told).tolist():
        tokens[i], ahead[i] = sample_plain(logits[sampled[i]], choices[i])
    return tokens, ahead
