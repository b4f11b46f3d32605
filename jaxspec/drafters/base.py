"""What the engine asks of a drafter, and how to add one.

A drafter is a value of pure functions plus a state pytree of its own; the engine holds both and
looks inside neither. Adding one touches its own file, an entry in a dict and its tests; nothing in
the engine changes. `ngram.py`, the shortest complete one, shows the steps:

1. `plan_ngram` takes a `DrafterSetup` and returns a `DrafterPlan`: what it loads (nothing), which
   target layers it reads (none), the block size, and `build`.
2. `build_ngram` makes the `Drafter`. `init_state` gives what it keeps of the texts, by the ids of
   the target's pages. `draft` is called with the bonus token of each row and proposes a
   `DraftBlock`: a chain, or a tree where it also says `parents` (`eagle_tree.py`). `ingest` is
   called with the tokens that became final, of prompts and of verify steps alike, and brings the
   state up to date. What else one step tells the next travels as `carry` through the `FutureMap`
   (`eagle.py`).
3. `registry.DRAFTERS` gets `"ngram": plan_ngram`, and `MODEL_FREE` its name, since it has no
   checkpoint; one with a checkpoint gets its architecture in `weights/drafter_json.py` instead.
4. `tests/drafters/test_ngram.py` holds what it drafts against plain Python, and its name stands in
   the list of `tests/engine/test_lossless.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax

from jaxspec.cache.kv_pages import KVSizes, kv_bytes_per_token
from jaxspec.config import EngineConfig, Kernels
from jaxspec.models.base import Block, Target
from jaxspec.models.config import ModelConfig

Params = Any  # the drafter's own weights
State = Any  # the drafter's own KV or history, donated with the engine's state
Carry = Any  # pytree with leaves [S+1, ...] in the FutureMap, [B, ...] for a batch


@flax.struct.dataclass
class ModelParams:
    """All weights a step reads."""

    target: Any
    drafter: Any


@flax.struct.dataclass
class DraftContext:
    """One row per request of the batch, as resolved from the FutureMap.

    `block` holds the bonus token and K mask tokens at positions seq_len..seq_len+K, with KV
    locations that the request owns.
    """

    rows: jax.Array  # i32[B] slot of each row, 0 for padding
    block: Block
    carry: Carry  # leaves [B, ...]
    sample: Callable[[jax.Array, jax.Array], jax.Array] = flax.struct.field(pytree_node=False)
    """(logits f32[B, K, V], positions i32[B, K] of the tokens) -> token_dtype[B, K]: greedy, or
    with each request's own sampling parameters and position-keyed noise."""
    greedy: bool = flax.struct.field(pytree_node=False, default=False)
    """True where `sample` takes the highest logit for every row of the batch, so that a drafter
    may do so itself, without logits over the target's vocabulary."""
    scores: Callable[[jax.Array, jax.Array], jax.Array] | None = flax.struct.field(
        pytree_node=False, default=None
    )
    """What `sample` takes the highest of, f32[B, K, V], for drafters of trees: noise included,
    filtered tokens at -inf."""
    log_probs: Callable[[jax.Array, jax.Array], jax.Array] | None = flax.struct.field(
        pytree_node=False, default=None
    )
    """Log-probabilities f32[B, K, V] that `sample` draws with, where the accept rule asks for them;
    else None."""


class DraftBlock(NamedTuple):
    """A drafter's proposal."""

    tokens: jax.Array  # token_dtype[B, N] bonus token, then K drafts
    num_draft_tokens: jax.Array  # i32[B] how many drafts are meant, 0..K; the rest never match
    parents: jax.Array | None = None  # i32[B, N] of a tree, as `tree.DraftTree`; None: a chain
    log_probs: jax.Array | None = None  # f32[B, K, V] that drafts were drawn with; None: certain


@flax.struct.dataclass
class IngestBatch:
    """Tokens whose target KV has just become final, for the drafter's own KV or history.

    After verification row b is a request and its first `num_valid[b]` positions were committed; a
    tree has become the chain of its accepted path. In prefill row b is a tile of a prompt.
    `block.kv_locs` already point to page 0 past `num_valid`.
    """

    rows: jax.Array  # i32[B] slot of each row, 0 for padding
    block: Block
    next_ids: jax.Array  # token_dtype[B, N] the token after each position, the bonus at the end
    features: jax.Array  # [B, N, F * E]
    num_valid: jax.Array  # i32[B]
    is_first: jax.Array  # bool[B] what the drafter keeps for the slot is of its last owner


class Drafter(NamedTuple):
    """A drafter as pure functions; closes over sizes and kernel names, never over arrays.

    num_draft_tokens: K, static; K + 1 positions are verified a step.
    depth: drafts on a path of its trees at most, static; None where its drafts are a chain.
    feature_layers: 0-based target layers whose outputs it conditions on, in order.
    init_state: (num_pages, num_slots, max_len) -> its state, every leaf a buffer of its own.
    init_carry: (num_slots) -> its relay leaves [S+1, ...]; () when it relays nothing.
    draft: (params: ModelParams, state, context: DraftContext) -> (DraftBlock, state).
    ingest: (params: ModelParams, state, batch: IngestBatch) -> (state, carry[B, ...]).
    mask_token_id: fills draft positions of `context.block`.
    kv_lookahead: tokens behind a position that its row of the drafter's KV depends on, static; the
        prefix cache tells pages apart by them. What a drafter keeps of a text lies in pages, by
        `block.kv_locs`, so that a request that finds its beginning in the cache finds it too.
    min_ingest: columns that an `IngestBatch` must have, static.
    """

    name: str
    num_draft_tokens: int
    feature_layers: tuple[int, ...]
    mask_token_id: int
    init_state: Callable[[int, int, int], State]
    init_carry: Callable[[int], Carry]
    draft: Callable[[ModelParams, State, DraftContext], tuple[DraftBlock, State]]
    ingest: Callable[[ModelParams, State, IngestBatch], tuple[State, Carry]]
    kv_lookahead: int = 0
    min_ingest: int = 1
    depth: int | None = None

    @property
    def block_size(self) -> int:
        """N = K + 1: the bonus token and the drafts."""
        return self.num_draft_tokens + 1

    @property
    def max_accept_length(self) -> int:
        """The tokens that a step emits at most: the chain's length, or that of a tree's path."""
        return 1 + (self.num_draft_tokens if self.depth is None else self.depth)


class DrafterSetup(NamedTuple):
    """What is known when a drafter is chosen: before the target is built."""

    config: EngineConfig
    target: ModelConfig
    dtype: str  # "float32" | "bfloat16" | "float16", as the target's
    checkpoint: Path | None  # folder of the drafter's checkpoint, where it has one
    token_id: Callable[[str], int | None] | None = None  # the target's tokenizer, by token text


class DrafterPlan(NamedTuple):
    """A chosen drafter: its weights, what it needs of the target, and how to build it.

    block_size: N, what a verify step takes. kv_bytes_per_token: of its own KV, all layers.
    kernel_shapes: op -> static sizes of its calls, for the choice of kernels.
    build: (target, page_size, kernels) -> Drafter. takes_trees: whether it heeds the settings of
    trees; tree_depth: `Drafter.depth`.
    """

    params: Any
    feature_layers: tuple[int, ...]
    block_size: int
    kv_bytes_per_token: int
    kernel_shapes: dict[str, dict[str, int]]
    build: Callable[[Target, int, Kernels], Drafter]
    takes_trees: bool = False
    tree_depth: int | None = None


class AttentionSizes(KVSizes, Protocol):
    """What a drafter's config says of its attention."""

    num_heads: int


def kv_and_shapes(
    sizes: AttentionSizes, num_layers: int, dtype: str
) -> tuple[int, dict[str, dict[str, int]]]:
    """The KV bytes a token of a drafter's layers, and the kernel shapes of their attention."""
    heads = {"kv_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim}
    own = {"heads": sizes.num_heads, **heads}
    kv_bytes = kv_bytes_per_token(sizes, num_layers, dtype)
    return kv_bytes, {"paged_attention": own, "kv_write": own}
