"""The commands: common, generate, chat, models; each has `add_arguments` and `run`."""
