"""The engine: models loaded, probed and joined; requests in, completions out.

The public API of the package, beside the plain data of `request` and `config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from detgen.drafters.model import ModelDrafter
from detgen.drafters.registry import Parts, make_drafter, make_drafters
from detgen.engine.config import EngineConfig
from detgen.engine.decoding import Decoding, Trace
from detgen.engine.models import load_models
from detgen.engine.request import Completion, Request, SamplingParams
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.errors import EngineError, RequestError
from detgen.machine import cpu_name
from detgen.passes.forward import Forward
from detgen.passes.loading import pick_device
from detgen.passes.packing import Shapes
from detgen.passes.preparing import Prepared, prepare

_DRAFT_TOKENS = 4  # drafted a round, where neither the user nor the drafter says how many
# What `with_settings` may change: nothing of it is part of the prepared models.
_SETTINGS = frozenset(
    {"drafter", "draft_tokens", "verify_window", "batch_size", "threads", "prefill_chunk", "prefix_reuse"}
)


class Engine:
    """Generates with a target model; the output does not depend on how.

    >>> from detgen import Engine
    >>> engine = Engine()
    >>> print(engine.generate(["def add(a, b):"], max_tokens=16)[0].text)

    Args:
        config: all settings; or give its fields by name.

    Raises:
        EngineError: if a model cannot be loaded, is not supported, is not row-invariant here, or does not go with
            the draft model; the message names the remedy.
    """

    def __init__(self, config: EngineConfig | None = None, **settings: Any) -> None:
        config = replace(config, **settings) if config is not None else EngineConfig(**settings)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = pick_device(config.device)
        target, draft = load_models(config, device)
        prepared = prepare(
            target,
            draft,
            device,
            batch_size=config.batch_size,
            kv_memory=config.kv_memory,
            allow_nondeterministic=config.allow_nondeterministic,
        )
        self._assemble(config, prepared)

    def with_settings(self, **settings: Any) -> Engine:
        """Another engine on the same models, caches and probe; only one of the two may generate at a time.

        Args:
            settings: drafter, draft_tokens, verify_window, batch_size, threads, prefill_chunk, prefix_reuse; the
                others stay as they are. Drafters beside the draft model need none; it is there if this engine has it.

        Raises:
            EngineError: if another setting is given, or one is out of range.
        """
        if fixed := settings.keys() - _SETTINGS:
            raise EngineError(f"{', '.join(sorted(fixed))} cannot change on loaded models; build another Engine")
        engine = Engine.__new__(Engine)
        engine._assemble(replace(self.config, **settings), self._prepared)
        return engine

    def _assemble(self, config: EngineConfig, prepared: Prepared) -> None:
        """Join the parts of an engine on prepared models."""
        self.config, self._prepared = config, prepared
        self._device, self._target, self._draft = prepared.device, prepared.target, prepared.draft
        self.tokenizer = self._target.tokenizer
        self.probe = prepared.probe
        self.deterministic = self.probe.row_invariant
        self.stats = EngineStats()
        self._shapes = prepared.shapes
        self._forward, self._fast_forward = prepared.passes[0].counting(), prepared.passes[0].counting()
        self._draft_forward = prepared.passes[1].counting() if self._draft else None
        model = None
        if self._draft and self._draft_forward:
            model = ModelDrafter(self._draft_forward, self._target.vocabulary, self._draft.context, self._target.eos)
        self._scheduler = Scheduler(
            [p.cache for p in prepared.passes],
            self._shapes,
            config.batch_size,
            model.start if model else lambda *_: None,
            config.prefill_chunk,
            config.prefix_reuse,
        )
        self._decoding = Decoding(
            self._forward, self._shapes, self._fast_forward, self._scheduler, self.stopping, self.stats
        )
        parts = Parts(
            model=model,
            fast=self._decoding.fast,
            target_cost=self._forward.cost,
            most_rows=self._shapes.most_rows,
            eos=self._target.eos,
            draft_tokens=config.draft_tokens,
            verify_window=config.verify_window,
        )
        own = config.drafter
        drafter = make_drafter(own, parts) if isinstance(own, str) else own(make_drafters(parts))
        self._decoding.draft_with(drafter, config.draft_tokens or _DRAFT_TOKENS)

    @property
    def vocabulary(self) -> int:
        """Entries of the logits."""
        return self._target.vocabulary

    @property
    def stopping(self) -> Stopping:
        """Where sequences end, and their texts."""
        return Stopping(self.tokenizer, self._target.eos)

    @property
    def canonical(self) -> tuple[Forward, Shapes]:
        """The target's passes and the shapes that canonical ones keep to; for proofs and benchmarks."""
        return self._forward, self._shapes

    def generate(self, prompts: Iterable[str | Request], **sampling: Any) -> list[Completion]:
        """Complete prompts.

        Args:
            prompts: texts or requests.
            sampling: fields of `SamplingParams` for the texts.

        Returns:
            The completions in the order of the prompts, samples of a prompt in order.

        Raises:
            RequestError: if a sampling parameter is out of range. A prompt that cannot run gives a completion with
                an `error` instead.
        """
        params = SamplingParams(**sampling)
        requests = (
            p if isinstance(p, Request) else Request(i, i, prompt=p, params=params) for i, p in enumerate(prompts)
        )
        order: dict[int, int] = {}

        def numbered() -> Iterator[Request]:
            for request in requests:
                order[id(request)] = len(order)
                yield request

        done = [c for batch in self.stream(numbered()) for c in batch]
        return sorted(done, key=lambda c: (order[id(c.request)], c.sample))

    def stream(self, requests: Iterable[Request], trace: Trace | None = None) -> Iterator[list[Completion]]:
        """Complete requests while they are read.

        Args:
            requests: read as slots become free, about one batch ahead.
            trace: sees logits and KV entries of what is committed.

        Yields:
            After each round the completions that it finished, often none.
        """
        source = iter(requests)
        scheduler = self._scheduler
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self._decoding.trace = trace
        more = True
        samples: Iterator[Sequence] = iter(())  # of the request that was read last
        try:
            while more or scheduler.waiting or scheduler.live:
                refused: list[Completion] = []
                while more and scheduler.wants() > 0:
                    sample = next(samples, None)
                    if sample is not None:
                        scheduler.waiting.append(sample)
                        continue
                    request = next(source, None)
                    if request is None:
                        more = False
                        break
                    try:
                        samples = self.sequences(request)
                    except RequestError as e:
                        refused.append(Completion(request, error=str(e)))
                done = self._decoding.step()
                self._update_stats()
                yield refused + [_completion(seq) for seq in done]
        finally:
            scheduler.waiting.clear()
            for seq in list(scheduler.live.values()):
                scheduler.release(seq)
            self.stats.live = 0

    def _update_stats(self) -> None:
        s, f = self.stats, self._forward
        s.target_passes, s.rows, s.padding_rows = f.passes, f.rows, f.padding
        s.fast_passes = self._fast_forward.passes
        s.draft_passes = self._draft_forward.passes if self._draft_forward else 0
        s.reused_tokens = self._scheduler.reused

    def sequences(self, request: Request) -> Iterator[Sequence]:
        """The request's samples before their first token, made one by one; it is tokenized and checked at once.

        Raises:
            RequestError: if the request can never run.
        """
        tokens = self.encode(request)
        context, capacity = self._target.context, self._scheduler.capacity
        if len(tokens) >= context:
            raise RequestError(f"the prompt has {len(tokens)} tokens, the model's context is {context}")
        limit = min(len(tokens) + request.params.max_tokens, context)
        if limit > capacity:  # cutting it short would make the output depend on the memory
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and may grow to {limit}, the KV cache holds sequences of "
                f"{capacity}; give it more with --kv-memory, or ask for fewer --max-tokens"
            )
        return (Sequence(request, i, list(tokens), len(tokens), limit) for i in range(request.params.n))

    def encode(self, request: Request) -> list[int]:
        """The token ids of a request's prompt.

        Raises:
            RequestError: if the prompt is empty, or a chat that the tokenizer has no template for.
        """
        if request.token_ids is not None:
            tokens = list(request.token_ids)
            if not all(0 <= t < self._target.vocabulary for t in tokens):
                raise RequestError(f"token_ids must be from 0 to {self._target.vocabulary - 1}")
        elif request.messages is not None:
            if not getattr(self.tokenizer, "chat_template", None):
                raise RequestError(
                    f"{self._target.name} has no chat template, so messages cannot be rendered; use prompt instead"
                )
            try:
                text = self.tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
            except Exception as e:  # whatever a template raises is a fault of the messages
                raise RequestError(f"the chat template refuses these messages: {e}") from e
            tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            tokens = self.tokenizer(request.prompt or "").input_ids if request.prompt else []
        if not tokens:
            raise RequestError("the prompt is empty")
        return list(tokens)

    def profile(self) -> dict[str, Any]:
        """The numerics profile: all that an output is a function of beside the request itself."""
        import transformers

        cpu = self._device.type == "cpu"
        return {
            "target": {"name": self._target.name, "digest": self._target.digest, "quant": self.config.target_quant},
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "device": cpu_name() if cpu else torch.cuda.get_device_name(self._device),
            "capability": torch.backends.cpu.get_cpu_capability() if cpu else torch.version.cuda,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "attention": self.probe.attention,
        }

    def draft_profile(self) -> dict[str, Any] | None:
        """The draft model, which no output depends on."""
        d = self._draft
        return {"name": d.name, "digest": d.digest, "quant": self.config.draft_quant} if d else None

    def probe_report(self) -> dict[str, Any]:
        """What the probe found."""
        return self.probe.as_dict()


def _completion(seq: Sequence) -> Completion:
    return Completion(
        request=seq.request,
        sample=seq.sample,
        text=seq.text,
        token_ids=tuple(seq.tokens[seq.prompt_length :]),
        finish_reason=seq.finish_reason,
        prompt_tokens=seq.prompt_length,
        logprobs=tuple(seq.logprobs) if seq.request.params.logprobs is not None else None,
        records=tuple(seq.records),
        drafts=seq.drafts,
    )
