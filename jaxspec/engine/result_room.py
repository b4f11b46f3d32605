"""Places for small results on a GPU, so that what a program needs besides lies still."""

from __future__ import annotations

import jax
import numpy as np

_NUM_PLACES = 8  # two results are on their way at once; what the host sends takes some, too
_BYTES = 4096  # a step's output for 32 requests with blocks of 16 takes 2,560


def make_room_for_results() -> list[jax.Array]:
    """Leaves some small places of the device's memory free between others that stay taken.

    The allocator takes the smallest free place that is large enough. Where there is no small one,
    a step's output is cut off the large place that the same call takes for its temporaries, which
    then lie elsewhere in every other call, and XLA sets the parameters of all launches in its
    command buffer anew: 0.65 ms of the host for 292 of them, where 6 change otherwise
    (`benchmarks/command_buffers.py`).

    Returns what keeps the places apart; free again when it is dropped.
    """
    arrays = [jax.device_put(np.zeros(_BYTES, np.uint8)) for _ in range(2 * _NUM_PLACES)]
    jax.block_until_ready(arrays)
    return arrays[1::2]
