"""Thinking States models: a decoder, a block T that writes thoughts, and a block C that turns them into states.

"Latent Reasoning with Supervised Thinking States" (Amos et al., arXiv 2602.08332), section 3. The input is read in
chunks of c tokens. After each full chunk T writes a short thought, C turns it into c state vectors, and these are
added to the next chunk's rows at the input of one layer. Thoughts never enter the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from detgen.thinking.configuration import ThinkingStatesConfig

Thought = tuple[int, ...]  # token ids without the end; () for none
IGNORED = -100  # in labels and thoughts: no target here


@dataclass
class ThinkingStatesOutput(ModelOutput):
    """The result of `forward`.

    Attributes:
        loss: sum of the losses of labels and thoughts; None without labels or gold thoughts.
        logits: [batch, tokens, vocabulary].
        thought_loss: mean cross-entropy over tokens and ends of the gold thoughts.
        thought_logits: [batch, chunks, width, vocabulary], with gold thoughts.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    thought_loss: torch.Tensor | None = None
    thought_logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """The result of `read`.

    Attributes:
        tokens: ids that were read, and those that were generated.
        logits: [tokens, vocabulary], of every token that was read; the last generated one was not.
        thoughts: thought of each full chunk that was read.
        states: [full chunks + 1, c, hidden]; state of each full chunk that was read, and the one after the last.
    """

    tokens: list[int]
    logits: torch.Tensor
    thoughts: list[Thought]
    states: torch.Tensor


class Thinker(nn.Module):
    """T: writes a thought about a chunk from the chunk's c hidden states.

    Attributes:
        layer: one decoder layer of the backbone's kind.
        norm: norm before the output layer.
        head: output layer, hidden size to vocabulary.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.layer, self.norm, self.head = layer, norm, head


class Compressor(nn.Module):
    """C: turns a thought into states.

    Attributes:
        layer: one decoder layer of the backbone's kind.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class ThinkingStatesForCausalLM(PreTrainedModel):
    """A decoder that thinks after each chunk of its input.

    T reads the input of layer `extract_index` at positions 0 to c - 1; its output at position c - 1 predicts the first
    token of the thought, whose embeddings follow at c, c + 1, ... The state is added to the input of layer
    `inject_layer`; if T reads the input of the same layer, it reads it after the addition. C reads the thought and its
    end at positions 0, 1, ...; its last c outputs are the state, aligned to the end of the chunk, with zeros before
    them. T and C use the backbone's rotary embedding, and attend to all rows up to their own.

    Attributes:
        backbone: transformers' decoder with its output layer.
        thinker: T.
        compressor: C.
    """

    config_class = ThinkingStatesConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ThinkingStatesConfig) -> None:
        super().__init__(config)
        self.backbone = AutoModelForCausalLM.from_config(config.backbone)
        inner, block = self.backbone.model, config.block()
        layer, norm = type(inner.layers[0]), type(inner.norm)
        head = nn.Linear(block.hidden_size, block.vocab_size, bias=False)
        self.thinker = Thinker(layer(block, 0), norm(block.hidden_size, eps=block.rms_norm_eps), head)
        self.compressor = Compressor(layer(block, 0))
        self.set_attn_implementation(self.backbone.config._attn_implementation)
        self.post_init()

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Set the attention function of the backbone's layers, T and C; arguments as in transformers."""
        super().set_attn_implementation(*args, **kwargs)
        chosen = self.backbone.config._attn_implementation
        layers: tuple[Any, ...] = (self.thinker.layer, self.compressor.layer)
        for layer in layers:
            layer.self_attn.config._attn_implementation = chosen

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's embeddings, which T and C share."""
        embeddings: nn.Module = self.backbone.get_input_embeddings()
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the backbone's embeddings."""
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the backbone's output layer."""
        head: nn.Module = self.backbone.get_output_embeddings()
        return head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the backbone's output layer."""
        self.backbone.set_output_embeddings(value)

    def decode(
        self, ids: torch.Tensor, states: torch.Tensor | None = None, cache: Any = None, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the backbone.

        Args:
            ids: int64 [batch, rows], at positions `first` and after.
            states: [batch, rows, hidden]; None for zeros.
            cache: a `DynamicCache` of the positions before, which is extended; None without one.
            first: position of the first row.

        Returns:
            Logits [batch, rows, vocabulary], and the hidden states that T reads [batch, rows, hidden].
        """
        inner = self.backbone.model
        x = extracted = inner.embed_tokens(ids)
        for i, layer in enumerate(inner.layers):
            if i == self.config.inject_layer and states is not None:
                x = x + states
            if i == self.config.extract_index:
                extracted = x
            x = self._layer(layer, x, cache, first)
        return self.backbone.lm_head(inner.norm(x)), extracted

    def _layer(self, layer: Any, x: torch.Tensor, cache: Any = None, first: int = 0) -> torch.Tensor:
        """Run a decoder layer over rows [batch, rows, hidden] from a position on; causal, within the layer's window."""
        end = first + x.shape[1]
        keys = x.shape[1] + (cache.get_seq_length(layer.self_attn.layer_idx) if cache is not None else 0)
        positions = torch.arange(first, end, device=x.device)
        back = positions[:, None] - torch.arange(end - keys, end, device=x.device)
        window = getattr(layer.self_attn, "sliding_window", getattr(layer.self_attn.config, "sliding_window", None))
        seen = (back >= 0) & (back < (window or end))
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
        turns = self.backbone.model.rotary_emb(x, positions[None])
        out: torch.Tensor = layer(
            x,
            attention_mask=mask[None, None],
            position_embeddings=turns,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out

    @torch.no_grad()
    def think(self, hidden: torch.Tensor) -> list[Thought]:
        """Return the thoughts about some chunks: greedy, ties go to the lowest id.

        Args:
            hidden: [chunks, c, hidden], which T reads.
        """
        thoughts: list[list[int]] = [[] for _ in hidden]
        cache, first, rows, live = DynamicCache(), 0, hidden, list(range(len(hidden)))
        while True:
            out = self._layer(self.thinker.layer, rows, cache, first)
            first += rows.shape[1]
            tokens = self.thinker.head(self.thinker.norm(out[:, -1])).argmax(-1)
            going = []
            for i, (chunk, token) in enumerate(zip(live, tokens.tolist(), strict=True)):
                if token != self.config.thought_end:
                    thoughts[chunk].append(token)
                    going += [i] if len(thoughts[chunk]) < self.config.max_thought_tokens else []
            if not going:
                return [tuple(thought) for thought in thoughts]
            live = [live[i] for i in going]
            kept = torch.tensor(going, device=hidden.device)
            cache.batch_select_indices(kept)
            rows = self.get_input_embeddings()(tokens[kept])[:, None]

    def compress(self, thoughts: Sequence[Thought]) -> torch.Tensor:
        """Return the states of some thoughts, [thoughts, c, hidden]; for an empty thought, from its end alone."""
        end, longest = self.config.thought_end, max(map(len, thoughts)) + 1
        ids = torch.tensor([[*t, *[end] * (longest - len(t))] for t in thoughts], device=self.device)
        return self._compressed(ids, torch.tensor([len(t) + 1 for t in thoughts], device=self.device))

    def _compressed(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return C's last c outputs [n, c, hidden] over ids [n, width], of which the first `lengths` [n] count."""
        out, c = self._layer(self.compressor.layer, self.get_input_embeddings()(ids)), self.config.chunk_size
        at = torch.arange(c, device=ids.device) - c + lengths[:, None]
        last = out.gather(1, at.clamp(0, ids.shape[1] - 1)[..., None].expand(-1, -1, out.shape[-1]))
        states: torch.Tensor = last * (at >= 0)[..., None]
        return states

    def next_state(self, thought: Thought, state: torch.Tensor) -> torch.Tensor:
        """Return the state [c, hidden] after a chunk that had `state` and thought `thought`."""
        if thought:
            return self.compress([thought])[0]
        return state if self.config.empty_state == "keep" else torch.zeros_like(state)

    @torch.no_grad()
    def read(self, input_ids: Sequence[int] | torch.Tensor, new_tokens: int = 0) -> Reading:
        """Read one sequence chunk by chunk, and generate greedily; the plain algorithm.

        Args:
            input_ids: [tokens], at least one.
            new_tokens: most tokens to generate; fewer if the sequence ends.
        """
        tokens, c = torch.as_tensor(input_ids).flatten().tolist(), self.config.chunk_size
        most, cache, done = len(tokens) + new_tokens, DynamicCache(), 0
        states = [torch.zeros(c, self.config.backbone.hidden_size, dtype=self.dtype, device=self.device)]
        logits: list[torch.Tensor] = []
        hidden: list[torch.Tensor] = []
        thoughts: list[Thought] = []
        while done < len(tokens):
            at, end = done % c, min(done - done % c + c, len(tokens))
            ids = torch.tensor([tokens[done:end]], device=self.device)
            out, extracted = self.decode(ids, states[-1][None, at : at + end - done], cache, done)
            logits.append(out[0])
            hidden.append(extracted[0])
            done = end
            if done % c == 0:
                thoughts += self.think(torch.cat(hidden)[None])
                states.append(self.next_state(thoughts[-1], states[-1]))
                hidden = []
            if done == len(tokens) < most:
                tokens.append(int(out[0, -1].argmax()))
                if len(tokens) == most or tokens[-1] == self.config.thought_end:
                    break
        return Reading(tokens, torch.cat(logits), thoughts, torch.stack(states))

    def forward(
        self,
        input_ids: torch.Tensor,
        thoughts: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **_: Any,
    ) -> ThinkingStatesOutput:
        """Read a batch with its gold thoughts, all chunks at once; without them, each sequence by `read`.

        Args:
            input_ids: int64 [batch, tokens], padded at the end.
            thoughts: int64 [batch, full chunks, width]: the tokens of each chunk's gold thought and its end, then -100;
                only -100 if there is no such chunk.
            labels: int64 [batch, tokens]: token ids to learn, -100 elsewhere. Logits predict the next token.

        Raises:
            ValueError: if there are not as many thoughts as full chunks.
        """
        if thoughts is None:
            return ThinkingStatesOutput(logits=torch.stack([self.read(row).logits for row in input_ids]))
        chunks, c = input_ids.shape[1] // self.config.chunk_size, self.config.chunk_size
        if thoughts.shape[:2] != (len(input_ids), chunks):
            raise ValueError(f"thoughts must be [{len(input_ids)}, {chunks}, width], got {list(thoughts.shape)}")
        logits, extracted = self.decode(input_ids, self._gold_states(thoughts)[:, : input_ids.shape[1]])
        said = self._said(extracted[:, : chunks * c], thoughts)
        thought_loss = _mean_loss(said, thoughts)
        loss = None if labels is None else _mean_loss(logits[:, :-1], labels[:, 1:]) + thought_loss
        return ThinkingStatesOutput(loss, logits, thought_loss, said)

    def _gold_states(self, thoughts: torch.Tensor) -> torch.Tensor:
        """Return the states [batch, c * (full chunks + 1), hidden] of all rows from gold thoughts as in `forward`."""
        c, (batch, chunks, _) = self.config.chunk_size, thoughts.shape
        made = torch.zeros(batch, chunks + 1, c, self.config.backbone.hidden_size, dtype=self.dtype, device=self.device)
        lengths = F.pad((thoughts != IGNORED).sum(-1), (1, 0))
        if (lengths > 1).any():
            ids = F.pad(thoughts, (0, 0, 1, 0)).clamp(min=0)
            made[lengths > 1] = self._compressed(ids[lengths > 1], lengths[lengths > 1])
        if self.config.empty_state == "keep":
            last = torch.arange(chunks + 1, device=self.device).where(lengths > 1, 0).cummax(1).values
            made = made.gather(1, last[..., None, None].expand_as(made))
        return made.flatten(1, 2)

    def _said(self, hidden: torch.Tensor, thoughts: torch.Tensor) -> torch.Tensor:
        """Return T's logits [batch, chunks, width, vocabulary] of the tokens of gold thoughts, given those before."""
        c, lengths = self.config.chunk_size, (thoughts != IGNORED).sum(-1)
        said = hidden.new_zeros(*thoughts.shape, self.config.backbone.vocab_size)
        for some in (lengths == 1, lengths > 1):  # most are empty, and cost less apart
            if some.any():
                gold = thoughts[some][:, : int(lengths[some].max())]
                before = self.get_input_embeddings()(gold[:, :-1].clamp(min=0))
                rows = torch.cat([hidden.unflatten(1, (-1, c))[some], before], 1)
                out = self._layer(self.thinker.layer, rows)[:, c - 1 :]
                said[..., : gold.shape[1], :][some] = self.thinker.head(self.thinker.norm(out))
        return said


def _mean_loss(logits: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of gold ids [...] by logits [..., vocabulary]; 0 if all are ignored."""
    loss = F.cross_entropy(logits.flatten(0, -2), gold.flatten(), ignore_index=IGNORED, reduction="sum")
    mean: torch.Tensor = loss / (gold != IGNORED).sum().clamp(min=1)
    return mean
