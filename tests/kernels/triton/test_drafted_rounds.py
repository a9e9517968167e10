"""Rounds that a device runs by itself: where it puts rows, what it drafts, and what it would commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, and with the dev extra on Linux")

from helpers.breaking import broken
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.drafters.ngram import NgramDrafter
from detgen.engine.verification import judge
from detgen.kernels.attention import BLOCK
from detgen.kernels.input_batch import Window, Windows, pack
from detgen.kernels.rounds import Limits, Pass, Rounds
from detgen.kernels.triton import drafted_rounds, rounds_self_test
from detgen.kernels.triton.rounds_self_test import rounds_right
from detgen.program.rows import Rows

VOCABULARY = 4  # so that drafts are often right
SHARING = 2  # tokens of a piece


def rounds_of(random: np.random.Generator, count: int) -> Rounds:
    """Of sequences of any length, that end anywhere."""
    length = random.integers(1, 3 * BLOCK, count)
    drafted = random.integers(0, 5, count)
    room = length + random.integers(0, 9, count)
    end = length + random.integers(1, 9, count)
    reach = np.minimum(np.minimum(room, end - 1), length + random.integers(0, 9, count))
    ending = np.where(random.random((count, 2)) < 0.3, random.integers(0, VOCABULARY, (count, 2)), -1)
    limits = Limits(drafted, reach, room, end, length + random.integers(-3, 3, count), ending)
    ones, slots = np.ones(count, np.int64), random.permutation(count)
    windows = Windows(slots, length - 1, ones, ones, random.integers(0, VOCABULARY, count))
    return Rounds(2, windows, length // 2, [], limits, None, windows, 1)


def verifying(asked: Rounds, tables: np.ndarray, *, reads: bool) -> Pass:
    """The pass that verifies all sequences, and perhaps reads a part of a prompt."""
    rows = 1 + asked.limits.drafted
    tokens = np.zeros(int(rows.sum()), np.int64)
    windows = Windows(asked.windows.slots, asked.windows.starts, rows, rows, tokens, rows - 1)
    if reads:
        windows = windows.joined(Windows.of([Window(len(rows), 60, [3, 1, 2, 3, 1], 0)]))
    return Pass(pack(windows, tables, 1), np.arange(len(rows)), np.zeros(0, np.int64), 1, -1)


def packed_of(chosen: np.ndarray, device: str) -> torch.Tensor:
    """Tokens as `choose` gives them."""
    packed = torch.zeros(len(chosen), 4, dtype=torch.int32)
    packed[:, 3] = torch.from_numpy(chosen)
    return packed.to(device)


def faults(module: ModuleType, device: str, seed: int) -> Iterator[str]:
    """What of two rounds is not as the host's functions say."""
    random = np.random.default_rng(seed)
    asked = rounds_of(random, int(random.integers(1, 5)))
    limits, length, last = asked.limits, asked.windows.starts + 1, asked.windows.tokens.copy()
    tables = random.permutation(len(length) * 4 + 4).reshape(-1, 4)
    scratch = tables.size * BLOCK
    sheet = module.Sheet(asked, torch.device(device))
    one, alive = verifying(asked, tables, reads=seed % 2 > 0), np.ones(len(length), bool)
    rows = 1 + limits.drafted
    firsts = rows.cumsum() - rows
    before = np.full(len(length), -1)
    for _ in range(asked.turns):
        counts = np.where(alive, np.clip(limits.reach - length, 0, limits.drafted), 0)
        drafts: list[list[int]] = [[] for _ in counts]
        for step in range(int(limits.drafted.max())):
            which = np.flatnonzero(limits.drafted > step)
            drafting = Pass(
                SimpleNamespace(windows=asked.windows.part(0, len(which))), which, which[:0], 1 + step, step
            )  # type: ignore[arg-type]
            tokens = random.integers(-2, VOCABULARY, len(which))
            sheet.note(drafting, packed_of(tokens, device))
            for i, token in zip(which.tolist(), tokens.tolist(), strict=True):
                if counts[i] > step:
                    drafts[i] += [token] * (token >= 0)
                    if token < 0 or token in limits.ending[i]:
                        counts[i] = len(drafts[i])
        known = sheet.known.cpu().numpy()
        if known[alive, 2].tolist() != counts[alive].tolist():
            yield "drafted tokens are counted"
        read = [[int(token), *draft] for token, draft in zip(last, drafts, strict=True)]

        # Where the rows of what is read are, those of others besides.
        wanted = [
            Window(int(s), int(n) - 1, r, len(r)) for s, n, r in zip(asked.windows.slots, length, read, strict=True)
        ]
        pieces, of_windows = one.batch.by_pieces(SHARING)
        buffers = [one.batch.ids, one.batch.positions, one.batch.kv_positions, one.batch.wanted, of_windows, pieces]
        there = Rows(*(torch.from_numpy(x.copy()).to(device) for x in buffers))
        sheet.place(one, there, scratch, SHARING)
        ids, positions, places, _, _, cut, _ = (None if x is None else x.cpu().numpy() for x in there)
        end = int(rows.sum())
        told = zip((ids, positions, places), buffers[:3], strict=True)
        if (
            any((mine[end:] != own[end:]).any() for mine, own in told)
            or (cut[cut[:, 0] >= len(rows)] != pieces[pieces[:, 0] >= len(rows)]).any()
        ):
            yield "what is read of prompts stays"
        theirs = [cut[cut[:, 0] == i] for i in range(len(rows))]
        for i, window in enumerate(wanted):
            at, n = int(firsts[i]), len(window.tokens) if alive[i] else 0
            if n:
                alone = pack(Windows.of([window]), tables, 1)
                mine = [x[at : at + n].tolist() for x in (ids, positions, places)]
                if mine != [alone.ids.tolist(), alone.positions.tolist(), alone.kv_positions.tolist()]:
                    yield "rows are where they belong"
                want, _ = alone.by_pieces(SHARING)
                if theirs[i][theirs[i][:, 2] > 0][:, 1:].tolist() != (want[:, 1:] + [0, 0, at]).tolist():
                    yield "pieces are those of the window"
            elif theirs[i][:, 2].any():
                yield "nothing is read of those that ended"
            if (places[at + n : at + rows[i]] != scratch).any():
                yield "other rows write to the scratch page"

        chosen = random.integers(0, VOCABULARY, len(ids))
        for i, draft in enumerate(drafts):
            right = int(random.integers(0, len(draft) + 1))
            chosen[firsts[i] : firsts[i] + right] = draft[:right]
        chosen[random.random(len(ids)) < 0.05] = -2
        flags = random.random(len(ids)) < 0.05
        sheet.judge(one, packed_of(chosen, device), torch.from_numpy(flags.astype(np.int8)).to(device))
        known = sheet.known.cpu().numpy()
        for i in np.flatnonzero(alive).tolist():
            n = int(counts[i]) + 1
            own = slice(int(firsts[i]), int(firsts[i]) + n)
            produced = length[i] + np.arange(n) + 1
            ends = np.isin(chosen[own], limits.ending[i]) & (produced > limits.least[i])
            ends |= (produced >= limits.end[i]) | (chosen[own] < 0) | flags[own]
            verdict = judge(np.zeros(1, np.int64), np.array([*drafts[i], -1]), chosen[own], ends)
            committed = int(verdict.committed[0])
            length[i] += committed
            alive[i] = not ends[committed - 1] and length[i] <= limits.room[i]
            before[i] = chosen[own][committed - 2] if committed > 1 else last[i]
            last[i] = chosen[own][committed - 1]
            if known[i, [0, 1]].tolist() != [length[i], alive[i]]:
                yield "lengths and ends are those of the verdict"
            if alive[i] and known[i, [3, 4]].tolist() != [before[i], last[i]]:
                yield "the last tokens are those committed"


@examples(120)
@given(seed=st.integers(0, 2**32))
def test_the_device_does_what_the_host_would(device: str, seed: int) -> None:
    assert list(faults(drafted_rounds, device, seed)) == []


class Text:
    """A sequence without a form, as look-up sees it."""

    structure = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


def faults_of_drafts(module: Any, device: str, seed: int) -> Iterator[str]:
    """What of four rounds is not what the host would look up."""
    random = np.random.default_rng(seed)
    asked, vocabulary = rounds_of(random, int(random.integers(1, 5))), int(random.choice([2, 4, 30, 300]))
    limits, length = asked.limits, asked.windows.starts + 1
    texts = [Text(random.integers(0, vocabulary, n).tolist()) for n in length.tolist()]
    asked = asked._replace(turns=4, texts=[text.tokens for text in texts])
    asked.windows.tokens[:] = [text.tokens[-1] for text in texts]
    limits.end[:], limits.reach[:], limits.room[:] = (x + random.integers(0, 20) for x in (limits.end, length, length))
    one = verifying(asked, random.permutation(len(length) * 4).reshape(-1, 4), reads=False)
    firsts = np.cumsum(1 + limits.drafted) - (1 + limits.drafted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MANY", 64)
        sheet, drafter = module.Sheet(asked, torch.device(device)), NgramDrafter()
        for _ in range(asked.turns):
            most = sheet.known[:, 2].tolist()
            sheet.look_up()
            known = sheet.copy().cpu().numpy()
            drafts = [row[5 : 5 + row[2]].tolist() for row in known]
            for text, draft, row, n in zip(texts, drafts, known, most, strict=True):
                if row[1] and draft != drafter.look_up(text, n)[0]:  # type: ignore[arg-type]
                    yield "drafts are those of the host"
            chosen = random.integers(0, vocabulary, len(one.batch.ids))
            for first, draft in zip(firsts.tolist(), drafts, strict=True):
                right = int(random.integers(0, len(draft) + 1))
                chosen[first : first + right] = draft[:right]
            sheet.judge(one, packed_of(chosen, device), torch.zeros(len(chosen), dtype=torch.int8, device=device))
            ends = sheet.known[:, 0].tolist()
            for text, first, end in zip(texts, firsts.tolist(), ends, strict=True):
                text.tokens += chosen[first : first + end - len(text.tokens)].tolist()


@examples(80)
@given(seed=st.integers(0, 2**32))
def test_the_device_looks_up_what_the_host_would(device: str, seed: int) -> None:
    """In texts of few tokens or many, which grow by drafts that are accepted or not."""
    assert list(faults_of_drafts(drafted_rounds, device, seed)) == []


BROKEN = {
    "a draft is accepted": ("(chosen == draft)", "(chosen != draft)", "verdict"),
    "one more is accepted": ("last = tl.minimum(accepted, end)", "last = tl.minimum(accepted + 1, end)", "verdict"),
    "ends are not seen": ("_ends(chosen, limits, bounds) &", "(chosen < 0) &", "verdict"),
    "ends come too early": ("produced > tl.load(limits + LEAST)", "produced > 0", "verdict"),
    "limits are not seen": ("(produced >= tl.load(limits + END))", "(produced < 0)", "verdict"),
    "pages are not counted": ("(end > accepted) & (length <= tl.load(limits + ROOM))", "end > accepted", "verdict"),
    "what is not finite goes on": ("there & (infinite | stops", "there & (stops", "verdict"),
    "the wrong token is last": ("tl.where(at == last, chosen, 0)", "tl.where(at == 0, chosen, 0)", "last tokens"),
    "a draft goes on behind its end": ("if _ends(token, limits", "if (token < -9) & _ends(token, limits", "counted"),
    "rows are one too far": ("tl.load(of + LENGTH) - 2 + column, ", "tl.load(of + LENGTH) - 1 + column, ", "rows"),
    "pieces are one too long": ("tl.maximum(there - cut, 0)", "tl.maximum(there + 1 - cut, 0)", "pieces"),
    "nothing goes to the scratch page": ("position % _PAGE, scratch)", "position % _PAGE, 0)", "scratch"),
    "two tokens are looked up": (" + three.to(tl.int64)", "", "those of the host"),
    "the earliest match is taken": ("matched * _MOST + after", "matched * _MOST + length - after", "those of the host"),
    "a draft ends with the text": ("at % (length - begin)", "at", "those of the host"),
    "what was committed is not read": ("mask=new < length)", "mask=new < 0)", "those of the host"),
    "the last one committed is not read": ("mask=new < length)", "mask=new < length - 1)", "those of the host"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_found(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, and by a device's self-test."""
    old, new, fault = BROKEN[name]
    module: Any = broken(drafted_rounds, tmp_path, (old, new))
    tried = faults_of_drafts if fault == "those of the host" else faults
    assert any(fault in found for seed in range(60) for found in tried(module, device, seed))
    monkeypatch.setattr(rounds_self_test, "Sheet", module.Sheet)
    assert not all(rounds_right(device, looked_up=looked_up) for looked_up in (True, False))
