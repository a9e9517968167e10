"""Weights in few bits: what a group becomes, on every processor, and that this is what it stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.threads import using
from safetensors.torch import load_file

from detgen.errors import EngineError
from detgen.kernels.bits import same_bits
from detgen.kernels.c import quantizing
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.c.panels import joined, panels
from detgen.kernels.c.quantizing import MADE, Form, fits, narrowed
from detgen.program.widening import in_floats

WEIGHT = torch.randn(20, 96, generator=torch.Generator().manual_seed(1))
LIBRARIES = {name: library for name in BUILDS if (library := build(name)) is not None}
F32 = np.float32


def hard(outputs: int, inputs: int) -> torch.Tensor:
    """Weights of several magnitudes, with groups that are zeros, of one sign, of one number, or hardly anything."""
    random = torch.Generator().manual_seed(outputs)
    made = torch.randn(outputs, inputs, generator=random) * torch.rand(outputs, 1, generator=random)
    made[0, :32], made[1, 32:64], made[2] = 0.0, 0.25, made[2].abs() + 1
    made[3], made[4, :32], made[5, :64] = -made[3].abs(), made[4, :32] * 1e-7, 1e-41
    made[6, 7], made[6, 9], made[7, :32] = -4.0, 4.0, torch.arange(32) - 8.0
    made[8, 64:96], made[9] = -0.75, made[9] * 60000 / 4
    return made


def by_largest(weight: torch.Tensor, form: Form) -> torch.Tensor:
    """What q8 and q4 are, in PyTorch."""
    groups = weight.float().unflatten(1, (-1, 32))
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (most.abs() / 127 if form == "q8" else most / -8).half().float()
    whole = (groups * torch.where(scale == 0, 0.0, 1 / scale)).round()
    return ((whole.clamp(-127, 127) if form == "q8" else whole.clamp(-8, 7)) * scale).flatten(1)


def inverse(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(x == 0, F32(0), F32(1) / x).astype(F32)


def added(terms: np.ndarray) -> np.ndarray:
    """The sum over the last axis, one after the other."""
    return np.add.accumulate(terms, axis=-1, dtype=F32)[..., -1]


@np.errstate(invalid="ignore")
def nearest_line(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of groups, float32 [..., 32]."""
    low, high = np.minimum(x.min(-1), F32(0)), x.max(-1)
    width = high - low
    times = inverse(width)
    nought, t = (F32(0) - low) * times, (x - low[..., None]) * times[..., None]
    total, best = added(t), np.full(low.shape, -1, F32)
    slope, base = np.full(low.shape, F32(1) / F32(15)), np.zeros(low.shape, F32)
    for fifths in range(65, 81):
        q = np.minimum(np.rint(t * (F32(fifths) / F32(5))), F32(15))
        q1, q2, qt = added(q), added(q * q), added(q * t)
        spread = F32(32) * q2 - q1 * q1
        a = (F32(32) * qt - q1 * total) * inverse(spread)
        b = (total - a * q1) / F32(32)
        a = np.where(b > nought, (qt - nought * q1) * inverse(q2), a)
        b = np.minimum(b, nought)
        lowered = a * (((qt + qt) - a * q2) - (b + b) * q1) + b * ((total + total) - F32(32) * b)
        better = (spread > 0) & (lowered > best)
        slope, base, best = np.where(better, a, slope), np.where(better, b, base), np.where(better, lowered, best)
    return slope * width, np.minimum(base * width + low, F32(0))


def on_line(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """What a line has for groups."""
    scale, minimum = scale[..., None], minimum[..., None]
    return np.clip(np.rint((x - minimum) * inverse(scale)), F32(0), F32(15)) * scale + minimum


def by_lines(weight: torch.Tensor) -> torch.Tensor:
    """What q4_k is, in numpy."""
    x = weight.float().numpy().reshape(len(weight), -1, 32)
    scale, minimum = nearest_line(x)
    if x.shape[1] % 8:
        found = on_line(x, *(number.astype(np.float16).astype(F32) for number in (scale, minimum)))
        return torch.from_numpy(found.reshape(weight.shape))

    def in_units(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        by_unit = numbers.reshape(len(x), -1, 8)
        most = np.take_along_axis(by_unit, np.abs(by_unit).argmax(-1)[..., None], -1)
        unit = np.repeat((most / F32(63)).astype(np.float16).astype(F32)[..., 0], 8, -1)
        return np.rint(numbers * inverse(unit)), unit

    (steps, unit), (downs, minimum_unit) = in_units(scale), in_units(minimum)
    best, found = np.full(steps.shape, np.inf, F32), np.zeros_like(x)
    for i in (-1, 0, 1):
        for j in (-1, 0, 1):
            line = [
                np.clip(n + F32(k), F32(0), F32(63)) * u for n, k, u in ((steps, i, unit), (downs, j, minimum_unit))
            ]
            made = on_line(x, *line)
            missed = added((made - x) ** 2)
            found, best = np.where((missed < best)[..., None], made, found), np.minimum(missed, best)
    return torch.from_numpy(found.reshape(weight.shape))


@pytest.mark.parametrize("inputs", [256, 768, 96])
@pytest.mark.parametrize("form", MADE)
@pytest.mark.parametrize("name", LIBRARIES)
def test_every_build_gives_the_bits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, name: str, form: Form, inputs: int
) -> None:
    """In panels as in floats, from all number formats, by one thread as by two, gated or not."""
    monkeypatch.setattr(quantizing, "best_build", lambda: LIBRARIES[name])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = hard(45, inputs).to(dtype)
        want = by_lines(weight) if form == "q4_k" else by_largest(weight, form)
        for threads in (1, 2):
            with using(threads):
                assert same_bits(narrowed(weight, form) + 0.0, want + 0.0)
                packed = panels([weight[:20], weight[20:]], form=form)
                assert (packed.outputs, packed.columns) == (45, 64)
                data = in_floats(packed).data.transpose(1, 2).flatten(0, 1)
                assert same_bits(data[:45] + 0.0, want + 0.0)
                assert not data[45:].any()
    halves = in_floats(joined([weight[:20], weight[20:40]], [], form, gated=True)).data.transpose(1, 2)
    assert same_bits(halves[:, :16].flatten(0, 1)[:20] + 0.0, want[:20] + 0.0)
    assert same_bits(halves[:, 16:].flatten(0, 1)[:20] + 0.0, want[20:40] + 0.0)


def test_q4_k_is_at_least_as_near_as_llama_cpp(demo_models: Any) -> None:
    """llama.cpp's Q4_K of the same weights, all rows of whole units, has a mean squared error of 4.2973e-05."""
    errors, count = 0.0, 0
    for name, weight in load_file(demo_models.target / "model.safetensors").items():
        if weight.dim() == 2 and weight.shape[1] % 256 == 0 and "embed" not in name:
            errors += float((narrowed(weight, "q4_k") - weight).double().square().sum())
            count += weight.numel()
    assert errors / count < 0.97 * 4.2973e-5


@pytest.mark.parametrize(("form", "steps"), [("q8", 127), ("q4", 8)])
def test_errors_are_half_a_step(form: Form, steps: int) -> None:
    most = WEIGHT.view(20, 3, 32).abs().amax(-1).repeat_interleave(32, 1)
    error = (narrowed(WEIGHT, form) - WEIGHT).abs()
    limit = 0.5 if form == "q8" else 1.0  # -8 has no counterpart
    assert (error <= most / steps * limit * 1.01).all()


@pytest.mark.parametrize("form", ["q8", "q4"])
def test_twice_is_once(form: Form) -> None:
    once = narrowed(WEIGHT, form)
    assert torch.equal(narrowed(once, form), once)
    few, again = panels([WEIGHT], form=form), panels([once], form=form)
    assert torch.equal(few.data, again.data)


@pytest.mark.parametrize("form", MADE)
def test_zeros(form: Form) -> None:
    assert torch.equal(narrowed(torch.zeros(3, 64), form), torch.zeros(3, 64))


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("form", MADE)
def test_what_cannot_be_quantized(form: Form, number: float) -> None:
    for inputs in (256, 96):
        weight = hard(40, inputs)
        weight[33, 50] = number
        for make in (lambda one: panels([one], form=form), lambda one: narrowed(one, form)):
            with pytest.raises(EngineError, match=f"too large for {form}; leave out that quantization"):
                make(weight)


def test_what_does_not_fit_stays() -> None:
    weight = WEIGHT[:, :40]
    assert not fits(weight)
    assert torch.equal(narrowed(weight, "q8"), weight)
    assert torch.equal(narrowed(WEIGHT, "none"), WEIGHT)
    assert narrowed(WEIGHT[0], "q8") is WEIGHT[0] or torch.equal(narrowed(WEIGHT[0], "q8"), WEIGHT[0])
