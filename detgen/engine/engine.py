"""The engine: models loaded, probed and joined; requests in, completions out.

The public API of the package, beside the plain data of `request` and `config`.
"""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import torch

from detgen.drafters.auto import AutoDrafter
from detgen.drafters.fast_path import FastPath, SelfDrafter
from detgen.drafters.model import ModelDrafter
from detgen.drafters.ngram import NgramDrafter
from detgen.engine.config import EngineConfig, EngineError
from detgen.engine.decoding import Decoding, Trace
from detgen.engine.forward import Forward, attach, attend_current
from detgen.engine.kv_cache import KVCache
from detgen.engine.probing import probe, reference_logits
from detgen.engine.request import Completion, Request, RequestError, SamplingParams
from detgen.engine.scheduler import Scheduler
from detgen.engine.sequence import Sequence
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.kernels.decoder_layer import lean_layers
from detgen.kernels.experts import pack_experts
from detgen.kernels.linear import pack_linears
from detgen.kernels.norm import fuse_norms
from detgen.kernels.packing import FREE_SHAPES, Shapes
from detgen.models import DEMO, LoadedModel, check_vocabularies, load_model, pick_device

_ADAPTIVE = 8  # most tokens an adaptive draft may have
_DEFAULT_DEPTH = 4  # of a drafter that was named, where no length was given
_LEAST_POSITIONS = 3 * 128  # what the probe needs


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
        self.config = replace(config, **settings) if config is not None else EngineConfig(**settings)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self._device = pick_device(self.config.device)
        self.stats = EngineStats()
        self._target, self._draft = self._load()
        self.tokenizer = self._target.tokenizer
        self._build()

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """An engine of these settings; raises as the constructor does."""
        return cls(config)

    def _load(self) -> tuple[LoadedModel, LoadedModel | None]:
        c = self.config
        _quiet()
        target = load_model(
            c.target or DEMO / "target", str(c.target or "embedded:target"), self._device, c.dtype, c.target_quant
        )
        source = c.draft or (DEMO / "draft" if c.target is None else None)
        if c.drafter == "model" and source is None:
            raise EngineError("--drafter model needs a draft model: give one with --draft, or use --drafter ngram")
        if source is None or c.drafter in ("self", "ngram", "none"):
            return target, None
        draft = load_model(source, str(c.draft or "embedded:draft"), self._device, c.dtype, c.draft_quant)
        check_vocabularies(target, draft)
        return target, draft

    def _build(self) -> None:
        """Attach attention, pack weights, allocate the caches, probe, and join the parts."""
        models = [self._target] + ([self._draft] if self._draft else [])
        layouts = []
        reference = reference_logits(self._target.model, self._target.vocabulary)
        for loaded in models:
            pack_linears(loaded.model)
            fuse_norms(loaded.model)
            pack_experts(loaded.model)
            layout = attach(loaded.model, loaded.name)
            lean_layers(loaded.model, attend_current, layout.traits)
            layouts.append(layout)
        parts = list(zip(models, layouts, strict=True))
        positions = self._positions(sum(KVCache.position_bytes(part.cached, m.dtype) for m, part in parts))
        caches = [KVCache(part.cached, positions, m.dtype, self._device) for m, part in parts]
        forwards = [Forward(m.model, cache, part.group) for (m, part), cache in zip(parts, caches, strict=True)]
        shapes, self.probe = probe(forwards[0], layouts[0].group, reference)
        if shapes is None:
            if not self.config.allow_nondeterministic:
                raise EngineError(
                    f"{self._target.name} is not row-invariant on this device: no two row counts give the same bits. "
                    "Its outputs would depend on the batch; --allow-nondeterministic runs it without the guarantee"
                )
            shapes = FREE_SHAPES
        self._shapes = shapes
        self.deterministic = self.probe.row_invariant
        drafter = None
        if self._draft:
            forwards[1].learn_cost(self.config.batch_size)
            drafter = ModelDrafter(forwards[1], self._target.vocabulary, self._draft.context, self._target.eos)
        self._scheduler = Scheduler(
            caches, shapes, self.config.batch_size, drafter.start if drafter else lambda *_: None
        )
        stopping = Stopping(self.tokenizer, self._target.eos)
        self._forward, self._fast_forward = forwards[0], Forward(forwards[0].model, caches[0], layouts[0].group)
        self._draft_forward = forwards[1] if self._draft else None
        forwards[0].reset()
        self._decoding = Decoding(forwards[0], shapes, self._scheduler, stopping, self.stats)
        fast = FastPath(self._fast_forward, self._decoding.riders, self._decoding.commit_riders)
        self._decoding.fast = fast
        self._join(drafter, fast)

    @property
    def canonical(self) -> tuple[Forward, Shapes]:
        """The target's passes and the shapes that canonical ones keep to; for proofs and benchmarks."""
        return self._forward, self._shapes

    def _join(self, model: ModelDrafter | None, fast: FastPath) -> None:
        """Choose the drafter and its length."""
        c, decoding = self.config, self._decoding
        decoding.draft_length = c.draft_tokens or _DEFAULT_DEPTH
        if c.drafter == "model":
            decoding.drafter = model
        elif c.drafter == "ngram":
            decoding.drafter = NgramDrafter()
        elif c.drafter == "self":
            decoding.drafter = SelfDrafter(fast, self._target.eos)
            decoding.draft_length = c.verify_window
        elif c.drafter == "auto":
            decoding.drafter = AutoDrafter(NgramDrafter(), model, self._forward.cost, c.draft_tokens)
            decoding.draft_length = c.draft_tokens or _ADAPTIVE
        # A window is verified in one pass.
        decoding.draft_length = min(decoding.draft_length, self._shapes.most_rows - 1)

    def _positions(self, position_bytes: int) -> int:
        """Size of the KV arena in positions: what a whole batch of the longest sequences takes, or what fits.

        Raises:
            EngineError: if not even a short sequence fits the budget.
        """
        budget = self.config.kv_memory
        if budget is None:
            if self._device.type == "cuda":
                budget = int(torch.cuda.mem_get_info(self._device)[0] * 0.8)
            else:
                budget = int(psutil.virtual_memory().available * 0.4)
        held = budget // position_bytes
        if self.config.kv_memory is not None and held < _LEAST_POSITIONS:
            raise EngineError(
                f"--kv-memory {budget} bytes holds {held} positions of {position_bytes} bytes; "
                f"give at least {_LEAST_POSITIONS * position_bytes} bytes"
            )
        context = -(-self._target.context // 512) * 512
        return max(min(held, self.config.batch_size * context), _LEAST_POSITIONS)

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
        self._decoding.trace = trace
        more = True
        try:
            while more or scheduler.waiting or scheduler.live:
                refused: list[Completion] = []
                while more and scheduler.wants() > 0:
                    request = next(source, None)
                    if request is None:
                        more = False
                        break
                    try:
                        scheduler.waiting.extend(self._sequences(request))
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

    def _sequences(self, request: Request) -> list[Sequence]:
        """The request's samples, tokenized and checked.

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
        return [Sequence(request, i, list(tokens), len(tokens), limit) for i in range(request.params.n)]

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
            "device": _cpu_name() if cpu else torch.cuda.get_device_name(self._device),
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
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            names = (line.partition(":")[2].strip() for line in f if line.startswith("model name"))
            return next(names, platform.processor())
    except OSError:
        return platform.processor()


def _quiet() -> None:
    """Keep transformers' loading bars and advice off the screen; errors are raised and shown by detgen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="MatMul8bitLt")
