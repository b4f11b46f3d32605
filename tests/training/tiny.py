"""A target and a drafter small enough to train in a test, and packed rows for them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_params import DFlashParams
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import LayerParams, TargetParams
from jaxspec.training.anchors import TokenRows
from jaxspec.training.dflash import init_params
from jaxspec.training.loss import LossSpec
from jaxspec.training.rows import Conversation, PackedRows, pack_rows
from jaxspec.training.spec import StepSpec

VOCAB = 48
MASK = 47
BLOCK = 4

TARGET = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
# A drafter of two layers; one of a single layer compiles faster.
DRAFTER = DFlashConfig(
    num_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    block_size=BLOCK,
    mask_token_id=MASK,
    target_layer_ids=(0, 1),
    layer_windows=(None, None),
    layer_causal=(False, False),
    max_position_embeddings=256,
    vocab_size=VOCAB,
    target_hidden_size=32,
)


def target_params(seed: int = 0, config: ModelConfig = TARGET) -> TargetParams:
    """A random target whose next token is far from random: its logits are spread out."""
    rng = np.random.default_rng(seed)
    width, heads = config.hidden_size, config.num_heads * config.head_dim

    def matrix(rows: int, columns: int, std: float) -> jax.Array:
        return jnp.asarray(rng.normal(0, std, (rows, columns)), jnp.float32)

    depth = config.num_layers
    norms = {
        name: jnp.asarray(rng.uniform(0.8, 1.2, (depth, width)), jnp.float32)
        for name in ("input_norms", "post_norms")
    }
    return TargetParams(
        embed=matrix(config.vocab_size, width, 1.0),
        lm_head=None,
        final_norm=jnp.ones((width,), jnp.float32),
        q_norms=None,
        k_norms=None,
        layers=tuple(
            LayerParams(
                qkv=matrix(heads + 2 * config.num_kv_heads * config.head_dim, width, 0.3),
                o=matrix(width, heads, 0.3),
                gate_up=matrix(2 * config.intermediate_size, width, 0.3),
                down=matrix(width, config.intermediate_size, 0.3),
            )
            for _ in range(depth)
        ),
        **norms,
    )


def drafter_params(config: DFlashConfig = DRAFTER, seed: int = 1) -> DFlashParams:
    """Fresh weights, with norms that are not ones, so that a norm left out shows."""
    params = init_params(config, jax.random.key(seed), final_norm=jnp.ones((32,), jnp.float32))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 7))

    def uneven(x: jax.Array) -> jax.Array:
        return x * jax.random.uniform(next(keys), x.shape, jnp.float32, 0.5, 1.5)

    names = ("hidden_norm", "norm", "input_norms", "post_norms", "q_norms", "k_norms")
    return params.replace(
        **{name: uneven(getattr(params, name)) for name in names},
        layers=jax.tree.map(lambda w: 10 * w, params.layers),
    )


def conversation(tokens: list[int], num_prompt: int) -> Conversation:
    """Everything after the prompt is the target's own."""
    supervised = np.arange(len(tokens)) >= num_prompt
    return Conversation(np.asarray(tokens, np.int32), supervised)


def random_rows(seed: int = 0, row_len: int = 24) -> PackedRows:
    """Rows that hold several conversations and padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 15, 9)
    return pack_rows(
        [conversation(rng.integers(0, MASK, n).tolist(), 3) for n in lengths], row_len, seed=seed
    )


def device_rows(rows: PackedRows) -> TokenRows:
    """The rows on the device."""
    return TokenRows.from_host(rows)


SHALLOW = dataclasses.replace(DRAFTER, num_layers=1, layer_windows=(None,), layer_causal=(False,))


def step_spec(**changes) -> StepSpec:
    """A step of a drafter of one layer in float32, four anchors a row."""
    loss = changes.pop("loss", LossSpec(block_size=BLOCK, chunk=3))
    spec = StepSpec(
        target=TARGET, drafter=SHALLOW, loss=loss, num_anchors=4, compute_dtype="float32"
    )
    return dataclasses.replace(spec, **changes)
