"""`python -m kernels_pallas`: prints the device and the implementation of each kernel."""

from kernels_pallas.overview import overview

print(overview())
