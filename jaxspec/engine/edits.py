"""How a request's logit edits reach its slot: packed by the host, written before its prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, Geometry
from jaxspec.logit_edits import EditRows

# Columns of a packed row before its tokens; the first three are filled when the request starts.
_ROW, _NUM_PROMPT, _NUM_TOKENS, _MIN_LEN = range(4)
_PENALTIES = slice(4, 7)
_BIAS_IDS = slice(7, 7 + MAX_LOGIT_BIAS)
_BIASES = slice(_BIAS_IDS.stop, _BIAS_IDS.stop + MAX_LOGIT_BIAS)
_WORDS = slice(_BIASES.stop, _BIASES.stop + MAX_BAD_WORDS * MAX_BAD_WORD_LEN)
_FIXED = _WORDS.stop

StartEdits = Callable[[EditRows, np.ndarray], EditRows]


def pack_edits(
    geometry: Geometry,
    *,
    min_len: int = 0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: dict[int, float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """Packs a request's edits, i32[F]; without arguments, those that change nothing.

    min_len: tokens of prompt and output before which no stop id is chosen. bad_words: token ids.
    """
    out = np.full(_FIXED, geometry.vocab_size, np.int32)
    out[_MIN_LEN] = min_len
    penalties = [presence_penalty, frequency_penalty, repetition_penalty]
    out[_PENALTIES] = np.array(penalties, np.float32).view(np.int32)
    biases = dict(logit_bias or {})
    out[_BIAS_IDS][: len(biases)] = list(biases)
    out[_BIASES] = 0
    out[_BIASES][: len(biases)] = np.array(list(biases.values()), np.float32).view(np.int32)
    words = out[_WORDS].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
    for row, word in zip(words, bad_words, strict=False):
        row[MAX_BAD_WORD_LEN - len(word) :] = word
    return out


def pack_start(
    edits: np.ndarray,
    geometry: Geometry,
    row: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> np.ndarray:
    """The packed array of `build_start_edits`, i32[F + max_model_len]; a new one each time.

    edits: from `pack_edits`. output: what the request has put out already, none at first.
    """
    tokens = [*prompt, *output]
    out = np.zeros(_FIXED + geometry.max_model_len, np.int32)
    out[:_FIXED] = edits
    out[_ROW], out[_NUM_PROMPT], out[_NUM_TOKENS] = row, len(prompt), len(tokens)
    out[_FIXED:][: len(tokens)] = tokens
    return out


@lru_cache(maxsize=64)
def build_start_edits(geometry: Geometry) -> StartEdits:
    """Builds (DONATED edits, packed i32[F + max_model_len]) -> edits with one row written anew."""
    vocab_size = geometry.vocab_size

    def start_edits(edits: EditRows, packed: jax.Array) -> EditRows:
        row, num_prompt, num_tokens = packed[_ROW], packed[_NUM_PROMPT], packed[_NUM_TOKENS]
        tokens = packed[_FIXED:]
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        in_prompt = jnp.where(index < num_prompt, tokens, vocab_size)
        in_output = (index >= num_prompt) & (index < num_tokens)
        counts = jnp.zeros((vocab_size,), jnp.int32)
        counts = counts.at[in_prompt].set(1, mode="drop")
        counts = counts.at[jnp.where(in_output, tokens, vocab_size)].add(2, mode="drop")
        newest = num_tokens + jnp.arange(1 - MAX_BAD_WORD_LEN, 0, dtype=jnp.int32)
        tail = jnp.where(newest >= 0, tokens[jnp.maximum(newest, 0)], vocab_size)
        values = EditRows(
            counts=counts,
            tail=tail,
            penalties=jax.lax.bitcast_convert_type(packed[_PENALTIES], jnp.float32),
            min_lens=packed[_MIN_LEN],
            bias_ids=packed[_BIAS_IDS],
            biases=jax.lax.bitcast_convert_type(packed[_BIASES], jnp.float32),
            bad_words=packed[_WORDS].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_LEN),
        )
        return jax.tree.map(lambda leaf, value: leaf.at[row].set(value), edits, values)

    return jax.jit(start_edits, donate_argnames="edits")
