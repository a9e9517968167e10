"""The configuration of a Thinking States model: its backbone, and how it thinks."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

BACKBONES = ("llama", "mistral", "qwen2", "qwen3")
EMPTY_STATES = ("keep", "zero")
PAGE = 64  # positions in a page of detgen's KV cache; T's rows of a chunk must fit one


class ThinkingStatesConfig(PreTrainedConfig):
    """How a decoder reads in chunks, thinks after each and adds the thought's state to the next chunk's rows.

    Attributes:
        backbone: configuration of the decoder that reads: Llama, Mistral, Qwen2 or Qwen3.
        chunk_size: tokens of a chunk (c).
        inject_layer: layer to whose input the state is added; 0 is the embeddings.
        extract_layer: layer whose input T reads, after the addition if it is the same layer; negative numbers count
            from the last. It must not be below `inject_layer`, or T would read no state.
        max_thought_tokens: most tokens of a thought, without its end.
        empty_state: the state after an empty thought: "keep" leaves it as it was, "zero" is the paper's.
        initializer_range: standard deviation of new weights, the backbone's.
    """

    model_type = "thinking_states"
    sub_configs: ClassVar[dict[str, Any]] = {"backbone": AutoConfig}

    def __init__(
        self,
        backbone: PreTrainedConfig | dict[str, Any] | None = None,
        chunk_size: int = 4,
        inject_layer: int = 1,
        extract_layer: int = -1,
        max_thought_tokens: int = 7,
        empty_state: str = "keep",
        **kwargs: Any,
    ) -> None:
        """Take the settings; those common to all transformers models may follow by name.

        Raises:
            ValueError: if they do not fit together; the message names the setting and its allowed values.
        """
        self.backbone = _backbone(backbone)
        self.chunk_size = chunk_size
        self.inject_layer = inject_layer
        self.extract_layer = extract_layer
        self.max_thought_tokens = max_thought_tokens
        self.empty_state = empty_state
        self.initializer_range = getattr(self.backbone, "initializer_range", 0.02)
        kwargs = {"eos_token_id": self.backbone.eos_token_id, **kwargs}
        kwargs["tie_word_embeddings"] = getattr(self.backbone, "tie_word_embeddings", False)
        super().__init__(**kwargs)
        self._check()

    def _check(self) -> None:
        layers = self.backbone.num_hidden_layers
        _check_range("chunk_size", self.chunk_size, 1, PAGE - 1)
        _check_range("max_thought_tokens", self.max_thought_tokens, 1, None)
        if self.chunk_size + self.max_thought_tokens > PAGE:
            raise ValueError(
                f"chunk_size + max_thought_tokens must be at most {PAGE}, a page of the KV cache: got {self.chunk_size}"
                f" + {self.max_thought_tokens}; shorten the thoughts to {PAGE - self.chunk_size} tokens"
            )
        _check_range("inject_layer", self.inject_layer, 0, layers - 1)
        _check_range("extract_layer", self.extract_layer, -layers, layers - 1)
        if self.extract_index < self.inject_layer:
            raise ValueError(
                f"extract_layer must not lie below inject_layer, or T reads no state: got extract_layer"
                f" {self.extract_layer} and inject_layer {self.inject_layer} of {layers} layers"
            )
        if not 0 <= self.thought_end < self.backbone.vocab_size:
            raise ValueError(
                f"eos_token_id of the backbone must be below its vocab_size, {self.backbone.vocab_size}: it ends a"
                f" thought; got {self.thought_end}"
            )
        if self.empty_state not in EMPTY_STATES:
            raise ValueError(f"empty_state must be {' or '.join(EMPTY_STATES)}, got {self.empty_state!r}")

    @property
    def extract_index(self) -> int:
        """`extract_layer` as an index from the first layer."""
        return int(self.extract_layer % self.backbone.num_hidden_layers)

    @property
    def thought_end(self) -> int:
        """Token that ends a thought: the backbone's end of sequence, the first of several."""
        ends = self.backbone.eos_token_id
        return int(ends[0] if isinstance(ends, list) else ends)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the backbone's configuration, which has the vocabulary and the context."""
        return self.backbone

    def block(self) -> PreTrainedConfig:
        """Return the configuration of T's and C's layer: the backbone's, with one layer of full attention."""
        block = copy.deepcopy(self.backbone)
        block.num_hidden_layers = 1
        for name, value in {
            "sliding_window": None,
            "use_sliding_window": False,
            "layer_types": ["full_attention"],
        }.items():
            if hasattr(block, name):
                setattr(block, name, value)
        return block


def _backbone(given: Any) -> PreTrainedConfig:
    """Return the configuration of the backbone, of a supported kind.

    Raises:
        ValueError: if it is of another kind, or has no end of sequence.
    """
    kinds = f"{', '.join(BACKBONES[:-1])} or {BACKBONES[-1]}"
    if given is None:
        given = {"model_type": "mistral", "eos_token_id": 2}
    settings = dict(given) if isinstance(given, dict) else {"model_type": getattr(given, "model_type", None)}
    kind = settings.pop("model_type", None)
    if kind not in BACKBONES:
        raise ValueError(f"the backbone must be a {kinds} decoder, got model_type {kind!r}: use one of these")
    backbone = AutoConfig.for_model(kind, **settings) if isinstance(given, dict) else given
    if backbone.eos_token_id is None or backbone.eos_token_id == []:
        raise ValueError("the backbone has no eos_token_id, which ends a thought: add it to the backbone's settings")
    return backbone


def _check_range(name: str, value: Any, low: int, high: int | None) -> None:
    """Raise ValueError unless the setting is a whole number from low to high; None for high means no bound."""
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be a whole number {bounds}, got {value!r}")
