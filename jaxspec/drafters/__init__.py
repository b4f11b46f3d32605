"""Drafters. Reading order: `base.py`, `none.py`, `ngram.py`, `dflash.py`."""
