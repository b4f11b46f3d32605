"""Where blocks begin in packed rows, what they should say and how much each slot counts."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.training.rows import PackedRows

DECAY = {16: 7.0, 10: 5.0, 8: 4.0}  # gamma by block size, DFlash (arXiv 2602.06036)


@flax.struct.dataclass
class TokenRows:
    """`PackedRows` on the device: R rows of S tokens."""

    token_ids: jax.Array  # i32[R, S]
    segments: jax.Array  # i32[R, S], 0: padding
    positions: jax.Array  # i32[R, S] within the segment
    supervised: jax.Array  # bool[R, S]

    @classmethod
    def from_host(cls, rows: PackedRows) -> TokenRows:
        """Copies rows to the device."""
        return cls(*(jnp.asarray(getattr(rows, name)) for name in cls.__dataclass_fields__))


@flax.struct.dataclass
class Anchors:
    """Blocks of N tokens in rows of S: block a of row r begins at token `index[r, a]`.

    A dropped block (`keep` False) has a legal index and counts nowhere.
    """

    index: jax.Array  # i32[R, A] ascending
    keep: jax.Array  # bool[R, A]


@flax.struct.dataclass
class Labels:
    """What the K = N - 1 mask slots of each block stand for: the tokens at their own positions."""

    token_ids: jax.Array  # i32[R, A, K]
    valid: jax.Array  # bool[R, A, K]
    source: jax.Array  # i32[R, A, K] row index of the token, clipped to the row


def possible_anchors(rows: TokenRows) -> jax.Array:
    """bool[R, S]: which tokens may stand for the bonus token of a verify step.

    It and the token after it must be the target's own (DFlash, arXiv 2602.06036, section 4.2).
    """
    own, nxt = rows.supervised[:, :-1], rows.supervised[:, 1:]
    together = rows.segments[:, :-1] == rows.segments[:, 1:]
    return jnp.pad(own & nxt & together, ((0, 0), (0, 1)))


def sample_anchors(key: jax.Array, rows: TokenRows, num_anchors: int) -> Anchors:
    """Draws distinct anchors of each row uniformly, all of them where there are too few.

    Args:
        key: a jax.random key.
        rows: packed conversations.
        num_anchors: A.
    """
    possible = possible_anchors(rows)
    draw = jax.random.uniform(key, possible.shape, jnp.float32)
    draw = jnp.where(possible, draw, -1.0)
    best, index = jax.lax.top_k(draw, min(num_anchors, possible.shape[1]))
    keep = best >= 0.0
    # Dropped blocks go behind the others: their index is past every real one while sorting.
    order = jnp.argsort(jnp.where(keep, index, possible.shape[1]), axis=1)
    index = jnp.take_along_axis(index, order, axis=1).astype(jnp.int32)
    return Anchors(index=index, keep=jnp.take_along_axis(keep, order, axis=1))


def labels_of(rows: TokenRows, anchors: Anchors, block_size: int) -> Labels:
    """Reads the tokens that slots 1..N-1 stand for: slot k of anchor a is token a + k, not a+k+1.

    Example, tokens t0..t5 of one response, block 4: anchor 1 has labels t2 t3 t4; anchor 4 has
    t5 and two invalid ones.
    """
    offsets = jnp.arange(1, block_size, dtype=jnp.int32)[None, None]
    source = anchors.index[:, :, None] + offsets
    inside = source < rows.token_ids.shape[1]
    source = jnp.where(inside, source, rows.token_ids.shape[1] - 1)

    def at(values: jax.Array) -> jax.Array:
        flat = jnp.take_along_axis(values, source.reshape(source.shape[0], -1), axis=1)
        return flat.reshape(source.shape)

    own = jnp.take_along_axis(rows.segments, anchors.index, axis=1)[:, :, None]
    valid = inside & at(rows.supervised) & (at(rows.segments) == own) & anchors.keep[:, :, None]
    return Labels(token_ids=at(rows.token_ids), valid=valid, source=source)


def before_labels(hidden: jax.Array, labels: Labels) -> jax.Array:
    """[R, A, K, E]: the target's output one token before each label, which chose it."""
    before = jnp.maximum(labels.source - 1, 0).reshape(labels.source.shape[0], -1, 1)
    picked = jnp.take_along_axis(hidden, before, axis=1)
    return picked.reshape(*labels.source.shape, hidden.shape[-1])


def slot_decay(block_size: int, gamma: float | None) -> np.ndarray:
    """exp(-(k - 1) / gamma) for k = 1..N-1: f32[K]. None takes the paper's gamma for the size."""
    if gamma is None:
        gamma = DECAY.get(block_size, block_size / 2)
    return np.exp(-np.arange(block_size - 1, dtype=np.float32) / np.float32(gamma))
