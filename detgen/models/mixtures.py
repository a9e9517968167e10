"""Mixtures of experts, a row of traits for each class of them that transformers has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from detgen.models.parts import UnknownError
from detgen.program.operands import Scoring


class Mixture(NamedTuple):
    """The traits of a mixture; names are those of modules.

    Attributes:
        router: gives the experts of a row.
        logits: its linear layer, if it is none itself.
        scoring: what it makes of logits.
        weighs_inputs: see `Experts`.
        shared: a feed-forward that all rows take, as far as a model has one, beside the mixture or in it.
        added: see `Route`.
        clamped: whether gates are clamped, and what they open; the experts say how far.
    """

    router: str = "gate"
    logits: str = ""
    scoring: Scoring = Scoring.OVER_ALL
    weighs_inputs: bool = False
    shared: str = "shared_expert"
    added: float = 1e-20
    clamped: bool = False


# By the classes of mixtures, whose experts have joined gates.
MIXTURES = {
    "MixtralSparseMoeBlock": Mixture(),
    "Qwen2MoeSparseMoeBlock": Mixture(),
    "Qwen3MoeSparseMoeBlock": Mixture(),
    "Qwen3NextSparseMoeBlock": Mixture(),
    "Qwen3_5MoeSparseMoeBlock": Mixture(),
    "MellumSparseMoeBlock": Mixture(),
    "FlintSparseMoeBlock": Mixture(scoring=Scoring.SIGMOIDS),
    "FlexOlmoSparseMoeBlock": Mixture(),
    "Ernie4_5_MoeSparseMoeBlock": Mixture(shared="shared_experts"),
    "GraniteMoeSharedMoE": Mixture(router="router", scoring=Scoring.OVER_PICKS, shared="shared_mlp"),
    "Dots1MoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Glm4MoeMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "DeepseekV2Moe": Mixture(shared="shared_experts"),
    "DeepseekV3MoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Glm4MoeLiteMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Llama4TextMoe": Mixture(router="router", scoring=Scoring.SIGMOIDS_OF_PICKS, weighs_inputs=True),
    "HunYuanMoEV1Moe": Mixture(logits="wg", shared="shared_mlp"),
    "OlmoeSparseMoeBlock": Mixture(),
    "GraniteMoeMoE": Mixture(router="router", scoring=Scoring.OVER_PICKS),
    "ExaoneMoeSparseMoEBlock": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "SolarOpenMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "MiniMaxM2SparseMoeBlock": Mixture(scoring=Scoring.SIGMOIDS),
    "HYV3MoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "GraniteMoeHybridMoE": Mixture(router="router", scoring=Scoring.OVER_PICKS, shared="shared_mlp"),
    "NemotronHMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Lfm2MoeSparseMoeBlock": Mixture(scoring=Scoring.SIGMOIDS, added=1e-6),
    "GptOssMLP": Mixture(router="router", scoring=Scoring.OVER_PICKS, clamped=True),
}


def routing_of(mlp: Any, router: Any, mixture: Mixture, tensor: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """The fields of `Route` that say how a mixture's router chooses.

    Args:
        mlp: the module.
        router: that in it.
        mixture: its traits.
        tensor: gives the numbers of a parameter.

    Raises:
        UnknownError: if it chooses in another way.
    """
    scoring = mixture.scoring
    found: dict[str, Any] = {"scoring": scoring, "normalized": bool(getattr(router, "norm_topk_prob", True))}
    if hasattr(router, "topk_method"):  # DeepSeek V2's
        found |= {"normalized": False, "factor": float(router.routed_scaling_factor)}
        if router.topk_method == "group_limited_greedy":
            return found | {"groups": int(router.num_group), "best_groups": int(router.topk_group)}
        if router.topk_method != "greedy":
            raise UnknownError(f"experts by {router.topk_method}")
        return found
    if scoring == Scoring.SIGMOIDS_OF_PICKS:
        return found | {"normalized": False}
    parts = (router, getattr(router, "moe_statics", None), mlp)
    biases = [getattr(of, name, None) for of in parts for name in ("e_score_correction_bias", "expert_bias")]
    bias = next((bias for bias in biases if bias is not None), None)
    if bias is not None:
        numbers = tensor(bias) if isinstance(bias, nn.Parameter) else bias.detach()
        found |= {"correction": numbers.float().flatten()}
    if scoring != Scoring.SIGMOIDS:
        return found
    groups, names = int(getattr(router, "num_group", 1)), ("routed_scaling_factor", "router_scaling_factor")
    return found | {
        "added": mixture.added,
        "groups": groups,
        "best_groups": int(getattr(router, "topk_group", 1)),
        "of_group": 2 if groups > 1 else 1,
        "factor": float(next((getattr(router, name) for name in names if hasattr(router, name)), 1.0)),
    }
