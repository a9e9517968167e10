"""Torch's operators, classified by their effect on entries of tensors, under the names of the base operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Entries are moved, as they are.
MOVES = _names(
    "alias cat chunk clone constant_pad_nd contiguous detach diagonal expand expand_as flatten flip movedim narrow"
    " permute repeat reshape reshape_as roll select slice split split_with_sizes squeeze stack swapaxes t tensor_split"
    " transpose unbind unflatten unfold unsqueeze view view_as _reshape_alias _to_copy _unsafe_view unsafe_chunk"
    " unsafe_split"
)
# The same; where from, entries of another tensor say.
READS = _names("embedding gather index index_select take_along_dim")
# Pairs of numbers become complex numbers, or the other way round.
PAIRS = _names("view_as_complex view_as_real")
# Makes tensors of one number, or of numbers that Python gives.
CONSTANTS = _names(
    "empty empty_like empty_strided full full_like lift_fresh lift_fresh_copy new_empty new_empty_strided new_full"
    " new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like"
)
# Element by element: exact, or one operation that IEEE 754 defines. `is_exact` asks for certain arguments of some.
_DEFINED = _names(
    "abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min copy div eq fill floor ge gt"
    " hardtanh isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum"
    " mul ne neg pow reciprocal relu rsub sign sub threshold tril triu trunc where zero"
)
# Element by element, though torch does not tag them.
_ELEMENTWISE = _names("copy fill masked_fill polar tril triu where zero")
# Computes along axes that are named `dim` or `normalized_shape`, each place by itself.
ALONG = _names(
    "_fused_rms_norm _log_softmax _softmax all amax amin any argmax argmin argsort cumprod cumsum linalg_vector_norm"
    " logsumexp max mean min native_layer_norm norm prod sort std sum topk var"
)
_CHOOSING = _names("all amax amin any max min")  # of them, those that compute nothing
_ORDERING = _names("argmax argmin argsort sort topk")  # of them, those that may order equal entries as they like
PRODUCTS = _names("addmm baddbmm bmm mm")
# Their results leave the tensors, or have a shape that depends on what is in them.
TELLING = _names(
    "_local_scalar_dense bincount equal is_nonzero item masked_select nonzero unique unique_consecutive unique_dim"
    " _unique _unique2"
)


def base_name(func: Any) -> str:
    """Return the operator's name without its overload and without the mark of in-place variants."""
    name: str = func._schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, including defaults."""
    found = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return found | dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def written(func: Any) -> str | None:
    """Return the name of the argument that the operator changes, if any."""
    return next((a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write), None)


def is_elementwise(func: Any) -> bool:
    """Return whether each entry of the result depends only on the entries at its place."""
    return torch.Tag.pointwise in func.tags or base_name(func) in _ELEMENTWISE


def is_exact(func: Any, named: dict[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an operator's results are defined by IEEE 754, so that no kernel can give others.

    Args:
        func: the operator.
        named: the result of `bound`.
        tensors: the tensors among its arguments and results.
    """
    name = base_name(func)
    if name in _ORDERING and not named.get("stable"):
        return False
    if name in MOVES or name in READS or name in CONSTANTS or name in PAIRS or name in _CHOOSING or name == "sort":
        return True
    if not any(x.is_floating_point() or x.is_complex() for x in tensors):
        return True
    if any(x.is_complex() for x in tensors):  # products of these are sums of products
        return False
    if name in ("add", "sub", "rsub"):
        return bool(named.get("alpha", 1) == 1)
    if name == "div":
        return named.get("rounding_mode") is None
    if name == "pow":
        return named.get("exponent") in (1, 2)
    if name == "scatter":  # of one number, so that it does not matter which comes last
        return bool(func._overloadname == "value")
    return name in _DEFINED
