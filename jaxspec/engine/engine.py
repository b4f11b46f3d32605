"""The host loop: admit, dispatch step n, read step n-1, commit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxspec.cache.page_pool import OutOfPages, PagePool
from jaxspec.config import Geometry
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.admission import (
    Tile,
    bucket,
    make_sequence,
    next_tiles,
    pack_tiles,
    request_key,
    stop_ids_of,
)
from jaxspec.engine.allowed import allowed_tokens
from jaxspec.engine.commit import commit_tokens
from jaxspec.engine.device_faults import DeviceFault, StateLost, describe_fault
from jaxspec.engine.draft_input import DraftInput
from jaxspec.engine.edits import build_start_edits, pack_edits, pack_start
from jaxspec.engine.logprob_output import DecodeToken, read_logprobs
from jaxspec.engine.pace import Pace
from jaxspec.engine.page_table import PageTable
from jaxspec.engine.sequence import Detokenizer, Sequence, TextCodec
from jaxspec.engine.staged_step import Allow
from jaxspec.engine.state import EngineState, StepOutput
from jaxspec.engine.steps import Steps
from jaxspec.future_map import (
    NON_FINITE_LOGITS,
    RelayError,
    describe_errors,
    resolve_seq_lens_cpu,
)
from jaxspec.grammar import Grammars
from jaxspec.logit_edits import EditRows
from jaxspec.mode import Mode
from jaxspec.request import FinishReason, Request, RequestError, RequestOutput

log = logging.getLogger(__name__)

_VERIFIES_TO_JUDGE = 64  # slot-steps


@dataclass(slots=True)
class EngineStats:
    """Raw sums; ratios are made where they are printed."""

    num_prefill_steps: int = 0
    num_decode_steps: int = 0  # dispatches; a loop of several steps is one
    num_preemptions: int = 0
    num_verifies: int = 0  # slot-steps
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    host_s: float = 0.0  # planning, dispatching and committing
    wait_s: float = 0.0  # waiting for results
    accept_lengths: list[int] = field(default_factory=list)  # histogram, index = accept length

    def reset(self) -> None:
        """Sets all sums to zero."""
        fresh = EngineStats(accept_lengths=[0] * len(self.accept_lengths))
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))


class Entry(NamedTuple):
    """A request in a dispatch, and its row of the output; None where the row says nothing yet."""

    seq: Sequence
    row: int | None


class Dispatch(NamedTuple):
    """A step on its way."""

    output: jax.Array  # packed, i32[B, N+4], or i32[k, B, N+4] of a loop
    entries: list[Entry]
    max_commit: int  # rows of KV that it can add to a request
    kind: str  # "prefill" | "decode" | "decode_loop"
    mode: Mode
    width: int  # tokens verified a row
    started_s: float
    tiles: Collection[Tile]  # of a prefill

    @property
    def is_prefill(self) -> bool:
        """True of a prefill."""
        return self.kind == "prefill"

    @property
    def batch(self) -> Hashable:
        """What tells programs of one width apart: kind, mode and bucket."""
        return self.kind, self.mode, self.output.shape[-2]


class Engine:
    """Serves requests of token ids; knows text only through a detokenizer.

    Not thread-safe: one thread calls its methods.

    steps: the programs of each mode that requests may need.
    make_detokenizer: called per request; None where nobody asks for text.
    pace: chooses how much to verify; None always verifies all drafts. narrow_steps: the programs of
        its other widths.
    make_state: builds a state as `state` was, after the device has lost it; None gives up then.
    prefix_lookahead: `Drafter.kv_lookahead`; None keeps no KV of past texts.
    tokenizer: for bad words and the texts of log-probabilities; None where there is none.
    grammars: for structured outputs; None where there is no tokenizer.
    expected_accept_length: a mean below it, once enough was drafted, is worth a warning.
    """

    def __init__(
        self,
        geometry: Geometry,
        params: ModelParams,
        state: EngineState,
        steps: dict[Mode, Steps],
        *,
        eos_token_ids: tuple[int, ...] = (),
        make_detokenizer: Callable[[Request], Detokenizer] | None = None,
        tokenizer: TextCodec | None = None,
        grammars: Grammars | None = None,
        overlap: bool = True,
        pace: Pace | None = None,
        narrow_steps: Mapping[int, dict[Mode, Steps]] | None = None,
        make_state: Callable[[], EngineState] | None = None,
        prefix_lookahead: int | None = None,
        seed: int = 0,
        expected_accept_length: float | None = None,
    ):
        self.geometry = geometry
        self.stats = EngineStats(accept_lengths=[0] * (geometry.block_size + 1))
        self.pace = pace
        self._params, self._state, self._steps = params, state, steps
        self._narrow_steps = narrow_steps or {}
        self._make_state = make_state
        self._eos_token_ids = eos_token_ids
        self._make_detokenizer = make_detokenizer
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._overlap = overlap
        self._seed = seed
        self._expected_accept_length = expected_accept_length
        self._num_requests = 0
        self._prefix_lookahead = prefix_lookahead
        self._use_pool(PagePool(geometry.num_pages))
        self._free_slots = deque(range(1, geometry.num_slots + 1))
        self._published_lens = np.zeros(geometry.num_slots + 1, np.int32)
        self._in_flight_rows = np.zeros(geometry.num_slots + 1, np.int32)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._running: dict[int, Sequence] = {}  # slot -> request whose prompt is dispatched
        self._draft_input = DraftInput.create_idle_input()
        self._in_flight: deque[Dispatch] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._warm: set[Mode] = set()  # those whose programs were compiled beforehand
        self._changed: dict[str, Sequence] = {}  # by the step that runs
        self._faults: list[str] = []  # of the relay, found by it
        self._num_restarts = 0  # since a decode step has landed
        self._last_landed = ("prefill", 0.0)  # kind and time
        self._stale_edits: set[int] = set()  # slots that hold what their last owner asked for
        self._edits: EditRows | None = None  # from the first request on that needs them

    def _use_pool(self, pool: PagePool) -> None:
        self._pages = PageTable(self.geometry, pool, self._prefix_lookahead)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: it can never run, or its id is in use.
        """
        if request.request_id in self._by_id:
            raise RequestError(
                f"request_id {request.request_id!r} is in use; wait for its end or take another"
            )
        make_detokenizer = self._make_detokenizer if request.params.detokenize else None
        seq = make_sequence(
            request,
            self.geometry,
            eos_token_ids=self._eos_token_ids,
            key=request_key(
                request.params.seed, self._seed, self._num_requests, request.copy_index
            ),
            num_usable_pages=self._pages.pool.num_usable,
            detokenizer=make_detokenizer(request) if make_detokenizer else None,
            tokenizer=self._tokenizer,
            grammars=self._grammars,
        )
        self._num_requests += 1
        self._by_id[request.request_id] = seq
        self._waiting.append(seq)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request wherever it is; None where it is unknown or over already.

        Its slot and pages are free once the steps in flight have landed.
        """
        seq = self._by_id.get(request_id)
        if seq is None:
            return None
        self._finish(seq, FinishReason.ABORT)
        return seq.output()

    @property
    def has_unfinished(self) -> bool:
        """True while a request runs or waits, or a step is in flight."""
        return bool(self._by_id or self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Runs the loop once: admits, dispatches, and commits what has landed.

        Returns the requests that a result has changed, finished ones included.

        Raises:
            RelayError: a row of the relay was used out of turn; holds what would be returned.
            DeviceFault: the device has failed for good, and every request with it; likewise.
        """
        self._changed, self._faults = {}, []
        try:
            return self._step()
        except StateLost as lost:
            self._start_over(lost.error)
            return [seq.output() for seq in self._changed.values()]

    def _step(self) -> list[RequestOutput]:
        started, waited = time.perf_counter(), self.stats.wait_s
        num_before = len(self._in_flight)
        newest = self._in_flight[-1] if self._in_flight else None
        self._admit()
        if self._prefilling:
            self._dispatch_prefill()
        is_amid_prompts = bool(self._prefilling) and len(self._in_flight) > num_before
        if self.geometry.chunked_prefill or not is_amid_prompts:
            self._dispatch_decode()
        # The newest stays on its way. A prefill beside it lands now: its first tokens are awaited.
        is_new = bool(self._in_flight) and self._in_flight[-1] is not newest
        self._land_all(keep=int(is_new and self._overlap))
        outputs = [seq.output() for seq in self._changed.values()]
        if not self.has_unfinished:
            self.check_idle()
        waited = self.stats.wait_s - waited
        self.stats.host_s += time.perf_counter() - started - waited
        if self._faults:
            raise RelayError("; ".join(self._faults), outputs)
        return outputs

    def run_idle(
        self, kind: str, packed: np.ndarray, *, mode: Mode, width: int | None = None
    ) -> None:
        """Runs a program on padding rows alone and waits for it; requests are not touched.

        width: tokens verified a row, all by default.
        """

        def allow(tokens: np.ndarray, parents: np.ndarray | None) -> np.ndarray:
            return allowed_tokens([], tokens, parents, self.geometry.vocab_size)

        width = width or self.geometry.block_size
        jax.block_until_ready(self._call(kind, packed, mode, width, allow))
        self._warm.add(mode)

    def check_idle(self) -> None:
        """Asserts that an engine without requests owns every slot and page again."""
        self._pages.check_idle()
        assert len(self._free_slots) == self.geometry.num_slots, "slots leak"
        assert not self._in_flight_rows.any(), "rows in flight outlive their steps"

    @property
    def num_free_pages(self) -> int:
        """Pages that no request owns, those of the prefix cache included."""
        return self._pages.pool.num_free

    def _admit(self) -> None:
        """Lets waiting requests in, in their order, while there are slots and pages."""
        while (
            self._waiting
            and self._free_slots
            and self._pages.has_room_for(
                self._waiting[0], admitted=self._prefilling, num_running=len(self._running)
            )
        ):
            seq = self._waiting.popleft()
            seq.slot = self._free_slots.popleft()
            self._published_lens[seq.slot] = seq.prefill_len - 1
            if seq.edits_row is not None:
                self._write_edits(seq.slot, seq.edits_row, seq)
            self._prefilling.append(seq)

    def _plan_prefill(self) -> list[Tile]:
        """Takes the next tiles of the prompts, in order, as many as one dispatch holds.

        A prompt that begins like one before it in the same dispatch finds its pages already: each
        layer writes the KV of all tiles before any of them attends.
        """
        tiles: list[Tile] = []
        sizes = self.geometry
        max_tiles, room = sizes.prefill_buckets[-1], sizes.max_num_batched_tokens
        for seq in self._prefilling:
            if len(tiles) == max_tiles or not room:
                break
            if not seq.pages:
                try:
                    self._pages.begin(seq)
                except OutOfPages:
                    break  # those that run have grown since it was admitted
            new = next_tiles(
                seq, sizes.prefill_tile, num_tiles=max_tiles - len(tiles), num_tokens=room
            )
            tiles += new
            room -= sum(tile.num_tokens for tile in new)
            seq.num_prefilled = new[-1].start + new[-1].num_tokens
            self._pages.offer(seq)
        return tiles

    def _dispatch_prefill(self) -> None:
        tiles = self._plan_prefill()
        if not tiles:
            return
        packed = pack_tiles(tiles, self.geometry, self._pages.table)
        entries = {}
        for row, tile in enumerate(tiles):
            entries[tile.seq.slot] = Entry(tile.seq, row if tile.is_final else None)
        self._launch("prefill", packed, list(entries.values()), max_commit=1, tiles=tiles)
        self.stats.num_prefill_steps += 1
        self._prefilling = [seq for seq in self._prefilling if seq.num_prefilled < seq.prefill_len]
        started = [seq for seq, row in entries.values() if row is not None and not seq.is_over]
        self._running.update({seq.slot: seq for seq in started})
        self._draft_input = self._draft_input.merge_batch(
            DraftInput.create([seq.slot for seq in started], [seq.prefill_len for seq in started])
        )

    def _dispatch_decode(self) -> None:
        going = self._draft_input.filter_batch(
            {slot for slot, seq in self._running.items() if self._may_go_on(seq)}
        )
        seqs = [self._running[slot] for slot in going.rows.tolist()]
        quiet = not (self._waiting or self._prefilling or any(s.needs_host for s in seqs))
        is_loop = quiet and self.geometry.decode_steps > 1
        max_commit = self.geometry.max_commit if is_loop else self.geometry.block_size
        _, upper = resolve_seq_lens_cpu(self._published_lens, self._in_flight_rows, going.rows)
        going = going.reserve(upper + np.int32(max_commit))
        for seq, num_rows in zip(seqs, going.reserved_lens.tolist(), strict=True):
            self._grow(seq, num_rows, seqs)
        seqs = [seq for seq in seqs if not seq.is_preempted]
        going = going.filter_batch({seq.slot for seq in seqs})
        if not seqs:
            return
        packed = pack_decode(going, self.geometry, self._pages.table)
        entries = [Entry(seq, row) for row, seq in enumerate(seqs)]
        kind = "decode_loop" if is_loop else "decode"
        self._launch(kind, packed, entries, max_commit=max_commit)
        self.stats.num_decode_steps += 1

    def _grow(self, seq: Sequence, num_rows: int, going: list[Sequence]) -> None:
        """Gives a running request pages for `num_rows` rows, others' if there is no other way.

        The last that came gives up its pages first, if need be `seq` itself.
        """
        while not seq.is_preempted:
            try:
                return self._pages.reserve(seq, num_rows)
            except OutOfPages:
                started = [other for other in self._prefilling if other.pages]
                later = [other for other in going if not other.is_preempted]
                self._preempt([*later, *started][-1])

    def _preempt(self, seq: Sequence) -> None:
        """Takes slot and pages from a request, which waits in front of those that came later.

        What is in flight of it is dropped when it lands, and its slot is free then.
        """
        again = seq.preempt()
        again.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._by_id[seq.request.request_id] = again
        self._waiting.appendleft(again)
        self._pages.take_back(seq, self._num_written(seq))
        self._leave(seq)

    def _fail(self, seqs: Iterable[Sequence], message: str) -> None:
        """Ends requests that the device has refused."""
        for seq in seqs:
            if not seq.is_over:
                seq.error = message
                self._finish(seq, FinishReason.ERROR)
                self._changed[seq.request.request_id] = seq

    def _start_over(self, error: Exception) -> None:
        """Builds a new state in place of one that is lost; all requests go on from their texts.

        The second time in a row, those that ran are ended instead.
        """
        seqs = [*self._running.values(), *self._prefilling]
        message = describe_fault(error, "while requests ran")
        log.warning("%s; %d requests are computed again", message, len(seqs))
        self._state = self._edits = None
        self._in_flight.clear()
        self._in_flight_rows[:] = 0
        for seq in reversed(seqs):
            seq.num_in_flight = 0
            if not self._num_restarts:
                self._preempt(seq)
        self._fail(seqs, message)
        self._num_restarts += 1
        self._free_slots = deque(range(1, self.geometry.num_slots + 1))
        self._use_pool(PagePool(self._pages.pool.num_usable + 1))
        try:
            if self._make_state is None:
                raise error
            self._state = self._make_state()
        except jax.errors.JaxRuntimeError:
            self._fail([*self._by_id.values()], message)
            outputs = [seq.output() for seq in self._changed.values()]
            raise DeviceFault(message, outputs) from error

    def _may_go_on(self, seq: Sequence) -> bool:
        """False for a request that is full once the steps in flight have landed.

        Each of them commits a token at least, or finds that the request has ended.
        """
        length = int(self._published_lens[seq.slot])
        return length + 1 + seq.num_in_flight < seq.max_len

    def _launch(
        self,
        kind: str,
        packed: np.ndarray,
        entries: list[Entry],
        *,
        max_commit: int,
        tiles: Collection[Tile] = (),
    ) -> None:
        asked = [entry.seq.request.params for entry in entries]
        mode = max(params.prefill_mode if tiles else params.mode for params in asked)
        if self._warm and mode not in self._warm:
            self._warm.add(mode)
            name = mode.name.lower()
            log.warning("compiling for %s while requests wait; name it in warm_up", name)
        width = 1 if tiles else self.geometry.block_size
        if self.pace is not None and not tiles:
            width = self.pace.choose((kind, mode, len(packed)), may_try=not self._warm)
        for seq, _ in entries:
            seq.num_in_flight += 1
            self._in_flight_rows[seq.slot] += max_commit

        def allow(tokens: np.ndarray, parents: np.ndarray | None) -> np.ndarray:
            if not tiles:
                self._land_all()  # only now are the texts before the drafts known
            return allowed_tokens(entries, tokens, parents, self.geometry.vocab_size)

        try:
            output = self._call(kind, packed, mode, width, allow)
            output.copy_to_host_async()
        except jax.errors.JaxRuntimeError as error:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
                raise StateLost(error) from error
            for seq, _ in entries:
                seq.num_in_flight -= 1
                self._in_flight_rows[seq.slot] -= max_commit
            what = f"in a {kind.replace('_', ' ')} of {len(entries)} requests"
            self._fail([entry.seq for entry in entries], describe_fault(error, what))
            return
        now = time.perf_counter()
        dispatch = Dispatch(output, entries, max_commit, kind, mode, width, now, tiles)
        self._in_flight.append(dispatch)

    def _call(
        self, kind: str, packed: np.ndarray, mode: Mode, width: int, allow: Allow
    ) -> jax.Array:
        """Runs a program; those of modes without edits never see the edits' rows.

        allow: asked in modes with grammars alone.
        """
        is_narrow = kind != "prefill" and width < self.geometry.block_size
        steps = self._narrow_steps[width] if is_narrow else self._steps
        step = getattr(steps[mode], kind)
        if not mode.edits:
            self._state, output = step(self._params, self._state, packed)
            return output
        if self._edits is None:
            self._write_edits(0, pack_edits(self.geometry))
        for slot in list(self._stale_edits):
            self._write_edits(slot, pack_edits(self.geometry))
        begun = self._state.replace(edits=self._edits)
        if mode.constrained and kind == "decode":
            state, output = step(self._params, begun, packed, allow)
        elif mode.constrained:
            words = allow(np.zeros((len(packed), 1), np.int32), None).view(np.int32)
            packed = np.concatenate([packed, words[:, 0]], axis=1)
            state, output = step(self._params, begun, packed)
        else:
            state, output = step(self._params, begun, packed)
        self._state, self._edits = state.replace(edits=None), state.edits
        return output

    def _write_edits(self, slot: int, edits: np.ndarray, seq: Sequence | None = None) -> None:
        """Writes a slot's edits, for a request that begins there, or neutral ones."""
        if self._edits is None:
            size = self.geometry.num_slots + 1
            self._edits = EditRows.neutral(size, self.geometry.vocab_size)
        self._stale_edits.discard(slot)
        texts = (seq.request.prompt_token_ids, seq.output_ids) if seq else ((), ())
        packed = pack_start(edits, self.geometry, slot, *texts)
        self._edits = build_start_edits(self.geometry)(self._edits, packed)

    def _land_all(self, *, keep: int = 0) -> None:
        """Reads and commits the results that are on their way, but for the newest `keep`."""
        while len(self._in_flight) > keep:
            self._land(self._in_flight.popleft())

    def _land(self, dispatch: Dispatch) -> None:
        """Reads a result and commits it."""
        before = time.perf_counter()
        try:
            packed = np.asarray(dispatch.output)
        except jax.errors.JaxRuntimeError as error:
            raise StateLost(error) from error
        if not dispatch.is_prefill:
            self._num_restarts = 0
        now = time.perf_counter()
        self.stats.wait_s += now - before
        output = StepOutput.unpack(
            packed if packed.ndim == 3 else packed[None], dispatch.width, self.geometry.vocab_size
        )
        for row, tile in enumerate(dispatch.tiles):
            self._keep_prompt_logprobs(tile, output.logprobs[0, row, 1:])
        if self.pace is not None:
            self._tell_pace(dispatch, output, now)
        for seq, row in dispatch.entries:
            seq.num_in_flight -= 1
            self._in_flight_rows[seq.slot] -= dispatch.max_commit
            if row is not None:
                # A request that ended or was preempted since it was dispatched drops the result.
                for step in range(len(packed) if packed.ndim == 3 else 1):
                    if seq.is_over:
                        break
                    self._commit(seq, output.row(step, row), dispatch, now)
                    self._changed[seq.request.request_id] = seq
            if seq.is_over and seq.slot and not seq.num_in_flight:
                self._release(seq)

    def _keep_prompt_logprobs(self, tile: Tile, columns: np.ndarray) -> None:
        """Keeps what a tile tells of the prompt; one that was preempted has told some before."""
        seq, num_top = tile.seq, tile.seq.request.params.prompt_logprobs
        if num_top is None or seq.is_over:
            return
        first = len(seq.prompt_logprobs) + 1
        tokens = seq.request.prompt_token_ids[first : tile.start + tile.num_tokens + 1]
        columns = columns[first - tile.start - 1 :]
        seq.prompt_logprobs += read_logprobs(columns, list(tokens), num_top, self._token_text)

    @property
    def _token_text(self) -> DecodeToken | None:
        """The text of a single token, where there is a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return lambda token: tokenizer.decode([token], skip_special_tokens=False)

    def _tell_pace(self, dispatch: Dispatch, output: StepOutput, now: float) -> None:
        """Reports what a decode dispatch took, if nothing else ran meanwhile, and brought."""
        last, self._last_landed = self._last_landed, (dispatch.kind, now)
        if dispatch.is_prefill:
            return
        if last[0] != "prefill":
            seconds = now - max(last[1], dispatch.started_s)
            self.pace.note_time(dispatch.batch, dispatch.width, seconds)
        live = output.num_committed[:, : len(dispatch.entries)] > 0
        accepted = output.num_accepted[:, : len(dispatch.entries)][live]
        self.pace.note_accepted(dispatch.batch, dispatch.width, accepted.tolist())

    def _commit(self, seq: Sequence, result: StepOutput, dispatch: Dispatch, now: float) -> None:
        bits = int(result.errors)
        if bits:
            seq.error = describe_errors(seq.slot, bits)
            if bits & ~NON_FINITE_LOGITS:
                self._faults.append(seq.error)
            self._finish(seq, FinishReason.ERROR)
            return
        count = int(result.num_committed)
        self._published_lens[seq.slot] += count
        if seq.metrics.first_token_s is None:
            seq.metrics.first_token_s = now
        num_before = len(seq.output_ids)
        tokens, logprobs = result.tokens[:count].tolist(), []
        if (num_top := seq.request.params.logprobs) is not None:
            logprobs = read_logprobs(result.logprobs, tokens, num_top, self._token_text)
        commit_tokens(
            seq,
            tokens,
            finished=bool(result.finished),
            stop_ids=stop_ids_of(seq.request, self._eos_token_ids),
            logprobs=logprobs,
        )
        if seq.matcher is not None:
            seq.matcher.consume(seq.output_ids[num_before:])
        if not dispatch.is_prefill and count:
            # A stop string may have cut off tokens that the device committed.
            num_kept = len(seq.output_ids) - num_before
            self._count(seq, dispatch.width - 1, int(result.num_accepted), num_kept)
        if seq.finished:
            self._finish(seq, seq.finish_reason)

    def _count(
        self, seq: Sequence, num_drafted: int, num_accepted: int, num_committed: int
    ) -> None:
        for sums in (self.stats, seq.metrics):
            sums.num_verifies += 1
            sums.num_draft_tokens += num_drafted
            sums.num_accepted += num_accepted
            sums.num_committed += num_committed
        self.stats.accept_lengths[num_accepted + 1] += 1
        if self.stats.num_verifies == _VERIFIES_TO_JUDGE:
            self._warn_of_useless_drafts()
        seq.metrics.accept_lengths.append(num_accepted + 1)

    def _warn_of_useless_drafts(self) -> None:
        """A drafter made for another model, or misread, shows in nothing but its accept length."""
        mean = 1.0 + self.stats.num_accepted / self.stats.num_verifies
        if self._expected_accept_length is not None and mean < self._expected_accept_length:
            log.warning(
                "mean accept length is %.2f after %d verify steps, below %.1f; check that the "
                "drafter was made for this model, or use --drafter none",
                mean,
                self.stats.num_verifies,
                self._expected_accept_length,
            )

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a request for its caller; slot and pages follow once nothing of it is in flight."""
        seq.finish_reason = reason
        seq.metrics.finished_s = time.perf_counter()
        del self._by_id[seq.request.request_id]
        if not seq.slot:
            self._waiting.remove(seq)
            return
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Takes a request out of the batch; its slot is free once nothing of it is in flight."""
        if self._running.pop(seq.slot, None) is not None:
            self._draft_input = self._draft_input.filter_batch(set(self._running))
        else:
            self._prefilling = [other for other in self._prefilling if other is not seq]
        if not seq.num_in_flight:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        if seq.finish_reason is FinishReason.ERROR:
            self._pages.discard(seq)
        else:
            self._pages.take_back(seq, self._num_written(seq))
        if seq.edits_row is not None:
            self._stale_edits.add(seq.slot)
        self._free_slots.append(seq.slot)
        seq.slot = 0

    def _num_written(self, seq: Sequence) -> int:
        """Rows of KV that hold the request's text, as far as the host knows."""
        is_prefilled = seq.num_prefilled == seq.prefill_len
        return int(self._published_lens[seq.slot]) if is_prefilled else seq.num_prefilled


def pack_decode(plan: DraftInput, geometry: Geometry, page_table: np.ndarray) -> np.ndarray:
    """The packed array of a decode dispatch, i32[B, 1 + M], padded to its bucket with row 0.

    A new array each time: the device may still read the last one (jax#37830).
    """
    size = bucket(len(plan), geometry.batch_buckets)
    packed = np.zeros((size, 1 + geometry.pages_per_slot), np.int32)
    packed[: len(plan), 0] = plan.rows
    packed[: len(plan), 1:] = page_table[plan.rows]
    return packed
