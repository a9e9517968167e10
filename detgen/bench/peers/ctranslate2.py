"""CTranslate2 on the CPU: static batches, weights and arithmetic in float32 or weights in 8 bits.

Its converter needs torch and transformers. Batches are taken in the order of the prompts and run until their longest
member has its tokens; end-of-sequence tokens are not generated before.
"""

from __future__ import annotations

import json
from typing import Any

from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome
from detgen.bench.peers.clock import Clock

_KINDS = {"f32": "float32", "int8": "int8_float32"}


class CTranslate2Peer:
    """Runs jobs by `Generator.generate_batch`."""

    packages = ("ctranslate2", "torch", "transformers")

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        import ctranslate2

        folder, kind = source.scratch / f"ctranslate2-{contender.name}", _KINDS[contender.name]
        converter = ctranslate2.converters.TransformersConverter(
            str(source.engine.target), trust_remote_code=source.engine.trust_remote_code
        )
        converter.convert(str(folder), quantization=kind, force=True)
        # It works with names of tokens; every id gets its own name, including ids that the tokenizer lacks.
        vocabulary = folder / "vocabulary.json"
        self._names = [f"<{i}>" for i in range(len(json.loads(vocabulary.read_text())))]
        vocabulary.write_text(json.dumps(self._names))
        settings = folder / "config.json"
        ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), self._names[0])
        settings.write_text(json.dumps(json.loads(settings.read_text()) | ends))
        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=kind, inter_threads=1, intra_threads=source.threads
        )

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return two contenders, float32 and 8 bits, each in its own process."""
        # It takes the names of tokens from a tokenizer, which random weights do not have.
        if source.on_gpu or source.engine.target_quant != "none" or source.random_weights is not None:
            return []
        return [
            Contender("ctranslate2", "f32", "float32", "ctranslate2-f32"),
            Contender("ctranslate2", "int8", "int8", "ctranslate2-int8", fewer_bits=True),
        ]

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run one batch after the other."""
        tokens: list[list[int]] = []
        passes = 0
        clock = Clock(job)
        for start in range(0, len(job.prompts), job.batch_size):
            batch = job.prompts[start : start + job.batch_size]
            most = max(p.output for p in batch)

            def take(step: Any, start: int = start) -> bool:
                clock.tokens(start + step.batch_id, 1)
                return False  # do not stop

            results = self._generator.generate_batch(
                [[self._names[t] for t in p.tokens] for p in batch],
                max_length=most,
                min_length=most,
                beam_size=1,
                sampling_topk=1,
                include_prompt_in_result=False,
                callback=take,
            )
            tokens += [r.sequences_ids[0][: p.output] for r, p in zip(results, batch, strict=True)]
            passes += most
        return clock.outcome(tokens, passes)
