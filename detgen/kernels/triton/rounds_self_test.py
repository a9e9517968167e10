"""The part of a device's self-test that tries rounds of drafting and verifying: a few, against plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from detgen.kernels.input_batch import Windows, pack
from detgen.kernels.penalties import Adjuster, Penalties
from detgen.kernels.rounds import Limits, Pass, Rounds
from detgen.kernels.sampling import Choice, Choices
from detgen.kernels.triton.drafted_rounds import Sheet
from detgen.kernels.triton.launching import sent
from detgen.program.operands import PAGE
from detgen.program.rows import Rows

_SHARING = 2  # tokens of a piece
_PENALTIES = Penalties(1.3, 0.1, 0.2, ((7, 0.5),), frozenset({3}), 2)
_NONE = np.zeros(0, np.int64)


@dataclass
class _Text:
    """A sequence; `drafted` to `ending` are its `Limits`."""

    tokens: list[int]
    drafted: int
    room: int
    end: int
    ending: int
    draft: list[int] = field(default_factory=list)
    goes: bool = True

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.adjuster = Adjuster(_PENALTIES, self.tokens.copy())

    @property
    def least(self) -> int:
        """The length up to which no token ends it."""
        return self.prompt + 2

    @property
    def reach(self) -> int:
        """The length that a draft may not exceed."""
        return min(self.end - 1, self.room)

    @property
    def most(self) -> int:
        """The most tokens that its next draft has."""
        return max(min(self.drafted, self.reach - len(self.tokens)), 0) if self.goes else 0

    def look_up(self) -> list[int]:
        """Return what followed its last three tokens, or two, or one, where they were before, again and again."""
        for n in (3, 2, 1):
            for at in range(len(self.tokens) - 1, n - 1, -1):
                if self.tokens[at - n : at] == self.tokens[-n:]:
                    return (self.tokens[at:] * self.most)[: self.most]
        return []

    def cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a draft, which ends with the one that ends the sequence."""
        there = tokens[: self.most]
        return there[: there.index(self.ending) + 1] if self.ending in there else there

    def commit(self, chosen: list[int], *, broken: bool) -> None:
        """Append the tokens chosen behind the last one and the draft, up to the first that was not drafted."""
        for token, drafted in zip(chosen, [*self.draft, -1], strict=True):
            self.tokens.append(token)
            ends = token == self.ending and len(self.tokens) > self.least
            self.goes = not (ends or broken or len(self.tokens) >= self.end)
            if not self.goes or token != drafted:
                break
        self.goes &= len(self.tokens) <= self.room


def rounds_right(device: torch.device | str, *, looked_up: bool) -> bool:
    """Return whether drafts, rows, adjustments and verdicts of three rounds are those that plain Python finds.

    Args:
        device: where the kernels run.
        looked_up: whether drafts are looked up; otherwise they are given, as if a model had chosen them.
    """
    texts = [
        _Text([1, 2, 3, 4, 5, 2, 3, 8, 1, 2, 3], drafted=3, room=40, end=30, ending=2),
        _Text([*range(PAGE - 3), 5, 4, 5], drafted=2, room=PAGE + 2, end=PAGE + 7, ending=-1),
        _Text([7, 8, 9], drafted=0, room=20, end=10, ending=9),
        _Text([6, 6], drafted=3, room=20, end=7, ending=-1),
    ]
    asked = _asked(texts, looked_up=looked_up)
    sheet, right, number = Sheet(asked, torch.device(device)), True, np.arange(len(texts))
    tables = np.arange(4 * len(texts))[::-1].reshape(-1, 4).copy()
    rows = 1 + asked.limits.drafted
    one = Pass(pack(_windows(asked, number, rows), tables, 1), number, _NONE, 1, -1)
    for turn in range(asked.turns):
        if looked_up:
            sheet.look_up()
        for step in range(0 if looked_up else int(rows.max()) - 1):
            there = number[asked.limits.drafted > step]
            batch = pack(_windows(asked, there, np.ones(len(there), np.int64)), tables, 1)
            sheet.note(Pass(batch, there, _NONE, 1 + step, step), _packed((there + step + turn) % 10, device))
        for i, text in enumerate(texts):
            text.draft = text.look_up() if looked_up else text.cut([(i + step + turn) % 10 for step in range(3)])
        sheet.copy()
        right &= _rows_right(sheet, one, texts, tables) and _lists_right(sheet, one, texts)
        chosen = [[*text.draft, 9 - turn] for text in texts]
        chosen[0][turn:] = [turn] * len(chosen[0][turn:])
        padded = [n + [0] * (count - len(n)) for n, count in zip(chosen, rows.tolist(), strict=True)]
        broken = (number == 2) & (turn == 2)
        flags = sent(torch.from_numpy(np.repeat(broken, rows).astype(np.int8)), device)
        sheet.judge(one, _packed(np.concatenate(padded), device), flags)
        for i, (text, tokens) in enumerate(zip(texts, chosen, strict=True)):
            if text.goes:
                text.commit(tokens, broken=bool(broken[i]))
                known = sheet.known[i].tolist()
                right &= known[:2] == [len(text.tokens), text.goes] and known[3:5] == text.tokens[-2:]
    return right


def _asked(texts: list[_Text], *, looked_up: bool) -> Rounds:
    """Return three rounds of sequences with adjusted logits."""
    ones, prompts = np.ones(len(texts), np.int64), np.array([text.prompt for text in texts])
    limits = Limits._make(np.array([getattr(text, name) for text in texts]) for name in Limits._fields)
    limits = limits._replace(ending=limits.ending[:, None])
    windows = Windows(np.arange(len(texts)), prompts - 1, ones, ones, np.array([text.tokens[-1] for text in texts]))
    how = Choices.of([Choice(0.5, seed=i) for i in range(len(texts))])
    how = replace(how, growing=[text.adjuster.growing([]) for text in texts])
    own = [text.tokens for text in texts] if looked_up else None
    return Rounds(3, windows, prompts, [], limits, how, windows, 1, own)


def _windows(asked: Rounds, which: np.ndarray, rows: np.ndarray) -> Windows:
    """Return windows of some sequences with so many rows."""
    return Windows(asked.windows.slots[which], asked.windows.starts[which], rows, rows, np.zeros(rows.sum(), np.int64))


def _packed(tokens: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Return tokens as `sampling_kernels.choose` gives them."""
    packed = np.zeros((len(tokens), 4), np.int32)
    packed[:, 3] = tokens
    return sent(torch.from_numpy(packed), device)


def _rows_right(sheet: Sheet, one: Pass, texts: list[_Text], tables: np.ndarray) -> bool:
    """Return whether each window has the last token and the draft, where they belong, and all other rows are spare."""
    batch, scratch = one.batch, tables.size * PAGE
    pieces, of_windows = batch.by_pieces(_SHARING)
    rows = Rows(batch.ids, batch.positions, batch.kv_positions, batch.wanted, of_windows, pieces)
    rows = Rows(*(sent(torch.from_numpy(x.copy()), sheet.known.device) for x in rows[:6]))
    sheet.place(one, rows, scratch, _SHARING)
    ids, positions, places, cut = (x.tolist() for x in (rows.ids, rows.positions, rows.places, rows.pieces))
    wanted, wanted_pieces, row = list[tuple[int, ...]](), list[list[int]](), 0
    for i, (text, spare) in enumerate(zip(texts, batch.windows.lengths.tolist(), strict=True)):
        read = [text.tokens[-1], *text.draft] if text.goes else []
        for at, token in enumerate(read, len(text.tokens) - 1):
            wanted.append((token, at, tables[i, at // PAGE] * PAGE + at % PAGE))
        wanted += [(0, 0, scratch)] * (spare - len(read))
        for first in range(0, len(read), _SHARING):
            at = len(text.tokens) - 1 + first
            wanted_pieces.append([i, at, min(len(read) - first, _SHARING), row + first])
        row += spare
    return [*zip(ids, positions, places, strict=True)] == wanted and [x for x in cut if x[2]] == wanted_pieces


def _lists_right(sheet: Sheet, one: Pass, texts: list[_Text]) -> bool:
    """Return whether each row is adjusted as the tokens before it say, and chosen at its position."""
    _, lists, positions = sheet.choices(one)
    assert lists is not None, "there are penalties"
    assert positions is not None, "tokens are sampled"
    bounds, ids, terms = lists.bounds.tolist(), lists.ids.tolist(), lists.terms.cpu().numpy()
    row, right = 0, True
    for text, rows in zip(texts, one.batch.windows.lengths.tolist(), strict=True):
        for depth in range(1 + len(text.draft) if text.goes else 0):
            completion = [*text.tokens[text.prompt :], *text.draft[:depth]]
            wanted, first = text.adjuster.after(completion), bounds[row + depth][0]
            assert wanted is not None, "there is a bias"
            part = slice(first, first + len(wanted.ids))
            right &= ids[part] == wanted.ids.tolist() and terms[:, part].tobytes() == wanted.terms.tobytes()
            right &= int(positions[row + depth]) == len(completion)
        row += rows
    return right
