"""DFlash as its paper writes it: context and block concatenated, masks dense, nothing cached.

Numpy in float64, one request, so that it shares no code with `jaxspec.drafters.dflash`.
"""

from __future__ import annotations

import numpy as np

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams


def dense_hidden(
    params: DFlashParams,
    config: DFlashConfig,
    features: np.ndarray,
    block_embeddings: np.ndarray,
    draft_window: int | None = None,
) -> np.ndarray:
    """[N, E] normed output for a block behind C context tokens.

    features: [C, F * E]; block_embeddings: [N, E].
    """
    length, size = len(features), len(block_embeddings)
    x = np.asarray(block_embeddings, np.float64)
    context = _norm(_product(features, params.fc), params.hidden_norm, config)
    key_positions = np.arange(length + size)
    for i, layer in enumerate(params.layers):
        normed = _norm(x, params.input_norms[i], config)
        q, _, _ = _heads(normed, layer, config)
        _, k, v = _heads(np.concatenate([context, normed]), layer, config)
        q = _rotate(_norm(q, params.q_norms[i], config), key_positions[length:], config)
        k = _rotate(_norm(k, params.k_norms[i], config), key_positions, config)
        visible = _visible(length, size, config.layer_causal[i], config.layer_windows[i])
        if draft_window is not None:
            visible &= _visible(length, size, causal=False, window=draft_window)
        attended = _attend(q, k, v, visible)
        x = x + _product(attended, layer.o) + np.asarray(layer.o_bias)
        gate, up = np.split(
            _product(_norm(x, params.post_norms[i], config), layer.gate_up), 2, axis=-1
        )
        x = x + _product(gate / (1 + np.exp(-gate)) * up, layer.down)
    return _norm(x, params.norm, config)


def _visible(length: int, size: int, causal: bool, window: int | None) -> np.ndarray:
    """bool[N, C + N]: the distance from query back to key decides."""
    distance = np.arange(length, length + size)[:, None] - np.arange(length + size)[None]
    visible = distance >= 0 if causal else np.ones_like(distance, bool)
    if window is not None:
        visible &= (distance < window) & (-distance < window)
    return visible


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("nhd,thd->hnt", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(np.where(visible, scores, -np.inf) - scores.max())
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hnt,thd->nhd", weights, v).reshape(len(q), -1)


def _heads(x: np.ndarray, layer, config: DFlashConfig) -> list[np.ndarray]:
    heads = _product(x, layer.qkv) + np.asarray(layer.qkv_bias)
    heads = heads.reshape(len(x), -1, config.head_dim)
    return np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)


def _rotate(x: np.ndarray, positions: np.ndarray, config: DFlashConfig) -> np.ndarray:
    half = config.head_dim // 2
    angles = positions[:, None] * config.rope_theta ** -(np.arange(half) / half)
    turn = np.exp(1j * angles)[:, None] * (x[..., :half] + 1j * x[..., half:])
    return np.concatenate([turn.real, turn.imag], axis=-1)


def _norm(x: np.ndarray, weight, config: DFlashConfig) -> np.ndarray:
    scale = np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)
    return x / scale * np.asarray(weight, np.float64)


def _product(x: np.ndarray, weight) -> np.ndarray:
    return x @ np.asarray(weight, np.float64).T
