"""`paged_attention` of a block of queries in Pallas Mosaic GPU: KV is asked for before q is there.

The kernel ahead makes q and writes the block's own KV; all KV before the block has been there since
earlier steps. So a program asks for its tiles of that first and then waits (`griddepcontrol.wait`),
as no kernel of Pallas-Triton can, and two groups of threads take tiles in turn.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import limits
from kernels_pallas.mosaic_tiles import swizzled, turns_of
from kernels_pallas.paged_attention import mosaic_merge, plans, triton
from kernels_pallas.paged_attention.plans import Plan
from kernels_pallas.paged_attention.triton import LOG2_E, MASKED

TILE = 64  # rows of KV of one step, and query rows of a program: what the tensor cores take at once
_GROUPS = 2  # warp groups that multiply; one more loads
_EIGHT = 8  # rows lie in shared memory in eights
_DIM = 128
_MOST_ROWS = 32  # of a batch; with more it was not measured


class Config(NamedTuple):
    """Static choices of a launch."""

    shares: int  # into which a KV head's rows of a batch are cut, about; 1: no row is split
    # Tiles of K and V under way at once; even, since each belongs to one group of threads.
    num_stages: int
    least_tiles: int = 2  # of a part


class _Place(NamedTuple):
    """One part of one row's KV, of one head."""

    program: jax.Array  # of the plan
    j: jax.Array  # KV head
    b: jax.Array  # row of the batch
    splits: jax.Array  # that the row has; 0: nothing to do
    length: jax.Array  # rows of KV before the block
    end: jax.Array  # and with it
    low: jax.Array  # first tile
    tiles: jax.Array
    own: jax.Array  # tiles before those that hold rows of the block, or none at all


def serves(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> bool:
    """Whether it takes such q and pages, without a window or a block mask."""
    batch, block, heads, dim = q_shape
    kv_heads, page_size = kv_shape[2:4]
    return (
        batch <= _MOST_ROWS
        and jnp.finfo(dtype).bits == 16
        and dim == _DIM
        and block % _EIGHT == 0
        and block * (heads // kv_heads) <= TILE
        and page_size % _EIGHT == 0
        and (page_size % TILE == 0 or TILE % page_size == 0)
    )


def choose(batch: int, kv_heads: int, max_rows: int) -> Config:
    """The launch for a batch bucket; max_rows: M * G."""
    # Half the multiprocessors keep the memory busy, with four tiles under way on each; the product
    # behind asks for its weight on the others meanwhile. Even idle programs would be in its way.
    shares = max(1, limits.MULTIPROCESSORS // 2 // kv_heads)
    shares = min(shares, batch * -(-max_rows // TILE))
    return Config(shares, num_stages=4, least_tiles=3 if batch == 1 else 2)


def make_plan(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    page_table: jax.Array,
    lens: jax.Array,
    config: Config | None = None,
) -> Plan:
    """Which program reads what; q_shape, kv_shape: of q and the pages."""
    max_rows = page_table.shape[1] * kv_shape[3]
    if config is None:
        config = choose(q_shape[0], kv_shape[2], max_rows)
    return plans.make_plan(
        lens,
        block=q_shape[1],
        window=None,
        tile=TILE,
        reach=max_rows,
        shares=config.shares,
        least_tiles=config.least_tiles,
    )


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    *,
    causal: bool,
    scale: float,
    plan: Plan | None = None,
    early_launch: bool = False,
    interpret: bool = False,
    config: Config | None = None,
) -> jax.Array:
    """See `paged_attention`; of a config other than the chosen one a plan must be made, too."""
    batch, block, _, dim = q.shape
    kv_heads, page_size = kv_pages.shape[2:4]
    if config is None:
        config = choose(batch, kv_heads, page_table.shape[1] * page_size)
    is_ahead = plan is not None and not interpret
    if plan is None:
        plan = make_plan(q.shape, kv_pages.shape, page_table, lens, config)
    is_split = config.shares > 1
    out, *parts = attend(
        q,
        kv_pages,
        page_table,
        plan.programs,
        causal=causal,
        scale=scale,
        config=config,
        is_ahead=is_ahead,
        early_launch=early_launch or (is_split and is_ahead),  # the merge is ours
        interpret=interpret,
    )
    if not is_split:
        return out
    merge = mosaic_merge.merge if mosaic_merge.serves(batch, block, dim) else triton.merge
    return merge(
        out,
        plan.split_rows,
        *parts,
        shares=config.shares,
        by_head=True,
        early_launch=early_launch,
        interpret=interpret,
    )


def attend(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    programs: jax.Array,
    *,
    causal: bool,
    scale: float,
    config: Config,
    is_ahead: bool,
    early_launch: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """(out, acc, m, total): the rows that are not split, and the parts of those that are.

    programs: `Plan.programs`. The parts' query rows are those of head after head, r = g * N + n.
    is_ahead: whether KV is asked for while the kernel ahead runs.
    Grid: programs that take one of `programs`, and one KV head, after another.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    dim, kv_heads = q.shape[3], kv_pages.shape[2]
    parts = (programs.shape[0], kv_heads, TILE)  # only rows of queries are read
    run = functools.partial(
        _kernel,
        causal=causal,
        scale=scale,
        config=config,
        is_ahead=is_ahead,
        early_launch=early_launch,
        is_interpreted=interpret,
    )
    run.__name__ = "paged_attention"
    return plgpu.kernel(
        run,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*parts, dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        grid=(min(programs.shape[0] * kv_heads, limits.MULTIPROCESSORS),),
        grid_names=("program",),
        num_threads=_GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(q, kv_pages, page_table, programs)


def _kernel(
    q_gmem,  # [B, N, H, D]
    kv_gmem,  # [P, 2, J, G, D]
    page_table_gmem,  # i32[B, M]
    programs_gmem,  # `Plan.programs`
    out_gmem,  # [B, N, H, D]
    acc_gmem,  # f32[S, J, R, D]
    m_gmem,  # f32[S, J, R] in units of log2
    total_gmem,  # f32[S, J, R]
    *,
    causal,
    scale,
    config,
    is_ahead,
    early_launch,
    is_interpreted,
):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    _, block, heads, dim = q_gmem.shape
    kv_heads, page_size = kv_gmem.shape[2:4]
    columns, dtype = page_table_gmem.shape[1], q_gmem.dtype
    heads_each, num_stages = heads // kv_heads, config.num_stages
    assert num_stages % _GROUPS == 0
    piece = min(TILE, page_size)  # rows that one copy brings
    group = lax.axis_index("group")
    work = programs_gmem.shape[0] * kv_heads
    turns = turns_of(work)
    is_one_turn = work <= lax.axis_size("program")
    if not is_ahead and not is_interpreted:
        plgpu.griddepcontrol_wait()

    def place(turn):
        """What a program does in its turn."""
        index = lax.axis_index("program") + turn * np.int32(lax.axis_size("program"))
        program, j = lax.div(index, np.int32(kv_heads)), lax.rem(index, np.int32(kv_heads))
        b, split, splits, length = (programs_gmem[program, column] for column in range(4))
        end = jnp.minimum(length + np.int32(block), np.int32(columns * page_size))
        end_tile = lax.div(end + np.int32(TILE - 1), np.int32(TILE))
        some = jnp.maximum(splits, np.int32(1))
        each = lax.div(end_tile + some - np.int32(1), some)
        low = split * each
        tiles = jnp.where(splits > 0, jnp.clip(end_tile - low, 0, each), np.int32(0))
        own = jnp.clip(lax.div(length, np.int32(TILE)) - low, 0, tiles)
        return _Place(program, j, b, splits, length, end, low, tiles, own)

    def slot_of(done):
        return lax.rem(done, np.int32(num_stages))

    def head_at(at, head):
        return at.j * np.int32(heads_each) + np.int32(head)

    def run(
        q_smem,
        kv_smem,
        other_smem,
        row_smem,
        out_smem,
        q_loaded,
        q_free,
        loaded,
        free,
        given,
        taken,
    ):
        out_smem = q_smem if is_one_turn else out_smem.at[0]

        def load():
            plgpu.set_max_registers(40, action="decrease")

            def load_place(turn, done):
                at = place(turn)

                def rows_of(tile):
                    row = (at.low + tile) * np.int32(TILE)
                    return [row + np.int32(first) for first in range(0, TILE, piece)]

                def pages_of(tile):
                    columns_of = [lax.div(row, np.int32(page_size)) for row in rows_of(tile)]
                    last = np.int32(columns - 1)
                    return [page_table_gmem[at.b, jnp.minimum(one, last)] for one in columns_of]

                def load_tile(tile, carry):
                    done, pages = carry
                    slot = slot_of(done)
                    pl.when(done >= num_stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for index, (row, page) in enumerate(zip(rows_of(tile), pages, strict=True)):
                        offset = pl.ds(lax.rem(row, np.int32(page_size)), piece)
                        for which in range(2):  # the copy engine takes one box, of K or of V
                            plgpu.copy_gmem_to_smem(
                                kv_gmem.at[page, which, at.j, offset],
                                kv_smem.at[slot, which, pl.ds(index * piece, piece)],
                                loaded.at[slot],
                            )
                    # Those of the next tile come while this one's stage is waited for.
                    return done + np.int32(1), pages_of(tile + np.int32(1))

                is_first = turn == 0
                ahead = jnp.where(is_first, at.own, at.tiles) if is_ahead else at.tiles
                ahead = jnp.minimum(ahead, np.int32(num_stages))
                carry = done, pages_of(np.int32(0))
                carry = lax.fori_loop(np.int32(0), ahead, load_tile, carry)
                if is_ahead:
                    pl.when(is_first)(plgpu.griddepcontrol_wait)

                @pl.when(at.splits > 0)
                def _load_q():
                    pl.when(turn > 0)(lambda: plgpu.barrier_wait(q_free))
                    for head in range(heads_each):
                        plgpu.copy_gmem_to_smem(
                            q_gmem.at[at.b, :, head_at(at, head)],
                            q_smem.at[pl.ds(head * block, block)],
                            q_loaded,
                        )

                done, _ = lax.fori_loop(ahead, at.tiles, load_tile, carry)
                return done

            done = lax.fori_loop(np.int32(0), turns, load_place, np.int32(0))

            def wait(done, _):  # until what was loaded is read
                plgpu.barrier_wait(free.at[slot_of(done)])

            lax.fori_loop(jnp.maximum(done - np.int32(num_stages), 0), done, wait, None)
            pl.when(done > 0)(lambda: plgpu.barrier_wait(q_free))

        def rows_layout(x):
            return plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))

        def over_columns(x, width):
            return lax.broadcast_in_dim(x, (TILE, width), [0])

        def iota(dimension, width=TILE):
            shape, layout = (TILE, width), plgpu.Layout.WGMMA
            return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)

        def times(a_smem, b_smem, meanwhile):
            """a b^T."""
            if is_interpreted:
                meanwhile()
                return a_smem[...].astype(jnp.float32) @ b_smem[...].astype(jnp.float32).T

            def multiply(acc):
                plgpu.wgmma(acc, a_smem, b_smem.transpose((1, 0)))
                meanwhile()
                return acc[...]

            return pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))

        def plus_values(acc, p, slot):
            """acc + p v."""
            if is_interpreted:  # which has no products of values
                return acc + p.astype(jnp.float32) @ kv_smem[slot, 1].astype(jnp.float32)

            def multiply(ref):
                plgpu.wgmma(ref, p, kv_smem.at[slot, 1])

            return pl.run_state(multiply)(plgpu.ACC.init(acc))

        def multiply():
            plgpu.set_max_registers(232, action="increase")

            def multiply_place(turn, before):
                at = place(turn)
                pl.when(at.splits > 0)(lambda: attend_place(at, turn, before))
                return before + at.tiles

            tiles = lax.fori_loop(np.int32(0), turns, multiply_place, np.int32(0))

            @pl.when((group > 0) & (tiles > 0))
            def _():
                plgpu.barrier_wait(taken)

            plgpu.wait_smem_to_gmem(0)

        def attend_place(at, turn, before):
            """before: tiles of this program's earlier turns."""
            plgpu.barrier_wait(q_loaded)
            # A thread counts the phases of a barrier by its own waits, so that a stage must always
            # be read by the same group.
            first_tile = lax.rem(before + group, np.int32(_GROUPS))

            def step(i, carry, *, masked):
                m, total, acc = carry
                tile = i * np.int32(_GROUPS) + first_tile
                slot = slot_of(before + tile)
                plgpu.barrier_wait(loaded.at[slot])
                first = (at.low + tile) * np.int32(TILE)

                def clean():
                    """A row of the block that an earlier query must not see may hold NaN."""
                    values = kv_smem.at[slot, 1]
                    v = plgpu.load(values, layout=plgpu.Layout.WGMMA, optimized=False)
                    sound = jnp.abs(v.astype(jnp.float32)) < jnp.inf
                    sound |= first + iota(0, dim) < at.length
                    values[...] = jnp.where(sound, v, jnp.zeros_like(v))
                    plgpu.commit_smem()

                scores = times(q_smem, kv_smem.at[slot, 0], clean if masked else lambda: None)
                scores = scores * np.float32(scale * LOG2_E)
                if masked:
                    position = first + iota(1)
                    visible = position < at.end
                    if causal:
                        visible &= position <= at.length + lax.rem(iota(0), np.int32(block))
                    scores = jnp.where(visible, scores, MASKED)
                m_next = jnp.maximum(m, jnp.max(scores, axis=1))
                p = jnp.exp2(scores - over_columns(m_next, TILE))
                if masked:
                    p = jnp.where(visible, p, 0.0)
                alpha = jnp.exp2(m - m_next)
                total = total * alpha + jnp.sum(p, axis=1)
                acc = plus_values(acc * over_columns(alpha, dim), p.astype(dtype), slot)
                plgpu.barrier_arrive(free.at[slot])
                return m_next, total, acc

            def steps(tiles):  # of this group, among the first so many
                return lax.div(tiles - first_tile + np.int32(_GROUPS - 1), np.int32(_GROUPS))

            carry = (
                rows_layout(jnp.full((TILE,), MASKED, jnp.float32)),
                rows_layout(jnp.zeros((TILE,), jnp.float32)),
                plgpu.layout_cast(jnp.zeros((TILE, dim), jnp.float32), plgpu.Layout.WGMMA),
            )
            # Tiles before the block are seen whole, and need neither masks nor care for NaN.
            whole = functools.partial(step, masked=False)
            carry = lax.fori_loop(np.int32(0), steps(at.own), whole, carry)
            masked = functools.partial(step, masked=True)
            carry = lax.fori_loop(steps(at.own), steps(at.tiles), masked, carry)
            plgpu.barrier_arrive(q_free)
            lax.cond(group == 0, lambda: take(at, *carry), lambda: give(turn, *carry))

        def give(turn, m, total, acc):
            """The second group's sums, for the first one to add."""
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(taken))
            other_smem[...] = acc
            row_smem[0] = m
            row_smem[1] = total
            plgpu.barrier_arrive(given)

        def take(at, m, total, acc):
            plgpu.barrier_wait(given)
            other = plgpu.load(other_smem, layout=plgpu.Layout.WGMMA)
            m_other, total_other = (
                plgpu.load(row_smem.at[i], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                for i in range(2)
            )
            plgpu.barrier_arrive(taken)
            most = jnp.maximum(m, m_other)
            own_part, other_part = jnp.exp2(m - most), jnp.exp2(m_other - most)
            total = total * own_part + total_other * other_part
            acc = acc * over_columns(own_part, dim) + other * over_columns(other_part, dim)

            @pl.when(at.splits == 1)
            def _store_result():
                out = acc / over_columns(jnp.where(total == 0.0, 1.0, total), dim)
                plgpu.wait_smem_to_gmem(0)  # of the turn before
                out_smem[...] = out.astype(dtype)
                plgpu.commit_smem()
                for head in range(heads_each):
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[pl.ds(head * block, block)],
                        out_gmem.at[at.b, :, head_at(at, head)],
                    )

            @pl.when(at.splits > 1)
            def _store_part():
                part = at.program, at.j
                plgpu.store(acc_gmem.at[part], acc, optimized=False)
                plgpu.store(m_gmem.at[part], most, optimized=False)
                plgpu.store(total_gmem.at[part], total, optimized=False)

        if early_launch:
            plgpu.griddepcontrol_launch_dependents()
        # One with nothing to do makes room for those of the next launch.
        pl.when(place(np.int32(0)).splits > 0)(lambda: lax.cond(group < _GROUPS, multiply, load))

    pl.run_scoped(
        run,
        plgpu.SMEM((TILE, dim), dtype, transforms=swizzled(TILE, dtype)),
        plgpu.SMEM((num_stages, 2, TILE, dim), dtype, transforms=swizzled(TILE, dtype)),
        plgpu.SMEM((TILE, dim), jnp.float32, transforms=swizzled(TILE, jnp.float32)),
        plgpu.SMEM((2, TILE), jnp.float32),
        plgpu.SMEM((0 if is_one_turn else 1, TILE, dim), dtype, transforms=swizzled(TILE, dtype)),
        plgpu.Barrier(num_arrivals=heads_each),
        plgpu.Barrier(num_arrivals=_GROUPS),
        plgpu.Barrier(num_arrivals=2 * TILE // piece, num_barriers=num_stages),
        plgpu.Barrier(num_barriers=num_stages),
        plgpu.Barrier(),
        plgpu.Barrier(),
        collective_axes="group",
    )
