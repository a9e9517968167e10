"""detgen itself: its drafters, its unverified fast path, and drafts of a stated acceptance.

A prompt's beginning is never taken over from an earlier prompt here: every round runs the same prompts, and the peers
read them anew too. In partly verified batches the times of tokens are those of the verified requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from detgen.bench.interface import Job, ModelSource, Outcome, Prompt, Variant
from detgen.bench.models import loaded
from detgen.bench.peers.clock import Clock
from detgen.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from detgen.drafters.protocol import Drafter
    from detgen.engine import Engine

FAST, SYNTHETIC = "fast path", "synthetic"


class DetgenPeer:
    """Runs jobs by one engine and others on the same models."""

    name = "detgen"
    packages = ("torch", "transformers")

    def __init__(self) -> None:
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self._continuations: dict[Prompt, list[int]] = {}

    def variants(self, source: ModelSource) -> list[Variant]:
        """The fast path, each drafter, and the synthetic one, which is there whenever it is asked for."""
        names = [FAST, "none", *(["model"] if source.has_draft else []), "self", "ngram", "auto"]
        precision = precision_of(source)
        plain = [Variant(name, precision, "detgen", self_checked=True) for name in names]
        return [*plain, Variant(SYNTHETIC, precision, "detgen-synthetic", self_checked=True)]

    def load(self, source: ModelSource, variant: Variant, batch_sizes: tuple[int, ...]) -> None:
        """Load and probe the models, the first time."""
        if self._engines:
            return
        from detgen.engine import Engine

        drafted = source.has_draft or variant.name == SYNTHETIC
        self._source = source
        target = loaded(source, "target")
        self._vocabulary = target.vocabulary
        self._base = Engine(
            target=target,
            draft=loaded(source, "draft") if drafted else None,
            drafter="auto" if drafted else "none",
            batch_size=max(batch_sizes),
            threads=source.threads,
            device=source.device,
            prefix_reuse=False,
        )
        self._engines["base",] = self._base

    def run(self, variant: Variant, job: Job) -> Outcome:
        """Run a job; jobs of the fast path are not verified whatever they say."""
        if variant.name == SYNTHETIC:
            self._learn_continuations(job)
            return self._run(self._synthetic(job), job)
        if variant.name == FAST:
            return self._run(
                self._engine("none", job.batch_size), replace(job, deterministic=(False,) * len(job.prompts))
            )
        return self._run(self._engine(variant.name, job.batch_size), job)

    def _engine(self, drafter: str, batch_size: int) -> Engine:
        key = drafter, batch_size
        if key not in self._engines:
            self._engines[key] = self._base.with_settings(drafter=drafter, batch_size=batch_size)
        return self._engines[key]

    def _learn_continuations(self, job: Job) -> None:
        """Run the prompts that are new without a draft: what the synthetic drafter proposes."""
        new = tuple(p for p in job.prompts if p not in self._continuations)
        if new:
            made = self._run(self._engine("none", job.batch_size), Job(new, job.batch_size, (True,) * len(new)))
            self._continuations.update(zip(new, made.tokens, strict=True))

    def _synthetic(self, job: Job) -> Engine:
        """An engine whose drafter proposes the continuations with errors; the draft length is the best one."""
        from detgen.bench.synthetic import SyntheticDrafter, best_draft_tokens

        assert job.acceptance is not None
        known = [self._continuations[p] for p in job.prompts]
        key = SYNTHETIC, job.batch_size, job.acceptance, job.prompts
        if key not in self._engines:
            found: dict[str, Any] = {}
            vocabulary = self._vocabulary

            def drafter(named: Mapping[str, Drafter]) -> Drafter:
                found.update(named)
                return SyntheticDrafter(named["model"], known, job.acceptance or 0.0, vocabulary, self._source.seed)

            engine = self._base.with_settings(drafter=drafter, batch_size=job.batch_size)
            costs = engine.canonical[0].cost, found["model"].cost
            length = best_draft_tokens(job.acceptance, job.batch_size, *costs)
            self._engines[key] = engine.with_settings(draft_tokens=length)
        return self._engines[key]

    def _run(self, engine: Engine, job: Job) -> Outcome:
        requests = [
            Request(i, i, token_ids=p.tokens, params=SamplingParams(max_tokens=p.output, deterministic=verified))
            for i, (p, verified) in enumerate(zip(job.prompts, job.deterministic, strict=True))
        ]
        tokens: list[list[int]] = [[] for _ in requests]
        before = _counts(engine)
        mixed = any(job.deterministic) and not all(job.deterministic)
        moments: list[float] = []  # the end of each round
        clock = Clock(job)
        for completions in engine.stream(requests):
            moments.append(time.perf_counter())
            for completion in completions:
                if completion.error is not None:
                    raise RuntimeError(completion.error)
                index = completion.request.index
                tokens[index] = list(completion.token_ids)
                if job.deterministic[index] or not mixed:
                    # A request commits in every round from its first token on, so its rounds tell when.
                    rounds = completion.records[-1].round - completion.records[0].round
                    clock.tokens(index, 1, moments[-1 - rounds])
                    clock.tokens(index, len(tokens[index]) - 1, moments[-1])
        counts = {name: n - before.get(name, 0) for name, n in _counts(engine).items()}
        return clock.outcome(tokens, counts["target_passes"] + counts["fast_passes"], counts)


def _counts(engine: Engine) -> dict[str, int]:
    s = engine.stats
    total = s.drafters.total()
    return {
        **{name: getattr(s, name) for name in ("target_passes", "fast_passes", "draft_passes", "rows", "padding_rows")},
        **{name: getattr(total, name) for name in ("drafted", "accepted", "corrected", "rolled_back")},
    }


def precision_of(source: ModelSource) -> str:
    """Of weights and arithmetic, as detgen and transformers run the target."""
    return source.dtype if source.target_quant == "none" else source.target_quant
