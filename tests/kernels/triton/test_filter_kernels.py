"""Where top_k and top_p cut rows in Triton: the sets of the reference, ties and large vocabularies included."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.examples import examples

from detgen.kernels import filters as reference
from detgen.kernels.sampling import Choice, Choices
from detgen.kernels.triton import filter_kernels as module
from detgen.kernels.triton.filter_kernels import boundaries
from detgen.kernels.triton.row_reading import read
from detgen.kernels.triton.sampling_kernels import Asked

# What overflows float32 is meant to; on a GPU nobody says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Small = Callable[[], AbstractContextManager[None]]


def keys(row: np.ndarray) -> np.ndarray:
    bits = np.where(row == 0, np.float32(0), row).view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)


def kept(
    logits: torch.Tensor,
    choices: list[Choice],
    device: str,
    boundaries: Callable[..., torch.Tensor] = boundaries,
) -> list[set[int]]:
    """What is left of each row, but for what min_p drops."""
    logits = logits.to(device)
    table = Asked.of(Choices.of(choices)).to(device).table
    cuts = boundaries(logits, table, read(logits, None)).cpu().numpy()
    rows = logits.cpu().numpy()
    every = np.arange(rows.shape[1])
    found = []
    for row, (bound, last), choice in zip(rows, cuts, choices, strict=True):
        cut = 0 < choice.top_k < len(row) or choice.top_p < 1
        stays = (keys(row) > bound) | ((keys(row) == bound) & (every <= last))
        found.append(set(every[stays & (row > -np.inf)].tolist() if cut else every[row > -np.inf].tolist()))
    return found


def wanted(logits: torch.Tensor, choices: list[Choice]) -> list[set[int]]:
    rows = logits.numpy()
    return [
        {i for i in reference.kept(row, choice).tolist() if row[i] > -np.inf}
        for row, choice in zip(rows, choices, strict=True)
    ]


CHOICES = st.builds(
    Choice,
    temperature=st.sampled_from([1e-4, 0.2, 1.0, 3.0, 1e4]),
    top_p=st.sampled_from([1.0, 1.0 - 2.0**-53, 0.9137, 0.5311, 0.1019, 5e-324]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 1000]),
)


@examples(8)
@given(
    choices=st.lists(CHOICES, min_size=2, max_size=2),
    spread=st.sampled_from([0.02, 1.0, 4.0, 300.0]),
    whole=st.booleans(),
    special=st.sampled_from([None, -torch.inf, 3e38, -3e38, -0.0, 1e-42]),
    on_sum=st.sampled_from([0, 1, 2, 37, 500]),
    seed=st.integers(0, 10**6),
)
def test_the_sets_of_the_reference(
    small_sections: Small,
    device: str,
    choices: list[Choice],
    spread: float,
    whole: bool,
    special: float | None,
    on_sum: int,
    seed: int,
) -> None:
    """Also where top_p is just what the best entries have together."""
    maker = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, 600, generator=maker)
    if whole:
        logits = logits.round()
    if special is not None:
        logits[torch.rand(logits.shape, generator=maker) < 0.2] = special
    if on_sum:
        row, warm = logits[0].numpy(), choices[0].temperature
        sums = np.cumsum(np.sort(reference.shares(row, row.max(), warm))[::-1])
        choices = [Choice(warm, min(float(sums[on_sum]) / float(sums[-1]), 1.0)), choices[1]]
    with small_sections():
        assert kept(logits, choices, device) == wanted(logits, choices)


@pytest.mark.parametrize("choice", [Choice(1.0, 0.5), Choice(1.0, 1.0, 300), Choice(1.0, 0.5, 301)])
def test_equal_logits(small_sections: Small, device: str, choice: Choice) -> None:
    """All are in one bucket, and all are ties: the lowest ids are kept."""
    logits = torch.full((1, 602), 2.5)
    with small_sections():
        found = kept(logits, [choice], device)
    assert found == wanted(logits, [choice])
    assert found == [set(range(len(found[0])))]


def test_a_vocabulary_of_real_size(device: str) -> None:
    """Blocks as they are on a GPU; a flat row, whose list is long, beside one with a peak."""
    logits = torch.randn(2, 9001, generator=torch.Generator().manual_seed(1))
    logits[1] *= 4
    choices = [Choice(0.7, 0.9), Choice(0.7, 0.9, 50)]
    assert kept(logits, choices, device) == wanted(logits, choices)


# The row that shows it, what is there, and what is put in its place.
MUTATIONS = {
    "top_p of all": (0, "total = mass + ties * ", "total += 0 * "),
    "top_p before top_k": (0, "weight < _cut(top_p, known)", "weight < _cut(top_p, total)"),
    "one tie too many": (1, "(number == ties)", "(number == ties + 1)"),
    "all that ties": (1, "tl.minimum(ties, fitting), fitting)", "ties, size)"),
    "one entry too few": (2, "ties = top_k - more", "ties = top_k - more - 1"),
    "zeros that differ": (2, "tl.where(x == 0, 0.0, x).to", "x.to"),
}


@pytest.mark.parametrize("name", ["", *MUTATIONS])
def test_mutations_are_found(small_sections: Small, device: str, name: str, tmp_path: Path) -> None:
    source = Path(str(module.__file__)).read_text()
    some = slice(None)
    if name:
        row, old, new = MUTATIONS[name]
        assert old in source
        source, some = source.replace(old, new), slice(row, row + 1)
    path = tmp_path / "mutated.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"mutated_filters_{abs(hash(name))}", path)
    assert spec is not None
    assert spec.loader is not None
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    logits = 2 * torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1] = logits[0] / 4, logits[1].round()
    logits[2] = torch.where(logits[2] > 0, torch.tensor([0.0, -0.0, 1.0] * 200), logits[2])
    choices = [Choice(1.0, 0.6, 60), Choice(1.0, 0.85), Choice(1.0, 1.0, 201)]
    with small_sections(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutated, "SECTION", 256)
        patch.setattr(mutated, "_TILE", 256)
        right = kept(logits[some], choices[some], device, mutated.boundaries) == wanted(logits[some], choices[some])
    assert right == (not name)
