"""A toy target and a toy drafter whose every read of KV shows in what they say.

The target's next token depends on a checksum over all KV that it reads through the page table, so
a stale, missing or foreign row of KV changes the text. The drafter keeps KV of its own, rebuilds
the same checksum from it and drafts rightly only while that, its relayed carry and what it was told
of following tokens agree; so a fault of its KV, its carry or its positions shows in the accept
lengths.
"""

from __future__ import annotations

import codecs
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.base import DraftBlock, DraftContext, Drafter, IngestBatch, ModelParams
from jaxspec.future_map import token_dtype
from jaxspec.grammar import Grammars
from jaxspec.models.base import KV, Block, Target, TargetOutput

VOCAB = 32
EOS = 2
NUM_STATES = 61
MODULUS = 1 << 20


def make_table(seed: int = 0) -> np.ndarray:
    """Logits of each checksum state, f32[NUM_STATES, V]: multiples of 0.5, no two equal."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(VOCAB) for _ in range(NUM_STATES)]
    return np.stack(rows).astype(np.float32) * 0.5


def contribution(token: int, position: int) -> int:
    """What a token adds to the checksum; also with arrays."""
    return (token + 1) * ((position * 37 + 11) % 1009) + position * 13


def checksum(tokens: list[int]) -> int:
    """Checksum of a sequence from position 0."""
    return sum(contribution(t, p) for p, t in enumerate(tokens)) % MODULUS


def _read_rows(pages: jax.Array, page_table: jax.Array) -> jax.Array:
    """All rows that a page table names: i32[B, M * G, D], first token and position."""
    batch, width = page_table.shape
    size, dim = pages.shape[3:]
    rows = pages[page_table][:, :, 0, 0]
    return rows.reshape(batch, width * size, dim).astype(jnp.int32)


def _write_rows(pages: jax.Array, kv_locs: jax.Array, rows: jax.Array) -> jax.Array:
    size = pages.shape[3]
    flat = kv_locs.reshape(-1)
    values = rows.reshape(-1, rows.shape[-1]).astype(pages.dtype)
    return pages.at[flat // size, 0, 0, flat % size].set(values)


def _prefix_checksums(
    rows: jax.Array, lens: jax.Array, num: int, mask: jax.Array | None = None
) -> jax.Array:
    """Checksums of rows 0..lens+i for i in 0..num-1, of the stored tokens and positions.

    mask: u32[B, num, W] of a tree, each of whose tokens sees of the block what its bits say.
    """
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    node = index - lens[:, None]
    if mask is None:
        visible = node[:, None, :] <= jnp.arange(num, dtype=jnp.int32)[None, :, None]
        own = index
    else:
        inside = (node >= 0) & (node < num)
        at = jnp.clip(node, 0, num - 1)
        words = jnp.broadcast_to(at[:, None, :] // 32, (*mask.shape[:2], at.shape[1]))
        bits = jnp.take_along_axis(mask, words, axis=2) >> (at % 32).astype(jnp.uint32)[:, None]
        visible = (node < 0)[:, None] | (inside[:, None] & (bits & jnp.uint32(1) == 1))
        depth = jax.lax.population_count(mask).sum(-1, dtype=jnp.uint32).astype(jnp.int32) - 1
        own = jnp.where(inside, lens[:, None] + jnp.take_along_axis(depth, at, axis=1), index)
    terms = contribution(rows[..., 0], rows[..., 1])
    # A row that holds another position's KV must not pass for its own.
    terms = jnp.where(rows[..., 1] == own, terms, terms + 7919)
    return jnp.where(visible, terms[:, None, :], 0).sum(-1, dtype=jnp.int32) % MODULUS


@functools.cache
def build_table_target(page_size: int, num_layers: int = 2) -> Target:
    """A target whose params are a table f32[NUM_STATES, V]; each layer keeps the KV rows."""

    def forward(params: jax.Array, kv: KV, block: Block) -> TargetOutput:
        stored = jnp.stack([block.token_ids.astype(jnp.int32), block.positions], axis=-1)
        new_kv, state = [], jnp.zeros(block.positions.shape, jnp.int32)
        for pages in kv:
            pages = _write_rows(pages, block.kv_locs, stored)
            rows = _read_rows(pages, block.page_table)
            state += _prefix_checksums(rows, block.lens, block.positions.shape[1], block.mask)
            new_kv.append(pages)
        hidden = (state % (MODULUS * num_layers))[..., None].astype(jnp.float32)
        features = jnp.concatenate([stored.astype(jnp.float32), hidden], axis=-1)
        return TargetOutput(hidden, features, tuple(new_kv))

    def logits(params: jax.Array, hidden: jax.Array) -> jax.Array:
        return params[hidden[..., 0].astype(jnp.int32) % NUM_STATES]

    return Target(
        embed=lambda params, ids: ids[..., None].astype(jnp.float32),
        forward=forward,
        logits=logits,
        init_kv=lambda num_pages: tuple(
            jnp.zeros((num_pages, 2, 1, page_size, 2), jnp.float32) for _ in range(num_layers)
        ),
    )


def _knows_what_follows(rows: jax.Array, lens: jax.Array, bonus: jax.Array) -> jax.Array:
    """bool[B]: each row of KV holds, third, the token of the next row, the last the bonus token."""
    index = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    following = jnp.roll(rows[..., 0], -1, axis=1)
    following = jnp.where(index == lens[:, None] - 1, bonus.astype(jnp.int32)[:, None], following)
    return jnp.all((rows[..., 2] == following) | (index >= lens[:, None]), axis=1)


class ScriptedParams(NamedTuple):
    """accepts: i32[C] how many drafts are right when the bonus token stands at a position.

    table: the target's, from which right drafts follow.
    """

    accepts: jax.Array
    table: jax.Array


@functools.cache
def build_scripted_drafter(num_draft_tokens: int, page_size: int, num_layers: int = 2) -> Drafter:
    """Drafts rightly for as many tokens as `ScriptedParams.accepts` says, then wrongly."""

    def init_state(num_pages: int, num_slots: int, max_len: int) -> tuple:
        return (jnp.zeros((num_pages, 2, 1, page_size, 3), jnp.float32),)

    def init_carry(num_slots: int) -> dict:
        return {"checksum": jnp.zeros((num_slots + 1, 1), jnp.int32)}

    def draft(params: ModelParams, state: tuple, context: DraftContext):
        script: ScriptedParams = params.drafter
        block = context.block
        rows = _read_rows(state[0], block.page_table)
        own = _prefix_checksums(rows, block.lens - 1, 1)[:, 0]
        intact = own == context.carry["checksum"][:, 0]
        intact &= _knows_what_follows(rows, block.lens, block.token_ids[:, 0])

        def next_draft(carry, position):
            token, total = carry
            total = (total + contribution(token.astype(jnp.int32), position)) % MODULUS
            logits = script.table[(total * num_layers) % NUM_STATES]
            choice = context.sample(logits[:, None], position[:, None] + 1)[:, 0]
            return (choice, total), choice

        bonus = block.token_ids[:, 0]
        _, drafts = jax.lax.scan(next_draft, (bonus, own), block.positions.T[:num_draft_tokens])
        ids = jnp.concatenate([bonus[:, None], drafts.T], axis=1)
        right = jnp.where(intact, script.accepts[block.positions[:, 0]], 0)
        column = jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None, :]
        wrong = (ids + 1) % VOCAB
        ids = jnp.where(column <= right[:, None], ids, wrong)
        count = jnp.full_like(context.rows, num_draft_tokens)
        return DraftBlock(ids.astype(token_dtype()), count), state

    def ingest(params: ModelParams, state: tuple, batch: IngestBatch):
        next_ids = batch.next_ids.astype(jnp.float32)[..., None]
        stored = jnp.concatenate([batch.features[..., :2], next_ids], axis=-1)
        pages = _write_rows(state[0], batch.block.kv_locs, stored)
        rows = _read_rows(pages, batch.block.page_table)
        sums = _prefix_checksums(rows, batch.block.lens, batch.block.positions.shape[1])
        last = jnp.maximum(batch.num_valid - 1, 0)[:, None]
        return (pages,), {"checksum": jnp.take_along_axis(sums, last, axis=1)}

    return Drafter(
        name="scripted",
        num_draft_tokens=num_draft_tokens,
        feature_layers=(0,),
        mask_token_id=0,
        init_state=init_state,
        init_carry=init_carry,
        draft=draft,
        ingest=ingest,
        kv_lookahead=1,
    )


@functools.cache
def build_tree_drafter(num_nodes: int, depth: int, page_size: int, num_layers: int = 2) -> Drafter:
    """The scripted drafter's drafts along one path of a tree, another tree at each position.

    Off the path no draft is right.
    """
    chain = build_scripted_drafter(depth, page_size, num_layers)
    trees = [random_tree(seed, num_nodes, depth) for seed in range(5)]
    parents, depths, paths = (np.stack(parts) for parts in zip(*trees, strict=True))

    def of_trees(values: np.ndarray, which: jax.Array) -> jax.Array:
        return jnp.asarray(values, jnp.int32)[which]

    def draft(params: ModelParams, state: tuple, context: DraftContext):
        block = context.block
        own = context.replace(block=block.columns(0, depth + 1))
        drafts, state = chain.draft(params, state, own)
        which = block.positions[:, 0] % len(trees)
        along = jnp.take_along_axis(drafts.tokens, of_trees(depths, which), axis=1)
        node = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
        on_path = (node[:, :, None] == of_trees(paths, which)[:, None, :]).any(-1)
        # Where the script is over, the chain's draft is the right one plus 1.
        other = (along + (2 + node % (VOCAB - 3)).astype(along.dtype)) % VOCAB
        ids = jnp.where(on_path, along, other)
        count = jnp.full_like(context.rows, num_nodes - 1)
        return DraftBlock(ids.astype(token_dtype()), count, of_trees(parents, which)), state

    return chain._replace(name="tree", num_draft_tokens=num_nodes - 1, depth=depth, draft=draft)


def random_tree(seed: int, num_nodes: int, depth: int) -> tuple[list[int], list[int], list[int]]:
    """Parents and depths of a tree's nodes, and one of its longest paths, the root included."""
    rng = np.random.default_rng(seed)
    nodes = rng.permutation(np.arange(1, num_nodes))[:depth]
    path = [0, *sorted(nodes.tolist())]
    parents, depths = [-1], [0]
    for node in range(1, num_nodes):
        if node in path:
            parent = path[path.index(node) - 1]
        else:
            parent = int(rng.choice([i for i in range(node) if depths[i] < depth]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents, depths, path


@functools.cache
def build_random_drafter(num_draft_tokens: int) -> Drafter:
    """Drafts arbitrary tokens, sometimes fewer than K."""

    def draft(params: ModelParams, state: tuple, context: DraftContext):
        positions = context.block.positions
        ids = (positions * 7919 + context.block.token_ids[:, :1].astype(jnp.int32) * 31) % VOCAB
        ids = ids.astype(token_dtype()).at[:, 0].set(context.block.token_ids[:, 0])
        count = positions[:, 0] % (num_draft_tokens + 1)
        return DraftBlock(ids, count), state

    return Drafter(
        name="random",
        num_draft_tokens=num_draft_tokens,
        feature_layers=(),
        mask_token_id=0,
        init_state=lambda num_pages, num_slots, max_len: (),
        init_carry=lambda num_slots: (),
        draft=draft,
        ingest=lambda params, state, batch: (state, ()),
    )


class PieceDetokenizer:
    """Text of tokens that stand for bytes each; holds back the bytes of an unfinished character."""

    def __init__(self, pieces: dict[int, bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        """Adds tokens."""
        return self._decoder.decode(b"".join(self._pieces[token] for token in token_ids))

    def flush(self) -> str:
        """What is left."""
        return self._decoder.decode(b"", final=True)


def encode_letters(text: str) -> list[int]:
    """Tokens that `letters` spells as `text`; it knows no space."""
    tokens = {piece.decode(): token for token, piece in letters().items()}
    return [tokens[letter] for letter in text if letter != " "]


class LetterTokenizer:
    """What the engine asks of a tokenizer, in the spelling of `letters`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a text."""
        return encode_letters(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens."""
        return b"".join(letters()[token] for token in ids).decode()


@functools.cache
def letter_grammars() -> Grammars:
    """Grammars over the spelling of `letters`; EOS spells nothing."""

    def make():
        import llguidance

        class Spelling:
            eos_token_id, bos_token_id, special_token_ids = EOS, None, (EOS,)
            tokens = tuple(b"" if i == EOS else piece for i, piece in letters().items())

            def __call__(self, text):
                text = text if isinstance(text, str) else text.decode()
                return encode_letters("".join(filter(str.isalnum, text)))  # the rest has no token

        wrapper = llguidance.TokenizerWrapper(Spelling())
        return llguidance.LLTokenizer(wrapper, n_vocab=VOCAB, eos_token=[EOS])

    return Grammars(make)


def letters() -> dict[int, bytes]:
    """A letter or digit for each token of the toy vocabulary."""
    return {token: b"abcdefghijklmnopqrstuvwxyz012345"[token : token + 1] for token in range(VOCAB)}
