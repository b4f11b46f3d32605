"""Which pages hold the KV of which beginnings of texts. Host only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxspec.cache.page_pool import PagePool

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A page behind the pages that lead to it; `key` are the tokens that decide its KV."""

    page: int
    key: Key
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)


class PrefixTree:
    """A tree of full pages: a request takes those of its text that are there, and adds its own.

    A page of the tree is never written again. It is owned by the requests that read it and stays
    in the pool, idle, when none does; a request that owns a page owns all pages that lead to it, so
    that no page is lost before those that follow it.

    page_size: G. lookahead: tokens behind a row that the row's KV depends on, 0 of a target; row j
    of an EAGLE drafter depends on token j + 1, so its pages are kept apart by one token more.
    Example, page_size 4, lookahead 1: the text a b c d e f g h i has the keys (a b c d e) and
    (e f g h i); the text a b c d x shares neither, since its row 3 is another one.
    """

    def __init__(self, pool: PagePool, *, page_size: int, lookahead: int):
        self._pool, self._page_size, self._lookahead = pool, page_size, lookahead
        self._root = Node(0, (), None)
        self._nodes: dict[int, Node] = {}  # by page
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._nodes)

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Pages of KV that the text can begin with, now owned by the caller too.

        The last token is never among them: what follows it is yet to be computed.
        """
        pages = [node.page for node in self._walk(tokens, len(tokens) - 1)]
        self._pool.share(pages)
        return pages

    def num_in_use(self, tokens: Sequence[int]) -> int:
        """How many of the pages that `take` would give some request reads now."""
        path = self._walk(tokens, len(tokens) - 1)
        return sum(self._pool.is_owned(node.page) for node in path)

    def add(self, tokens: Sequence[int], pages: Sequence[int], num_rows: int) -> None:
        """Enters the full pages of a request that goes on.

        Where another request's page holds the same, the request keeps its own out of the tree, and
        what follows too.

        tokens: all known ones. pages: the request's. num_rows: rows of KV written, or to be written
        by what is dispatched already.
        """
        node = self._root
        for page, key in zip(pages, self._keys(tokens, num_rows), strict=False):
            found = node.children.get(key)
            if found is not None and found.page != page:
                return
            node = found or self._enter(page, key, node)

    def hand_over(self, tokens: Sequence[int], pages: list[int], num_rows: int) -> None:
        """As `add`, and takes the pages from the request, which ends: copies are let go."""
        path: list[int] = []
        node = self._root
        for page, key in zip(pages, self._keys(tokens, num_rows), strict=False):
            node = node.children.get(key) or self._enter(page, key, node)
            path.append(node.page)
        # What leads to a page must have been used as lately as the page.
        self._pool.share(path)
        self._pool.release(pages)
        self._pool.release(path)

    def forget(self, pages: Sequence[int]) -> None:
        """Takes pages, and what follows them, out of the tree: their content is not to be had."""
        for page in pages:
            if page in self._nodes:
                self._remove(self._nodes[page])

    def check(self) -> None:
        """Asserts that the tree and the pool agree on what is kept."""
        assert self._pool.kept == set(self._nodes), "kept pages are not those of the tree"
        for page, node in self._nodes.items():
            assert node.page == page and node.parent.children[node.key] is node
            assert node.parent is self._root or node.parent.page in self._nodes, "a page hangs free"

    def _walk(self, tokens: Sequence[int], num_rows: int) -> list[Node]:
        node, path = self._root, []
        for key in self._keys(tokens, num_rows):
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def _keys(self, tokens: Sequence[int], num_rows: int) -> Iterator[Key]:
        """The keys of the pages that are full and will not change, in order.

        A row whose following tokens were not all known when it was written may be written again.
        """
        size, ahead = self._page_size, self._lookahead
        end = min(len(tokens) - ahead, num_rows - max(ahead - 1, 0))
        for start in range(0, end - size + 1, size):
            yield tuple(tokens[start : start + size + ahead])

    def _enter(self, page: int, key: Key, parent: Node) -> Node:
        node = Node(page, key, parent)
        parent.children[key] = self._nodes[page] = node
        self._pool.keep(page)
        return node

    def _remove(self, node: Node) -> None:
        below = [node]
        while below:
            node = below.pop()
            below += node.children.values()
            self._detach(node)
            self._pool.drop(node.page)

    def _evicted(self, page: int) -> None:
        node = self._nodes[page]
        assert not node.children, f"page {page} is lost before those that follow it"
        self._detach(node)

    def _detach(self, node: Node) -> None:
        del node.parent.children[node.key], self._nodes[node.page]
