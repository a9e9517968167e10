"""T and C of a thinking model: packed passes of one layer, in addition to those of its backbone.

T writes thoughts about chunks of hidden states, C turns them into the states of the next chunks (Amos et al., arXiv
2602.08332, section 3). Each is run as an ordinary decoder of one layer, with a KV cache of its own. Knows no sequences:
the caller decides what is thought about and where states go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from detgen.kernels.exchange import Exchange
from detgen.kernels.input_batch import MOST_ROWS, Windows
from detgen.kernels.sampling import choose
from detgen.program.arrays import array, tensor
from detgen.runner.block_manager import PAGE
from detgen.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from detgen.thinking.configuration import ThinkingStatesConfig
    from detgen.thinking.modeling import ThinkingStatesForCausalLM

Thought = tuple[int, ...]  # token ids without the end; () for none

NO_TOKEN = -1  # in a window of T: a row that is a hidden state, given as a state
SLOTS = 256  # chunks or thoughts that share passes, a page each
_REMEMBERED = 4096  # most remembered states
_MEMORY = 64 << 20  # most bytes of remembered states


class Block(NamedTuple):
    """T or C.

    Attributes:
        runner: runs its passes.
    """

    runner: ModelRunner

    def run(self, windows: Windows, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits that windows want, in as few passes as possible.

        Args:
            windows: any number of rows, at most one window per slot.
            rows: what each row reads besides its token's embedding, float32 [rows, hidden]; None for nothing.

        Returns:
            float32 [sum of the windows' `logits`, vocabulary]; hidden states for C.
        """
        found, first = [], 0
        for part in _parts(windows, MOST_ROWS):
            last = first + len(part.tokens)
            exchange = None if rows is None else Exchange(0, -1, rows[first:last])
            found.append(tensor(self.runner.run(part, exchange=exchange)))
            first = last
        return found[0] if len(found) == 1 else torch.cat(found)


def _parts(windows: Windows, most: int) -> Iterator[Windows]:
    """Yield the same rows in the same order, at most `most` per pass; a window may continue in the next pass."""
    if len(windows.tokens) <= most:
        yield windows
        return
    ends = np.cumsum(windows.lengths)
    begins, asked = ends - windows.lengths, ends - windows.logits
    for first in range(0, len(windows.tokens), most):
        last = min(first + most, len(windows.tokens))
        some = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(begins, last, "left")))
        begin, end = np.maximum(begins[some], first), np.minimum(ends[some], last)
        starts = windows.starts[some] + begin - begins[some]
        logits = np.maximum(end - np.maximum(begin, asked[some]), 0)
        yield Windows(windows.slots[some], starts, end - begin, logits, windows.tokens[first:last])


class _Embedding(nn.Module):
    """The backbone's embeddings, zeros for `NO_TOKEN`; changes to the backbone's module leave this one alone."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up int64 [...] -> [..., hidden]."""
        return F.embedding(ids.clamp(min=0), self.weight).masked_fill((ids < 0)[..., None], 0)


def one_layer(model: ThinkingStatesForCausalLM, block: Any) -> PreTrainedModel:
    """Return T or C as a transformers decoder of one layer; C, without norm and output layer, gives hidden states.

    Args:
        model: the thinking model.
        block: its `thinker` or its `compressor`, whose parts the decoder takes over.
    """
    from transformers import AutoModelForCausalLM

    backbone: Any = model.backbone
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(model.config.block())
    made.model.embed_tokens = _Embedding(backbone.get_input_embeddings().weight)
    made.model.rotary_emb = backbone.model.rotary_emb
    made.model.layers[0] = block.layer
    made.model.norm = getattr(block, "norm", nn.Identity())
    made.lm_head = getattr(block, "head", nn.Identity())
    block.layer.self_attn.config = made.config  # this names the attention function
    for name, _ in list(block.named_children()):
        setattr(block, name, nn.Identity())
    decoder: PreTrainedModel = made.eval()
    return decoder


class Thinker:
    """T and C of a thinking model; one thread at a time may use them.

    Args:
        config: the model's configuration.
        writer: T.
        compressor: C.

    Attributes:
        chunk: tokens of a chunk.
        hidden: entries of a hidden state.
        most: most tokens of a thought.
        keeps: whether an empty thought leaves the state as it was; otherwise it leaves zeros.
        inject: layer to whose input states are added.
        extract: layer whose input T reads, counted from the first.
        writer: T.
        compressor: C.
    """

    def __init__(self, config: ThinkingStatesConfig, writer: Block, compressor: Block) -> None:
        self.chunk = config.chunk_size
        self.hidden = int(config.backbone.hidden_size)
        self.most = config.max_thought_tokens
        self.keeps = config.empty_state == "keep"
        self.inject, self.extract = config.inject_layer, config.extract_index
        self.writer, self.compressor = writer, compressor
        self._end = config.thought_end
        self._device = str(writer.runner.device)
        self._states: OrderedDict[Thought, torch.Tensor] = OrderedDict()  # least recently used first
        self._kept = max(min(_REMEMBERED, _MEMORY // (4 * self.chunk * self.hidden)), 1)
        for block in (writer, compressor):
            block.runner.cache.pages.lay_out(SLOTS, PAGE)  # for good: no row sees what another chunk left after it

    def think(self, chunks: torch.Tensor, owners: np.ndarray) -> list[Thought | None]:
        """Return T's thoughts about chunks: greedy, ties go to the lowest id.

        The first token is computed for all chunks, and the rest only for the first chunk of each owner that thinks:
        later chunks were read with another state than this thought gives.

        Args:
            chunks: float32 [chunks, chunk, hidden], the hidden states of each chunk's rows.
            owners: int64 [chunks], owner of each chunk; chunks of an owner are in the order of its text.

        Returns:
            The thought about each chunk; None for chunks after the first of their owner that thinks. A thought ends
            where its logits are not finite.
        """
        found: list[Thought | None] = [None] * len(owners)
        pending = np.arange(len(owners))
        while len(pending):
            some, pending = pending[:SLOTS], pending[SLOTS:]
            at = torch.from_numpy(some).to(chunks.device)
            firsts = self._begin(chunks.index_select(0, at))
            writing: dict[int, int] = {}  # by owner: the slot of its first chunk that thinks
            for slot, (i, first) in enumerate(zip(some.tolist(), firsts, strict=True)):
                if (owner := int(owners[i])) in writing:
                    continue
                if first == self._end:
                    found[i] = ()
                else:
                    writing[owner] = slot
            slots = list(writing.values())
            for slot, thought in zip(slots, self._write(slots, [firsts[s] for s in slots]), strict=True):
                found[int(some[slot])] = thought
            pending = pending[~np.isin(owners[pending], list(writing))]
        return found

    def _begin(self, chunks: torch.Tensor) -> list[int]:
        """Return the first token about each chunk, [chunks, chunk, hidden]; the chunks take the first slots."""
        count = len(chunks)
        slots, ones = np.arange(count), np.ones(count, dtype=np.int64)
        tokens = np.full(count * self.chunk, NO_TOKEN)
        windows = Windows(slots, 0 * ones, self.chunk * ones, ones, tokens)
        return self._best(windows, chunks.reshape(-1, self.hidden))

    def _write(self, slots: list[int], firsts: list[int]) -> list[Thought]:
        """Return the thoughts in these slots, which begin with these tokens."""
        thoughts = [[token] for token in firsts]
        live = list(range(len(slots)))
        for at in range(self.chunk, self.chunk + self.most - 1):
            if not live:
                break
            tokens = np.array([thoughts[i][-1] for i in live])
            ones = np.ones(len(live), dtype=np.int64)
            found = self._best(Windows(np.array([slots[i] for i in live]), at * ones, ones, ones, tokens))
            going = [(i, token) for i, token in zip(live, found, strict=True) if token != self._end]
            for i, token in going:
                thoughts[i].append(token)
            live = [i for i, _ in going]
        return [tuple(thought) for thought in thoughts]

    def _best(self, windows: Windows, rows: torch.Tensor | None = None) -> list[int]:
        """Return the token after each window of T, or the end token if the logits are not finite."""
        logits = self.writer.run(windows, rows)
        finite = array(logits.amax(-1).isfinite())
        tokens: list[int] = np.where(finite, array(choose(logits, None).tokens), self._end).tolist()
        return tokens

    def state(self, thought: Thought) -> torch.Tensor:
        """Return the state that a thought gives; zeros for an empty one. See `states`."""
        return self.states([thought])[0]

    def states(self, thoughts: Sequence[Thought]) -> list[torch.Tensor]:
        """Return the states that thoughts give; those not remembered are computed in as few passes as possible.

        Args:
            thoughts: at most `most` tokens each.

        Returns:
            float32 [chunk, hidden] each, not to be changed: C's last outputs over the thought and its end, at the end
            of the chunk, after zeros if there are fewer. Zeros for an empty thought.
        """
        made: dict[Thought, torch.Tensor] = {(): torch.zeros(self.chunk, self.hidden, device=self._device)}
        missing = [thought for thought in dict.fromkeys(thoughts) if thought and thought not in self._states]
        for first in range(0, len(missing), SLOTS):
            some = missing[first : first + SLOTS]
            made |= zip(some, self._compress(some), strict=True)
        for thought in dict.fromkeys(thoughts):
            if thought in self._states:
                self._states.move_to_end(thought)
                made[thought] = self._states[thought]
            elif thought:
                self._states[thought] = made[thought]
        while len(self._states) > self._kept:
            self._states.popitem(last=False)
        return [made[thought] for thought in thoughts]

    def _compress(self, thoughts: list[Thought]) -> list[torch.Tensor]:
        """Compute the states that C gives for thoughts."""
        lengths = np.array([len(thought) + 1 for thought in thoughts])
        last = np.minimum(lengths, self.chunk)
        tokens = np.array([token for thought in thoughts for token in (*thought, self._end)])
        out = self.compressor.run(Windows(np.arange(len(thoughts)), 0 * lengths, lengths, last, tokens))
        return [F.pad(rows, (0, 0, self.chunk - len(rows), 0)) for rows in out.split(last.tolist())]
