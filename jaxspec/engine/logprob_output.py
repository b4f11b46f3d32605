"""Log-probabilities as the host reads them from a step's output. Host only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxspec.request import Logprob

DecodeToken = Callable[[int], str]


def read_logprobs(
    columns: np.ndarray, tokens: list[int], num_top: int, decode: DecodeToken | None
) -> list[dict[int, Logprob]]:
    """An entry a token: the token itself first, then the `num_top` likeliest.

    columns: i32[n, 2 + 2K] as `pack_logprobs` packs them, of the n >= len(tokens) first positions.
    decode: the text of a token; None where there is no tokenizer.
    """
    num_kept = (columns.shape[1] - 2) // 2
    floats = columns.view(np.float32)
    entries = []
    for token, ints, values in zip(tokens, columns.tolist(), floats.tolist(), strict=False):
        entry = {token: (values[0], ints[1])}
        for place in range(min(num_top, num_kept)):
            entry.setdefault(ints[2 + place], (values[2 + num_kept + place], place + 1))
        entries.append(
            {
                each: Logprob(logprob, rank, decode(each) if decode else None)
                for each, (logprob, rank) in entry.items()
            }
        )
    return entries
