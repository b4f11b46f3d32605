from __future__ import annotations

import pytest

from kernels_pallas import dispatch, limits


@pytest.mark.parametrize(
    ("capability", "kib"), [((8, 0), 163), ((8, 9), 99), ((9, 0), 227), ((11, 1), 99), (None, 227)]
)
def test_shared_memory_is_the_devices(capability, kib):
    assert limits.shared_memory(dispatch.Device("gpu", "some", capability)) == kib * 1024


def test_there_is_always_one_stage():
    assert limits.num_stages(3, stage_bytes=1 << 20) == 1
    assert limits.num_stages(3, stage_bytes=1 << 10) == 3
