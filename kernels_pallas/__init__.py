"""GPU kernels for speculative decoding, each beside its plain `jax.numpy` specification.

Depends on jax only. One folder an op; read `dispatch.py`, then `paged_attention/`.
"""
