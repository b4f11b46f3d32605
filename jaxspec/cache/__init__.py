"""The paged KV cache: `kv_pages.py` (where a row lives), `page_pool.py` (who owns a page)."""
