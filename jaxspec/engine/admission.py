"""Who may run: requests checked, slots and pages given, prompts cut into tiles. Host only."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from jaxspec.config import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, Geometry
from jaxspec.engine.edits import pack_edits
from jaxspec.engine.sequence import Detokenizer, Sequence, TextCodec
from jaxspec.engine.state import empty_prefill_batch, pack_limits, pack_prefill_tile
from jaxspec.grammar import Grammars, Matcher
from jaxspec.request import Request, RequestError, RequestMetrics, StructuredOutputsParams
from jaxspec.threefry import fold_in

_MAX_FLOAT = float(np.finfo(np.float32).max)


def make_sequence(
    request: Request,
    geometry: Geometry,
    *,
    eos_token_ids: tuple[int, ...],
    key: np.ndarray,
    num_usable_pages: int,
    detokenizer: Detokenizer | None,
    tokenizer: TextCodec | None = None,
    grammars: Grammars | None = None,
) -> Sequence:
    """Checks a request against the engine's sizes and prepares it.

    key: u32[2] of the request's noise. tokenizer: for bad words. grammars: for structured outputs.

    Raises:
        RequestError: the request can never run here.
    """
    params, prompt_len = request.params, len(request.prompt_token_ids)
    if params.n != 1:
        raise RequestError(
            f"n is {params.n}, but the engine gives one answer a request; use `LLM.generate`"
        )
    _check_prompt(request, geometry)
    max_len = geometry.max_model_len
    if params.max_tokens is not None:
        if params.max_tokens > max_len:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but max_model_len is {max_len}, prompt "
                "included; lower it, or leave it at None for as many as there is room for"
            )
        max_len = min(max_len, prompt_len + params.max_tokens)
    needed = geometry.pages_at_most(max_len)
    if needed > num_usable_pages:
        raise RequestError(
            f"the request may need {needed} KV pages ({prompt_len} prompt tokens, up to {max_len} "
            f"in all), but the pool has {num_usable_pages}; lower max_tokens or enlarge "
            "kv_cache_tokens"
        )
    if params.stop and detokenizer is None:
        raise RequestError(f"stop is {params.stop!r}, which needs a tokenizer; give the engine one")
    stop_ids = stop_ids_of(request, eos_token_ids)
    if len(stop_ids) > geometry.max_stop_ids:
        raise RequestError(
            f"stop_token_ids and EOS ids are {len(stop_ids)}; at most {geometry.max_stop_ids} "
            "are possible"
        )
    limits_row = pack_limits(
        geometry,
        max_len=max_len,
        temperature=min(params.temperature, _MAX_FLOAT),
        top_k=min(max(params.top_k, 0), geometry.vocab_size),  # more would not fit an int32
        top_p=params.top_p,
        min_p=params.min_p,
        key=key,
        stop_ids=sorted(stop_ids),
    )
    metrics = RequestMetrics(arrival_s=time.perf_counter())
    prompt = np.asarray(request.prompt_token_ids, np.int32)
    edits_row = _pack_edits_of(request, geometry, tokenizer) if params.edits_logits else None
    matcher = None
    if params.structured_outputs is not None:
        matcher = _matcher_of(params.structured_outputs, grammars, eos_token_ids)
    return Sequence(
        request,
        max_len,
        limits_row,
        metrics,
        prompt,
        stop_ids,
        detokenizer=detokenizer,
        matcher=matcher,
        edits_row=edits_row,
    )


def _matcher_of(
    asked: StructuredOutputsParams, grammars: Grammars | None, eos_token_ids: tuple[int, ...]
) -> Matcher:
    lacking = "a tokenizer" if grammars is None else "a model that can end its answer"
    if grammars is None or not eos_token_ids:
        raise RequestError(f"structured_outputs asks for {asked.kind}, which needs {lacking}")
    return grammars.matcher(asked)


def _pack_edits_of(request: Request, geometry: Geometry, tokenizer: TextCodec | None) -> np.ndarray:
    params = request.params
    if wrong := [i for i in params.logit_bias or () if not 0 <= i < geometry.vocab_size]:
        raise RequestError(
            f"logit_bias names token id {wrong[0]}, which is outside the vocabulary; ids are 0 to "
            f"{geometry.vocab_size - 1}"
        )
    if params.bad_words and tokenizer is None:
        raise RequestError(
            f"bad_words is {params.bad_words!r}, which needs a tokenizer; give the engine one"
        )
    return pack_edits(
        geometry,
        min_len=min(len(request.prompt_token_ids) + params.min_tokens, geometry.max_model_len),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        bad_words=bad_word_ids(params.bad_words, tokenizer),
    )


def bad_word_ids(words: tuple[str, ...], tokenizer: TextCodec | None) -> list[tuple[int, ...]]:
    """The token sequences that spell bad words, at the beginning of a text and behind a space.

    Raises:
        RequestError: more of them, or longer ones, than a slot holds, or what is no text.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            try:
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except ValueError as error:
                raise RequestError(f"bad_words holds {word!r}, which is no text: {error}") from None
            if len(ids) > MAX_BAD_WORD_LEN:
                raise RequestError(
                    f"bad_words holds {word!r}, which is {len(ids)} tokens; each may have "
                    f"{MAX_BAD_WORD_LEN} at most"
                )
            found[ids] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words are {len(found)} token sequences; at most {MAX_BAD_WORDS} are possible"
        )
    return list(found)


def stop_ids_of(request: Request, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The token ids that end a request."""
    eos = () if request.params.ignore_eos else eos_token_ids
    return frozenset((*eos, *request.params.stop_token_ids))


def _check_prompt(request: Request, geometry: Geometry) -> None:
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty; it needs at least one token")
    if len(prompt) >= geometry.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but max_model_len is {geometry.max_model_len} "
            "and one token must fit after it; shorten the prompt or raise max_model_len"
        )
    ids = (*prompt, *request.params.stop_token_ids)
    if strange := [i for i in ids if isinstance(i, bool) or not isinstance(i, (int, np.integer))]:
        raise RequestError(f"token id {strange[0]!r} is not a whole number; give integer ids")
    if wrong := [i for i in ids if not 0 <= i < geometry.vocab_size]:
        raise RequestError(
            f"token id {wrong[0]!r} is outside the vocabulary; ids are 0 to "
            f"{geometry.vocab_size - 1}"
        )


def request_key(seed: int | None, engine_seed: int, index: int, copy_index: int = 0) -> np.ndarray:
    """u32[2] threefry key of one answer: `fold_in(seed, copy_index)`.

    Where the request has no seed, it stands for the engine's and a running number.
    """
    if seed is None:
        words = np.random.SeedSequence([engine_seed, index]).generate_state(2, np.uint32).tolist()
    else:
        words = [seed >> 32, seed & 0xFFFFFFFF]
    return np.array(fold_in(tuple(words), copy_index), np.uint32)


class Tile(NamedTuple):
    """A row of a prefill dispatch."""

    seq: Sequence
    start: int
    num_tokens: int
    is_first: bool

    @property
    def is_final(self) -> bool:
        """True where the prompt ends in this tile."""
        return self.start + self.num_tokens == self.seq.prefill_len


def next_tiles(seq: Sequence, tile_size: int, *, num_tiles: int, num_tokens: int) -> list[Tile]:
    """The next tiles of a prompt, at most so many; what is left goes on in the next dispatch."""
    start, tiles = seq.num_prefilled, []
    end = min(seq.prefill_len, start + num_tokens)
    while start < end and len(tiles) < num_tiles:
        count = min(tile_size, end - start)
        tiles.append(Tile(seq, start, count, start == seq.num_cached))
        start += count
    return tiles


def pack_tiles(tiles: list[Tile], geometry: Geometry, page_table: np.ndarray) -> np.ndarray:
    """The packed array of a prefill dispatch, padded to its bucket.

    page_table: i32[S+1, M] of all slots.
    """
    packed = empty_prefill_batch(bucket(len(tiles), geometry.prefill_buckets), geometry)
    for out, (seq, start, count, is_first) in zip(packed, tiles, strict=False):
        ids, end = seq.prefill_ids, start + count
        pack_prefill_tile(
            out,
            geometry,
            row=seq.slot,
            start=start,
            is_first=is_first,
            tokens=ids[start:end],
            next_id=int(ids[end]) if end < len(ids) else None,
            limits_row=seq.limits_row,
            page_row=page_table[seq.slot],
        )
    return packed


def bucket(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `count`."""
    return next(size for size in buckets if size >= count)
