"""How tensor cores add up products of bf16, in plain PyTorch: some inputs at a time, as a `Rule` says.

The exact products, and the number that they are added to, are truncated at a number of bits below the largest exponent
among them (a product's exponent is the sum of its factors' exponents), added exactly, and the sum is truncated to
float32. Where any of them is not finite, the sum is what IEEE 754 prescribes. The rule is that of MMA-Sim
(github.com/microsoft/MMA-Sim).
"""

from __future__ import annotations

import torch

from detgen.program.storage import Rule

_LEAST = -126  # the exponent of zeros, and of what is subnormal


def added(x: torch.Tensor, weight: torch.Tensor, sums: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Add products to sums.

    Args:
        x: [..., inputs], numbers of bf16.
        weight: [..., inputs, outputs], likewise.
        sums: float32 [..., outputs].
        rule: how products are added up.

    Returns:
        float32 [..., outputs].
    """
    for some in zip(x.double().split(rule.inputs, -1), weight.double().split(rule.inputs, -2), strict=True):
        a, b, start = some[0][..., None], some[1], sums.double()
        products = a * b  # exact, as sums of fewer than 2^20 of what is cut are
        top = (_exponents(a) + _exponents(b)).amax(-2).maximum(_exponents(start))
        unit = _power(top - rule.bits)
        cut = (products * _power(rule.bits - top)[..., None, :]).trunc().sum(-2)
        found = ((cut + (start * _power(rule.bits - top)).trunc()) * unit) + 0.0  # no -0
        plain = products.sum(-2) + start  # is finite where all are
        sums = _narrowed(found).where(plain.isfinite(), plain.float())
    return sums


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """Exponents e of numbers 1.f * 2^e, int64; zeros and subnormal numbers have the least one."""
    found: torch.Tensor = (torch.frexp(x).exponent.long() - 1).clamp(min=_LEAST)
    return found.where(x != 0, _LEAST)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the power of each, exactly, float64."""
    return (exponents + 1023 << 52).view(torch.float64)


def _narrowed(x: torch.Tensor) -> torch.Tensor:
    """float64 to float32, toward zero; infinite from 2^128 on."""
    near = x.float()
    beyond = (near.double().abs() > x.abs()) & (x.abs() < 2.0**128)
    return torch.where(beyond, torch.nextafter(near, torch.zeros(())), near)
