"""Plain decoding in plain Python: what every engine run must equal."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.request import SamplingParams
from jaxspec.sampling import SamplingRows, sample_tokens
from tests.fakes import EOS, MODULUS, NUM_STATES, checksum, encode_letters, make_table

_sample = jax.jit(sample_tokens)


# The automata of some regular expressions over `letters`: state -> token -> state.
A, B, D, E, F = encode_letters("abdef")
AUTOMATA = {
    "(ab|de)+f": {
        0: {A: 1, D: 2},
        1: {B: 3},
        2: {E: 3},
        3: {A: 1, D: 2, F: 4},
        4: {EOS: 4},
    },
    "[abd]*e": {0: {A: 0, B: 0, D: 0, E: 1}, 1: {EOS: 1}},
    "(a|e)*": {0: {A: 0, E: 0, EOS: 1}, 1: {}},
}


class Expected(list):
    """Expected output ids, with the finish reason."""

    finish_reason: str


@functools.cache
def _table(seed: int) -> np.ndarray:
    return make_table(seed)


def raw_logits(tokens: list[int], *, table_seed=0, num_layers=2) -> np.ndarray:
    """The toy target's logits after `tokens`, f32[V]."""
    state = (checksum(tokens) * num_layers) % (MODULUS * num_layers) % NUM_STATES
    return _table(table_seed)[state]


def logprobs(
    tokens: list[int], first: int, num_top: int, *, table_seed: int = 0
) -> list[dict[int, tuple[float, int]]]:
    """Log-probability and rank of each token from `first` on and of the likeliest, by id."""
    entries = []
    for position in range(first, len(tokens)):
        logits = raw_logits(tokens[:position], table_seed=table_seed).astype(np.float64)
        values = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-values, kind="stable")
        ranks = {int(token): place + 1 for place, token in enumerate(order)}
        shown = [tokens[position], *order[:num_top].tolist()]
        entries.append({token: (float(values[token]), ranks[token]) for token in shown})
    return entries


def edited_logits(
    logits: np.ndarray,
    tokens: list[int],
    num_prompt: int,
    params: SamplingParams,
    eos_token_ids: tuple[int, ...] = (EOS,),
) -> np.ndarray:
    """What bias, penalties, min_tokens and bad words make of logits after `tokens`."""
    logits, output = logits.copy(), tokens[num_prompt:]
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    for token in range(len(logits)):
        if token in tokens:
            repetition = np.float32(params.repetition_penalty)
            up = logits[token] > 0
            logits[token] = logits[token] / repetition if up else logits[token] * repetition
        times = output.count(token)
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(times)
        logits[token] -= np.float32(params.presence_penalty) * np.float32(times > 0)
    if params.structured_outputs is not None:
        automaton, state = AUTOMATA[params.structured_outputs.regex], 0
        for token in output:
            state = automaton[state][token]
        forbidden = [token for token in range(len(logits)) if token not in automaton[state]]
        logits[forbidden] = -np.inf
    if len(output) < params.min_tokens:
        stop = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        logits[stop] = -np.inf
    for word in params.bad_words:
        *first, last = encode_letters(word)
        if not first or tokens[-len(first) :] == first:
            logits[last] = -np.inf
    return logits


@functools.cache
def key_of(seed: int, copy_index: int) -> jax.Array:
    """u32[2] of an answer's noise."""
    words = jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, copy_index))


def next_token(
    tokens: list[int],
    params: SamplingParams,
    *,
    num_prompt: int,
    eos_token_ids: tuple[int, ...] = (EOS,),
    table_seed: int = 0,
    copy_index: int = 0,
) -> int:
    """The toy target's choice after `tokens`."""
    logits = raw_logits(tokens, table_seed=table_seed)
    logits = edited_logits(logits, tokens, num_prompt, params, eos_token_ids)
    if params.greedy:
        return int(np.argmax(logits))
    rows = SamplingRows(
        temperature=jnp.asarray([params.temperature], jnp.float32),
        top_k=jnp.asarray([max(params.top_k, 0)], jnp.int32),
        top_p=jnp.asarray([params.top_p], jnp.float32),
        min_p=jnp.asarray([params.min_p], jnp.float32),
        key=key_of(params.seed, copy_index)[None],
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
    copy_index: int = 0,
) -> Expected:
    """Decodes token by token until a stop id or a limit."""
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    limit = max_model_len - len(prompt)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    tokens, out = list(prompt), Expected()
    out.finish_reason = "length"
    while len(out) < limit:
        token = next_token(
            tokens,
            params,
            num_prompt=len(prompt),
            eos_token_ids=eos_token_ids,
            table_seed=table_seed,
            copy_index=copy_index,
        )
        tokens.append(token)
        out.append(token)
        if token in stop:
            out.finish_reason = "stop"
            break
    return out
