"""Records of real runs and pictures of them, for the notebooks and the README.

`picture.py` is what a cell shows; `device_spans.py`, `record_timeline.py` and `timeline.py` show
when host and device work; `relay.py` what a step does to the relay; `bars.py` accept lengths,
speed, step times and bandwidth; `kernel_checks.py` runs the kernels beside their references.
"""
