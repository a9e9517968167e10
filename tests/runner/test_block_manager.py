"""Pages case by case: what is found, copied, promised, reused and forgotten."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from detgen.runner.block_manager import PAGE, BlockManager, Prefix


class Slots:
    """Slots that read prompts whole."""

    def __init__(self, count: int, kept: int | None = None) -> None:
        self.pages = BlockManager(count, kept)

    def find(self, tokens: list[int]) -> Prefix:
        return self.pages.find(tokens, self.pages.keys(tokens))

    def take(self, slot: int, tokens: list[int]) -> tuple[int, int, int] | None:
        prefix = self.find(tokens)
        return self.pages.take(slot, -(-len(tokens) // PAGE), prefix, tokens, self.pages.keys(tokens))

    def read(self, slot: int, tokens: list[int]) -> None:
        self.pages.fill(slot, tokens, len(tokens), self.pages.keys(tokens))

    def run(self, slot: int, tokens: list[int]) -> list[int]:
        """The pages that it had."""
        self.take(slot, tokens)
        self.read(slot, tokens)
        table: list[int] = self.pages.tables[slot, : self.pages.held[slot]].tolist()
        self.pages.release(slot)
        return table


def prompt(*runs: tuple[int, int]) -> list[int]:
    """Runs of (token, length)."""
    return [token for token, length in runs for _ in range(length)]


@given(
    st.lists(st.integers(0, 3), min_size=2 * PAGE, max_size=3 * PAGE),
    st.integers(0, 2 * PAGE - 1) | st.sampled_from([0, PAGE - 1, PAGE, 2 * PAGE - 1]),
)
@examples(30)
def test_every_token_counts(tokens: list[int], at: int) -> None:
    """A key depends on each token of its block and of those before, and on no other; known keys change nothing."""
    pages = BlockManager(1)
    keys = pages.keys(tokens)
    assert len(keys) == len(tokens) // PAGE
    assert all(len(k) == 16 for k in keys)
    assert pages.keys(np.array(tokens), keys[:1]) == keys
    assert pages.keys(tokens[:PAGE], keys) == keys[:1]
    other = pages.keys([*tokens[:at], 9, *tokens[at + 1 :]])
    assert [a == b for a, b in zip(keys, other, strict=True)] == [i < at // PAGE for i in range(len(keys))]


def test_equal_prompts_are_read_once() -> None:
    """Samples of one request wait for the first one, then share whole pages and copy the last."""
    slots = Slots(20)
    tokens = prompt((1, 150))
    assert slots.find(tokens) == ([], -1, 0, False)
    assert slots.take(0, tokens) is None
    assert slots.find(tokens) == ([], -1, 0, True)
    keys = slots.pages.keys(tokens)
    slots.pages.fill(0, tokens, 70, keys)
    assert slots.find(tokens) == ([0], 1, 70, True)
    slots.pages.fill(0, tokens, 128, keys)
    assert slots.find(tokens) == ([0, 1], -1, 128, True), "the rest is read once, too"
    slots.pages.fill(0, tokens, 150, keys)
    assert slots.find(tokens) == ([0, 1], 2, 149, False), "the last token goes through a pass"
    assert slots.take(1, tokens) == (2, 3, 21)
    assert slots.pages.tables[:2, :3].tolist() == [[0, 1, 2], [0, 1, 3]]
    assert slots.pages.references[:4].tolist() == [2, 2, 1, 1]


def test_the_rest_is_found_whatever_was_read_behind_it() -> None:
    """The first sample has committed tokens when its prompt is noted as read, and many others began like it."""
    slots = Slots(100)
    tokens = prompt((1, 20), (2, 10))
    slots.take(0, tokens)
    longer = [*tokens, 5, 6, 7]
    slots.pages.fill(0, longer, 33, slots.pages.keys(longer))
    for i in range(20):
        other = prompt((1, 20), (3, i + 1))
        slots.take(i + 1, other)
        slots.read(i + 1, other)
    assert slots.find(tokens) == ([], 0, 29, False)


def test_whole_blocks_leave_one_token() -> None:
    """Of a prompt of whole blocks the last page is copied without its last position."""
    slots = Slots(20)
    tokens = prompt((1, 128))
    first = slots.run(0, tokens)
    assert slots.find(tokens) == (first[:1], first[1], 127, False)
    assert slots.find([*tokens, 1]) == (first, -1, 128, False)
    assert slots.find(tokens[:65]) == (first[:1], -1, 64, False)


def test_a_copy_is_worth_four_positions() -> None:
    slots = Slots(20)
    slots.run(0, prompt((1, 3), (2, 40)))
    slots.run(0, prompt((3, 4), (2, 40)))
    assert slots.find(prompt((1, 3), (4, 40))).shared == 0
    assert slots.find(prompt((3, 4), (4, 40))).shared == 4
    assert slots.find(prompt((3, 4))).shared == 0, "the last token is none of them"
    assert slots.find([]).shared == slots.find([1]).shared == 0


def test_the_longest_common_beginning_wins() -> None:
    slots = Slots(40)
    for shared in (10, 50, 30):
        slots.run(0, prompt((1, shared), (2, 64 - shared)))
    prefix = slots.find(prompt((1, 60), (3, 60)))
    assert prefix.shared == 50
    assert prefix.partial == 1


def test_as_many_as_sixteen_pages_are_compared() -> None:
    """The most recently used of those that begin alike; all of them are found by prompts that are the same."""
    slots = Slots(40)
    tokens = [prompt((1, 30 - i), (2, 34 + i)) for i in range(20)]
    for each in tokens:
        slots.run(0, each)
    assert slots.find(prompt((1, 60))).shared == 30 - 4
    assert all(slots.find(each).shared == 63 for each in tokens)
    slots = Slots(40)
    for each in tokens[:16]:
        slots.run(0, each)
    slots.run(0, tokens[0])
    slots.run(0, tokens[17])
    assert slots.find(prompt((1, 60))).shared == 30, "it was used since"
    assert slots.find(prompt((1, 29), (2, 10))).shared == 29, "that of 29 was not"


def test_order_of_reuse() -> None:
    """Empty pages, fresh ones, then those that hold something, the least recently used first, tails before roots."""
    slots = Slots(8)
    assert slots.run(0, prompt((1, 192))) == [0, 1, 2]
    assert slots.run(0, prompt((2, 128))) == [3, 4]
    slots.pages.take(0, 1)
    slots.pages.release(0)  # page 5 is empty
    assert slots.run(1, prompt((3, 64))) == [5]
    assert slots.run(1, prompt((1, 64), (4, 63)))[0] == 0  # used again: 0, and 6 is its other page
    assert (slots.pages.available, slots.pages.used) == (8, 0)
    slots.pages.take(2, 8)
    assert slots.pages.tables[2, :8].tolist() == [7, 2, 1, 4, 3, 5, 6, 0]


def test_the_last_page_becomes_its_own() -> None:
    """Where a page is to be copied and there is no other one, it is taken as it is, and not found any more."""
    slots = Slots(3)
    tokens = prompt((1, 64), (2, 30), (3, 20))
    assert slots.run(0, tokens) == [0, 1]
    slots.pages.drafted[:2] = 64, 40
    slots.pages.take(1, 1)
    other = prompt((1, 64), (2, 30), (4, 20))
    assert slots.find(other) == ([0], 1, 94, False)
    assert slots.pages.need(2, slots.find(other)) == slots.pages.available == 2
    assert slots.take(2, other) is None
    assert slots.pages.tables[2, :2].tolist() == [0, 1]
    assert slots.pages.drafted[:2].tolist() == [64, 30]
    assert slots.find(tokens) == ([0], -1, 64, False)
    slots.read(2, other)
    assert slots.find(other) == ([0], 1, 113, False)
    assert slots.find(tokens) == ([0], 1, 94, False)


def test_what_is_copied_from_was_used() -> None:
    """A page that others are copied from is kept longer than one that was left later."""
    slots = Slots(4)
    first, second = (slots.run(0, prompt((i, 60)))[0] for i in (1, 2))
    slots.run(0, prompt((1, 50), (3, 10)))
    slots.take(0, prompt((4, 128)))
    assert first not in slots.pages.tables[0]
    assert second in slots.pages.tables[0]


def test_what_is_cut_off_is_filled_again() -> None:
    """Blocks that a slot reads anew after it was truncated are found; so are those it had."""
    slots = Slots(8)
    old, new = prompt((1, 200)), prompt((1, 70), (2, 130))
    slots.take(0, old)
    slots.read(0, old)
    slots.pages.truncate(0, 1)
    assert slots.pages.grow(0, 4)
    slots.read(0, new)
    assert slots.find(new).shared == slots.find(old).shared == 199


def test_no_more_pages_are_touched_than_used_and_kept() -> None:
    """A thousand prompts, two at a time, stay within those two and what is kept; without a bound they do not."""
    for kept, most in ((None, 400), (10, 14), (1, 5)):
        slots = Slots(400, kept)
        touched = set()
        for i in range(1000):
            other = prompt((i, 100))
            slots.take(1, other)
            touched |= {*slots.run(0, prompt((i + 2000, 128))), *slots.pages.tables[1, :2].tolist()}
            slots.pages.release(1)
        assert most - 2 <= len(touched) <= most
    assert not slots.pages._promised


def test_the_same_block_twice() -> None:
    """Of two slots that read the same at the same time, the first one's page is found; the other's is empty later."""
    slots = Slots(20)
    tokens = prompt((1, 100))
    for slot in (0, 1):
        slots.take(slot, tokens)
    for slot in (1, 0):
        slots.read(slot, tokens)
    assert slots.find(tokens) == ([2], 3, 99, False)
    slots.pages.release(1)
    slots.pages.release(0)
    assert slots.find(tokens) == ([2], 3, 99, False)
    slots.pages.take(5, 2)
    assert sorted(slots.pages.tables[5, :2].tolist()) == [0, 1]


def test_a_broken_promise_frees_others() -> None:
    """Nobody waits for a slot that was released, or cut, before it had read."""
    slots = Slots(20)
    tokens = prompt((1, 150))
    slots.take(3, tokens)
    assert slots.find(tokens).pending
    slots.pages.truncate(3, 2)
    assert slots.find(tokens).pending
    slots.pages.fill(3, tokens, 128, slots.pages.keys(tokens))
    assert not slots.find(tokens).pending, "the rest was given up"
    slots.pages.release(3)
    slots.take(3, prompt((2, 150)))
    slots.pages.release(3)
    assert not slots.find(prompt((2, 150))).pending


def test_what_is_wrong_is_refused() -> None:
    slots = Slots(4)
    slots.pages.take(0, 2)
    with pytest.raises(ValueError, match="slot 0, which has 2 pages, cannot take 1 more"):
        slots.pages.take(0, 1)
    with pytest.raises(ValueError, match="slot 1, which has 0 pages, cannot take 3 more"):
        slots.pages.take(1, 3)
    with pytest.raises(ValueError, match="slot 0 has 2 pages, fewer than 129 positions take"):
        slots.pages.fill(0, [1] * 129, 129, slots.pages.keys([1] * 129))
    with pytest.raises(ValueError, match="2 slots of 129 positions exceed the 4 pages"):
        slots.pages.lay_out(2, 129)
    slots.pages.release(0)
    slots.pages.release(0)
    slots.pages.release(100)
    assert slots.pages.available == 4


def test_a_layout_forgets_everything() -> None:
    """Contiguous pages for probes and audits; the next sequence finds all pages free."""
    slots = Slots(8)
    tokens = prompt((1, 150))
    slots.take(5, tokens)
    slots.run(0, prompt((2, 100)))
    slots.pages.lay_out(2, 150)
    assert slots.find(tokens) == slots.find(prompt((2, 100))) == ([], -1, 0, False)
    assert slots.pages.tables[:3, :4].tolist() == [[0, 1, 2, 8], [3, 4, 5, 8], [8] * 4]
    assert slots.pages.held.tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    assert (slots.pages.available, slots.pages.used) == (8, 0)
    slots.pages.lay_out(4, 64)
    assert slots.pages.tables[:5, :2].tolist() == [[i, 8] for i in range(4)] + [[8, 8]]
    slots.pages.lay_out_one([1, 0, 1, 1, 2])
    assert slots.pages.tables[:2, :6].tolist() == [[1, 0, 1, 1, 2, 8], [8] * 6]
    slots.pages.take(0, 8)
    assert (slots.pages.available, slots.pages.used) == (0, 8)
    assert slots.pages.references.tolist() == [1] * 8


def test_what_is_forgotten_is_not_found() -> None:
    """A slot keeps its pages."""
    slots = Slots(8)
    tokens = prompt((1, 150))
    slots.take(5, tokens)
    slots.read(5, tokens)
    slots.run(0, prompt((2, 100)))
    slots.pages.forget()
    assert slots.find(tokens) == slots.find(prompt((2, 100))) == ([], -1, 0, False)
    assert slots.pages.held[5] == slots.pages.used == 3
    slots.pages.release(5)
    slots.pages.take(0, 8)
    assert (slots.pages.available, slots.pages.used) == (0, 8)


def test_tables_grow() -> None:
    """Higher slots and more blocks keep what is there."""
    pages = BlockManager(100)
    pages.take(0, 1)
    pages.take(9, 3)
    assert pages.grow(0, 20)
    assert pages.grow(0, 5), "has them already"
    assert pages.tables[0, :20].tolist() == [0, *range(4, 23)]
    assert pages.tables[9, :4].tolist() == [1, 2, 3, 100]
    assert (pages.held[0], pages.held[9], pages.used) == (20, 3, 23)
    assert pages.tables.flags.c_contiguous


MANY = """
import psutil
from detgen.runner.block_manager import BlockManager

before = psutil.Process().memory_info().rss
pages = BlockManager(10_000_000, 256)
pages.take(0, 1000)
pages.release(0)
pages.forget()
print(psutil.Process().memory_info().rss - before)
"""


def test_many_pages_cost_nothing_until_used() -> None:
    """Neither memory nor time: 640 million positions.

    In a process of its own: memory that others gave back has to be cleared before it is used again.
    """
    grown = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 8 << 20
