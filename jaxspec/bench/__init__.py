"""Measurements. Reading order: metrics, prompts, rig, then one file a mode, report, command."""
