"""EAGLE as its papers write it: all rows at once from features and tokens, nothing cached.

Numpy in float64, one request, so that it shares no code with `jaxspec.drafters`.
"""

from __future__ import annotations

import numpy as np

from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.drafters.multi_layer_eagle_config import MultiLayerEagleConfig
from jaxspec.drafters.multi_layer_eagle_params import MultiLayerEagleParams
from jaxspec.models.layers import LayerParams


class DenseEagle:
    """A drafter over one request; the target's embedding and head serve where it has none."""

    def __init__(self, config: EagleConfig, params: EagleParams, embed=None, head=None):
        self.config, self.params = config, params
        self.embed = _wide(embed if params.embed is None else params.embed)
        self.head = _wide(head if params.lm_head is None else params.lm_head)

    def chain(self, features, next_ids, num_drafts: int, forced=()) -> tuple[list, list]:
        """Drafts after P features [P, F * E] and the P tokens behind each of them.

        forced: tokens to go on with in place of the drafter's own.
        Returns the drafts (ids of the target) and the outputs [E] that they came from.
        """
        hidden, ids = self._project(_wide(features)), list(next_ids)
        drafts, outputs = [], []
        for step in range(num_drafts):
            output = self._rows(hidden, np.array(ids))[-1]
            outputs.append(output)
            drafts.append(self.best(output))
            ids.append(forced[step] if step < len(forced) else drafts[-1])
            hidden = np.concatenate([hidden, output[None]])
        return drafts, outputs

    def logits(self, output) -> np.ndarray:
        """[V_draft] from an output [E]."""
        if self.params.norm is not None and not self.config.norm_output:
            output = self._norm(output, self.params.norm)
        return self.head @ output

    def best(self, output) -> int:
        """The likeliest draft, as an id of the target."""
        best = int(self.logits(output).argmax())
        return best if self.params.target_ids is None else int(self.params.target_ids[best])

    def _project(self, features) -> np.ndarray:
        params = self.params
        if not self.config.has_taps:
            return features
        if params.taps_norm is not None:
            features = self._norm(features, params.taps_norm)
        if params.fc_norms is not None:
            taps = features.reshape(len(features), len(params.fc_norms), -1)
            features = self._norm(taps, params.fc_norms).reshape(features.shape)
        return self._mix(features)

    def _mix(self, x) -> np.ndarray:
        bias = 0.0 if self.params.fc_bias is None else _wide(self.params.fc_bias)
        return x @ _wide(self.params.fc).T + bias

    def _norm(self, x, weight) -> np.ndarray:
        return _norm(x, weight, self.config)

    def _rows(self, hidden, ids) -> np.ndarray:
        """[P, E] outputs of all rows."""
        params, config = self.params, self.config
        embeds = self.embed[ids]
        if config.has_taps:
            normed = self._norm(hidden, params.hidden_norm)
            x = np.concatenate([self._norm(embeds, params.input_norm), normed], axis=-1)
            residual = normed if config.norm_before_residual else hidden
        else:
            x = residual = self._mix(np.concatenate([embeds, hidden], axis=-1))
        head_norms = (params.q_norm, params.k_norm) if config.qk_norm else None
        x = residual + _attend(x, params.layer, config, head_norms, config.window)
        x = x + _swiglu(self._norm(x, params.post_norm), params.layer)
        return self._norm(x, params.norm) if config.norm_output else x


class DenseMultiLayer:
    """N layers over one request, as DeepSeek-V3's report writes them (section 2.2)."""

    def __init__(self, config: MultiLayerEagleConfig, params: MultiLayerEagleParams, embed, head):
        self.config, self.params = config, params
        self.embed, self.head = _wide(embed), _wide(head)

    def chain(self, features, next_ids, num_drafts: int, forced=()) -> tuple[list, list]:
        """As `DenseEagle.chain`; draft i from layer i, whose rows read the token i + 1 behind."""
        hidden, ids = _wide(features), list(next_ids)
        drafts, outputs = [], []
        for layer in range(num_drafts):
            x = self._layer(layer, hidden, np.array(ids))
            outputs.append(x[-1])
            normed = _norm(x[-1], self.params.norms[layer], self.config)
            drafts.append(int((self.head @ normed).argmax()))
            ids = [*ids[1:], forced[layer] if layer < len(forced) else drafts[-1]]
            hidden = x if self.config.is_chain else hidden
        return drafts, outputs

    def _layer(self, index: int, hidden, ids) -> np.ndarray:
        params, config = self.params, self.config
        embeds = _norm(self.embed[ids], params.embed_norms[index], config)
        normed = _norm(hidden, params.hidden_norms[index], config)
        x = np.concatenate([embeds, normed], axis=-1) @ _wide(params.mixes[index]).T
        norms = None if params.q_norms is None else (params.q_norms[index], params.k_norms[index])
        attended = _attend(
            _norm(x, params.input_norms[index], config), params.layers[index], config, norms
        )
        x = x + attended
        return x + _swiglu(_norm(x, params.post_norms[index], config), params.layers[index])


def _attend(x, layer: LayerParams, config, head_norms=None, window=None) -> np.ndarray:
    length = len(x)
    heads = (x @ _wide(layer.qkv).T).reshape(length, -1, config.head_dim)
    q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
    if head_norms is not None:
        q, k = (_norm(part, norm, config) for part, norm in zip((q, k), head_norms, strict=True))
    q, k = _rotate(q, config), _rotate(k, config)
    group = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    visible = (distance >= 0) & (distance < (window or length))
    scores = np.einsum("nhd,thd->hnt", q, k) * config.head_dim**-0.5
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hnt,thd->nhd", weights, v).reshape(length, -1) @ _wide(layer.o).T


def _swiglu(x, layer: LayerParams) -> np.ndarray:
    gate, up = np.split(x @ _wide(layer.gate_up).T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ _wide(layer.down).T


def _rotate(x, config) -> np.ndarray:
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(np.arange(half) / half)
    turn = np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    turned = turn * (x[..., :half] + 1j * x[..., half:])
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _norm(x, weight, config) -> np.ndarray:
    scale = np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)
    return x / scale * _wide(weight)


def _wide(x) -> np.ndarray:
    return np.asarray(x, np.float64)
