"""Make your own drafter.

Reading order. Data: filters, prompts, conversations, generate, data (the command). Training:
rows, target, anchors, dflash, loss, step, checkpoint, plan, report, export, train (the command).
"""
