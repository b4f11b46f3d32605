"""Makes tests/data/{eagle,eagle3,eagle3_speculators,mtp}.npz: tiny random drafters as the PyTorch
originals see them.

Needs torch, transformers >= 5 and these PyPI packages, none of which jaxspec needs, installed with
--no-deps: specforge==0.2.0 (EAGLE-3), eagle-llm==1.2.1 (EAGLE-1 and 2) and speculators==0.9.0 (the
EAGLE-3 layer of another layout, and a layer of multi-token prediction).

    python tests/make_eagle_fixtures.py

Each file holds the checkpoint's tensors under their published names, the inputs, and what the
original computed in float32 on CPU: `outputs[k, j]` belongs to the pass that has read the feature
of position j and the tokens up to position j + 1 + k.
"""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from eagle.model.cnets import Model as EagleModel
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

DATA = Path(__file__).parent / "data"
VOCAB, DRAFT_VOCAB, TARGET_WIDTH, NUM_TOKENS, NUM_STEPS = 97, 40, 24, 20, 4
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attention_bias=False,
    pad_token_id=None,
)


def submodule(name: str) -> types.ModuleType:
    """Imports a module of `speculators` without the package's own imports, which need a server."""
    package = "speculators"
    for part in ("", ".models", *(f".models.{kind}" for kind in ("eagle3", "mtp"))):
        stub = types.ModuleType(package + part)
        folder = Path(sys.modules[package].__path__[0]) if part else _folder(package)
        stub.__path__ = [str(folder.joinpath(*part.split(".")[1:]))]
        sys.modules.setdefault(package + part, stub)
    __import__(name)
    return sys.modules[name]


def _folder(package: str) -> Path:
    if package in sys.modules:
        return Path(sys.modules[package].__path__[0])
    return Path(find_spec(package).submodule_search_locations[0])


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random weights, biases and norms, large enough that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        norm = tensor.ndim == 1 and not name.endswith("bias")
        tensor.data = 1.0 + 0.3 * noise if norm else 0.3 * noise


def tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {f"w.{name}": value.numpy() for name, value in model.state_dict().items()}


def inputs(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [1, T, width] of a text, and its ids [1, T + NUM_STEPS]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, NUM_TOKENS, width, generator=generator)
    ids = torch.randint(0, VOCAB, (1, NUM_TOKENS + NUM_STEPS), generator=generator)
    return features, ids


def save(name: str, features: torch.Tensor, ids: torch.Tensor, **arrays) -> None:
    arrays = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in arrays.items()}
    np.savez_compressed(
        DATA / f"{name}.npz",
        features=features[0].numpy(),
        token_ids=ids[0].numpy().astype(np.int32),
        **arrays,
    )


def following(ids: torch.Tensor, step: int) -> torch.Tensor:
    """The token step + 1 positions after each of the first T positions."""
    return ids[:, step + 1 : step + 1 + NUM_TOKENS]


@torch.no_grad()
def eagle3() -> None:
    """SpecForge unrolls its training-time test; its rows and serving's are the same numbers."""
    features, ids = inputs(3 * TARGET_WIDTH, 41)
    saved = {}
    for case, fc_norm in (("plain", False), ("fc_norm", True)):
        config = LlamaConfig(**SIZES, rope_parameters=dict(rope_type="default", rope_theta=5000.0))
        config.draft_vocab_size, config.target_hidden_size = DRAFT_VOCAB, TARGET_WIDTH
        config.fc_norm = fc_norm
        model = LlamaForCausalLMEagle3(config).eval()
        randomise(model, 40)
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(42))[:DRAFT_VOCAB]
        kept = kept.sort().values
        model.d2t.copy_(kept - torch.arange(DRAFT_VOCAB))
        model.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True))
        hidden, cache, outputs, logits = model.project_hidden_states(features), [[], []], [], []
        mask = model.prepare_decoder_attention_mask(
            attention_mask=torch.ones(1, NUM_TOKENS, dtype=torch.bool),
            hidden_states=hidden,
            batch_size=1,
            seq_length=NUM_TOKENS,
            past_key_values_length=0,
        )
        for step in range(NUM_STEPS):
            hidden = model.backbone(
                input_embeds=model.embed_input_ids(following(ids, step)),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(NUM_TOKENS)[None],
            )
            outputs.append(hidden[0])
            logits.append(model.compute_logits(hidden)[0])
        saved.update({f"{case}.{k}": v for k, v in tensors(model).items()})
        saved[f"{case}.outputs"] = torch.stack(outputs)
        saved[f"{case}.logits"] = torch.stack(logits)
    save("eagle3", features, ids, **saved)


@torch.no_grad()
def eagle1() -> None:
    config = LlamaConfig(**SIZES)
    config.rope_scaling, config.pretraining_tp = None, 1
    model = EagleModel(config, bias=True).eval()
    randomise(model, 50)
    features, ids = inputs(SIZES["hidden_size"], 51)
    outputs = torch.zeros(NUM_STEPS, NUM_TOKENS, SIZES["hidden_size"])
    outputs[0] = model(features, input_ids=following(ids, 0))[0]
    for j in range(NUM_TOKENS):
        hidden, tokens = features[:, : j + 1], following(ids, 0)[:, : j + 1]
        out, cache = model(hidden, input_ids=tokens, use_cache=True)
        for step in range(1, NUM_STEPS):
            out, cache = model(
                out[:, -1:],
                input_ids=following(ids, step)[:, j : j + 1],
                past_key_values=cache,
                use_cache=True,
            )
            outputs[step, j] = out[0, -1]
    save("eagle", features, ids, outputs=outputs, **tensors(model))


def qwen3_config() -> Qwen3Config:
    config = Qwen3Config(**SIZES, rope_parameters=dict(rope_type="default", rope_theta=1000000.0))
    config._attn_implementation = "eager"
    return config


def causal_mask(length: int) -> torch.Tensor:
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


@torch.no_grad()
def eagle3_speculators() -> None:
    """The layer alone, with q/k norms and the residual taken after the norm; fc, norm and head are
    those of the file, applied as the package's forward does."""
    definitions = submodule("speculators.models.eagle3.model_definitions")
    config = qwen3_config()
    width = SIZES["hidden_size"]
    layer = definitions.Qwen3DecoderEagle3FirstLayer(config, 0, norm_before_residual=True)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer])
    model.fc = torch.nn.Linear(2 * TARGET_WIDTH, width, bias=False)
    model.norm = type(layer.hidden_norm)(width, eps=config.rms_norm_eps)
    model.embed_tokens = torch.nn.Embedding(VOCAB, width)
    model.lm_head = torch.nn.Linear(width, VOCAB, bias=False)
    randomise(model.eval(), 60)
    rotary = Qwen3RotaryEmbedding(config)
    features, ids = inputs(2 * TARGET_WIDTH, 61)
    projected = model.fc(features)
    outputs = torch.zeros(NUM_STEPS, NUM_TOKENS, width)
    for j in range(NUM_TOKENS):
        hidden, tokens = projected[:, : j + 1], following(ids, 0)[:, : j + 1]
        for step in range(NUM_STEPS):
            positions = torch.arange(hidden.shape[1])[None]
            out = layer(
                torch.cat([model.embed_tokens(tokens), hidden], dim=-1),
                attention_mask=causal_mask(hidden.shape[1]),
                position_embeddings=rotary(hidden, positions),
            )
            outputs[step, j] = out[0, -1]
            hidden = torch.cat([hidden, out[:, -1:]], dim=1)
            tokens = torch.cat([tokens, following(ids, step + 1)[:, j : j + 1]], dim=1)
    logits = model.lm_head(model.norm(outputs))
    save("eagle3_speculators", features, ids, outputs=outputs, logits=logits, **tensors(model))


@torch.no_grad()
def mtp() -> None:
    """Three layers that each read the target's feature: layer k reads tokens k + 1 ahead."""
    definitions = submodule("speculators.models.mtp.model_definitions")
    config = qwen3_config()
    model = torch.nn.Module()
    model.mtp_layers = torch.nn.ModuleList(
        definitions.Qwen3MTPLayer(config) for _ in range(NUM_STEPS - 1)
    )
    model.embed_tokens = torch.nn.Embedding(VOCAB, SIZES["hidden_size"])
    randomise(model.eval(), 70)
    rotary = Qwen3RotaryEmbedding(config)
    features, ids = inputs(SIZES["hidden_size"], 71)
    outputs = [
        layer(
            features,
            model.embed_tokens(following(ids, step)),
            attention_mask=causal_mask(NUM_TOKENS),
            position_embeddings=rotary(features, torch.arange(NUM_TOKENS)[None]),
        )[0]
        for step, layer in enumerate(model.mtp_layers)
    ]
    save("mtp", features, ids, outputs=torch.stack(outputs), **tensors(model))


if __name__ == "__main__":
    eagle3()
    eagle1()
    eagle3_speculators()
    mtp()
    for path in sorted(DATA.glob("*.npz")):
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
