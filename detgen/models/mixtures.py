"""Mixtures of experts: the traits of each class that transformers has, and their descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from detgen.models.activations import activation_of
from detgen.models.parts import Experts, Linear, Norm, UnknownError
from detgen.models.skeleton import is_parameter, is_torch
from detgen.models.stored import Weight, turned
from detgen.program.arrays import array, floats
from detgen.program.experts import Route
from detgen.program.operands import Activation, Buffer, Scoring

if TYPE_CHECKING:
    from torch import nn

    from detgen.models.description import Description

_LEAST_SUM = 1e-12  # lower bound of sums that divide weights: Ernie's, far below any sum


class Mixture(NamedTuple):
    """The traits of a mixture; names are names of modules.

    Attributes:
        router: the module that chooses a row's experts.
        logits: its linear layer, unless it is one itself.
        scoring: how scores are computed from logits.
        weighs_inputs: as in `Experts`.
        shared: a feed-forward for all rows, parallel to the mixture or in it, if a model has one.
        added: as in `Route`.
        normalized: as in `Route`, unless the router says.
        clamped: whether gates, and what they open, are clamped; the experts say to which bounds.
    """

    router: str = "gate"
    logits: str = ""
    scoring: Scoring = Scoring.OVER_ALL
    weighs_inputs: bool = False
    shared: str = "shared_expert"
    added: float = 1e-20
    normalized: bool = True
    clamped: bool = False


# By class of the mixture, or of a layer with one parallel to a feed-forward; experts' gates are joined with ups.
MIXTURES = {
    "MixtralSparseMoeBlock": Mixture(),
    "Qwen2MoeSparseMoeBlock": Mixture(),
    "Qwen3MoeSparseMoeBlock": Mixture(),
    "Qwen3VLMoeTextSparseMoeBlock": Mixture(),
    "Qwen3NextSparseMoeBlock": Mixture(),
    "Qwen3_5MoeSparseMoeBlock": Mixture(),
    "MellumSparseMoeBlock": Mixture(),
    "FlintSparseMoeBlock": Mixture(scoring=Scoring.SIGMOIDS),
    "FlexOlmoSparseMoeBlock": Mixture(),
    "Ernie4_5_MoeSparseMoeBlock": Mixture(shared="shared_experts"),
    "GraniteMoeSharedMoE": Mixture(router="router", scoring=Scoring.OVER_PICKS, shared="shared_mlp"),
    "Dots1MoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Glm4MoeMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Glm4vMoeTextMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Mistral4MoE": Mixture(shared="shared_experts"),
    "AfmoeSparseMoeBlock": Mixture(router="router", logits="gate", scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "AriaTextMoELayer": Mixture(router="router", scoring=Scoring.OVER_PICKS, shared="shared_experts"),
    "DeepseekV2Moe": Mixture(shared="shared_experts"),
    "DeepseekOcr2TextMoe": Mixture(shared="shared_experts"),
    "DeepseekV3MoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Glm4MoeLiteMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Llama4TextMoe": Mixture(router="router", scoring=Scoring.SIGMOIDS_OF_PICKS, weighs_inputs=True),
    "HunYuanMoEV1Moe": Mixture(logits="wg", shared="shared_mlp"),
    "OlmoeSparseMoeBlock": Mixture(),
    "GraniteMoeMoE": Mixture(router="router", scoring=Scoring.OVER_PICKS),
    "GraniteMoeSWAMoE": Mixture(router="router", scoring=Scoring.OVER_PICKS),
    "ExaoneMoeSparseMoEBlock": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "SolarOpenMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "MiniMaxM2SparseMoeBlock": Mixture(scoring=Scoring.SIGMOIDS),
    "HYV3MoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "GraniteMoeHybridMoE": Mixture(router="router", scoring=Scoring.OVER_PICKS, shared="shared_mlp"),
    "NemotronHMoE": Mixture(scoring=Scoring.SIGMOIDS, shared="shared_experts"),
    "Lfm2MoeSparseMoeBlock": Mixture(scoring=Scoring.SIGMOIDS, added=1e-6),
    "Gemma4TextDecoderLayer": Mixture(router="router", logits="proj"),
    "PhimoeSparseMoeBlock": Mixture(router="router", scoring=Scoring.SPARSE),
    "Cohere2MoeSparseMoeBlock": Mixture(shared="shared_experts"),
    "JambaSparseMoeBlock": Mixture(router="router", normalized=False),
    "GptOssMLP": Mixture(router="router", scoring=Scoring.OVER_PICKS, clamped=True),
}


def experts_of(of: Description, mlp: Any, layer: Any) -> Experts:
    """Describe a mixture of experts, whose module may be the layer itself.

    Raises:
        UnknownError: if its class is unknown, or does not match its traits.
    """
    mixture = MIXTURES.get(type(mlp).__name__)
    if mixture is None:
        raise UnknownError(type(mlp).__name__)
    experts, router, biases, short = mlp.experts, getattr(mlp, mixture.router), None, None
    if is_torch(getattr(mlp, "fc1_latent_proj", None), "Linear"):  # Nemotron H's
        short = of.linear(mlp.fc1_latent_proj), of.linear(mlp.fc2_latent_proj)
    if hasattr(experts, "gate_up_proj_bias"):
        biases = of.array(experts.gate_up_proj_bias), of.array(experts.down_proj_bias)
    shared = None
    beside = next((each for each in (mlp, layer) if getattr(each, mixture.shared, None) is not None), None)
    if beside is not None:
        gate = getattr(beside, f"{mixture.shared}_gate", None)
        shared = of.feed_forward(getattr(beside, mixture.shared)), None if gate is None else of.linear(gate)
    linear, routed = getattr(router, mixture.logits) if mixture.logits else router, None
    if hasattr(router, "scalar_root_size"):  # Gemma 4's
        weight = floats(of.array(router.scale)) * np.float32(router.scalar_root_size)
        routed = Norm(weight, None, router.norm.eps, centred=False)
    bias, gated = getattr(linear, "bias", None), hasattr(experts, "gate_up_proj")
    picks = getattr(router, "top_k", None)
    picks = int(of.config.top_k_experts if picks is None else picks)
    routing = _routing(of, mlp, router, mixture)
    how = {name: value for name, value in routing.items() if not isinstance(value, np.ndarray)}  # may be empty
    logits, routes = Buffer("router", linear.weight.shape[0]), Buffer("routes", 2 * picks)
    for fault in Route(name="", x=logits, to=routes, **how).faults():
        raise UnknownError(fault)
    return Experts(
        router=Linear(of.array(linear.weight), None if bias is None else of.array(bias)),
        up=_weights(of, experts, experts.gate_up_proj if gated else experts.up_proj),
        down=_weights(of, experts, experts.down_proj),
        biases=biases,
        gated=gated,
        interleaved=not getattr(experts, "is_concatenated", True),
        activation=Activation.SILU if mixture.clamped else activation_of(experts),
        limited=(float(experts.limit), float(experts.alpha), 1.0) if mixture.clamped else (0.0, 1.0, 0.0),
        picks=picks,
        routing=routing,
        weighs_inputs=mixture.weighs_inputs,
        shared=shared,
        short=short,
        routed=routed,
        factor=0.5 if shared and getattr(mlp, "shared_expert_combination_strategy", "sum") == "average" else 1.0,
    )


def _weights(of: Description, experts: Any, parameter: nn.Parameter) -> Weight:
    """Return [experts, outputs, inputs], the order that weights in few bits always have."""
    weight = of.weight(parameter)
    if isinstance(weight, np.ndarray) and turned(experts):
        return weight.swapaxes(1, 2)
    return weight


def _routing(of: Description, mlp: Any, router: Any, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of `Route` that describe how a mixture's router chooses.

    Args:
        of: the model.
        mlp: the module.
        router: its router.
        mixture: its traits.

    Raises:
        UnknownError: if it chooses in an unknown way.
    """
    scoring = mixture.scoring
    normalized = bool(getattr(router, "norm_topk_prob", mixture.normalized))
    found: dict[str, Any] = {"scoring": scoring, "normalized": normalized}
    if hasattr(router, "topk_method"):  # DeepSeek V2's
        found |= {"normalized": False, "factor": float(router.routed_scaling_factor)}
        if router.topk_method == "group_limited_greedy":
            return found | {"groups": int(router.num_group), "best_groups": int(router.topk_group)}
        if router.topk_method != "greedy":
            raise UnknownError(f"experts by {router.topk_method}")
        return found
    if scoring == Scoring.SIGMOIDS_OF_PICKS:
        return found | {"normalized": False}
    if scoring == Scoring.SPARSE:
        if router.top_k != 2:  # it always takes 2
            raise UnknownError("sparse mixing of other than two experts")
        return found | {"normalized": False, "spread": 2.0 * router.router_jitter_noise}
    if hasattr(router, "expert_selection_fn"):  # Cohere 2's
        sigmoids = router.expert_selection_fn == "sigmoid"
        how = {"scoring": Scoring.SIGMOIDS, "added": 0.0} if sigmoids else {"scoring": Scoring.OVER_PICKS}
        return found | how | {"normalized": not sigmoids or bool(router.norm_topk_prob)}
    parts = (router, getattr(router, "moe_statics", None), mlp)
    biases = [getattr(part, name, None) for part in parts for name in ("e_score_correction_bias", "expert_bias")]
    bias = next((bias for bias in biases if bias is not None), None)
    if bias is not None:
        numbers = of.array(bias) if is_parameter(bias) else array(bias)
        found |= {"correction": floats(numbers).ravel()}
    if getattr(router, "norm_min", 0.0) > _LEAST_SUM:
        raise UnknownError("a least sum of weights that counts")
    if hasattr(router, "per_expert_scale"):
        found |= {"factors": floats(of.array(router.per_expert_scale))}
    if scoring == Scoring.OVER_PICKS:
        return found
    groups = int(getattr(router, "num_group", 1))
    names = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
    return found | {
        "added": mixture.added,
        "groups": groups,
        "best_groups": int(getattr(router, "topk_group", 1)),
        "of_group": 2 if groups > 1 else 1,
        "factor": float(next((getattr(router, name) for name in names if hasattr(router, name)), 1.0)),
    }
