"""How the kernels in Pallas Mosaic GPU share tiles among programs and hold them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def turns_of(work: int) -> Any:
    """How many of `work` tiles the program at hand takes; the first take those left over."""
    turns, rest = divmod(work, lax.axis_size("program"))
    turns = np.int32(turns)
    if rest:
        turns = turns + lax.convert_element_type(lax.axis_index("program") < rest, jnp.int32)
    return turns


def swizzled(elements: int, dtype: jax.typing.DTypeLike) -> tuple[Any, Any]:
    """How tiles with rows of so many elements lie in shared memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(elements * bits)
    return (
        plgpu.TilingTransform((8, 8 * swizzle // bits)),
        plgpu.SwizzleTransform(swizzle),
    )
