"""The engine: `state.py`, `prefill_step.py`, `decode_step.py` on the device; `draft_input.py`,
`admission.py`, `commit.py`, `engine.py`, `programs.py` on the host; `warmup.py` compiles before
serving."""
