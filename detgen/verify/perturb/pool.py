"""The requests of a check: those that are compared, and their neighbours.

Plain data: requests made from prompts and a setting.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from detgen.engine.request import Request
from detgen.params import GUIDES, SamplingParams
from detgen.verify.perturb.axes import SAMPLING, Setting

if TYPE_CHECKING:
    from detgen.verify.perturb.generation_digests import Key, Observed

_FEW = 4  # requests of the smallest batches
_SURPLUS = 2  # more requests than slots, so that slots are used again
_FILLED = 64  # tokens of a neighbour that breaks
_SEVERAL = 8  # requests that may have several samples, if the sampling asks for them
_CROWD = 6  # requests for a cache that holds few at a time
_GROWING = "growing"  # prefix of the ids of requests that together outgrow such a cache
_MUSING, _MUSED = 3, 22  # requests that think while they generate, and their tokens: not whole chunks of four
_WIDEST = Setting(batch="all", drafter="oracle", draft_tokens=64)  # requests of all kinds that such a cache holds
_BEFORE_END, _BEHIND_END = 4, 5  # tokens by which a prompt ends before a block, and its completion goes on behind it
_GROWTH = 20  # tokens that they generate: the first to need a page must still run when the second needs it


@dataclass(slots=True)
class Pool:
    """The prompts of a check.

    Attributes:
        requests: the prompts, each with its own parameters.
        long: text of the longest prompt that neighbours may have.
        name: name of the input.
        given: number of prompts in the user's file; None if unknown, or for the embedded prompts.
        errors: errors of prompts that cannot run and are not included.
        stops: a stop string for each request by its id, for the sampling "stop".
        tokens: the reference's completion of each request by its id.
        following: a prompt that continues another request's completion, once that is known.
        variants: prompts of whole blocks that differ in one token of a block: the first, the last, one between, or one
            of the block before.
        crossing: a prompt whose completion crosses a block end; then one that continues it, once that is known.
        musing: of a thinking model, requests that think while generating: they repeat the tokens of a chunk that did.
        growing: two prompts that together outgrow a cache made for the longest request.
    """

    requests: list[Request]
    long: str
    name: str = ""
    given: int | None = None
    errors: list[str] = field(default_factory=list)
    stops: dict[str | int, str] = field(default_factory=dict)
    tokens: dict[str | int, tuple[int, ...]] = field(default_factory=dict)
    following: Request | None = None
    variants: list[Request] = field(default_factory=list)
    crossing: list[Request] = field(default_factory=list)
    musing: list[Request] = field(default_factory=list)
    growing: list[Request] = field(default_factory=list)

    def watched(self, setting: Setting) -> list[Request]:
        """Return the requests to compare under a setting: a few more than its slots."""
        batch = len(self.requests) if setting.batch == "all" else int(setting.batch)
        count = batch + _SURPLUS if batch > 1 else _FEW
        if setting.preemption:
            count = min(count, _CROWD)
        chosen = self.requests[: max(count, _FEW)]
        if self.following is not None:
            chosen = [*chosen, self.following, *self.musing]
        if setting.prefix_cache != "off" and not setting.preemption:
            chosen = [*self.crossing[:1], *chosen, *self.variants, *self.crossing[1:]]
        if setting.preemption:
            chosen = [*chosen, *(self._lengthened(r, setting.draft_tokens or 0) for r in self.growing)]
        if (setting.draft_tokens or 0) > max(r.params.max_tokens for r in self.requests):
            chosen = [self._lasting(setting.draft_tokens or 0), *chosen]
        if setting.neighbours == "long":
            chosen = [self.longest(), *chosen]
        return [self._sampled(r, setting.sampling) for r in chosen]

    def _lasting(self, window: int) -> Request:
        """Return a request that fills a whole window, with a token before it and one after."""
        few = self.requests[min(2, len(self.requests) - 1)]
        params = SamplingParams(max_tokens=window + 2)
        return replace(few, index=len(self.requests) + 1, id=f"lasting {window}", params=params)

    def _lengthened(self, request: Request, window: int) -> Request:
        """Return the same request, or another that does not end with the first window either."""
        if window < _GROWTH:
            return request
        return replace(request, id=f"{request.id}, {window} long").with_params(
            max_tokens=window + 8, min_tokens=window + 8
        )

    def longest(self) -> Request:
        """Return the long neighbour, which is compared too: its positions reach further than any other's."""
        return Request(len(self.requests) + 2, "long", prompt=self.long, params=SamplingParams(max_tokens=4))

    def resampled(self, watched: list[Request], kind: str) -> list[Request]:
        """Return the same requests with another kind of sampling."""
        own = {r.id: r for r in (*self.requests, *self.musing)}
        plain = [replace(r, params=SamplingParams(max_tokens=r.params.max_tokens)) for r in watched]
        return [self._sampled(own.get(r.id, r), kind) for r in plain]

    def learn(
        self,
        reference: Mapping[Key, Observed],
        prompts: Mapping[str | int, list[int]],
        size: Callable[[Request], int],
        page: int,
    ) -> None:
        """Keep the reference's texts, stop strings from their middles, and make the requests that consist of token ids.

        Args:
            reference: reference of the requests.
            prompts: tokens of their prompts, by id.
            size: returns the most tokens of a request with its completion; 0 if it cannot run.
            page: positions per page.
        """
        self.requests = [r for r in self.requests if (r.id, 0) in reference]  # the others cannot run
        for (id, _), sample in reference.items():
            text = sample.line["text"]
            self.stops[id] = text[len(text) // 2 :][:2] or "\n"
            self.tokens[id] = sample.tokens
        second = self.requests[min(1, len(self.requests) - 1)]
        tokens = (*prompts[second.id], *reference[second.id, 0].tokens)
        params = SamplingParams(max_tokens=8)
        self.following = Request(len(self.requests), "following", token_ids=tokens + tokens[:3], params=params)
        self.musing = self._musing(reference, prompts)
        text = [token for request in self.requests for token in prompts[request.id]]
        self.variants = self._variants(text, page)
        params = SamplingParams(max_tokens=_BEFORE_END + _BEHIND_END, ignore_eos=True)
        self.crossing = [self._of_tokens("crossing", _repeated(text[1:] or text, page - _BEFORE_END), params)]
        others = self._neighbours(Setting(neighbours="others"))
        self.growing = self._growing(text, page, max(map(size, [*self.watched(_WIDEST), *others])))

    def cross(self, tokens: tuple[int, ...]) -> None:
        """Add a prompt that continues the completion that crosses a block end by a little more."""
        prompt = self.crossing[0].token_ids or ()
        whole = [*prompt, *tokens, *prompt[:3]]
        self.crossing.append(self._of_tokens("crossed", whole, SamplingParams(max_tokens=3)))

    def _musing(self, reference: Mapping[Key, Observed], prompts: Mapping[str | int, list[int]]) -> list[Request]:
        """Return prompts that thought, continued by the tokens of the last chunk that did, in any order.

        A penalty for each use makes these tokens alternate.
        """
        made: list[Request] = []
        for request in self.requests:
            seen, tokens = reference[request.id, 0], prompts[request.id]
            first = max((at for at, _ in seen.line.get("thoughts", ()) if at + seen.chunk <= len(tokens)), default=None)
            if first is not None and len(made) < _MUSING:
                bias = tuple((token, 100.0) for token in sorted({*tokens[first : first + seen.chunk]}))
                params = SamplingParams(max_tokens=_MUSED, ignore_eos=True, frequency_penalty=2.0, logit_bias=bias)
                made.append(self._of_tokens(f"musing {len(made)}", tokens, params))
        return made

    def _variants(self, text: list[int], page: int) -> list[Request]:
        """Return prompts whose first two blocks differ in one token at most, or are shorter."""
        base, tokens = _repeated(text, 2 * page + 1), sorted(set(text))
        prompts = [base]
        for place, length in ((0, 2 * page + 1), (page - 1, page + 1), (page // 2, page + 1), (page + 7, 2 * page + 1)):
            other = tokens[(tokens.index(base[place]) + 1) % len(tokens)]
            prompts.append([*base[:place], other, *base[place + 1 : length]])
        return [
            self._of_tokens(f"variant {i}", prompt, SamplingParams(max_tokens=3)) for i, prompt in enumerate(prompts)
        ]

    def _growing(self, text: list[int], page: int, longest: int) -> list[Request]:
        """Return two prompts that nearly fill half the pages that the longest request needs, read backwards.

        The younger one needs another page first, and still has tokens to come when the older one needs one.
        """
        half = -(-longest // (2 * page)) * page
        prompts = [_repeated(text[::-1], half - 1), _repeated(text[-2::-1] or text, half)]
        params = SamplingParams(max_tokens=_GROWTH, min_tokens=_GROWTH, ignore_eos=True)
        return [self._of_tokens(f"{_GROWING} {i}", prompt, params) for i, prompt in enumerate(prompts)]

    def _of_tokens(self, id: str, tokens: list[int], params: SamplingParams) -> Request:
        return Request(len(self.requests) + _SEVERAL, id, token_ids=tuple(tokens), params=params)

    def _sampled(self, request: Request, kind: str) -> Request:
        changes = dict(SAMPLING[kind])
        if request.index >= _SEVERAL:
            changes.pop("n", None)
        if kind == "stop":
            changes["stop"] = (self.stops.get(request.id, "\n"),)
        if "min_tokens" in changes:
            common = [token for token, _ in Counter(self.tokens.get(request.id, (1, 2))).most_common(3)]
            changes["min_tokens"] = min(changes["min_tokens"], request.params.max_tokens)
            changes["stop_token_ids"] = common[-1:]
            changes["logit_bias"] = dict.fromkeys(common, 1.0)
        if request.tool_choice not in ("auto", "none") or any(getattr(request.params, name) for name in GUIDES):
            changes.pop("ignore_eos", None)  # texts with a form or a call must end
        if "seed" in changes:
            changes["seed"] += request.index
        return request.with_params(**changes)

    def arranged(
        self, watched: list[Request], setting: Setting, seed: int, broken: tuple[int, ...] = ()
    ) -> list[Request]:
        """Return the watched requests in the setting's order, with neighbours and unverified requests among them.

        `broken` are token ids for neighbours that break, the first of them that of the token with the broken embedding.
        """
        queue = list(watched)
        if setting.order == "reversed":
            queue.reverse()
        elif setting.order != "file":
            random.Random(f"{seed} {setting.order}").shuffle(queue)
        turn = setting.slot % max(len(queue), 1)
        queue = queue[-turn:] + queue[:-turn] if turn else queue
        neighbours = self._neighbours(setting) + self._breaking(setting, broken) + self._unverified(setting)
        for i, other in enumerate(neighbours):  # spread over the first slots, so that they run beside the longest
            queue.insert(min(2 * i, len(queue)), other)
        return sorted(queue, key=lambda request: not grows(request))  # at the same time, beside no others' pages

    def beginnings(self, watched: list[Request], prompts: Mapping[str | int, list[int]]) -> list[Request]:
        """Return other requests that begin like the watched ones: longer, unverified, or differing in a middle token.

        Args:
            watched: the watched requests.
            prompts: tokens of their prompts by id, of those that can run.
        """
        made: list[Request] = []
        for request in watched:
            tokens = prompts.get(request.id, [])
            if not tokens:
                continue
            middle, kind = len(tokens) // 2, request.index % 3
            if kind == 0:
                tokens = [*tokens, *tokens[:2]]
            elif kind == 2:
                tokens = [*tokens[:middle], tokens[middle - 1], *tokens[middle + 1 :]]
            params = SamplingParams(max_tokens=8 if kind == 1 else 2, deterministic=kind != 1)
            made.append(Request(len(made), f"beginning {len(made)}", token_ids=tuple(tokens), params=params))
        return made

    def _neighbours(self, setting: Setting) -> list[Request]:
        kinds: dict[str, list[dict[str, Any]]] = {
            "others": [{"max_tokens": 5, "temperature": 1.0, "seed": i} for i in range(3)],
            "early": [{"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 1, "temperature": 1.5}],
        }
        made = []
        for i, params in enumerate(kinds.get(setting.neighbours, [])):
            made.append(Request(i, f"neighbour {i}", prompt=self._other(i), params=SamplingParams(**params)))
        return made

    def _breaking(self, setting: Setting, broken: tuple[int, ...]) -> list[Request]:
        """Return neighbours that break early in their prompts, which fill more of their pages than most others will."""
        if setting.neighbours != "broken" or not broken:
            return []
        token, *others = broken
        sound = (others * (_FILLED // len(others) + 1))[:_FILLED]
        return [
            Request(
                i,
                f"neighbour {i}",
                token_ids=(*sound[: 5 * i], token, *sound),
                params=SamplingParams(n=1 + i % 2, max_tokens=8),
            )
            for i in range(3)
        ]

    def _unverified(self, setting: Setting) -> list[Request]:
        params = SamplingParams(max_tokens=5, temperature=0.8, deterministic=False)
        return [
            Request(i, f"unverified {i}", prompt=self._other(7 + i), params=params.with_(seed=i))
            for i in range(setting.unverified)
        ]

    def _other(self, i: int) -> str:
        """Return some text that is not a prompt of the pool."""
        start = (37 * i) % max(len(self.long) - 60, 1)
        return self.long[start : start + 60]


def grows(request: Request) -> bool:
    """Return whether it is one of the two requests that together outgrow a small cache."""
    return str(request.id).startswith(_GROWING)


def _repeated(tokens: list[int], length: int) -> list[int]:
    """Return the tokens repeated up to a length."""
    return list(islice(cycle(tokens), length))
