"""What programs are built from: kernels, sizes, target and drafter, for arrays or their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache.kv_pages import kv_bytes_per_token
from jaxspec.config import DeviceFacts, EngineConfig, Geometry, Kernels, resolve
from jaxspec.drafters.base import Drafter, DrafterPlan, ModelParams
from jaxspec.models import Target, build_target
from jaxspec.models.config import ModelConfig
from kernels_pallas import dispatch, early_launch
from kernels_pallas.dispatch import Choice, Device, pick


class Parts(NamedTuple):
    """The static side of an engine; kernels: of each op, with the reason."""

    geometry: Geometry
    target: Target
    drafter: Drafter
    kernels: dict[str, Choice]
    kv_bytes_per_token: int  # of all layers of both


def build_parts(
    config: EngineConfig,
    model: ModelConfig,
    plan: DrafterPlan,
    params: ModelParams,
    *,
    dtype: str,
    device: Device,
    memory_bytes: int | None,
    kernels: Mapping[str, Any] | None = None,
) -> Parts:
    """Decides kernels and sizes, and builds the target and the drafter that `plan` names.

    params: of both, arrays or their shapes alone: their bytes count. memory_bytes: of the device;
    None where it does not tell. kernels: fields of `Kernels` other than the chosen ones.

    Raises:
        ConfigError, UnsupportedKernel: settings that cannot be met.
    """
    chosen, choices = choose_kernels(config.kernels, device, model, plan, dtype)
    kv_bytes = kv_bytes_per_token(model, model.num_layers, dtype) + plan.kv_bytes_per_token
    geometry = resolve(
        config,
        vocab_size=model.vocab_size,
        model_max_len=model.max_position_embeddings,
        block_size=plan.block_size,
        kv_bytes_per_token=kv_bytes,
        weight_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)),
        dtype=dtype,
        kernels=replace(chosen, **(kernels or {})),
        device=DeviceFacts(device.platform, memory_bytes),
        tree_depth=plan.tree_depth,
    )
    target = build_target(
        model,
        feature_layers=plan.feature_layers,
        page_size=geometry.page_size,
        dtype=jnp.dtype(dtype),
        kernels=geometry.kernels,
    )
    drafter = plan.build(target, geometry.page_size, geometry.kernels)
    return Parts(geometry, target, drafter, choices, kv_bytes)


def choose_kernels(
    wanted: str, device: Device, model: ModelConfig, plan: DrafterPlan, dtype: str
) -> tuple[Kernels, dict[str, Choice]]:
    """Picks the implementation of each op for the shapes in use, and says why."""
    shapes = {
        "paged_attention": {"head_dim": model.head_dim},
        "kv_write": {"head_dim": model.head_dim},
        "kv_move": {"head_dim": model.head_dim},
    }
    choices: dict[str, Choice] = {}
    for op in (name for name in Kernels.__dataclass_fields__ if name != "early_launch"):
        each = [shapes.get(op, {}), plan.kernel_shapes.get(op, {})]
        picked = [pick(op, requested=wanted, device=device, **sizes) for sizes in each]
        # One implementation serves target and drafter: the plainer of the two choices.
        order = [*dispatch.op_module(op).BACKENDS, dispatch.XLA]
        choices[op] = max(picked, key=lambda choice: order.index(choice.name))
    if dtype == "float32":
        choices["few_row_gemm"] = Choice("xla", "its tiles are made for weights of 16 bits")
    names = {op: choice.name for op, choice in choices.items()}
    late = early_launch.refuses(device)
    if plain := [op for op in early_launch.CHAIN if names[op] == "xla"]:
        late = f"{plain[0]} is XLA's"
    choices["early_launch"] = Choice("off" if late else "on", late or f"runs on {device.kind}")
    return Kernels(**names, early_launch=late is None), choices
