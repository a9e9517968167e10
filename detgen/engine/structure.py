"""The form of a text: which tokens may come next, by llguidance. Knows no logits.

Promise: what `Masks.after` returns is a function of the form and the tokens that it is given. Earlier calls, for these
or other tokens, and roll-backs leave no trace.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from detgen.engine.bounded import Bounded
from detgen.engine.grammars import as_grammar, check_end, form_of, one_line, with_little_stack, within_bounds
from detgen.errors import RequestError
from detgen.kernels.penalties import Mask
from detgen.params import SamplingParams

_KEPT = 64  # structures to keep for later requests, and masks to keep for the last positions of a sequence
_STATES = 50_000  # states of a lexer, of one or two kilobytes each; llguidance's limits bound everything else
# For a mask: so high that states run out first. Since states in use already cost no fuel, this limit depends on the
# past.
_FUEL = 100_000_000
# To see how long masks take, this many tokens are written once, in at most this many seconds: all sequences would wait.
_TRIED, _PATIENCE = 16, 2.0
_NO_BITS = np.zeros(0, np.uint8)
_Found = TypeVar("_Found")


class Structures:
    """Compiles the forms that requests ask for, each once.

    Args:
        tokenizer: the target's tokenizer, see `LoadedModel`.
        model: name of the target in errors.
        vocabulary: number of entries of its logits.
        eos: its end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Any, model: str, vocabulary: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._model, self._vocabulary, self._eos = tokenizer, model, vocabulary, eos
        self._known: OrderedDict[tuple[str, Any], Structure] = OrderedDict()
        self._own: Any = None
        self._fault = Bounded(with_little_stack(self._found_wrong))

    def of(self, params: SamplingParams, calls: str | None = None, key: str | None = None) -> Structure | None:
        """Return the form of a request's text; None if it is free.

        Args:
            params: the request's parameters.
            calls: the grammar of its calls, if it must call a tool.
            key: name of the form in errors; None for the parameter's name.

        Raises:
            RequestError: if it cannot be compiled, or not with this tokenizer; gives llguidance's reason.
        """
        name = form_of(params)
        if calls is not None and name is not None:
            raise RequestError(f"both tool_choice and {key or name} say what the text must be; give one of them")
        name, value = ("tool_choice", calls) if calls is not None else (name, getattr(params, name or "", None))
        if name is None:
            return None
        key = key or name
        check_end(params, key)
        found = self._known.pop((name, value), None)
        found = found or Structure(name, self._compiler(name, value, key), self._eos)
        self._known[name, value] = found
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def _compiler(self, name: str, value: Any, key: str) -> Callable[[], Any]:
        """Return a function that makes fresh matchers; one was made in another process to see that it works."""
        self._llguidance(key)
        if reason := within_bounds(self._fault, name, value):
            raise RequestError(f"{key} is refused: {reason}")
        return partial(self._matcher, name, as_grammar(name, value))

    def _matcher(self, name: str, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_STATES, step_lexer_fuel=_FUEL, verbose_errors=False)
        return LLMatcher(self._llguidance(name), grammar, log_level=0, limits=limits)

    def _found_wrong(self, name: str, value: Any) -> str:
        """Return why there is no matcher, or none that gives a mask; "" if there is one."""
        try:
            made = self._matcher(name, as_grammar(name, value))
        except RequestError as error:
            return str(error)
        if not made.is_error():
            made.compute_bitmask()  # some errors are found only then
        if not made.is_error():
            return _too_slow(made)
        reason = one_line(made.get_error())
        return "no text fits it" if reason.startswith("NoExtension") else reason

    def _llguidance(self, key: str) -> Any:
        """Return the tokenizer in llguidance's form; errors name the key that needs it."""
        if self._own is None:
            from tokenizers import Tokenizer

            if not self._eos:
                raise RequestError(f"{key} needs a model with an end-of-sequence token, and {self._model} has none")
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if not isinstance(backend, Tokenizer):
                raise RequestError(f"{key} needs a tokenizer of the library tokenizers, and {self._model} has another")
            if backend.truncation or backend.padding:
                backend = Tokenizer.from_str(backend.to_str())  # transformers' own stays truncated and padded
                backend.no_truncation()
                backend.no_padding()
            try:
                self._own = _read_tokenizer(backend.to_str(), self._vocabulary, self._eos)
            except Exception as error:  # anything that llguidance does not support
                raise RequestError(
                    f"{key} cannot be combined with the tokenizer of {self._model}: {one_line(str(error))}"
                ) from None
        return self._own


@lru_cache(maxsize=2)
def _read_tokenizer(tokenizer: str, vocabulary: int, eos: frozenset[int]) -> Any:
    """Return a tokenizer in llguidance's form; it takes a fifth of a second, and engines of one target share it."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(eos))


def _too_slow(matcher: Any) -> str:
    """Return why texts would take too long, by writing one from first allowed tokens; "" if they would not."""
    began = time.process_time()
    for _ in range(_TRIED):
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():  # all states of its automaton would be made anew for each token
            return one_line(matcher.get_error())
        if matcher.is_stopped() or not allowed.any():
            break
        matcher.try_consume_tokens([int(allowed.argmax())])
    slow = time.process_time() - began > _PATIENCE
    return f"llguidance takes more than {_PATIENCE:g} seconds for {_TRIED} tokens of it" if slow else ""


class Structure:
    """A form of texts.

    Args:
        name: name of the parameter.
        compile: makes a fresh matcher of llguidance.
        eos: the end-of-sequence tokens.
    """

    def __init__(self, name: str, compile: Callable[[], Any], eos: frozenset[int]) -> None:
        self.name, self.eos = name, eos
        self._compile = compile
        self._matcher: Any = None

    def start(self) -> Any:
        """Return a matcher for one sequence, which shares the states of its lexer with others."""
        if self._matcher is None:
            self._matcher = self._compile()
        return self._matcher.deep_copy()

    def anew(self) -> Any:
        """Return a matcher that shares nothing; matchers that start later share nothing with earlier ones either."""
        self._matcher = None
        return self._compile()


class Masks:
    """The masks of one sequence; moves forward and back from where it was last asked.

    Args:
        structure: the form of the text.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._matcher: Any = None  # made on first use
        self._path: list[int] = []  # the longest completion that was asked about since it last went back
        self._depth = 0  # number of these tokens that the matcher has consumed
        self._made: dict[int, _Mask] = {}  # masks by the number of tokens of the path before them

    def after(self, completion: list[int]) -> Mask | None:
        """Return what may follow a completion; None if it does not fit or has ended, so that nothing matters.

        The result is invalid once this was called for a completion that does not begin with this one.

        Args:
            completion: committed and drafted tokens.
        """
        self._go_back(completion)
        path, depth = self._path, len(completion)
        if (known := self._made.get(depth)) is not None:
            return known
        before, new = len(path), completion[len(path) :]
        path += new
        mask: Mask | None = None
        if self._structure.eos.isdisjoint(new):
            fits, error = self._ask(depth, lambda matcher: True)
            if fits:
                return self._new(depth)
            mask = Mask(_NO_BITS, error) if error else self._wrong(path[self._depth])
        del path[before:]
        self._go_back(path)
        return mask

    def _new(self, depth: int) -> Mask:
        if len(self._made) >= _KEPT:
            self._made = {at: made for at, made in self._made.items() if at > depth - _KEPT // 2}
        self._made[depth] = made = _Mask(self, depth)
        return made

    def _wrong(self, token: int) -> Mask | None:
        """Return the result of `after` for completions with a token that the matcher does not accept in its place."""
        bits, error = self.bits(self._depth)
        if not error and not Mask(bits).allows(token):
            return None
        return Mask(_NO_BITS, error or "llguidance does not take a token that it allows")

    def forced(self, completion: list[int], most: int) -> list[int]:
        """Return the next tokens, at most `most`, as long as only one may come; a guess, made as cheaply as possible.

        Args:
            completion: committed tokens.
            most: at least 1.
        """
        if self.after(completion) is None or not self._at(len(completion)):
            return []
        eos = self._structure.eos
        found = self._next_forced()[:most]
        if found and len(found) < most and len(eos) == 1 and eos.isdisjoint(found):
            consumed = self._matcher.try_consume_tokens(found)
            if self._matcher.is_stopped() and not self._matcher.is_error():
                found += eos
            self._matcher.rollback(consumed)
        return found

    def bits(self, depth: int) -> tuple[np.ndarray, str]:
        """Return all that may follow `depth` tokens of the path, as the bits of a `Mask`, and an error, or ""."""
        found, error = self._ask(depth, lambda matcher: np.frombuffer(matcher.compute_bitmask(), np.uint8))
        return (_NO_BITS if found is None else found), error

    def allows(self, depth: int, token: int) -> bool:
        """Return whether a token is known to be allowed after `depth` tokens of the path, where none is forced."""
        return bool(self._ask(depth, lambda matcher: matcher.validate_tokens([token]))[0])

    def forced_at(self, depth: int) -> int | None:
        """Return the only token that may follow `depth` tokens of the path, if it is known to be the only one."""
        return next(iter(self._next_forced()), None) if self._at(depth) else None

    def _next_forced(self) -> list[int]:
        matcher, eos = self._matcher, self._structure.eos
        if matcher.is_stopped():
            return [*eos] if len(eos) == 1 and not matcher.is_error() else []
        found: list[int] = matcher.compute_ff_tokens() if matcher.compute_ff_bytes() else []
        return found

    def _ask(self, depth: int, what: Callable[[Any], _Found]) -> tuple[_Found | None, str]:
        """Return a matcher's answer after `depth` tokens of the path, None if they do not fit; and an error, or "".

        States from other requests or from drafts may have reached a limit; a fresh matcher tells if this text reaches
        it.
        """
        for anew in (False, True):
            if anew:
                self._begin(self._structure.anew())
            found = what(self._matcher) if self._at(depth) else None
            if not self._matcher.is_error():
                return found, ""
        error = _reason(self._matcher)
        self._begin(None)
        return None, error

    def _begin(self, matcher: Any) -> None:
        self._matcher, self._depth = matcher, 0

    def _at(self, depth: int) -> bool:
        """Have the matcher consume `depth` tokens of the path; return whether they fit."""
        if self._matcher is None:
            self._begin(self._structure.start())
        if depth < self._depth:
            self._matcher.rollback(self._depth - depth)
            self._depth = depth
        if depth > self._depth:
            self._depth += self._matcher.try_consume_tokens(self._path[self._depth : depth])
        return self._depth == depth

    def _go_back(self, completion: list[int]) -> None:
        """Cut the path down to its common beginning with the completion, unless one of them begins with the other."""
        path, shorter = self._path, min(len(self._path), len(completion))
        if path[:shorter] == completion[:shorter]:
            return
        kept = next(i for i in range(shorter) if path[i] != completion[i])
        del path[kept:]
        if self._depth > kept:
            self._at(kept)
        for depth in [depth for depth in self._made if depth > kept]:
            del self._made[depth]


class _Mask(Mask):
    """A mask that asks `Masks` when something is needed.

    Args:
        masks: masks of the sequence.
        depth: number of tokens of its path before the mask.
    """

    def __init__(self, masks: Masks, depth: int) -> None:
        super().__init__(_NO_BITS)
        self._masks, self._depth, self._told = masks, depth, False

    @property
    def bits(self) -> np.ndarray:
        """All bits; empty if they are unknown."""
        if not self._told:
            self._bits, self.error = self._masks.bits(self._depth)
            self._told = True
            if not self.error and not self._bits.any():
                self.error = "no token of the model fits"
        return self._bits

    @cached_property
    def forced(self) -> int | None:
        """The only token that may come, if it is known to be the only one."""
        return self._masks.forced_at(self._depth)

    def allows(self, token: int) -> bool:
        """Return whether a token may come; computes no bits."""
        if self._told:
            return super().allows(token)
        return self._masks.allows(self._depth, token) if self.forced is None else token == self.forced


def _reason(matcher: Any) -> str:
    return one_line(matcher.get_error()) or "llguidance says no more"
