"""Models by their sizes alone, with random weights made on the device: for timing, not for text."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.bench.floor import Work, dflash_step, eagle3_step, plain_step
from jaxspec.config import EngineConfig
from jaxspec.drafters import dflash, eagle
from jaxspec.drafters.base import DrafterPlan, DrafterSetup
from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_params import EagleParams
from jaxspec.drafters.none import plan_none
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import LayerParams, TargetParams

DRAFTERS = ("none", "dflash", "eagle3")
_EAGLE3_BLOCK = 8  # the bonus token and seven drafts


class Shape(NamedTuple):
    """A target, and a DFlash and an EAGLE-3 drafter for it."""

    target: ModelConfig
    drafter: DFlashConfig
    eagle3: EagleConfig

    def block_size(self, drafter: str, config: EngineConfig) -> int:
        """Tokens that a step with `drafter`, one of `DRAFTERS`, verifies."""
        if drafter == "none":
            return 1
        of_the_shape = self.drafter.block_size if drafter == "dflash" else _EAGLE3_BLOCK
        return config.block_size or of_the_shape


def _shape(
    target: ModelConfig,
    *,
    num_layers: int,
    block_size: int,
    taps: tuple[int, ...],
    draft_vocab_size: int,
) -> Shape:
    drafter = DFlashConfig.like(
        target,
        num_layers=num_layers,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=taps,
    )
    ends_and_middle = (taps[0], taps[len(taps) // 2], taps[-1])
    eagle3 = EagleConfig.like(
        target, draft_vocab_size=draft_vocab_size, feature_layers=ends_and_middle
    )
    return Shape(target, drafter, eagle3)


SHAPES = {
    "qwen3-8b": _shape(
        ModelConfig(
            architecture="qwen3",
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            max_position_embeddings=40960,
            tie_word_embeddings=False,
            qk_norm=True,
        ),
        num_layers=5,
        block_size=16,
        taps=(1, 9, 17, 25, 33),
        draft_vocab_size=32_000,
    ),
    "smollm2-135m": _shape(
        ModelConfig(
            architecture="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rope_theta=1e5,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        num_layers=3,
        block_size=8,
        taps=(1, 8, 14, 21, 27),
        draft_vocab_size=16_384,
    ),
    "tiny": _shape(
        ModelConfig(
            architecture="qwen3",
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            qk_norm=True,
        ),
        num_layers=1,
        block_size=4,
        taps=(0, 1),
        draft_vocab_size=32,
    ),
}


def random_target(config: ModelConfig, dtype: str) -> TargetParams:
    """Weights of a target: matrices of unit gain, norms of one."""
    make = _Maker(dtype)
    width, layers, dim = config.hidden_size, config.num_layers, config.head_dim
    return TargetParams(
        embed=make.matrix(config.vocab_size, width),
        lm_head=None if config.tie_word_embeddings else make.matrix(config.vocab_size, width),
        final_norm=make.ones(width),
        input_norms=make.ones(layers, width),
        post_norms=make.ones(layers, width),
        q_norms=make.ones(layers, dim) if config.qk_norm else None,
        k_norms=make.ones(layers, dim) if config.qk_norm else None,
        layers=tuple(make.layer(config) for _ in range(layers)),
    )


def random_dflash(config: DFlashConfig, dtype: str) -> DFlashParams:
    """Weights of a drafter, likewise."""
    make = _Maker(dtype)
    width, layers, dim = config.hidden_size, config.num_layers, config.head_dim
    return DFlashParams(
        fc=make.matrix(width, len(config.target_layer_ids) * config.target_hidden_size),
        hidden_norm=make.ones(width),
        norm=make.ones(width),
        input_norms=make.ones(layers, width),
        post_norms=make.ones(layers, width),
        q_norms=make.ones(layers, dim),
        k_norms=make.ones(layers, dim),
        layers=tuple(make.layer(config) for _ in range(layers)),
    )


def random_eagle3(config: EagleConfig, dtype: str) -> EagleParams:
    """Weights of an EAGLE-3 drafter with a head of its own and the target's embedding."""
    make = _Maker(dtype)
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    return EagleParams(
        layer=dataclasses.replace(
            make.layer(config), qkv=make.matrix(heads + kv, config.input_size)
        ),
        post_norm=make.ones(width),
        fc=make.matrix(width, config.fc_size),
        input_norm=make.ones(width),
        hidden_norm=make.ones(width),
        norm=make.ones(width),
        lm_head=make.matrix(config.draft_vocab_size, width),
        target_ids=jnp.arange(config.draft_vocab_size, dtype=jnp.int32),
    )


def plan_shape(shape: Shape, drafter: str, config: EngineConfig, dtype: str) -> DrafterPlan:
    """The plan of one of `DRAFTERS`."""
    setup = DrafterSetup(config, shape.target, dtype, None)
    if drafter == "none":
        return plan_none(setup)
    if drafter == "dflash":
        return dflash.plan_from_params(shape.drafter, random_dflash(shape.drafter, dtype), setup)
    block_size = shape.block_size(drafter, config)
    setup = setup._replace(config=dataclasses.replace(config, block_size=block_size))
    return eagle.plan_from_params(shape.eagle3, random_eagle3(shape.eagle3, dtype), setup)


def step_work(
    shape: Shape, drafter: str, *, block: int, batch: int, context: float, itemsize: int
) -> Work:
    """What a step with one of `DRAFTERS` cannot do without."""
    sizes = {"batch": batch, "context": context, "itemsize": itemsize}
    if drafter == "none":
        return plain_step(shape.target, **sizes)
    if drafter == "dflash":
        return dflash_step(shape.target, shape.drafter, block=block, **sizes)
    return eagle3_step(shape.target, shape.eagle3, block=block, **sizes)


class _Maker:
    """Makes one array after the other, each from a key of its own."""

    def __init__(self, dtype: str):
        self._dtype = jnp.dtype(dtype)
        self._key = jax.random.key(0)
        self._draw: Any = jax.jit(jax.random.normal, static_argnums=(1, 2))
        self._scale: Any = jax.jit(lambda x, scale: x * scale.astype(x.dtype), donate_argnums=0)

    def matrix(self, rows: int, columns: int) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        scale = jnp.asarray(columns**-0.5, jnp.float32)
        return self._scale(self._draw(key, (rows, columns), self._dtype), scale)

    def ones(self, *shape: int) -> jax.Array:
        return jnp.ones(shape, self._dtype)

    def layer(self, config: ModelConfig | DFlashConfig | EagleConfig) -> LayerParams:
        width, heads = config.hidden_size, config.num_heads * config.head_dim
        kv = 2 * config.num_kv_heads * config.head_dim
        return LayerParams(
            qkv=self.matrix(heads + kv, width),
            o=self.matrix(width, heads),
            gate_up=self.matrix(2 * config.intermediate_size, width),
            down=self.matrix(width, config.intermediate_size),
        )
