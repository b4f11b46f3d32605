"""What changes logits before a token is chosen: bias, penalties, min_tokens, bad words.

Every change at a position depends on the tokens before it alone. Inside a block that is being
verified these are the tokens of the context and the drafts before the position, so that the target
chooses what it would choose one token at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.config import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS


@flax.struct.dataclass
class EditRows:
    """Edits, one row a request: leaves [B, ...] (or [S+1, ...] in the engine's state).

    counts: i32[., V] twice the times that a token stands in the output, plus 1 where it stands in
    the prompt. tail: i32[., W - 1] the newest tokens, the last one rightmost; V before the prompt.
    penalties: f32[., 3] presence, frequency, repetition. min_lens: i32[.] no stop id is chosen at a
    position before it. bias_ids: i32[., E] and biases: f32[., E], ids padded with V. bad_words:
    i32[., D, W] tokens aligned to the right, V in front and in unused rows.
    """

    counts: jax.Array
    tail: jax.Array
    penalties: jax.Array
    min_lens: jax.Array
    bias_ids: jax.Array
    biases: jax.Array
    bad_words: jax.Array

    @classmethod
    def neutral(cls, num_rows: int, vocab_size: int) -> EditRows:
        """Rows that change nothing; every leaf a buffer of its own."""
        words = (num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
        return cls(
            counts=jnp.zeros((num_rows, vocab_size), jnp.int32),
            tail=jnp.full((num_rows, MAX_BAD_WORD_LEN - 1), vocab_size, jnp.int32),
            penalties=jnp.tile(jnp.asarray([[0.0, 0.0, 1.0]], jnp.float32), (num_rows, 1)),
            min_lens=jnp.zeros((num_rows,), jnp.int32),
            bias_ids=jnp.full((num_rows, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
            biases=jnp.zeros((num_rows, MAX_LOGIT_BIAS), jnp.float32),
            bad_words=jnp.full(words, vocab_size, jnp.int32),
        )

    def of(self, rows: jax.Array) -> EditRows:
        """The rows of a batch, leaves [B, ...]."""
        return jax.tree.map(lambda leaf: leaf[rows], self)

    def advance(self, rows: jax.Array, tokens: jax.Array, num_tokens: jax.Array) -> EditRows:
        """Counts tokens that were appended to the output; leaves [S+1, ...].

        rows: i32[B], 0 for padding, whose row stays as it is. tokens: [B, N], of which the first
        num_tokens: i32[B] count.
        """
        tokens = tokens.astype(jnp.int32)
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        num_tokens = jnp.where(rows == 0, 0, num_tokens)
        twice = jnp.where(column < num_tokens[:, None], jnp.int32(2), jnp.int32(0))
        ids = jnp.clip(tokens, 0, self.counts.shape[1] - 1)
        line = jnp.concatenate([self.tail[rows], tokens], axis=1)
        width = self.tail.shape[1]
        newest = num_tokens[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        return self.replace(
            counts=self.counts.at[rows[:, None], ids].add(twice),
            tail=self.tail.at[rows].set(jnp.take_along_axis(line, newest, axis=1)),
        )


class Preceding(NamedTuple):
    """What stands before each position of a block, as far as the rows do not tell.

    tokens: i32[B, N] of the block. counted: bool[B, N, N] block token j, not yet in the row's
    counts, stands before the token to choose at i. tails: i32[B, N, W - 1] the newest tokens
    before the token to choose.
    """

    tokens: jax.Array
    counted: jax.Array
    tails: jax.Array


def preceding_in_chain(tokens: jax.Array, tail: jax.Array) -> Preceding:
    """Of a block of one path: token 0 is in the row's counts and tail, each other follows one.

    tokens: [B, N]. tail: i32[B, W - 1], token 0 rightmost.
    Example, W - 1 = 2: tail (a, b) and tokens (b, c, d) give tails (a, b), (b, c), (c, d).
    """
    tokens = tokens.astype(jnp.int32)
    batch, count = tokens.shape
    index = jnp.arange(count, dtype=jnp.int32)
    counted = (index[None, :] >= 1) & (index[None, :] <= index[:, None])
    line = jnp.concatenate([tail, tokens[:, 1:]], axis=1)
    window = index[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None, :]
    return Preceding(
        tokens, jnp.broadcast_to(counted[None], (batch, count, count)), line[:, window]
    )


def preceding_in_tree(
    tokens: jax.Array, parents: jax.Array, reach: jax.Array, tail: jax.Array
) -> Preceding:
    """Of a tree behind token 0, which is in the row's counts and tail.

    tokens, parents: [B, N], parents -1 of token 0. reach: bool[B, N, N] True where node j is node i
    or one before it. tail: i32[B, W - 1].
    """
    tokens = tokens.astype(jnp.int32)
    width = tail.shape[1]
    depth = reach.sum(-1, dtype=jnp.int32) - 1
    node = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    newest_first = []
    for back in range(width):
        in_tail = jnp.clip(width - 1 - (back - depth), 0, width - 1)
        of_tail = jnp.take_along_axis(tail, in_tail, axis=1)
        of_block = jnp.take_along_axis(tokens, node, axis=1)
        newest_first.append(jnp.where(back < depth, of_block, of_tail))
        node = jnp.maximum(jnp.take_along_axis(parents, node, axis=1), 0)
    counted = reach.at[:, :, 0].set(False)
    return Preceding(tokens, counted, jnp.stack(newest_first[::-1], axis=-1))


class Editing(NamedTuple):
    """What changes the logits of a block.

    rows: leaves [B, ...]. stop_ids: i32[B, E], padded with V. before: None for drafts, which are
    guesses: they are edited as if nothing stood between the row's last token and them, and bad
    words are left to verification. allowed: u32[B, N, ceil(V / 32)] a bit a token that a grammar
    allows there; None where there is no grammar, and for drafts.
    """

    rows: EditRows
    stop_ids: jax.Array
    before: Preceding | None = None
    allowed: jax.Array | None = None


def edit_logits(logits: jax.Array, positions: jax.Array, editing: Editing) -> jax.Array:
    """`restrict`, then `penalise`: all that changes logits, f32[B, N, V]."""
    return penalise(restrict(logits, positions, editing), editing)


def restrict(logits: jax.Array, positions: jax.Array, editing: Editing) -> jax.Array:
    """Adds the bias, and gives -inf to what a row may not choose.

    It costs little where nobody asks: all but the grammar changes some tokens alone, in place.

    logits: f32[B, N, V]. positions: i32[B, N] absolute positions of the tokens to choose.
    Returns f32[B, N, V].
    """
    rows, stop_ids, before, allowed = editing
    batch, count, vocab_size = logits.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    n = jnp.arange(count, dtype=jnp.int32)[None, :, None]

    def forbid(logits: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
        ids = jnp.where(where, ids, vocab_size)  # past the end: dropped
        return logits.at[b, n, ids].set(-jnp.inf, mode="drop")

    logits = logits.at[b, n, rows.bias_ids[:, None, :]].add(rows.biases[:, None, :], mode="drop")
    early = (positions < rows.min_lens[:, None])[:, :, None]
    logits = forbid(logits, stop_ids[:, None, :], early)
    if before is not None:
        first, last = rows.bad_words[:, None, :, :-1], rows.bad_words[:, None, :, -1]
        matching = (first == vocab_size) | (first == before.tails[:, :, None, :])
        logits = forbid(logits, last, jnp.all(matching, axis=-1))
    if allowed is not None:
        logits = jnp.where(unpack_bits(allowed, vocab_size), logits, -jnp.inf)
    return logits


def has_penalties(rows: EditRows) -> jax.Array:
    """bool[] a row of the batch is penalised."""
    return jnp.any(rows.penalties != jnp.asarray([0.0, 0.0, 1.0], jnp.float32)[None, :])


def unpack_bits(words: jax.Array, count: int) -> jax.Array:
    """bool[..., count] of u32[..., ceil(count / 32)], bit j of word j // 32 first."""
    bits = jnp.arange(32, dtype=jnp.uint32)
    shifts = jnp.broadcast_to(bits, (*words.shape, 32))
    spread = (words[..., None] >> shifts) & jnp.uint32(1)
    return spread.reshape(*words.shape[:-1], -1)[..., :count] != 0


def penalise(logits: jax.Array, editing: Editing) -> jax.Array:
    """Applies repetition, frequency and presence penalties to restricted logits, f32[B, N, V].

    The order is vLLM's: behind the bias. A repetition penalty divides positive logits and
    multiplies others, for tokens of prompt or output (CTRL, arXiv 1909.05858); frequency and
    presence are subtracted, for tokens of the output alone, as the OpenAI API defines them. What is
    forbidden stays so: each of them leaves -inf as it is.
    """
    rows, before = editing.rows, editing.before
    penalties = rows.penalties[:, :, None, None]
    everywhere = _penalised(logits, rows.counts[:, None, :], penalties)
    if before is None:
        return everywhere
    # The block's own tokens once more, counted up to each position: [B, N, N] of the vocabulary.
    tokens = before.tokens
    same = tokens[:, :, None] == tokens[:, None, :]
    times = jnp.einsum(
        "bik,bkj->bij",
        before.counted.astype(jnp.int32),
        same.astype(jnp.int32),
        preferred_element_type=jnp.int32,
    )
    ids = jnp.broadcast_to(tokens[:, None, :], times.shape)
    counts = jnp.take_along_axis(rows.counts, tokens, axis=1)[:, None, :] + 2 * times
    exact = _penalised(jnp.take_along_axis(logits, ids, axis=2), counts, penalties)
    batch, count, _ = logits.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    n = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    return everywhere.at[b, n, ids].set(exact)


def _penalised(values: jax.Array, counts: jax.Array, penalties: jax.Array) -> jax.Array:
    """values f32[B, N, .] of tokens with `counts` as in `EditRows`; penalties f32[B, 3, 1, 1]."""
    presence, frequency, repetition = penalties[:, 0], penalties[:, 1], penalties[:, 2]
    repeated = jnp.where(values > 0, values / repetition, values * repetition)
    values = jnp.where(counts > 0, repeated, values)
    times = (counts >> 1).astype(jnp.float32)
    return values - frequency * times - presence * jnp.minimum(times, 1.0)
