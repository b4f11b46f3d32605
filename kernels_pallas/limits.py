"""What a launch may ask of a device: shared memory limits the loads that are under way at once."""

from __future__ import annotations

from kernels_pallas import dispatch

# Opt-in shared memory of one block, in KiB (CUDA C++ programming guide, compute capabilities).
_SHARED_MEMORY = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
MULTIPROCESSORS = 132  # of an H100 or H200
_LEAST_SHARED_MEMORY = 99  # of 8.6, 8.9 and 12.x; a device not known here has no less


def shared_memory(device: dispatch.Device) -> int:
    """Bytes that one program may use; without a GPU, lowering for one, those of an H200."""
    capability = device.compute_capability or (9, 0)
    return 1024 * _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY)


def num_stages(wanted: int, stage_bytes: int, other_bytes: int = 0) -> int:
    """The steps whose loads may be under way at once, at most `wanted`, on the current device.

    Args:
      wanted: what is fastest where memory suffices.
      stage_bytes: what the loads of one step fill.
      other_bytes: what the kernel holds beside them.
    """
    spare = 8192  # for reductions and layout changes
    room = shared_memory(dispatch.Device.current()) - other_bytes - spare
    return max(1, min(wanted, room // stage_bytes))
