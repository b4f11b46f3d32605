"""Measurements of a model on a machine.

Reading order: metrics and prompts; settings, rig and step_times, on which the modes stand; one
file a mode (compare, latency, throughput, acceptance, host, forward, prefill with roofline,
startup); report and command.
"""
