"""`jax.jit` for kernel tests."""

from __future__ import annotations

import functools

import jax


def jit(function, implementation, **static):
    """Jits `function` with its keywords bound; an interpreted kernel is not optimised.

    The interpreter turns a kernel into a large program of small operations, which runs for
    milliseconds and compiles for seconds: twice as fast without LLVM's optimisations.
    """
    options = None
    if implementation.endswith("_interpret"):
        options = {"xla_backend_optimization_level": 0}
    run = functools.partial(function, **static, implementation=implementation)
    return jax.jit(run, compiler_options=options)
