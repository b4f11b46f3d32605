"""From a model's name to arrays on the device.

In reading order: `files.py` (what a stored tensor is), `hub.py` with `folder.py`, `wheel.py` and
`repo.py` (name -> files), `gguf.py` and `safetensors.py` (file -> tensors by name),
`json_fields.py`, `config_json.py`, `gguf_config.py` and `drafter_json.py` (-> configs),
`gguf_tokenizer.py`, `checkpoint.py` (all of that, opened), `mapping.py` (which tensor goes where),
`load.py` (streams them there).
"""
