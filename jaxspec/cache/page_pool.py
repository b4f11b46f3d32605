"""Who owns which page. Host only."""

from __future__ import annotations

import numpy as np


class PagePool:
    """Pages 1..num_pages-1; page 0 is nobody's. Pages may be shared: they are counted.

    Accounting is exact: `check` proves that free and owned pages make up the pool.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; the pool needs the null page and one more")
        self._free = list(range(num_pages - 1, 0, -1))
        self._owners = np.zeros(num_pages, np.int32)

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that requests can own in all."""
        return len(self._owners) - 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages.

        Raises:
            OutOfPages: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._owners[pages] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Adds an owner to pages that are owned already."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free and cannot be shared"
            self._owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """Takes one owner from each page; a page without owners is free again."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is released but nobody owns it"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def check(self) -> None:
        """Asserts that free and owned pages are disjoint and complete."""
        free = sorted(self._free)
        unowned = np.flatnonzero(self._owners[1:] == 0) + 1
        assert free == unowned.tolist(), f"free list {free}, pages without owner {unowned.tolist()}"


class OutOfPages(Exception):
    """The pool cannot give as many pages as wanted now."""
