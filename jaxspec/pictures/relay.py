"""What each stage of real decode steps does to one request's row of the relay."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.bench.rig import Rig, build_engine, greedy_steps
from jaxspec.drafters.base import ModelParams
from jaxspec.engine.decode_step import build_stages
from jaxspec.engine.state import EngineState
from jaxspec.mode import Mode
from jaxspec.prompts import encode_chat
from jaxspec.request import Request, SamplingParams
from kernels_pallas.measure import table


class Moment(NamedTuple):
    """A request's row of the relay after a stage.

    token, length: `output_tokens[row]` and `seq_lens[row]`. note: what the stage read or decided.
    """

    step: int
    after: str
    token: int
    length: int
    note: str


class RelayLog(list[Moment]):
    """The moments of some steps, shown as a table."""

    def __repr__(self) -> str:
        return table(moment._asdict() for moment in self)


def watch_relay(rig: Rig, text: str, *, num_steps: int = 3) -> RelayLog:
    """Answers a chat message, and notes the request's row after each stage of its decode steps.

    Reading the row waits for the device, which an engine never does. Where `rig` was loaded with
    `poison`, a row that was read holds a token outside the vocabulary until it is stashed again.
    """
    # The watcher takes the place of single steps, which a loop of several would pass by.
    rig = rig._replace(geometry=dataclasses.replace(rig.geometry, decode_steps=1))
    watcher = _Watcher(rig)
    engine = build_engine(rig, greedy_steps(rig)._replace(decode=watcher.decode), overlap=False)
    prompt = encode_chat(rig.tokenizer, [{"role": "user", "content": text}])
    limit = rig.geometry.max_model_len - len(prompt.token_ids)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=limit)
    engine.add_request(Request("0", prompt.token_ids, params))
    while watcher.num_steps < num_steps and engine.has_unfinished:
        engine.step()
    return watcher.log


class _Watcher:
    """A decode step in its two halves, looked at between the stages."""

    def __init__(self, rig: Rig):
        self.num_steps = 0
        self.log = RelayLog()
        self._rig = rig
        halves = build_stages(rig.geometry, rig.target, rig.drafter, mode=Mode.GREEDY)
        self._verify_and_publish, self._ingest_and_stash = (jax.jit(half) for half in halves)

    def decode(
        self, params: ModelParams, state: EngineState, packed: np.ndarray
    ) -> tuple[EngineState, Any]:
        """Runs the step and notes its moments."""
        geometry, relay = self._rig.geometry, state.future_map
        row = int(packed[0, 0])
        self._note("(before)", relay, row, "")
        read, resolved = relay.resolve_future(
            packed[:, 0], vocab_size=geometry.vocab_size, poison=geometry.poison
        )
        token, length = int(resolved.tokens[0]), int(resolved.lens[0])
        self._note("resolve", read, row, f"the batch reads {self._text([token])} at {length}")
        state, pending, output = self._verify_and_publish(params, state, packed)
        tokens, num_committed = np.asarray(output)[0], int(pending.ingest.num_valid[0])
        kept = f"{num_committed - 1} of {geometry.block_size - 1} drafts accepted"
        note = f"{kept}, {self._text(tokens[:num_committed])} committed"
        self._note("verify, publish", state.future_map, row, note)
        state = self._ingest_and_stash(params, state, pending)
        bonus = int(pending.bonus_tokens[0])
        note = f"the drafter has {num_committed} rows more; {self._text([bonus])} comes next"
        self._note("ingest, stash", state.future_map, row, note)
        self.num_steps += 1
        return state, output

    def _note(self, after: str, relay: Any, row: int, note: str) -> None:
        token, length = int(relay.output_tokens[row]), int(relay.seq_lens[row])
        self.log.append(Moment(self.num_steps, after, token, length, note))

    def _text(self, ids: Any) -> str:
        words = [int(token) for token in ids]
        return repr(self._rig.tokenizer.decode(words, skip_special_tokens=False))
