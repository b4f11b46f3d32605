"""What the engine asks of a language model: a value of pure functions over a block of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax

from jaxspec.config import Kernels

__all__ = ["KV", "Block", "Kernels", "Params", "Target", "TargetOutput"]

Params = Any  # a pytree of arrays that only the model itself looks into
KV = tuple[jax.Array, ...]  # one array a layer, [P, 2, J, G, D]


@flax.struct.dataclass
class Block:
    """N consecutive tokens of each of B rows, and where their KV lives.

    Decoding, verification, drafting and prefill are all such blocks: a prefill packs the prompts
    of several requests into tiles of N tokens, so that row b+1 may continue row b's request.
    KV of all rows is written before any row attends, hence a later tile sees an earlier one.
    Padding rows have lens 0, page table 0 and all `kv_locs` in page 0.
    The tokens of a tree see of the R rows behind `lens`, of which theirs are the last N, what the
    mask says, and all before them.
    """

    token_ids: jax.Array  # token_dtype[B, N]
    positions: jax.Array  # i32[B, N] absolute positions, lens[b] + 0..N-1; of a tree + depth
    kv_locs: jax.Array  # i32[B, N] flat row to write, page * page_size + offset; page 0: nobody's
    page_table: jax.Array  # i32[B, M] pages of the row's request, in order
    lens: jax.Array  # i32[B] rows of KV before the block
    mask: jax.Array | None = None  # u32[B, R, ceil(R / 32)] of a tree; None: the block is a chain

    def columns(self, first: int, end: int) -> Block:
        """Some of the tokens alone, where they are."""
        return self.replace(
            token_ids=self.token_ids[:, first:end],
            positions=self.positions[:, first:end],
            kv_locs=self.kv_locs[:, first:end],
        )


class TargetOutput(NamedTuple):
    """What one pass over a `Block` leaves behind."""

    hidden: jax.Array  # [B, N, E] after the final norm: what `logits` takes
    features: jax.Array  # [B, N, F * E] residual stream after each feature layer, concatenated
    kv: KV


class Target(NamedTuple):
    """A language model as pure functions; closes over sizes and kernel names, never over arrays.

    embed: (params, token_ids[...]) -> [..., E].
    forward: (params, kv, block) -> TargetOutput. Writes the block's KV at `kv_locs`, attends
        causally (or by its mask) inside the block and to the `lens` rows before it. kv is updated
        in place when the caller donates it.
    logits: (params, hidden[..., E]) -> f32[..., V].
    init_kv: (num_pages) -> KV of zeros.
    """

    embed: Callable[[Params, jax.Array], jax.Array]
    forward: Callable[[Params, KV, Block], TargetOutput]
    logits: Callable[[Params, jax.Array], jax.Array]
    init_kv: Callable[[int], KV]
