"""detgen itself: its drafters, drafts with a stated acceptance rate, and weights in 8 bits.

The prefix cache is off: every round runs the same prompts, and the peers read them again too. In partly verified
batches, tokens are timed for the verified requests only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from detgen.bench.model_source import loaded
from detgen.bench.peer_interface import Contender, Job, ModelSource, Outcome, Prompt
from detgen.bench.peers.clock import Clock
from detgen.engine.request import Request
from detgen.params import SamplingParams

if TYPE_CHECKING:
    from detgen.drafters.protocol import Drafter
    from detgen.engine import Engine
    from detgen.kernels.pass_cost import PassCost

SYNTHETIC = "synthetic"
_DRAFT_TOKENS = range(1, 9)


class DetgenPeer:
    """Runs jobs with `engine` and other engines on its models."""

    packages = ("torch", "transformers")

    def __init__(self, source: ModelSource, contender: Contender, batch_sizes: tuple[int, ...]) -> None:
        from detgen.engine import Engine

        drafted = source.has_draft or contender.name == SYNTHETIC
        self.source = source
        target = loaded(source, "target", contender.weights, as_stored=source.as_stored)
        kept = str(target.model.dtype).removeprefix("torch.")
        few = target.form != "none" or source.quantized
        self._weights = None if source.on_gpu or few or kept == source.engine.dtype else kept
        self.engine = Engine(
            source.engine,
            target=target,
            draft=loaded(source, "draft", as_stored=source.as_stored) if drafted else None,
            drafter="auto" if drafted else "none",
            batch_size=max(batch_sizes),
            prefix_cache=False,
        )
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self._continuations: dict[Prompt, list[int]] = {}

    @staticmethod
    def contenders(source: ModelSource) -> list[Contender]:
        """Return a contender for each drafter, for the synthetic one, which only runs if asked for, and for 8 bits."""
        own = source.native and not source.quantized
        names = ["none", *(["model"] if source.has_draft else []), *(["self"] if own else []), "ngram", "auto"]
        processes = dict.fromkeys(names, "detgen") | {SYNTHETIC: "detgen-synthetic"}
        found = [
            Contender("detgen", n, source.precision, p, self_checked=True, fewer_bits=source.quantized)
            for n, p in processes.items()
        ]
        if own:
            few: dict[str, Any] = {"weights": "q8", "precision": "q8", "process": "detgen-q8", "fewer_bits": True}
            found += [replace(c, **few) for c in found if c.name in ("none", "auto")]
        return found

    def run(self, contender: Contender, job: Job) -> Outcome:
        """Run a job."""
        outcome = self._run(contender, job)
        outcome.weights = self._weights
        return outcome

    def _run(self, contender: Contender, job: Job) -> Outcome:
        if contender.acceptance is not None:
            return generate(self._synthetic(job, contender.acceptance), job)
        return generate(self._engine(contender.name, job.batch_size), job)

    def _engine(self, drafter: str, batch_size: int) -> Engine:
        key = drafter, batch_size
        if key not in self._engines:
            self._engines[key] = self.engine.with_settings(drafter=drafter, batch_size=batch_size)
        return self._engines[key]

    def _synthetic(self, job: Job, acceptance: float) -> Engine:
        """Return an engine that drafts canonical texts with errors, with the best number of draft tokens."""
        from detgen.drafters.oracle import Known, OracleDrafter, SyntheticDrafter
        from detgen.kernels.sampling import Choice

        key = SYNTHETIC, job.batch_size, acceptance, job.prompts
        if key in self._engines:
            return self._engines[key]
        if new := tuple(p for p in job.prompts if p not in self._continuations):
            made = generate(self._engine("none", job.batch_size), Job(new, job.batch_size, (True,) * len(new)))
            self._continuations.update(zip(new, made.tokens, strict=True))
        known = [Known(Choice(), (*p.tokens, *self._continuations[p])) for p in job.prompts]
        costs = [self.engine.canonical.cost]

        def drafter(named: Mapping[str, Any]) -> Drafter:
            costs.append(named["model"].runner.cost)
            return SyntheticDrafter(
                named["model"], OracleDrafter(known), acceptance, self.engine.vocabulary, self.source.seed
            )

        engine = self.engine.with_settings(drafter=drafter, batch_size=job.batch_size)
        length = best_draft_tokens(acceptance, job.batch_size, costs[0], costs[1])
        self._engines[key] = engine.with_settings(draft_tokens=length)
        return self._engines[key]


def generate(engine: Engine, job: Job) -> Outcome:
    """Run a job with an engine.

    Raises:
        RuntimeError: if a prompt cannot run.
    """
    requests = [
        Request(
            *(i, i),
            token_ids=p.tokens,
            params=SamplingParams(max_tokens=p.output, deterministic=verified, temperature=job.temperature, seed=i),
        )
        for i, (p, verified) in enumerate(zip(job.prompts, job.deterministic, strict=True))
    ]
    tokens: list[list[int]] = [[] for _ in requests]
    before = _counts(engine)
    mixed = any(job.deterministic) and not all(job.deterministic)
    firsts: dict[int, float] = {}  # times of first tokens, by the request's index
    clock, live = Clock(job), engine.live
    for completions in engine.stream(requests):
        now = time.perf_counter()
        for slot in (live.busy & (live.length > live.prompt)).nonzero()[0].tolist():
            firsts.setdefault(live[slot].request.index, now)
        for completion in completions:
            if completion.error is not None:
                raise RuntimeError(completion.error)
            index = completion.request.index
            tokens[index] = list(completion.token_ids)
            if job.deterministic[index] or not mixed:
                clock.tokens(index, 1, firsts.get(index, now))
                clock.tokens(index, len(tokens[index]) - 1, now)
    counts = {name: n - before[name] for name, n in _counts(engine).items()}
    return clock.outcome(tokens, counts["target_passes"], counts)


def _counts(engine: Engine) -> dict[str, int]:
    s = engine.stats
    total = s.drafters.total()
    return {
        **{name: getattr(s, name) for name in ("target_passes", "draft_passes", "rows")},
        **{name: getattr(total, name) for name in ("drafted", "accepted", "corrected", "rolled_back")},
    }


def best_draft_tokens(acceptance: float, batch_size: int, target: PassCost, draft: PassCost) -> int:
    """Return the number of draft tokens with most tokens per second, from the measured costs of both models' passes."""

    def speed(length: int) -> float:
        expected = sum(acceptance**i for i in range(length + 1))
        seconds = target.predict(batch_size * (length + 1)) + length * draft.predict(batch_size)
        return expected / seconds if seconds else expected

    return max(_DRAFT_TOKENS, key=speed)
