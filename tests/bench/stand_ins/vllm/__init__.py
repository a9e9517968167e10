"""What its peer asks of vLLM: an engine that continues a prompt by its last token, and dies of token 0."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

EngineArgs = SamplingParams = SimpleNamespace


class LLMEngine:
    """Its steps give the tokens of the pass before: the first one gives none."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.live: dict[str, Any] = {}
        self.ahead: list[str] = []

    @classmethod
    def from_engine_args(cls, arguments: Any, usage_context: str) -> LLMEngine:
        assert usage_context == "offline"
        return cls(arguments)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.live[name] = SimpleNamespace(token=prompt["prompt_token_ids"][-1], left=params.max_tokens)
        if not self.live[name].token:
            os._exit(3)

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Any]:
        due, self.ahead = [n for n in self.ahead if n in self.live], list(self.live)
        outputs = []
        for name in due:
            request = self.live[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[request.token])]))
            request.left -= 1
            if not request.left:
                del self.live[name]
        return outputs
