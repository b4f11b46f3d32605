"""What `kv_write` and `kv_write_context` leave behind, token by token in numpy and float64."""

from __future__ import annotations

import numpy as np


def write(
    qkv,
    kv_pages,
    kv_locs,
    positions,
    inv_freq,
    *,
    num_heads,
    num_kv_heads,
    q_norm,
    k_norm,
    eps,
    layer=None,
):
    """Queries [B, N, H, D] and pages."""
    if layer is not None:
        q_norm, k_norm = q_norm[int(layer[0])], k_norm[int(layer[0])]
    batch, block, _ = qkv.shape
    heads = np.asarray(qkv, np.float64).reshape(batch, block, num_heads + 2 * num_kv_heads, -1)
    q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=2)
    q = turned(normed(q, q_norm, eps), positions, inv_freq)
    k = turned(normed(k, k_norm, eps), positions, inv_freq)
    return q, placed(kv_pages, kv_locs, k, v)


def write_context(kv, kv_pages, kv_locs, positions, inv_freq, *, k_norm, eps):
    """Pages of every layer."""
    kv = np.asarray(kv, np.float64)
    result = []
    for layer, pages in enumerate(kv_pages):
        weight = None if k_norm is None else k_norm[layer]
        k = turned(normed(kv[:, :, layer, 0], weight, eps), positions, inv_freq)
        result.append(placed(pages, kv_locs, k, kv[:, :, layer, 1]))
    return tuple(result)


def normed(x, weight, eps):
    if weight is None:
        return x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def turned(x, positions, inv_freq):
    """Each pair (a, b) of the two halves as the complex number a + ib, turned by its angle."""
    # The angle itself is a product in float32, whatever follows.
    angles = np.asarray(positions, np.float32)[..., None] * np.asarray(inv_freq, np.float32)
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles.astype(np.float64))[
        :, :, None
    ]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def placed(kv_pages, kv_locs, k, v):
    pages = np.array(kv_pages, np.float64)
    page_size = pages.shape[3]
    for at in np.ndindex(kv_locs.shape):
        page, offset = divmod(int(kv_locs[at]), page_size)
        pages[page, 0, :, offset], pages[page, 1, :, offset] = k[at], v[at]
    return pages
