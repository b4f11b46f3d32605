"""Plain decoding in plain Python: what every engine run must equal."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.admission import request_key
from jaxspec.request import SamplingParams
from jaxspec.sampling import SamplingRows, sample_tokens
from tests.fakes import EOS, MODULUS, NUM_STATES, checksum, make_table

_sample = jax.jit(sample_tokens)


class Expected(list):
    """Expected output ids, with the finish reason."""

    finish_reason: str


@functools.cache
def _table(seed: int) -> np.ndarray:
    return make_table(seed)


def next_token(tokens: list[int], params: SamplingParams, *, table_seed=0, num_layers=2) -> int:
    """The toy target's choice after `tokens`."""
    state = (checksum(tokens) * num_layers) % (MODULUS * num_layers) % NUM_STATES
    logits = _table(table_seed)[state]
    if params.greedy:
        return int(np.argmax(logits))
    rows = SamplingRows(
        temperature=jnp.asarray([params.temperature], jnp.float32),
        top_k=jnp.asarray([max(params.top_k, 0)], jnp.int32),
        top_p=jnp.asarray([params.top_p], jnp.float32),
        min_p=jnp.asarray([params.min_p], jnp.float32),
        key=jnp.asarray(request_key(params.seed, 0, 0)[None]),
    )
    position = jnp.asarray([[len(tokens)]], jnp.int32)
    return int(_sample(jnp.asarray(logits)[None, None], position, rows)[0, 0])


def decode(
    prompt: list[int],
    params: SamplingParams,
    *,
    max_model_len: int,
    eos_token_ids: tuple[int, ...] = (EOS,),
    table_seed: int = 0,
) -> Expected:
    """Decodes token by token until a stop id or a limit."""
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    limit = max_model_len - len(prompt)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    tokens, out = list(prompt), Expected()
    out.finish_reason = "length"
    while len(out) < limit:
        token = next_token(tokens, params, table_seed=table_seed)
        tokens.append(token)
        out.append(token)
        if token in stop:
            out.finish_reason = "stop"
            break
    return out
