"""Attention over pages in numpy and float64, row by row and head by head."""

from __future__ import annotations

import numpy as np


def attend(q, kv_pages, page_table, lens, *, causal, window, block_mask=None, scale=None):
    """Softmax over the list of positions that each query sees."""
    q, kv_pages = np.asarray(q, np.float64), np.asarray(kv_pages, np.float64)
    page_table, lens = np.asarray(page_table), np.asarray(lens)
    batch, block, heads, dim = q.shape
    group, page_size = heads // kv_pages.shape[2], kv_pages.shape[3]
    scale = 1 / np.sqrt(dim) if scale is None else scale
    out = np.zeros(q.shape)
    for b in range(batch):
        for i in range(block):
            words = None if block_mask is None else np.asarray(block_mask)[b, i]
            seen = [
                p
                for p in range(min(lens[b] + block, page_table.shape[1] * page_size))
                if sees(int(lens[b]), i, p, causal, window, words)
            ]
            pages, offsets = page_table[b, np.array(seen) // page_size], np.array(seen) % page_size
            for h in range(heads):
                k, v = kv_pages[pages, :, h // group, offsets].transpose(1, 0, 2)
                scores = scale * (k @ q[b, i, h])
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights @ v / weights.sum()
    return out


def sees(length, i, p, causal, window, words):
    """Whether query i of a block behind `length` rows sees position p."""
    if words is not None:
        j = p - length
        return j < 0 or bool(int(words[j // 32]) >> (j % 32) & 1)
    if causal and p > length + i:
        return False
    return window is None or abs(length + i - p) < window
