"""EAGLE as its papers write it: all rows at once from features and tokens, nothing cached.

Numpy in float64, one request, so that it shares no code with `jaxspec.drafters.eagle`.
"""

from __future__ import annotations

import numpy as np

from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams


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
        x = residual + self._attend(x)
        gate, up = np.split(
            self._norm(x, params.post_norm) @ _wide(params.layer.gate_up).T, 2, axis=-1
        )
        x = x + (gate / (1 + np.exp(-gate)) * up) @ _wide(params.layer.down).T
        return self._norm(x, params.norm) if config.norm_output else x

    def _attend(self, x) -> np.ndarray:
        config, length = self.config, len(x)
        heads = (x @ _wide(self.params.layer.qkv).T).reshape(length, -1, config.head_dim)
        q, k, v = np.split(
            heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1
        )
        if config.qk_norm:
            q, k = self._norm(q, self.params.q_norm), self._norm(k, self.params.k_norm)
        q, k = self._rotate(q), self._rotate(k)
        group = config.num_heads // config.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        distance = np.arange(length)[:, None] - np.arange(length)[None]
        visible = (distance >= 0) & (distance < (config.window or length))
        scores = np.einsum("nhd,thd->hnt", q, k) * config.head_dim**-0.5
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hnt,thd->nhd", weights, v).reshape(length, -1)
        return out @ _wide(self.params.layer.o).T

    def _rotate(self, x) -> np.ndarray:
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** -(np.arange(half) / half)
        turn = np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
        turned = turn * (x[..., :half] + 1j * x[..., half:])
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _norm(self, x, weight) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * _wide(weight)


def _wide(x) -> np.ndarray:
    return np.asarray(x, np.float64)
