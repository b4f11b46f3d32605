"""The threefry generator on the host, so that keys need no device. Host only."""

from __future__ import annotations

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MASK = 0xFFFFFFFF


def fold_in(key: tuple[int, int], data: int) -> tuple[int, int]:
    """As `jax.random.fold_in` of a threefry key: two 32-bit words, and a 32-bit number.

    Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011).
    """
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = keys[0], (data + keys[1]) & _MASK
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = (x + y) & _MASK
            y = ((y << rotation) | (y >> (32 - rotation))) & _MASK
            y ^= x
        x = (x + keys[(block + 1) % 3]) & _MASK
        y = (y + keys[(block + 2) % 3] + block + 1) & _MASK
    return x, y
