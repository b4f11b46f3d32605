"""A random Llama of a few thousand parameters in a folder, with a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tests.weights.folders import LLAMA_JSON, write_folder

BROKEN = "\x01"  # its embedding is NaN, so that a prompt with it fails on the device
# One geometry for many tests: programs compiled for one of them serve the others.
SIZES = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 1024}
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% if style is defined %}[{{ style }}]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = len(_BYTES) + len(SPECIAL)
EOS = VOCAB_SIZE - 1


def write_tiny_model(folder: Path, *, chat_template: str | None = TEMPLATE) -> Path:
    """Writes the model: a token a byte, and answers in printable ASCII."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={char: index for index, char in enumerate(_BYTES)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    config = {
        **LLAMA_JSON,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 1,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "attention_bias": False,
        "max_position_embeddings": 1024,
    }
    tokenizer_config = {"eos_token": SPECIAL[1]}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    write_folder(folder, config, _tensors(), tokenizer_config=tokenizer_config)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    width, middle, head, heads, kv_heads = 32, 48, 8, 4, 2

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(np.float32(columns))

    embed, lm_head = matrix(VOCAB_SIZE, width) * 6, matrix(VOCAB_SIZE, width) * 6
    embed[_id_of(BROKEN)] = np.nan
    # A row of zeros never wins against the 95 others.
    lm_head[[index for index in range(VOCAB_SIZE) if index not in _printable_ids()]] = 0
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": lm_head,
        "model.norm.weight": np.ones(width, np.float32),
    }
    prefix = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (kv_heads * head, width),
        "self_attn.v_proj": (kv_heads * head, width),
        "self_attn.o_proj": (width, heads * head),
        "mlp.gate_proj": (middle, width),
        "mlp.up_proj": (middle, width),
        "mlp.down_proj": (width, middle),
    }
    tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = np.ones(width, np.float32)
    return tensors


def _id_of(char: str) -> int:
    return _BYTES.index(chr(0x100 + ord(char)))  # GPT-2's stand-in for a byte that does not print


def _printable_ids() -> set[int]:
    letters = {chr(byte) for byte in range(0x21, 0x7F)} | {chr(0x100 + 0x20)}
    return {index for index, char in enumerate(_BYTES) if char in letters}


def spoil_json(folder: Path, name: str, **changes: object) -> None:
    """Changes keys of a JSON file of the folder."""
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
