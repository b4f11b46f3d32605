"""The host loop: admit, dispatch step n, read step n-1, commit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from collections.abc import Sequence as TypingSequence

import jax
import numpy as np
from jax.stages import Lowered

from jaxspec.cache.page_pool import OutOfPages, PagePool
from jaxspec.config import Geometry
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.accounting import DrafterCheck, EngineStats
from jaxspec.engine.admission import (
    Tile,
    make_sequence,
    next_tiles,
    pack_tiles,
    request_key,
)
from jaxspec.engine.allowed import allowed_tokens
from jaxspec.engine.device_faults import DeviceFault, EngineFault, StateLost, describe_fault
from jaxspec.engine.dispatch import DecodeBatch, Dispatch, Entry
from jaxspec.engine.draft_input import DraftInput
from jaxspec.engine.landing import Landed
from jaxspec.engine.logprob_output import DecodeToken
from jaxspec.engine.pace import Pace
from jaxspec.engine.page_table import PageTable
from jaxspec.engine.programs import Programs
from jaxspec.engine.sequence import Detokenizer, Sequence, TextCodec
from jaxspec.engine.state import EngineState
from jaxspec.engine.steps import Steps
from jaxspec.future_map import (
    NON_FINITE_LOGITS,
    RelayError,
    describe_errors,
    resolve_seq_lens_cpu,
)
from jaxspec.grammar import Grammars
from jaxspec.mode import Mode
from jaxspec.request import FinishReason, Request, RequestError, RequestOutput

log = logging.getLogger(__name__)

WatchStep = Callable[[Hashable, float], None]  # (batch, seconds)


def unwatched(batch: Hashable, seconds: float) -> None:
    """The `WatchStep` of an engine that nobody watches."""


class Engine:
    """Serves requests of token ids; knows text only through a detokenizer.

    Not thread-safe: one thread calls its methods.

    steps: the programs of each mode that requests may need.
    make_detokenizer: called per request; None where nobody asks for text.
    pace: chooses how much to verify; None always verifies all drafts. narrow_steps: the programs of
        its other widths.
    watch_step: told the batch of each step that verified all drafts, and the seconds it took.
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
        watch_step: WatchStep = unwatched,
        make_state: Callable[[], EngineState] | None = None,
        prefix_lookahead: int | None = None,
        seed: int = 0,
        expected_accept_length: float | None = None,
    ):
        self.geometry = geometry
        self.stats = EngineStats(accept_lengths=[0] * (geometry.block_size + 1))
        self.pace = pace
        self._programs = Programs(geometry, params, state, steps, narrow_steps)
        self._watch_step = watch_step
        self._make_state = make_state
        self._eos_token_ids = eos_token_ids
        self._make_detokenizer = make_detokenizer
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._overlap = overlap
        self._seed = seed
        self._drafter_check = DrafterCheck(expected_accept_length)
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
        self._batch: DecodeBatch | None = None  # of the last decode dispatch
        self._in_flight: deque[Dispatch] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._warm: set[Mode] = set()  # those whose programs were compiled beforehand
        self._changed: dict[str, Sequence] = {}  # by the step that runs
        self._faults: list[str] = []  # of the relay, found by it
        self._num_restarts = 0  # since a decode step has landed
        self._lost: Exception | None = None  # what the state went with, until there is a new one
        self._last_landed = ("prefill", 0.0)  # kind and time

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

        Its pages are free at once, its slot is once the steps in flight have landed.
        """
        seq = self._by_id.get(request_id)
        if seq is None:
            return None
        self._finish(seq, FinishReason.ABORT)
        return seq.output()

    def remember(self, token_ids: TypingSequence[int]) -> None:
        """Takes pages of the pool for KV of a text, as if a request had left it there.

        Whoever calls it has put the KV into the state, or measures only time.

        Raises:
            OutOfPages: there are too few.
        """
        self._pages.remember(token_ids)

    @property
    def has_unfinished(self) -> bool:
        """True while a request runs or waits, or a step is in flight."""
        return bool(self._by_id or self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Runs the loop once: admits, dispatches, and commits what has landed.

        Returns the requests that a result has changed, finished ones included.

        Raises:
            RelayError: a row of the relay was used out of turn; holds what would be returned.
            DeviceFault: the device has failed for good, and every request with it; likewise. The
                next step with requests tries it once more.
            EngineFault: the step went wrong otherwise, and every request with it; likewise.
        """
        self._changed, self._faults = {}, []
        try:
            if self._lost is not None and self._by_id:
                self._renew_state(self._lost)
            return self._step()
        except StateLost as lost:
            self._start_over(lost.error)
            return self._outputs()
        except (RelayError, DeviceFault):
            raise
        except Exception as error:
            message = f"the engine failed ({type(error).__name__}: {error}); please report it"
            log.exception("%s", message)
            self._end_all(message)
            if self._programs.is_state_lost:
                self._renew_state(error)
            raise EngineFault(message, self._outputs()) from error

    def _outputs(self) -> list[RequestOutput]:
        """Those of the requests that the step has changed so far."""
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
        outputs = self._outputs()
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
        packed, width = _as_served(kind, packed), width or self.geometry.block_size
        output = self._programs.call(kind, packed, mode, width, self._allow_all)
        jax.block_until_ready(output)
        self._warm.add(mode)

    def lower_idle(
        self, kind: str, packed: np.ndarray, *, mode: Mode, width: int | None = None
    ) -> TypingSequence[Lowered]:
        """What `run_idle` would compile; nothing where a step is no jitted function."""
        packed, width = _as_served(kind, packed), width or self.geometry.block_size
        return self._programs.lower(kind, packed, mode, width, self._allow_all)

    def _allow_all(self, tokens: np.ndarray, parents: np.ndarray | None) -> np.ndarray:
        return allowed_tokens([], tokens, parents, self.geometry.vocab_size)

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
            self._prefilling.append(seq)
            if seq.edits_row is not None:
                self._write_edits(seq)

    def _write_edits(self, seq: Sequence) -> None:
        """Writes what an admitted request asks for; it ends where there is no room for that."""
        try:
            self._programs.write_edits(seq.slot, seq.edits_row, seq)
        except jax.errors.JaxRuntimeError as error:
            if self._programs.is_state_lost:
                raise StateLost(error) from error
            self._fail([seq], describe_fault(error, "writing what a request asks of its logits"))

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
        self._launch(
            "prefill",
            packed,
            list(entries.values()),
            np.array(list(entries), np.int32),
            mode=max(tile.seq.request.params.prefill_mode for tile in tiles),
            max_commit=1,
            tiles=tiles,
        )
        self.stats.num_prefill_steps += 1
        self._prefilling = [seq for seq in self._prefilling if seq.num_prefilled < seq.prefill_len]
        started = [seq for seq, row in entries.values() if row is not None and not seq.is_over]
        self._running.update({seq.slot: seq for seq in started})
        self._draft_input = self._draft_input.merge_batch(
            DraftInput.create([seq.slot for seq in started], [seq.prefill_len for seq in started])
        )

    def _dispatch_decode(self) -> None:
        batch = self._going()
        if batch is None:
            return
        quiet = not (self._waiting or self._prefilling or batch.needs_host)
        is_loop = quiet and self.geometry.decode_steps > 1
        max_commit = self.geometry.max_commit if is_loop else self.geometry.block_size
        rows = batch.plan.rows
        _, upper = resolve_seq_lens_cpu(self._published_lens, self._in_flight_rows, rows)
        needed = upper + np.int32(max_commit)
        if short := batch.short_of(needed):
            for place in short:
                self._grow(batch.seqs[place], int(needed[place]), batch.seqs)
            lens = zip(batch.seqs, needed.tolist(), strict=True)
            able = [seq for seq, length in lens if self._pages.holds(seq, length)]
            if able != batch.seqs:
                batch = self._gather(able)
                if batch is None:
                    return
            else:
                batch.reserve(needed)
        packed = batch.packed(self._pages.table)
        kind = "decode_loop" if is_loop else "decode"
        self._launch(
            kind, packed, batch.entries, batch.plan.rows, mode=batch.mode, max_commit=max_commit
        )
        self.stats.num_decode_steps += 1

    def _going(self) -> DecodeBatch | None:
        """The requests that the next decode dispatch is for; None where there are none.

        A request that is full once the steps in flight have landed waits for them.
        """
        lens = self._published_lens.tolist()
        seqs = [seq for seq in self._running.values() if self._may_go_on(seq, lens[seq.slot])]
        if self._batch is not None and self._batch.seqs == seqs:
            return self._batch
        return self._gather(seqs)

    def _gather(self, seqs: list[Sequence]) -> DecodeBatch | None:
        """Makes a batch of running requests; None of none."""
        self._batch = None
        if seqs:
            plan = self._draft_input.filter_batch({seq.slot for seq in seqs})
            ordered = [self._running[slot] for slot in plan.rows.tolist()]
            self._batch = DecodeBatch(plan, ordered, self.geometry)
        return self._batch

    def _grow(self, seq: Sequence, num_rows: int, going: list[Sequence]) -> None:
        """Gives a running request pages for `num_rows` rows, others' if there is no other way.

        The last that came gives up its pages first, if need be `seq` itself. Where one ends with
        what is in flight, `seq` sits out a dispatch and takes those pages.
        """
        while not seq.is_preempted:
            try:
                return self._pages.reserve(seq, num_rows)
            except OutOfPages:
                earlier = [other for other in going if not other.is_preempted]
                if len(self._running) > len(earlier):
                    return
                self._preempt([*earlier, *self._prefilling][-1])

    def _preempt(self, seq: Sequence) -> None:
        """Takes slot and pages from a request, which waits in front of those that came later.

        What is in flight of it is dropped when it lands, and its slot is free then. One that has
        no pages yet waits again too, lest it overtake the one that it came behind.
        """
        again = seq.preempt()
        if seq.pages:
            again.metrics.num_preemptions += 1
            self.stats.num_preemptions += 1
        self._by_id[seq.request.request_id] = again
        self._waiting.appendleft(again)
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
        self._forget_flights()
        for seq in reversed(seqs):
            seq.num_in_flight = 0
            if not self._num_restarts:
                self._preempt(seq)
        self._fail(seqs, message)
        self._num_restarts += 1
        self._own_all()
        self._renew_state(error)

    def _end_all(self, message: str) -> None:
        """Ends all requests with an error, wherever an unfinished step has left them."""
        for seq in self._by_id.values():
            seq.error, seq.finish_reason = message, FinishReason.ERROR
            seq.metrics.finished_s = time.perf_counter()
        self._changed |= self._by_id
        self._by_id.clear()
        self._waiting.clear()
        self._prefilling, self._running = [], {}
        self._draft_input = DraftInput.create_idle_input()
        self._forget_flights()
        self._own_all()

    def _forget_flights(self) -> None:
        """Drops what is on its way back from the device."""
        self._batch = None
        self._in_flight.clear()
        self._in_flight_rows[:] = 0

    def _own_all(self) -> None:
        """Takes all slots and pages back, where no request holds any."""
        self._free_slots = deque(range(1, self.geometry.num_slots + 1))
        self._use_pool(PagePool(self._pages.pool.num_usable + 1))

    def _renew_state(self, error: Exception) -> None:
        """Builds a new state in place of one that went with `error`.

        Raises:
            DeviceFault: it cannot be built; all requests are over.
        """
        self._programs.drop()
        self._lost = error
        try:
            if self._make_state is None:
                raise jax.errors.JaxRuntimeError(str(error))
            self._programs.state = self._make_state()
        except jax.errors.JaxRuntimeError:
            message = describe_fault(error, "while requests ran")
            self._fail([*self._by_id.values()], message)
            raise DeviceFault(message, self._outputs()) from error
        self._lost = None

    @staticmethod
    def _may_go_on(seq: Sequence, length: int) -> bool:
        """False for a request that is full once the steps in flight have landed.

        Each of them commits a token at least, or finds that the request has ended. length: as last
        published.
        """
        return length + 1 + seq.num_in_flight < seq.max_len

    def _launch(
        self,
        kind: str,
        packed: np.ndarray | jax.Array,
        entries: TypingSequence[Entry],
        slots: np.ndarray,
        *,
        mode: Mode,
        max_commit: int,
        tiles: Collection[Tile] = (),
    ) -> None:
        if self._warm and mode not in self._warm:
            self._warm.add(mode)
            name = mode.name.lower()
            log.warning("compiling for %s while requests wait; name it in warm_up", name)
        size = packed.shape[0]
        width = 1 if tiles else self.geometry.block_size
        if self.pace is not None and not tiles:
            records = [seq.draft_record for seq, _ in entries]
            width = self.pace.choose((kind, mode, size), records, may_try=not self._warm)
        self._in_flight_rows[slots] += max_commit
        for seq, _ in entries:
            seq.num_in_flight += 1

        def allow(tokens: np.ndarray, parents: np.ndarray | None) -> np.ndarray:
            if not tiles:
                self._land_all()  # only now are the texts before the drafts known
            return allowed_tokens(entries, tokens, parents, self.geometry.vocab_size)

        try:
            output = self._programs.call(kind, packed, mode, width, allow)
            output.copy_to_host_async()
        except jax.errors.JaxRuntimeError as error:
            if self._programs.is_state_lost:
                raise StateLost(error) from error
            self._in_flight_rows[slots] -= max_commit
            for seq, _ in entries:
                seq.num_in_flight -= 1
            what = f"in a {kind.replace('_', ' ')} of {len(entries)} requests"
            self._fail([entry.seq for entry in entries], describe_fault(error, what))
            return
        self._in_flight.append(
            Dispatch(
                output,
                entries,
                slots,
                max_commit,
                kind,
                mode,
                size,
                width,
                started_s=time.perf_counter(),
                tiles=tiles,
            )
        )

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
        landed = Landed(
            dispatch, packed, vocab_size=self.geometry.vocab_size, token_text=self._token_text
        )
        landed.keep_prompt_logprobs()
        self._note_step(dispatch, landed, now)
        self._in_flight_rows[dispatch.slots] -= dispatch.max_commit
        for seq, row in dispatch.entries:
            seq.num_in_flight -= 1
            if row is not None:
                # A request that ended or was preempted since it was dispatched drops the result.
                for step in range(len(landed.steps)):
                    if seq.is_over:
                        break
                    self._commit(seq, landed, step, row, now)
                    if seq.request.is_watched or seq.finished:
                        self._changed[seq.request.request_id] = seq
            if seq.is_over and seq.slot and not seq.num_in_flight:
                self._release(seq)
        if landed.accepted:
            self.stats.count_verifies(dispatch.width - 1, landed.accepted, landed.num_kept)
            self._drafter_check.look_at(self.stats)

    @property
    def _token_text(self) -> DecodeToken | None:
        """The text of a single token, where there is a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return lambda token: tokenizer.decode([token], skip_special_tokens=False)

    def _note_step(self, dispatch: Dispatch, landed: Landed, now: float) -> None:
        """Reports what a decode dispatch took, if nothing else ran meanwhile, and brought."""
        last, self._last_landed = self._last_landed, (dispatch.kind, now)
        if dispatch.is_prefill:
            return
        if last[0] != "prefill":
            seconds = now - max(last[1], dispatch.started_s)
            if self.pace is not None:
                self.pace.note_time(dispatch.batch, dispatch.width, seconds)
            if dispatch.width == self.geometry.block_size:
                self._watch_step(dispatch.batch, seconds)
        if self.pace is not None:
            self.pace.note_accepted(dispatch.width, landed.accepted_on_device())

    def _commit(self, seq: Sequence, landed: Landed, step: int, row: int, now: float) -> None:
        bits = landed.errors(step, row)
        is_fault = bool(bits & ~NON_FINITE_LOGITS)
        count = 0 if is_fault else landed.num_committed(step, row)
        if count or not bits:
            self._published_lens[seq.slot] += count
            if seq.metrics.first_token_s is None:
                seq.metrics.first_token_s = now
            landed.commit(seq, step, row)
        if seq.matcher is not None and (reason := seq.matcher.error):
            kind = seq.request.params.structured_outputs.kind
            seq.error, seq.stop_reason = f"structured_outputs.{kind} cannot go on: {reason}", None
            self._finish(seq, FinishReason.ERROR)
        elif seq.finish_reason is not None:
            self._finish(seq, seq.finish_reason)
        elif bits:
            seq.error = describe_errors(seq.slot, bits)
            if seq.matcher is not None and seq.request.params.bad_words:
                seq.error += "; or bad_words forbid all that the grammar allows"
            if is_fault:
                self._faults.append(seq.error)
            self._finish(seq, FinishReason.ERROR)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a request for its caller; its slot follows once nothing of it is in flight."""
        seq.finish_reason = reason
        seq.metrics.finished_s = time.perf_counter()
        del self._by_id[seq.request.request_id]
        if not seq.slot:
            self._waiting.remove(seq)
            return
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Takes a request out of the batch; its slot is free once nothing of it is in flight.

        Its pages are free before that, lest another give up its own for want of them.
        """
        if self._running.pop(seq.slot, None) is not None:
            self._draft_input = self._draft_input.filter_batch(set(self._running))
        else:
            self._prefilling = [other for other in self._prefilling if other is not seq]
        if seq.finish_reason is FinishReason.ERROR:
            self._pages.discard(seq)
        else:
            self._pages.take_back(seq, self._num_written(seq))
        if not seq.num_in_flight:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        if seq.edits_row is not None:
            self._programs.leave_edits(seq.slot)
        self._free_slots.append(seq.slot)
        seq.slot = 0

    def _num_written(self, seq: Sequence) -> int:
        """Rows of KV that hold the request's text, as far as the host knows."""
        is_prefilled = seq.num_prefilled == seq.prefill_len
        return int(self._published_lens[seq.slot]) if is_prefilled else seq.num_prefilled


def _as_served(kind: str, packed: np.ndarray) -> np.ndarray | jax.Array:
    """The array as a dispatch of its kind hands it over, since jit tells the two apart."""
    return packed if kind == "prefill" else jax.device_put(packed)
