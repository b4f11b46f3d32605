"""Which pages each request has, given as it grows and taken back at its end. Host only."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds

import numpy as np

from jaxspec.cache.page_pool import OutOfPages, PagePool
from jaxspec.cache.prefix_tree import PrefixTree
from jaxspec.config import Geometry
from jaxspec.engine.sequence import Sequence


class PageTable:
    """The pages of all slots, out of one pool, and the prefix cache over them.

    table: i32[S+1, M], copied into what a dispatch sends. A page may be handed on while a step that
    reads or writes it for its last owner is in flight: the device runs steps in their order, and
    what a request reads of a page it, or the text that it shares, has written.

    prefix_lookahead: `Drafter.kv_lookahead`; None keeps no KV of past texts.
    """

    def __init__(self, geometry: Geometry, pool: PagePool, prefix_lookahead: int | None):
        self.table = np.zeros((geometry.num_slots + 1, geometry.pages_per_slot), np.int32)
        self.pool = pool
        self.prefixes: PrefixTree | None = None
        if prefix_lookahead is not None:
            self.prefixes = PrefixTree(
                pool, page_size=geometry.page_size, lookahead=prefix_lookahead
            )
        self._geometry = geometry

    def begin(self, seq: Sequence) -> None:
        """Gives a request the pages of its prefill: what the prefix cache has, and new ones.

        Raises:
            OutOfPages: there are too few; it has none then.
        """
        if self.prefixes is not None and seq.request.params.prompt_logprobs is None:
            self._give(seq, self.prefixes.take(seq.prefill_ids.tolist()))
        num_shared = len(seq.pages)
        try:
            self.reserve(seq, seq.prefill_len)
        except OutOfPages:
            self.pool.release(seq.pages)
            self.table[seq.slot], seq.pages = 0, []
            raise
        seq.num_cached = seq.num_prefilled = num_shared * self._geometry.page_size
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_cached

    def reserve(self, seq: Sequence, num_rows: int) -> None:
        """Gives a request the pages for `num_rows` rows of KV.

        Raises:
            OutOfPages: there are too few; it gets none.
        """
        if not self.holds(seq, num_rows):
            missing = self._geometry.pages_for(num_rows) - len(seq.pages)
            self._give(seq, self.pool.allocate(missing))

    def holds(self, seq: Sequence, num_rows: int) -> bool:
        """True where a request has the pages for `num_rows` rows of KV."""
        return len(seq.pages) >= self._geometry.pages_for(num_rows)

    def offer(self, seq: Sequence) -> None:
        """Lets other requests begin with what is dispatched of this one's prefill."""
        if self.prefixes is not None:
            self.prefixes.add(seq.prefill_ids.tolist(), seq.pages, seq.num_prefilled)

    def take_back(self, seq: Sequence, num_rows: int) -> None:
        """Takes a request's pages from it; the prefix cache keeps those that are full.

        num_rows: rows of KV that hold the request's text.
        """
        pages, seq.pages = seq.pages, []
        self.table[seq.slot] = 0
        if self.prefixes is None:
            self.pool.release(pages)
        else:
            self.prefixes.hand_over(seq.token_ids, pages, num_rows)

    def remember(self, token_ids: TokenIds[int]) -> None:
        """Enters a text of no request, as far as it fills pages, into the prefix cache.

        Raises:
            OutOfPages: there are too few.
        """
        assert self.prefixes is not None, "this engine keeps no KV of past texts"
        pages = self.pool.allocate(len(token_ids) // self._geometry.page_size)
        self.prefixes.hand_over(token_ids, pages, len(token_ids))

    def discard(self, seq: Sequence) -> None:
        """As `take_back`, of a request that failed: what it has written is not kept."""
        if self.prefixes is not None:
            self.prefixes.forget(seq.pages[seq.num_cached // self._geometry.page_size :])
        self.pool.release(seq.pages)
        self.table[seq.slot], seq.pages = 0, []

    def has_room_for(self, seq: Sequence, *, admitted: list[Sequence], num_running: int) -> bool:
        """True where a waiting request may enter without being preempted as soon as it runs.

        Its text and the blocks that its first dispatches reserve must fit beside those of the
        requests admitted before it, and leave each running one a page to grow.
        """
        promised = sum(max(self._pages_at_first(s) - len(s.pages), 0) for s in admitted)
        missing = self._pages_at_first(seq) + promised + num_running - self.pool.num_free
        if missing > 0 and self.prefixes is not None:
            missing -= self.prefixes.num_in_use(seq.prefill_ids.tolist())
        return missing <= 0

    def _pages_at_first(self, seq: Sequence) -> int:
        sizes = self._geometry
        needed = sizes.pages_for(seq.prefill_len + 2 * sizes.max_commit)
        return min(needed, sizes.pages_at_most(seq.max_len))

    def check_idle(self) -> None:
        """Asserts that no request has a page."""
        self.pool.check()
        if self.prefixes is not None:
            self.prefixes.check()
        assert self.pool.num_free == self.pool.num_usable, "pages leak"
        assert not self.table.any(), "page table rows outlive their requests"

    def _give(self, seq: Sequence, pages: list[int]) -> None:
        owned = len(seq.pages)
        seq.pages += pages
        self.table[seq.slot, owned : len(seq.pages)] = pages
