"""Weights in few bits: what a group becomes, on every processor, and that this is what it stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.threads import using
from safetensors.numpy import load_file

from detgen.errors import EngineError
from detgen.kernels.c import quantizing
from detgen.kernels.c.library import BUILDS, build
from detgen.kernels.c.panels import joined, panels
from detgen.kernels.c.quantizing import MADE, Form, fits, narrowed
from detgen.program.arrays import BFLOAT16, FLOAT16, FLOAT32, array, same_bits
from detgen.program.widening import in_floats

WEIGHT = np.random.default_rng(1).standard_normal((20, 96), np.float32)
LIBRARIES = {name: library for name in BUILDS if (library := build(name)) is not None}
F32 = np.float32


def hard(outputs: int, inputs: int) -> np.ndarray:
    """Weights of several magnitudes, with groups that are zeros, of one sign, of one number, or hardly anything."""
    random = np.random.default_rng(outputs)
    made = random.standard_normal((outputs, inputs), np.float32) * random.random((outputs, 1), np.float32)
    made[0, :32], made[1, 32:64], made[2] = 0.0, 0.25, np.abs(made[2]) + 1
    made[3], made[4, :32], made[5, :64] = -np.abs(made[3]), made[4, :32] * 1e-7, 1e-41
    made[6, 7], made[6, 9], made[7, :32] = -4.0, 4.0, np.arange(32) - 8.0
    made[8, 64:96], made[9] = -0.75, made[9] * 60000 / 4
    return made


def by_largest(weight: np.ndarray, form: Form) -> np.ndarray:
    """What q8 and q4 are, in numpy."""
    groups = weight.astype(F32).reshape(len(weight), -1, 32)
    most = np.take_along_axis(groups, np.abs(groups).argmax(2, keepdims=True), 2)
    scale = (np.abs(most) / F32(127) if form == "q8" else most / F32(-8)).astype(np.float16).astype(F32)
    whole = np.rint(groups * inverse(scale))
    found: np.ndarray = (whole.clip(-127, 127) if form == "q8" else whole.clip(-8, 7)) * scale
    return found.reshape(weight.shape)


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


def by_lines(weight: np.ndarray) -> np.ndarray:
    """What q4_k is, in numpy."""
    x = weight.astype(F32).reshape(len(weight), -1, 32)
    scale, minimum = nearest_line(x)
    if x.shape[1] % 8:
        found = on_line(x, *(number.astype(np.float16).astype(F32) for number in (scale, minimum)))
        return found.reshape(weight.shape)

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
    return found.reshape(weight.shape)


@pytest.mark.parametrize("inputs", [256, 768, 96])
@pytest.mark.parametrize("form", MADE)
@pytest.mark.parametrize("name", LIBRARIES)
def test_every_build_gives_the_bits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, name: str, form: Form, inputs: int
) -> None:
    """In panels as in floats, from all number formats, by one thread as by two, gated or not."""
    monkeypatch.setattr(quantizing, "best_build", lambda: LIBRARIES[name])
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        weight = hard(45, inputs).astype(dtype)
        want = by_lines(weight) if form == "q4_k" else by_largest(weight, form)
        for threads in (1, 2):
            with using(threads):
                assert same_bits(narrowed(weight, form) + 0.0, want + 0.0)
                packed = panels([weight[:20], weight[20:]], form=form)
                assert (packed.outputs, packed.columns) == (45, 64)
                data = array(in_floats(packed).data).swapaxes(1, 2).reshape(64, inputs)
                assert same_bits(data[:45] + 0.0, want + 0.0)
                assert not data[45:].any()
    halves = array(in_floats(joined([weight[:20], weight[20:40]], [], form, gated=True)).data).swapaxes(1, 2)
    assert same_bits(halves[:, :16].reshape(-1, inputs)[:20] + 0.0, want[:20] + 0.0)
    assert same_bits(halves[:, 16:].reshape(-1, inputs)[:20] + 0.0, want[20:40] + 0.0)


def test_q4_k_is_at_least_as_near_as_llama_cpp(demo_models: Any) -> None:
    """llama.cpp's Q4_K of the same weights, all rows of whole units, has a mean squared error of 4.2973e-05."""
    errors, count = 0.0, 0
    for name, weight in load_file(demo_models.target / "model.safetensors").items():
        if weight.ndim == 2 and weight.shape[1] % 256 == 0 and "embed" not in name:
            errors += float(np.square((narrowed(weight, "q4_k") - weight).astype(float)).sum())
            count += weight.size
    assert errors / count < 0.97 * 4.2973e-5


@pytest.mark.parametrize(("form", "steps"), [("q8", 127), ("q4", 8)])
def test_errors_are_half_a_step(form: Form, steps: int) -> None:
    most = np.abs(WEIGHT.reshape(20, 3, 32)).max(-1).repeat(32, 1)
    error = np.abs(narrowed(WEIGHT, form) - WEIGHT)
    limit = 0.5 if form == "q8" else 1.0  # -8 has no counterpart
    assert (error <= most / steps * limit * 1.01).all()


@pytest.mark.parametrize("form", ["q8", "q4"])
def test_twice_is_once(form: Form) -> None:
    once = narrowed(WEIGHT, form)
    assert np.array_equal(narrowed(once, form), once)
    few, again = panels([WEIGHT], form=form), panels([once], form=form)
    assert same_bits(few.data, again.data)


@pytest.mark.parametrize("form", MADE)
def test_zeros(form: Form) -> None:
    assert np.array_equal(narrowed(np.zeros((3, 64), F32), form), np.zeros((3, 64)))


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("form", MADE)
def test_what_cannot_be_quantized(form: Form, number: float) -> None:
    for inputs in (256, 96):
        weight = hard(40, inputs)
        weight[33, 50] = number
        for make in (lambda one: panels([one], form=form), lambda one: narrowed(one, form)):
            with pytest.raises(EngineError, match=f"too large for {form}; leave out the quantization"):
                make(weight)


def test_what_does_not_fit_stays() -> None:
    weight = WEIGHT[:, :40]
    assert not fits(weight)
    assert same_bits(narrowed(weight, "q8"), weight)
    assert same_bits(narrowed(WEIGHT, "none"), WEIGHT)
    assert same_bits(narrowed(WEIGHT[0], "q8"), WEIGHT[0])
