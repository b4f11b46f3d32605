"""Faults that others shipped, by the numbers of the table of public reports; `test_index.py` lists
where each row is tested, here or beside the code that it concerns."""
