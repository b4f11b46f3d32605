"""What a run trains, decided from the target and the data before anything large is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.models.config import ModelConfig
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.config import Eagle3TrainConfig, TrainConfig, TrainingError
from jaxspec.training.rows import Conversation

_DRAFT_VOCAB = 16000  # of SpecForge's smallest heads; a larger one costs a product more a draft
_MASK_TOKENS = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")
Choice = tuple[str, str, str]  # (what, value, reason)
# By option, what of a drafter its weights are made for.
_SHAPE: dict[str, Callable[[DFlashConfig], object]] = {
    "num_layers": lambda drafter: drafter.num_layers,
    "num_features": lambda drafter: len(drafter.target_layer_ids),
    "feature layers": lambda drafter: drafter.target_layer_ids,
    "mask_token_id": lambda drafter: drafter.mask_token_id,
}


def default_feature_layers(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Layers spread evenly from the second to the third last (z-lab's build_target_layer_ids).

    Raises:
        TrainingError: more features than the target has layers to take them from.
    """
    if num_features == 1:
        return (num_layers // 2,)
    start, end = 1, num_layers - 3
    step = (end - start) / (num_features - 1)
    layers = tuple(round(start + i * step) for i in range(num_features))
    if len(set(layers)) < num_features or start < 0 or end < start:
        raise TrainingError(
            f"num_features is {num_features}, but a target of {num_layers} layers has "
            f"{max(end - start + 1, 1)} to choose from; lower it"
        )
    return layers


def choose_mask_token(
    asked: int | None,
    tokenizer: Tokenizer,
    target: ModelConfig,
    conversations: Sequence[Conversation],
) -> tuple[int, str]:
    """The token that stands for a draft not made yet, and why.

    Its embedding is frozen and means nothing: all that matters is that no text holds it.

    Raises:
        TrainingError: the token asked for is out of range or in use, or none is free.
    """
    used = np.zeros(target.vocab_size, bool)
    for conversation in conversations:
        used[conversation.token_ids] = True
    if asked is not None:
        if not 0 <= asked < target.vocab_size:
            raise TrainingError(
                f"mask_token_id is {asked}; the target's vocabulary is 0 to {target.vocab_size - 1}"
            )
        if used[asked]:
            raise TrainingError(
                f"mask_token_id is {asked} ({tokenizer.token(asked)!r}), which the data holds as "
                "text; name a token that it never uses"
            )
        return asked, "asked for"
    for name in _MASK_TOKENS:
        token = tokenizer.token_id(name)
        if token is not None and token < target.vocab_size and not used[token]:
            return token, f"the tokenizer's {name}"
    if tokenizer.vocab_size < target.vocab_size and not used[tokenizer.vocab_size]:
        return tokenizer.vocab_size, "the first embedding that no text has"
    taken = {tokenizer.token_id(text) for text in tokenizer.special_tokens.values()}
    taken.update(target.eos_token_ids)
    special = [
        token
        for token in range(target.vocab_size)
        if tokenizer.is_special(token) and token not in taken and not used[token]
    ]
    if not special:
        raise TrainingError(
            f"{tokenizer.name} has no token that the data never uses and that could stand for a "
            "mask; name one with --mask-token-id"
        )
    return special[-1], f"{tokenizer.token(special[-1])}, a control token that the data never uses"


def drafter_config(config: TrainConfig, target: ModelConfig, mask_token_id: int) -> DFlashConfig:
    """A drafter of the target's own proportions (DFlash, arXiv 2602.06036)."""
    return DFlashConfig.like(
        target,
        num_layers=config.num_layers,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=default_feature_layers(target.num_layers, config.num_features),
    )


def check_same_shape(name: str, begun: DFlashConfig, drafter: DFlashConfig) -> None:
    """Raises TrainingError where a drafter cannot go on as another; block sizes may differ."""
    for option, of in _SHAPE.items():
        have, need = of(begun), of(drafter)
        if have != need:
            raise TrainingError(
                f"{name} has {option} {have}, and this run {need}; set {option} to the drafter's, "
                "or start from fresh weights"
            )


def eagle3_config(
    config: Eagle3TrainConfig, target: ModelConfig, draft_vocab_size: int
) -> EagleConfig:
    """An EAGLE-3 head of the target's own proportions (arXiv 2503.01840)."""
    return EagleConfig.like(
        target,
        draft_vocab_size=draft_vocab_size,
        feature_layers=default_feature_layers(target.num_layers, config.num_features),
    )


def choose_draft_vocabulary(
    size: int | None, target: ModelConfig, conversations: Sequence[Conversation]
) -> np.ndarray:
    """The target's ids that are drafted from, i32[V_draft] ascending: the likeliest of the answers.

    Raises:
        TrainingError: more than the target has.
    """
    vocab = target.vocab_size
    if size is not None and size > vocab:
        raise TrainingError(
            f"draft_vocab_size is {size}, but the target's vocabulary has {vocab} tokens; lower it"
        )
    counts = np.zeros(vocab, np.int64)
    for conversation in conversations:
        tokens = conversation.token_ids[conversation.supervised]
        counts += np.bincount(tokens, minlength=vocab)
    best = np.argsort(-counts, kind="stable")[: size or min(_DRAFT_VOCAB, vocab)]
    return np.sort(best).astype(np.int32)


def choose_compute_dtype(wanted: str, platform: str) -> tuple[str, str]:
    """The dtype of products and activations, and why."""
    if wanted != "auto":
        return wanted, "asked for"
    if platform == "gpu":
        return "bfloat16", "auto: matrix units multiply in it, sums are float32"
    return "float32", "auto: CPUs compute in float32"


def choose_attention(
    wanted: str, target: ModelConfig, dtype: str, row_len: int, platform: str
) -> tuple[str, str]:
    """The target's attention: cuDNN's where it takes these shapes, else XLA's, and why."""
    if wanted != "auto":
        return wanted, "asked for"
    if platform != "gpu":
        return "xla", "cudnn needs a GPU"
    shape = (1, row_len, target.num_heads, target.head_dim)
    kv_shape = (1, row_len, target.num_kv_heads, target.head_dim)
    refusal = _refusal(
        lambda q, k, mask: jax.nn.dot_product_attention(q, k, k, mask=mask, implementation="cudnn"),
        jnp.zeros(shape, dtype),
        jnp.zeros(kv_shape, dtype),
        jnp.ones((1, 1, row_len, row_len), bool),
    )
    if refusal is None:
        return "cudnn", "never holds the scores"
    return "xla", f"cudnn refuses: {refusal}"


def _refusal(function: Callable[..., jax.Array], *args: jax.Array) -> str | None:
    """Why a function cannot run on these arguments; None where it can."""
    try:
        jax.jit(function)(*args).block_until_ready()
    except Exception as error:  # jax raises whatever the library and its version happen to say
        return str(error).splitlines()[0][:120]
    return None
