"""Make your own drafter.

Reading order. Data: filters, prompts, conversations, generate, data (the command). Training:
rows, target, anchors, dflash, eagle, loss, both forwards, step, checkpoint, plan, report, export,
recipes, train (the command).
"""
