"""The content of pages, found by the key of a block or by comparing tokens. Knows no slots."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from detgen.kernels.attention import BLOCK

WORTH_COPYING = 4  # least shared positions of a page for which copying them beats reading the tokens again

_CANDIDATES = 16  # most recently used pages with the same beginning to compare with the rest of a prompt
_TOKEN = 8  # bytes of a token


@dataclass(slots=True)
class _Content:
    """The content of a page.

    Attributes:
        family: key of pages with the same beginning: the key of the block before and the page's first tokens.
        tokens: int64 bytes of its tokens.
        keys: all keys by which it is found.
    """

    family: bytes
    tokens: bytes
    keys: list[bytes] = field(default_factory=list)


class PrefixIndex:
    """The content of findable pages. A key belongs to one page; a page may have several keys."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}  # by key
        self._contents: dict[int, _Content] = {}
        self._families: dict[bytes, OrderedDict[int, None]] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._contents

    def __len__(self) -> int:
        return len(self._contents)

    def get(self, key: bytes) -> int | None:
        """Return the page of a key; None if there is none."""
        return self._pages.get(key)

    def most_alike(self, before: bytes, data: bytes) -> tuple[int, int]:
        """Return the page that shares most first positions with a block.

        Args:
            before: key of the block before.
            data: int64 bytes of the block's tokens, at least WORTH_COPYING of them.

        Returns:
            The page and the number of shared positions, at least WORTH_COPYING; or (-1, 0).
        """
        family = self._families.get(_family(before, data))
        if not family:
            return -1, 0
        pages = list(family)
        held = b"".join(self._contents[p].tokens.ljust(_TOKEN * BLOCK, b"\xff") for p in pages)
        wanted = np.frombuffer(data, np.int64)
        apart = np.frombuffer(held, np.int64).reshape(len(pages), BLOCK)[:, : len(wanted)] != wanted
        shared = np.where(apart.any(1), apart.argmax(1), len(wanted))
        best = len(pages) - 1 - int(shared[::-1].argmax())
        return pages[best], int(shared[best])

    def add(self, page: int, key: bytes, before: bytes, data: bytes) -> None:
        """Record a page's content, unless another page has the key; a page with fewer tokens now has these.

        Args:
            page: the page.
            key: key of the block or its first tokens.
            before: key of the block before.
            data: int64 bytes of the tokens.
        """
        if self._pages.setdefault(key, page) != page:
            return
        content = self._contents.get(page)
        if content is None:
            content = self._contents[page] = _Content(_family(before, data), data)
        elif len(data) > len(content.tokens):
            content.family, content.tokens = _family(before, data), data  # with fewer, it was in this family or in none
        if key not in content.keys:
            content.keys.append(key)
        self.use(page)

    def add_key(self, page: int, key: bytes) -> None:
        """Let a page be found by another key, unless another page has the key or this one's content is unknown."""
        if page in self._contents and key not in self._pages:
            self._pages[key] = page
            self._contents[page].keys.append(key)

    def use(self, page: int) -> None:
        """Make a page the most recently used of its family."""
        content = self._contents[page]
        if len(content.tokens) >= _TOKEN * WORTH_COPYING:
            family = self._families.setdefault(content.family, OrderedDict())
            family[page] = None
            family.move_to_end(page)
            if len(family) > _CANDIDATES:
                family.popitem(last=False)

    def drop(self, page: int) -> None:
        """Forget a page."""
        content = self._contents.pop(page)
        for key in content.keys:
            del self._pages[key]
        family = self._families.get(content.family)
        if family is not None:
            family.pop(page, None)
            if not family:
                del self._families[content.family]


def _family(before: bytes, data: bytes) -> bytes:
    return before + data[: _TOKEN * WORTH_COPYING]
