"""llama.cpp through llama-cpp-python: its batched decoding, driven like its server, with continuous batching.

The model is converted to a GGUF file first. Keys and values are cached in float32 with float32 weights, and in
llama.cpp's default, float16, with quantized ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import NamedTuple

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import run_stepwise

_KEPT: list[object] = []  # a callback must live as long as the library
_ROWS = 512  # tokens per call


class LlamaCppPeer:
    """Runs jobs by `llama_decode`."""

    packages = ("llama-cpp-python", "gguf", "torch", "transformers")

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        import llama_cpp
        import torch
        from transformers import AutoModelForCausalLM

        from detgen.bench.peers.gguf_file import write_gguf

        _KEPT.append(llama_cpp.llama_log_callback(_ignore))  # it would log every tensor
        llama_cpp.llama_log_set(_KEPT[-1], ctypes.c_void_p(0))
        path = source.scratch / f"target-{contender.name}.gguf"
        few = contender.name == "q4_k_m"  # only llama.cpp itself writes it
        kind = "F32" if few else contender.name.upper()
        model = AutoModelForCausalLM.from_pretrained(
            source.engine.target, dtype=torch.float32, trust_remote_code=source.engine.trust_remote_code
        )
        write_gguf(model, path, lambda _: kind)
        if few:
            whole = path.rename(path.with_suffix(".f32"))
            how = llama_cpp.llama_model_quantize_default_params()
            how.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
            if llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), ctypes.byref(how)):
                raise RuntimeError("llama.cpp cannot quantize the converted model")
            whole.unlink()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1 if source.on_gpu else 0
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
        if contender.name == "f32":
            context.type_k = context.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of this size")
        self._batch = llama_cpp.llama_batch_init(_ROWS, 0, 1)
        self._live: dict[int, _Live] = {}

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return float32, q8_0 and Q4_K_M, each in its own process; one alike if detgen's weights are quantized."""
        names = {"none": ("f32", "q8_0", "q4_k_m"), "q8": ("q8_0",), "q4": ("q4_0",)}.get(
            source.engine.target_quant, ()
        )
        return [
            Contender("llama.cpp", n, "float32" if n == "f32" else n, f"llama.cpp-{n}", fewer_bits=n != "f32")
            for n in names
        ]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run all prompts, at most a batch of them at a time."""
        import llama_cpp

        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, False)
        self._live.clear()

        def submit(index: int) -> None:
            taken = {seq.place for seq in self._live.values()}
            place = next(i for i in range(job.batch_size) if i not in taken)
            self._live[index] = _Live(place, list(job.prompts[index].tokens), 0, job.prompts[index].output)

        def step(live: Collection[int]) -> dict[int, list[int]]:
            wanted = self._fill()
            if llama_cpp.llama_decode(self._context, self._batch) != 0:
                raise RuntimeError("llama_decode failed")
            made = {}
            for index, row in wanted:
                seq, token = self._live[index], self._argmax(row)
                made[index] = [token]
                if seq.wanted == 1:
                    llama_cpp.llama_memory_seq_rm(memory, seq.place, -1, -1)
                    del self._live[index]
                else:
                    self._live[index] = seq._replace(tokens=[token], wanted=seq.wanted - 1)
            return made

        return run_stepwise(job, submit, step)

    def _fill(self) -> list[tuple[int, int]]:
        """Fill the batch with tokens to read; return the prompts whose next token it gives, with their rows."""
        batch, row = self._batch, 0
        wanted = []
        # Decoding prompts have one token each, so they go first; prompts being read take the rest.
        for index, seq in sorted(self._live.items(), key=lambda item: len(item[1].tokens)):
            part = seq.tokens[: _ROWS - row]
            for i, token in enumerate(part):
                batch.token[row], batch.pos[row] = token, seq.at + i
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, seq.place, 0
                row += 1
            if part and len(part) == len(seq.tokens):
                batch.logits[row - 1] = 1
                wanted.append((index, row - 1))
            self._live[index] = seq._replace(tokens=seq.tokens[len(part) :], at=seq.at + len(part))
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
    """A running prompt: its slot, the tokens to be read, the position of the first, and the number to generate."""

    place: int
    tokens: list[int]
    at: int
    wanted: int
