"""llama.cpp through llama-cpp-python: its batched decoding, driven as its server does, with continuous batching.

The model is converted to a GGUF file on the fly. Keys and values are cached in float32 beside float32 weights, and in
llama.cpp's default, float16, beside q8_0 ones.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from detgen.bench.interface import Job, ModelSource, Outcome, Variant
from detgen.bench.peers.clock import Clock

_KEPT: list[object] = []  # a callback must live as long as the library
_ROWS = 512  # tokens a call
_QUANTIZED = {"q8_0": "Q8_0"}


class LlamaCppPeer:
    """Runs jobs by `llama_decode`."""

    name = "llama.cpp"
    packages = ("llama-cpp-python", "gguf")

    def variants(self, source: ModelSource) -> list[Variant]:
        """float32 and q8_0, each in a process of its own."""
        if source.target_quant != "none":
            return []
        return [Variant("f32", "float32", "llama.cpp-f32"), Variant("q8_0", "q8_0", "llama.cpp-q8_0")]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Convert and load the model."""
        import llama_cpp

        from detgen.bench.peers.gguf_file import write_gguf

        _KEPT.append(llama_cpp.llama_log_callback(_ignore))  # it tells every tensor
        llama_cpp.llama_log_set(_KEPT[-1], ctypes.c_void_p(0))
        path = source.scratch / f"target-{variant.name}.gguf"
        write_gguf(source, path, _QUANTIZED.get(variant.name))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1 if source.device.startswith("cuda") else 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the converted model")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        slots = max(batch_sizes)
        context = llama_cpp.llama_context_default_params()
        context.n_seq_max = slots
        context.n_ctx = slots * (-(-source.positions // 256) * 256)
        context.n_batch = context.n_ubatch = _ROWS
        context.n_threads = context.n_threads_batch = source.threads
        if variant.name == "f32":
            context.type_k = context.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of this size")
        self._batch = llama_cpp.llama_batch_init(_ROWS, 0, 1)

    def run(self, variant: Variant, job: Job) -> Outcome:
        """All prompts, at most a batch of them at a time; a free place is taken at once."""
        import llama_cpp

        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, False)
        waiting = list(range(len(job.prompts)))[::-1]
        live: dict[int, _Live] = {}
        tokens: list[list[int]] = [[] for _ in job.prompts]
        passes = 0
        clock = Clock(job)
        while waiting or live:
            for place in range(job.batch_size):
                if waiting and place not in live:
                    index = waiting.pop()
                    live[place] = _Live(index, list(job.prompts[index].tokens), 0)
            wanted = self._fill(live)
            if llama_cpp.llama_decode(self._context, self._batch) != 0:
                raise RuntimeError("llama_decode failed")
            passes += 1
            for place, row in wanted:
                seq = live[place]
                token = self._argmax(row)
                tokens[seq.number].append(token)
                clock.tokens(seq.number, 1)
                if len(tokens[seq.number]) == job.prompts[seq.number].output:
                    llama_cpp.llama_memory_seq_rm(memory, place, -1, -1)
                    del live[place]
                else:
                    live[place] = seq._replace(tokens=[token])
        return clock.outcome(tokens, passes)

    def _fill(self, live: dict[int, _Live]) -> list[tuple[int, int]]:
        """Put tokens to be read into the batch; the places whose next token it gives, and their rows."""
        batch, row = self._batch, 0
        wanted = []
        # Those that decode have one token each, so they go first and prompts take what is left.
        for place, seq in sorted(live.items(), key=lambda item: len(item[1].tokens)):
            part = seq.tokens[: _ROWS - row]
            for i, token in enumerate(part):
                batch.token[row], batch.pos[row] = token, seq.at + i
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, place, 0
                row += 1
            if part and len(part) == len(seq.tokens):
                batch.logits[row - 1] = 1
                wanted.append((place, row - 1))
            live[place] = seq._replace(tokens=seq.tokens[len(part) :], at=seq.at + len(part))
        batch.n_tokens = row
        return wanted

    def _argmax(self, row: int) -> int:
        import llama_cpp
        import numpy as np

        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        values = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))
        return int(values.argmax())


def _ignore(level: int, text: bytes, data: object) -> None:
    pass


class _Live(NamedTuple):
    """A prompt that has a place: its number, the tokens that are still to be read, and the position of the first."""

    number: int
    tokens: list[int]
    at: int
