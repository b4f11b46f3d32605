"""The paged KV cache, in reading order.

`kv_pages.py` (where a row lives), `page_pool.py` (who owns a page), `prefix_tree.py` (what a page
holds, for the next request that begins alike).
"""
