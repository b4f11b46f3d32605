"""Makes tests/data/{llama,qwen3,dflash}.npz: tiny random models as the PyTorch originals see them.

Needs torch, transformers >= 5 and the PyPI package dflash 0.1.0 (installed with --no-deps), none of
which jaxspec needs:  python tests/make_fixtures.py

Each file holds the checkpoint's tensors under their published names, the inputs, and what the
original computed in float32 on CPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

DATA = Path(__file__).parent / "data"
NUM_TOKENS = 30

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    attn_implementation="eager",
)
LLAMA = LlamaConfig(
    **SIZES,
    rms_norm_eps=1e-5,
    attention_bias=True,
    tie_word_embeddings=False,
    rope_parameters=dict(
        rope_type="llama3",
        rope_theta=10000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
)
QWEN3 = Qwen3Config(
    **{**SIZES, "num_attention_heads": 6},
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
)


def dflash_config(is_causal: bool | None) -> Qwen3Config:
    config = Qwen3Config(
        **SIZES,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=5000.0),
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
    )
    config.num_target_layers = 9
    config.dflash_config = dict(target_layer_ids=[1, 4], mask_token_id=5, block_size=6)
    if is_causal is not None:
        config.is_causal = is_causal
    return config


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random weights, biases and norms, large enough that logits, masks and norms matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        norm = tensor.ndim == 1 and not name.endswith("bias")
        tensor.data = 1.0 + 0.3 * noise if norm else 0.3 * noise


def tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {f"w.{name}": value.numpy() for name, value in model.state_dict().items()}


@torch.no_grad()
def language_model(name: str, model: torch.nn.Module, seed: int) -> None:
    randomise(model.eval(), seed)
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(0, model.config.vocab_size, (1, NUM_TOKENS), generator=generator)
    out = model(ids, output_hidden_states=True)
    weights = tensors(model)
    if model.config.tie_word_embeddings:
        del weights["w.lm_head.weight"]
    np.savez_compressed(
        DATA / f"{name}.npz",
        token_ids=ids[0].numpy().astype(np.int32),
        logits=out.logits[0].numpy(),
        inv_freq=model.model.rotary_emb.inv_freq.numpy(),
        # Entry i of hidden_states is the output of layer i - 1; the last one is already normed.
        layer_outputs=torch.stack(out.hidden_states[1:-1])[:, 0].numpy(),
        **weights,
    )


@torch.no_grad()
def drafter() -> None:
    """Drafts after each of several commits, with the original's own cache cropped between them."""
    commits = [6, 1, 4, 2, 6, 3]
    generator = torch.Generator().manual_seed(31)
    width = 2 * SIZES["hidden_size"]
    features = torch.randn(1, sum(commits), width, generator=generator)
    embed = 0.3 * torch.randn(SIZES["vocab_size"], SIZES["hidden_size"], generator=generator)
    bonus = torch.randint(0, SIZES["vocab_size"], (len(commits),), generator=generator)
    saved = dict(
        commits=np.array(commits, np.int32),
        features=features[0].numpy(),
        embed=embed.numpy(),
        bonus=bonus.numpy().astype(np.int32),
    )
    for case, is_causal in (("by_layer", None), ("never_causal", False), ("causal", True)):
        model = DFlashDraftModel(dflash_config(is_causal)).eval()
        randomise(model, 30)
        cache, start, hidden = _make_cache(model.config), 0, []
        for count, token in zip(commits, bonus, strict=True):
            ids = torch.tensor([[int(token)] + [model.mask_token_id] * (model.block_size - 1)])
            end = start + count
            out = model(
                target_hidden=features[:, start:end],
                noise_embedding=embed[ids],
                position_ids=torch.arange(start, end + model.block_size)[None],
                past_key_values=cache,
                use_cache=True,
            )
            _crop_to(cache, end)
            hidden.append(out[0].numpy())
            start = end
        saved[f"hidden_{case}"] = np.stack(hidden)
        saved.update(tensors(model))
    np.savez_compressed(DATA / "dflash.npz", **saved)


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    language_model("llama", LlamaForCausalLM(LLAMA), 10)
    language_model("qwen3", Qwen3ForCausalLM(QWEN3), 20)
    drafter()
    for path in sorted(DATA.glob("*.npz")):
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
