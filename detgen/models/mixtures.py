"""Mixtures of experts, a row of traits for each class of them that transformers has."""

from __future__ import annotations

from typing import NamedTuple

from detgen.program.operands import Scoring


class Mixture(NamedTuple):
    """The traits of a mixture; names are those of modules.

    Attributes:
        router: gives the experts of a row.
        logits: its linear layer, if it is none itself.
        scoring: what it makes of logits.
        weighs_inputs: see `Experts`.
        shared: a feed-forward that all rows take, as far as a model has one.
        clamped: whether gates are clamped, and what they open; the experts say how far.
    """

    router: str = "gate"
    logits: str = ""
    scoring: Scoring = Scoring.OVER_ALL
    weighs_inputs: bool = False
    shared: str = "shared_expert"
    clamped: bool = False


# By the classes of mixtures, whose experts have joined gates.
MIXTURES = {
    "MixtralSparseMoeBlock": Mixture(),
    "Qwen2MoeSparseMoeBlock": Mixture(),
    "Qwen3MoeSparseMoeBlock": Mixture(),
    "Qwen3NextSparseMoeBlock": Mixture(),
    "Qwen3_5MoeSparseMoeBlock": Mixture(),
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
    "GptOssMLP": Mixture(router="router", scoring=Scoring.OVER_PICKS, clamped=True),
}
