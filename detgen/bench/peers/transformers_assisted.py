"""transformers' `generate` with `assistant_model`: speculative decoding, one prompt at a time."""

from __future__ import annotations

from detgen.bench.model_source import own_forward
from detgen.bench.peer_interface import Contender, ModelSource
from detgen.bench.peers.transformers_generate import GeneratePeer


class AssistedPeer(GeneratePeer):
    """Runs jobs by `model.generate(assistant_model=...)`, whose batch size is 1."""

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        super().__init__(source, contender, batch_sizes)
        assistant = own_forward(source, "draft")
        assistant.generation_config.eos_token_id = None
        self._options = {"assistant_model": assistant}

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """One where there is a draft model."""
        if not source.has_draft:
            return []
        return [
            Contender(
                "transformers-assisted", "generate", source.plain_precision, "transformers-assisted", most_batch=1
            )
        ]
