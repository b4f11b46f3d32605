"""Language models. Reading order: base, config, layers, decoder, llama, qwen3."""
