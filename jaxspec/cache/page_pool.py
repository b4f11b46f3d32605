"""Who owns which page. Host only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np


class PagePool:
    """Pages 1..num_pages-1; page 0 is nobody's. Pages may be shared: owners are counted.

    A page without owners is free, or idle where its content is kept for whoever can use it again.
    Idle pages are given out once no other is left, the longest unused first. Accounting is exact:
    `check` proves that free, idle and owned pages make up the pool.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; the pool needs the null page and one more")
        self.on_evict: Callable[[int], None] = lambda page: None  # told before a kept page is lost
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._kept: set[int] = set()
        self._owners = np.zeros(num_pages, np.int32)

    @property
    def num_free(self) -> int:
        """Pages nobody owns, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages nobody owns whose content is kept."""
        return len(self._idle)

    @property
    def num_usable(self) -> int:
        """Pages that requests can own in all."""
        return len(self._owners) - 1

    @property
    def kept(self) -> frozenset[int]:
        """Pages whose content is kept once nobody owns them."""
        return frozenset(self._kept)

    def is_owned(self, page: int) -> bool:
        """True where some request owns the page."""
        return bool(self._owners[page])

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages that nobody owns.

        Raises:
            OutOfPages: there are fewer; none is taken.
        """
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} free")
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            self.on_evict(page)
            self._kept.remove(page)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        self._owners[pages] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Adds an owner to pages that are owned already or idle."""
        for page in pages:
            idle = page in self._idle
            assert idle or self._owners[page] > 0, f"page {page} is free and cannot be shared"
            if idle:
                del self._idle[page]
            self._owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """Takes one owner from each page, the last page first.

        So that of a sequence's pages the end is lost before what leads up to it.
        """
        for page in reversed(pages):
            assert self._owners[page] > 0, f"page {page} is released but nobody owns it"
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Marks an owned page as worth keeping once nobody owns it."""
        assert self._owners[page] > 0, f"page {page} has no owner and cannot be kept"
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Takes back `keep`."""
        self._kept.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def check(self) -> None:
        """Asserts that free, idle and owned pages are disjoint and complete."""
        unowned = np.flatnonzero(self._owners[1:] == 0) + 1
        free = sorted([*self._free, *self._idle])
        assert free == unowned.tolist(), f"free list {free}, pages without owner {unowned.tolist()}"
        assert self._kept.issuperset(self._idle), "an idle page holds nothing worth keeping"
        assert self._kept.isdisjoint(self._free), "a free page is kept"


class OutOfPages(Exception):
    """The pool cannot give as many pages as wanted now."""
