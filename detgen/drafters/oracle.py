"""Drafters that know the text in advance: one is always right, one wrong on purpose, one right at a given rate."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from detgen.drafters.protocol import Draft, Drafter, Drafting
from detgen.kernels.sampling import Choice


@dataclass(frozen=True, slots=True)
class Known:
    """A sample of the reference run.

    Attributes:
        choice: how its first token is chosen; distinguishes samples of one prompt.
        tokens: prompt and completion.
    """

    choice: Choice
    tokens: tuple[int, ...]


class OracleDrafter(Drafter):
    """Proposes the tokens of the reference.

    Args:
        known: samples of the reference.
    """

    name = "oracle"

    def __init__(self, known: Iterable[Known]) -> None:
        self._known: dict[Choice, list[list[int]]] = {}
        for k in known:
            self._known.setdefault(replace(k.choice, position=0), []).append(list(k.tokens))
        self._found: WeakKeyDictionary[Drafting, list[int] | None] = WeakKeyDictionary()

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft the next lengths[i] tokens of the reference of seqs[i]; none for an unknown sequence."""
        return [Draft(self.ahead(seq, n), self.name) for seq, n in zip(seqs, lengths, strict=True)]

    def ahead(self, seq: Drafting, length: int) -> list[int]:
        """Return the next tokens of the reference, at most `length`."""
        whole = self._found.get(seq)
        at = len(seq.tokens)
        if whole is None or whole[:at] != seq.tokens:
            whole = self._look_up(seq)
            if whole is not None:
                self._found[seq] = whole
        return whole[at : at + length] if whole is not None else []

    def _look_up(self, seq: Drafting) -> list[int] | None:
        candidates = self._known.get(replace(seq.choice(0), position=0), [])
        at = len(seq.tokens)
        return max((c for c in candidates if c[:at] == seq.tokens), key=len, default=None)


class AdversaryDrafter(Drafter):
    """Proposes the reference with a wrong token at a random depth, so that verification rolls back at every depth.

    The wrong token is followed by the right continuation, which must not be accepted, or by noise.

    Args:
        oracle: knows the right tokens.
        vocabulary: entries of the logits.
        seed: another one is wrong elsewhere.
        broken: a token that is often the wrong one; None for none.
    """

    name = "adversary"

    def __init__(self, oracle: OracleDrafter, vocabulary: int, seed: int, broken: int | None = None) -> None:
        self._oracle = oracle
        self._broken = broken
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft lengths[i] tokens for seqs[i], at least one of them wrong if the sequence is known."""
        return [Draft(self._wrong(seq, n), self.name) for seq, n in zip(seqs, lengths, strict=True)]

    def _wrong(self, seq: Drafting, length: int) -> list[int]:
        rng = self._random
        right = self._oracle.ahead(seq, length)
        tokens = right + [rng.randrange(self._vocabulary) for _ in range(length - len(right))]
        if not tokens:
            return []
        depth = rng.randrange(len(tokens))
        tokens[depth] = (tokens[depth] + rng.randrange(1, self._vocabulary)) % self._vocabulary
        if self._broken is not None and rng.random() < 0.5:
            tokens[depth] = self._broken
        if rng.random() < 0.5:
            tokens[depth + 1 :] = [rng.randrange(self._vocabulary) for _ in tokens[depth + 1 :]]
        return tokens


class SyntheticDrafter(Drafter):
    """Proposes the reference, each token wrong with probability 1 - acceptance, at the cost of a draft model.

    With random weights, no draft model predicts the target, so this drafter measures what drafts of a given acceptance
    rate are worth: the draft model runs for every draft, and its tokens are thrown away. Whether a token is wrong
    depends only on its text and position, so all batch sizes see the same errors.

    Args:
        model: the draft model's drafter.
        oracle: knows the right tokens.
        acceptance: probability that a drafted token is right.
        vocabulary: entries of the logits.
        seed: another one is wrong elsewhere.
    """

    name = "synthetic"

    def __init__(self, model: Drafter, oracle: OracleDrafter, acceptance: float, vocabulary: int, seed: int) -> None:
        self._model = model
        self._oracle = oracle
        self._acceptance = acceptance
        self._vocabulary = vocabulary
        self._seed = seed
        self._spoiled: WeakKeyDictionary[Drafting, list[int]] = WeakKeyDictionary()

    def draft(self, seqs: Sequence[Drafting], lengths: list[int]) -> list[Draft]:
        """Draft at most lengths[i] tokens for seqs[i], fewer where the reference ends."""
        self._model.draft(seqs, lengths)
        return [Draft(self._text(seq)[len(seq.tokens) :][:n], self.name) for seq, n in zip(seqs, lengths, strict=True)]

    def _text(self, seq: Drafting) -> list[int]:
        """Return the whole text with its errors, which do not depend on when the sequence is first drafted for."""
        if seq not in self._spoiled:
            text = [*seq.tokens, *self._oracle.ahead(seq, sys.maxsize)]
            rng = random.Random(f"{self._seed} {text}")
            self._spoiled[seq] = [t if rng.random() < self._acceptance else (t + 1) % self._vocabulary for t in text]
        return self._spoiled[seq]
