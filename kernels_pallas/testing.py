"""How a kernel is held against its reference: one tolerance rule, and lowering without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

# A kernel may round its result once more than the plain computation does.
EPS_FACTOR = 1.0
# In float32 the reference is no more exact than the kernel: both sum in some order.
EPS_FACTOR_F32 = 16.0


def compare(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    static: Mapping[str, Any],
    implementation: str,
) -> str | None:
    """Runs an op by `implementation` and by its reference, and says how they differ.

    Whole numbers and booleans must be equal. Of floating-point results the error against the
    reference in float32 is held to `max_error`; that reference takes the same inputs, widened.

    Returns:
      None where the implementation is right, else one line: which result, its error, its limit.
    """

    def run(by, inputs):
        return jax.jit(functools.partial(function, **static, implementation=by))(*inputs)

    actual, plain = run(implementation, args), run("xla", args)
    with jax.default_matmul_precision("highest"):
        exact = run("xla", widen(args))
    return compare_results(actual, plain, exact)


def compare_results(actual: Any, plain: Any, exact: Any) -> str | None:
    """The rule of `compare` on results already at hand: pytrees of one structure."""
    flat_actual, structure = jax.tree_util.tree_flatten_with_path(actual)
    flat_plain = structure.flatten_up_to(plain)
    flat_exact = structure.flatten_up_to(exact)
    for (path, a), p, e in zip(flat_actual, flat_plain, flat_exact, strict=True):
        mismatch = _compare_leaf(a, p, e)
        if mismatch is not None:
            return f"result{jax.tree_util.keystr(path)}: {mismatch}"
    return None


def max_error(plain: np.ndarray, exact: np.ndarray, dtype: Any) -> float:
    """The largest error a kernel may have: twice the plain computation's in the same precision,
    plus a rounding of the largest result."""
    info = jnp.finfo(dtype)
    factor = EPS_FACTOR if info.bits < 32 else EPS_FACTOR_F32
    return 2.0 * _max_abs(plain - exact) + factor * float(info.eps) * _max_abs(exact)


def widen(tree: Any) -> Any:
    """Floating-point leaves below float32 become float32; all others stay as they are."""

    def one(leaf):
        low = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32
        return leaf.astype(jnp.float32) if low else leaf

    return jax.tree.map(one, tree)


def _compare_leaf(actual, plain, exact) -> str | None:
    if actual.shape != plain.shape or actual.dtype != plain.dtype:
        return f"{actual.dtype}{list(actual.shape)}, not {plain.dtype}{list(plain.shape)}"
    if not jnp.issubdtype(actual.dtype, jnp.floating):
        wrong = np.asarray(actual) != np.asarray(plain)
        if not wrong.any():
            return None
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return (
            f"{int(wrong.sum())} of {wrong.size} differ, first at {list(at)}: "
            f"{np.asarray(actual)[at]}, not {np.asarray(plain)[at]}"
        )
    a, p, e = (np.asarray(x).astype(np.float64) for x in (actual, plain, exact))
    finite = np.isfinite(e)
    # Poison may stay where the reference has it too, and nowhere else.
    if (np.isfinite(a) != finite).any():
        return f"{int((np.isfinite(a) != finite).sum())} values finite in one, not in the other"
    a, p, e = a[finite], p[finite], e[finite]
    error, limit = _max_abs(a - e), max_error(p, e, actual.dtype)
    return None if error <= limit else f"error {error:.3g} > {limit:.3g}"


def _max_abs(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def lower_for_cuda(function: Callable[..., Any], *args: Any, kind: str = "NVIDIA H200") -> str:
    """Lowers a function for a CUDA device that need not be there, and returns the module's text.

    Finds every restriction of Pallas' lowering on a machine without a GPU; it runs neither ptxas
    nor the kernel. Without the abstract device, jax 0.11 raises "No supported GPU devices found".

    Args:
      function: what to lower; its keywords bound by `functools.partial`.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      kind: a device kind that `jax._src.pallas.triton.gpu_info` knows.
    """
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def token_dtype() -> np.dtype:
    """int64 where x64 is enabled, else int32; asked at call time, never kept."""
    return jax.dtypes.canonicalize_dtype(jnp.int64)


def array(values: Any, dtype: Any) -> jax.Array:
    """Puts values on the device in a dtype, converted on the host: no program is compiled."""
    return jnp.asarray(np.asarray(values, dtype))
