"""The engine: requests in, completions out.

Together with the plain data of `request` and `config`, the public API of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen.drafters.model import ModelDrafter
from detgen.drafters.registry import Parts, available, drafter_of
from detgen.drafters.self import SelfDrafter
from detgen.engine.answering import Answering, completion_of
from detgen.engine.asking import Prompt, numbered, requests_of
from detgen.engine.config import EngineConfig
from detgen.engine.decoding import Decoding
from detgen.engine.encoding import Encoder
from detgen.engine.model_pair import kv_dtype, load_models, numerics
from detgen.engine.output_processing import Trace
from detgen.engine.pieces import Pieces
from detgen.engine.reading_ahead import ReadingAhead
from detgen.engine.request import Chunk, Completion, Request, chunks_of
from detgen.engine.running_batch import RunningBatch
from detgen.engine.scheduler import Scheduler
from detgen.engine.score_requests import Scorable, Score, ScoreRequest, score_requests_of
from detgen.engine.scored import ScoreEncoder
from detgen.engine.scoring import ScoreTrace, Scoring
from detgen.engine.sequence import Sequence
from detgen.engine.showing import call
from detgen.engine.stats import EngineStats
from detgen.engine.stopping import Stopping
from detgen.engine.streaming_rounds import StreamingRounds, Turns
from detgen.errors import EngineError
from detgen.kernels.c.threads import use_threads
from detgen.kernels.input_batch import MOST_ROWS
from detgen.models.loaded import LoadedModel, rule_of
from detgen.models.loading import pick_device
from detgen.params import SamplingParams
from detgen.progress import Observer, Unobserved
from detgen.runner.model_runner import ModelRunner
from detgen.runner.preparing import Prepared, prepare
from detgen.runner.trying import trusted

_DRAFT_TOKENS = 4  # per round, unless the user or the drafter sets another number
# Settings that `with_settings` may change: the prepared models do not depend on them.
_SETTINGS = frozenset(
    {
        *("drafter", "draft_tokens", "batch_size", "threads", "prefill_chunk", "prefix_cache"),
        *("speculative_prefill", "kv_memory"),
    }
)

if TYPE_CHECKING:
    from detgen.runner.slot_thoughts import Thinking


class Engine:
    """Generates with a target model; the output does not depend on the batch, the drafter or the schedule.

    >>> from detgen import Engine
    >>> engine = Engine()
    >>> print(engine.generate("def add(a, b):", max_tokens=16)[0].text)

    Threads may share an engine: their calls take turns.

    Args:
        config: the settings; or the target alone (a folder, hub name or loaded model), with defaults for the rest.
        observer: receives progress while models are loaded and prepared.
        settings: fields of `EngineConfig` by name; they override those of `config`.

    Attributes:
        config: the settings.
        tokenizer: the target's.
        pieces: the texts and bytes of its tokens.
        stats: running totals.
        stopping: decides where sequences end.
        answering: splits the answers of chats.

    Raises:
        EngineError: if a model cannot be loaded, is not supported, is not row-invariant here, or does not fit the
            draft model; the message names the remedy.
    """

    def __init__(
        self,
        config: EngineConfig | str | Path | LoadedModel | None = None,
        *,
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        observer = observer or Unobserved()
        if not isinstance(config, EngineConfig):
            config = EngineConfig(target=config)
        config = replace(config, **settings)
        if config.threads is not None:
            use_threads(config.threads)
        device = pick_device(config.device)
        if device.type == "cuda":
            dtype = config.target.dtype if isinstance(config.target, LoadedModel) else config.dtype
            device = trusted(device, observer, named=config.device != "auto", rule=rule_of(dtype))
        target, draft = load_models(config, observer)
        prepared = prepare(
            target,
            draft,
            device,
            batch_size=config.batch_size,
            kv_memory=config.kv_memory,
            kv_dtype=kv_dtype(config, target),
            drafts_itself=config.drafter in ("self", "auto"),
            observer=observer,
        )
        if config.prefix_cache and not prepared.shares:
            observer.message(
                f"{target.name} keeps states of what it reads, and there is no room for snapshots of them: prompts do"
                " not share prefixes"
            )
        self._assemble(config, prepared, Turns())

    def with_settings(self, **settings: Any) -> Engine:
        """Return another engine on the same models and caches; the two take turns.

        Args:
            settings: drafter, draft_tokens, batch_size, threads, prefill_chunk, prefix_cache,
                speculative_prefill, kv_memory; all others stay the same. A drafter can use the draft model only if
                this engine has one. The other engine uses at most `kv_memory` of the shared KV caches.

        Raises:
            EngineError: if another setting is given, one is out of range, or there is not enough memory for the states
                that the target keeps for so many requests.
        """
        if fixed := settings.keys() - _SETTINGS:
            raise EngineError(f"{', '.join(sorted(fixed))} cannot change on loaded models; build another Engine")
        config, engine = replace(self.config, **settings), Engine.__new__(Engine)
        self._prepared.check_states(config.batch_size)
        engine._assemble(config, self._prepared, self._turns)
        return engine

    def reset_prefix_cache(self) -> None:
        """Forget all KV entries of earlier requests: the next ones read their whole prompts.

        Raises:
            EngineError: if this thread is reading a stream of the engine.
        """
        turn = self._turns.take()
        try:
            self._prepared.pages.forget()
        finally:
            self._turns.give_back(turn)

    def __repr__(self) -> str:
        draft, device = self._prepared.draft, str(self._runner.device)
        shown = {"target": self._target.name, "draft": draft and draft.name, "device": device}
        own = self.config.drafter
        drafter = own if isinstance(own, str) else "custom"
        return call("Engine", {**shown, "drafter": drafter, "batch_size": self.config.batch_size})

    def _assemble(self, config: EngineConfig, prepared: Prepared, turns: Turns) -> None:
        """Build the parts of an engine on prepared models; `turns` says when it may use them."""
        self._turns = turns
        target, draft, thinking = prepared.target, prepared.draft, prepared.thinking
        if thinking is None and config.speculative_prefill != "auto":
            raise EngineError(
                f"--speculative-prefill is for models that think while they read, and {target.name} does not;"
                " leave it out"
            )
        self.config, self.tokenizer = config, target.tokenizer
        self.stats = EngineStats()
        self.stopping, self.pieces = Stopping(target.tokenizer), Pieces(lambda: target.tokenizer)
        self.answering = Answering(target.tokenizer)
        self._prepared, self._target = prepared, target
        self._runner, *drafting = [p.counting() for p in prepared.runners]
        ahead = None
        if thinking is not None:
            ahead = ReadingAhead(config.speculative_prefill, thinking, self._runner.cost)
        self._model = None
        if draft:
            self._model = ModelDrafter(drafting[0], target.vocabulary, draft.context)
        own = None
        if (narrowed := prepared.narrowed) is not None:
            drafting.append(self._runner.by(narrowed.decoder))
            own = SelfDrafter(drafting[-1], narrowed, self._runner.cost, target.vocabulary, target.context)
        self._scheduler = Scheduler(
            [p.cache for p in prepared.runners],
            config.batch_size,
            self._model.start if self._model else lambda *_: None,
            config.prefill_chunk,
            config.prefix_cache and prepared.shares,
            config.kv_memory and config.kv_memory // self.position_bytes,
            ahead,
            prepared.snapshots,
        )
        self._rounds = StreamingRounds(
            *(turns, self._scheduler, self.stats),
            *(self._runner, drafting, config.threads),
        )
        self._encoder = Encoder(target, self._scheduler, self._runner.device.type, self.answering)
        self._score_encoder = ScoreEncoder(target, self._scheduler, self._encoder)
        self._scoring = Scoring(self._runner, self._scheduler, self.stats, ahead)
        self._parts = Parts(self._model, self._runner.cost, MOST_ROWS, config.draft_tokens, own)
        self._decoding = Decoding(
            *(self._runner, self._scheduler, self.stopping, self.stats),
            *(drafter_of(config.drafter, self._parts), config.draft_tokens or _DRAFT_TOKENS, target.vocabulary, ahead),
        )

    @property
    def drafters(self) -> list[str]:
        """The names of the drafters that this engine can use."""
        return available(self._parts)

    @property
    def vocabulary(self) -> int:
        """Entries of the logits."""
        return self._target.vocabulary

    @property
    def context(self) -> int:
        """The maximum number of positions of a sequence."""
        return self._target.context

    @property
    def thinks(self) -> bool:
        """Whether the target thinks while it reads."""
        return self._prepared.thinking is not None

    @property
    def thinking(self) -> Thinking | None:
        """Thoughts and states of the slots; None if the target does not think. For proofs."""
        return self._prepared.thinking

    def chunks(self, request: Request, tokens: Iterable[int], thoughts: Mapping[int, str]) -> list[Chunk]:
        """Return a prompt and its completion in the chunks that the target reads; empty if it does not think.

        Args:
            request: the prompt.
            tokens: the completion's tokens.
            thoughts: its thoughts, by the position of the chunk's first token.

        Raises:
            RequestError: as `encode`.
        """
        thinking = self._prepared.thinking
        if thinking is None:
            return []
        text = [*self.encode(request), *tokens]
        return chunks_of(text, thoughts, thinking.chunk, self.tokenizer.decode, keeps=thinking.thinker.keeps)

    @property
    def dated(self) -> bool:
        """Whether the target's chat template prints the date, so that a chat is another prompt tomorrow."""
        return "strftime_now" in str(getattr(self.tokenizer, "chat_template", None))

    @property
    def position_bytes(self) -> int:
        """Bytes per position in the KV caches of the target and the draft model together."""
        return self._prepared.position_bytes

    @property
    def canonical(self) -> ModelRunner:
        """The target's passes; for proofs and benchmarks."""
        return self._runner

    @property
    def live(self) -> RunningBatch:
        """The sequences that have a slot; for proofs."""
        return self._scheduler.live

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None, **sampling: Any
    ) -> list[Completion]:
        """Complete prompts.

        Args:
            prompts: one prompt or several: texts, lists of token ids, chats (lists of messages) or requests.
            params: how the tokens are chosen; None for the defaults. Requests have parameters of their own.
            sampling: fields of `SamplingParams`; they replace those of `params`.

        Returns:
            The completions in the order of the prompts, samples of a prompt in order.

        Raises:
            RequestError: if a sampling parameter is out of range, or given for a request. A prompt that cannot run
                gives a completion with an `error` instead.
            EngineError: if this thread is reading a stream of the engine.
        """
        requests = requests_of(prompts, params, sampling)
        order = {id(request): i for i, request in enumerate(requests)}
        done = [c for batch in self.stream(requests) for c in batch]
        return sorted(done, key=lambda c: (order[id(c.request)], c.sample))

    def stream(self, requests: Iterable[Request | None], trace: Trace | None = None) -> Iterator[list[Completion]]:
        """Complete requests while reading them.

        Args:
            requests: read as slots become free, about one batch ahead. None means that there is no other request yet:
                the stream continues with the requests it has, and asks again after the next round.
            trace: sees the logits and KV entries of committed tokens.

        Yields:
            After each round, the completions that it finished, often none. Until the stream ends or is closed, no other
            call of the engine can begin: calls from other threads wait.

        Raises:
            EngineError: if this thread is reading another stream of the engine.
        """
        thinking, refused = self._prepared.thinking, list[Completion]()
        chunk = None if thinking is None else thinking.chunk

        def step() -> list[Completion]:
            self._decoding.committing.trace = trace
            return [completion_of(seq, chunk, self.stopping.decode, self.answering) for seq in self._decoding.step()]

        sequences = self._encoder.samples(numbered(requests), refused)
        return self._rounds.run(sequences, refused, step, self._decoding.committing.clear)

    def score(self, items: Scorable | Iterable[Scorable]) -> list[Score]:
        """Return the log-probabilities of given completions, or of whole texts.

        >>> [score] = engine.score(("def add(a, b):", " return a + b"))
        >>> score.logprob, score.is_greedy

        Prompt and completion are tokenized together; as many tokens as the prompt has alone are the prompt's. White
        space at the end of a text prompt counts as the completion's. A text by itself is scored after the tokenizer's
        BOS token (EOS if it has none), in windows if it is longer than the model's context. All this follows
        EleutherAI's lm-evaluation-harness.

        Args:
            items: one or several of: a text; a tuple of a prompt, as `generate` takes it, and a completion or a list of
                them, each a text or a list of token ids; a `ScoreRequest`.

        Returns:
            The scores in the order of the items, those of an item's completions in order. One that could not run has
            an `error`.

        Raises:
            RequestError: if an item is none of these.
            EngineError: if this thread is reading a stream of the engine.
        """
        requests = [replace(request) for request in score_requests_of(items)]
        order = {id(request): i for i, request in enumerate(requests)}
        done = [score for batch in self.score_stream(requests) for score in batch]
        return sorted(done, key=lambda score: (order[id(score.request)], score.sample))

    def score_stream(
        self, requests: Iterable[ScoreRequest | None], trace: ScoreTrace | None = None
    ) -> Iterator[list[Score]]:
        """Score requests while reading them, as `stream` completes them.

        Args:
            requests: as those of `stream`.
            trace: sees the logits of scored tokens.

        Yields:
            After each pass, the scores that it completed, often none.

        Raises:
            EngineError: if this thread is reading another stream of the engine.
        """
        refused: list[Score] = []
        sequences = self._score_encoder.all(numbered(requests), refused)

        def step() -> list[Score]:
            self._scoring.trace = trace
            return self._scoring.step()

        return self._rounds.run(sequences, refused, step, self._scoring.clear)

    def sequences(self, request: Request) -> Iterator[Sequence]:
        """Yield the request's samples, created one by one; the request is tokenized and checked immediately.

        Raises:
            RequestError: if the request can never run.
        """
        return self._encoder.sequences(request)

    def encode(self, request: Request) -> list[int]:
        """Return the token ids of a request's prompt.

        Raises:
            RequestError: if the prompt is empty, is too long by its length alone, has unknown token ids, or is a chat
                that cannot be rendered.
        """
        return self._encoder.encode(request)

    def profile(self) -> dict[str, Any]:
        """Return the numerics profile: everything that an output depends on besides the request."""
        return numerics(self._prepared, self.config)

    def draft_profile(self) -> dict[str, Any] | None:
        """Return name, digest and quantization of the draft model, which affects no output; None without one."""
        draft = self._prepared.draft
        return {"name": draft.name, "digest": draft.digest, "quant": self.config.draft_quant} if draft else None
