"""Linear shapes under the settings of the vendor's libraries: which row counts agree bit for bit, and what they take.

A setting is what a product may do with its sums, and the library; the workspaces are variables that a process reads
once, so that two stages run this. Row counts of one class give a row the same bits at every place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from detgen.kernels.linear import weight_sample
from detgen.kernels.probe import Product

from detgen.bench.random_weights import settings_of
from detgen.errors import DEMO
from gpu.notebook import Asked, Notebook
from gpu.timing import copies, seconds_each

# A ladder, with odd ones between its rungs.
ROWS: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 23, 24, 32, 33, 47, 48, 64, 65, 96, 97, 127, 128, 129, 192)
ROWS += (256, 257, 384, 511, 512, 1024, 2048)
TIMED = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
_FEW = (1, 2, 3, 16, 17)

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Shapes = dict[tuple[int, int], str]


class Setting(NamedTuple):
    """How products are told to compute.

    Attributes:
        reductions: whether sums in 16 bits are allowed, and sums that are split among blocks.
        library: of torch's.
        timed: whether times are taken, too.
    """

    reductions: tuple[bool, bool]
    library: str
    timed: bool

    @property
    def name(self) -> str:
        """In words."""
        reduced, split = self.reductions
        return f"{self.library}, {'any sum' if reduced else 'float32 sums' if split else 'no split sums'}"

    def take(self) -> None:
        """Make it the process's."""
        matmul: Any = torch.backends.cuda.matmul
        matmul.allow_bf16_reduced_precision_reduction = self.reductions
        matmul.allow_fp16_reduced_precision_reduction = self.reductions
        if torch.version.cuda is not None:
            torch.backends.cuda.preferred_blas_library(self.library)


# What detgen sets, and what torch does by itself; cuBLAS cannot be told not to split sums.
SETTINGS = (
    Setting((False, False), "cublaslt", timed=True),
    Setting((True, True), "cublas", timed=True),
    Setting((True, True), "cublaslt", timed=False),
    Setting((False, True), "cublaslt", timed=False),
    Setting((False, True), "cublas", timed=True),
)


def measure(book: Notebook, asked: Asked) -> None:
    """Classes under all settings, then times, then classes in float16."""
    torch.set_grad_enabled(False)
    weights = Weights(asked)
    for setting in SETTINGS[:2] if asked.tiny else SETTINGS:
        with book.part(f"{setting.name}: classes"):
            _classes(book, setting, weights, torch.bfloat16)
    for setting in SETTINGS:
        if setting.timed and (setting == SETTINGS[0] or not asked.tiny):
            with book.part(f"{setting.name}: times"):
                _times(book, setting, weights)
    for setting in SETTINGS[:1] if asked.tiny else SETTINGS[:2]:
        with book.part(f"{setting.name}: classes in float16"):
            _classes(book, setting, weights, torch.float16)


class Weights:
    """The weights of all shapes, made when they are needed first, and inputs that tell orders of summation apart."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        names = (
            [asked.model] if asked.tiny else list(dict.fromkeys([asked.model, "llama-3.2-1b", str(DEMO / "target")]))
        )
        self.shapes: Shapes = {}
        for name in names:
            label = "embedded" if name == str(DEMO / "target") else name
            for part, shape in shapes_of(settings_of(name)).items():
                self.shapes.setdefault(shape, f"{label} {part}")
        self._made: dict[tuple[tuple[int, int], torch.dtype], tuple[torch.Tensor, Product]] = {}

    def __call__(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Product]:
        """A weight [outputs, inputs], and its product as something to compare at many row counts."""
        key = shape, dtype
        if key not in self._made:
            weight = random(shape[::-1], dtype, self.asked.device)
            self._made[key] = weight, product_of(F.linear, weight)
        return self._made[key]

    def label(self, shape: tuple[int, int]) -> str:
        """The shape in words."""
        return f"{self.shapes[shape]} {shape[0]}→{shape[1]}"


def shapes_of(settings: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of a Llama, joined and apart, by name."""
    hidden, inner, heads = (settings[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    kv_heads, size = settings["num_key_value_heads"], settings.get("head_dim") or hidden // heads
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * size),
        "o": (heads * size, hidden),
        "gate+up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "head": (hidden, settings["vocab_size"]),
        "k": (hidden, kv_heads * size),
        "gate": (hidden, inner),
    }


def random(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A weight of random numbers, scaled so that what it gives is about as large as what it is given."""
    return torch.randn(*shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)


class Classes(NamedTuple):
    """Row counts that agree, and those at which a row's bits depend on its place."""

    agreeing: list[list[int]]
    unlike_themselves: list[int]


def classes(product: Product, counts: Iterable[int]) -> Classes:
    """The classes of row counts of a product."""
    known: list[tuple[Product, list[int]]] = []
    places = []
    for count in counts:
        members = next((members for one, members in known if one.agrees(count)), None)
        if members is None:
            one = copy.copy(product)
            one.learn(count)
            known.append((one, [count]))
            if not one.agrees(count):
                places.append(count)
        else:
            members.append(count)
    return Classes([members for _, members in known], places)


def spans(counts: Sequence[int], ladder: Sequence[int]) -> str:
    """Row counts in words: neighbours on the ladder as first-last."""
    at = [ladder.index(count) for count in counts]
    starts = [i for i in range(len(at)) if not i or at[i] != at[i - 1] + 1]
    ends = [*(i - 1 for i in starts[1:]), len(at) - 1]
    return " ".join(str(counts[i]) if i == j else f"{counts[i]}-{counts[j]}" for i, j in zip(starts, ends, strict=True))


def in_words(found: Classes, ladder: Sequence[int]) -> str:
    """Classes in words."""
    said = "one class" if len(found.agreeing) == 1 else " | ".join(spans(c, ladder) for c in found.agreeing)
    if found.unlike_themselves:
        said += f"; a row's place matters at {spans(found.unlike_themselves, ladder)}"
    return said


def _classes(book: Notebook, setting: Setting, weights: Weights, dtype: torch.dtype) -> None:
    setting.take()
    counts = _FEW if weights.asked.tiny else ROWS
    kind = str(dtype).rpartition(".")[2]
    found: dict[str, Classes] = {}
    for shape in weights.shapes:
        with book.part(f"{setting.name}, {kind}, {weights.label(shape)}"):
            found[weights.label(shape)] = classes(weights(shape, dtype)[1], counts)
            book.note(f"classes, {setting.name}, {kind}", {name: c._asdict() for name, c in found.items()})
    whole = sum(len(c.agreeing) == 1 and not c.unlike_themselves for c in found.values())
    book.say(f"{setting.name}, {kind}: one class of {counts[0]} to {counts[-1]} rows in {whole} of {len(found)} shapes")
    for name, each in found.items():
        if len(each.agreeing) > 1 or each.unlike_themselves:
            book.say(f"    {name}: {in_words(each, counts)}")


def _times(book: Notebook, setting: Setting, weights: Weights) -> None:
    setting.take()
    counts = _FEW[:2] if weights.asked.tiny else TIMED
    found: dict[str, dict[int, float]] = {}
    book.say(f"{setting.name}, bfloat16, microseconds at {', '.join(map(str, counts))} rows")
    for shape in weights.shapes:
        label = weights.label(shape)
        with book.part(f"{setting.name}, times of {label}"):
            weight, _ = weights(shape, torch.bfloat16)
            held = [weight, *(weight.clone() for _ in range(copies(weight.nbytes, tiny=weights.asked.tiny) - 1))]
            times = found[label] = {}
            for count in counts:
                x = random((count, shape[0]), torch.bfloat16, weights.asked.device)
                times[count] = seconds_each(calls(F.linear, x, held))
            book.note(f"seconds, {setting.name}", found)
            if label.startswith(weights.asked.model):
                book.say(f"    {label}: {' '.join(f'{1e6 * t:.1f}' for t in times.values())}")


def product_of(linear: Linear, weight: torch.Tensor) -> Product:
    """A linear layer as something to compare at many row counts."""
    return Product(lambda x: linear(x, weight), weight_sample(weight))


def calls(linear: Linear, x: torch.Tensor, weights: Iterable[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """A call of a linear layer with each of some weights."""
    return [partial(linear, x, weight) for weight in weights]
