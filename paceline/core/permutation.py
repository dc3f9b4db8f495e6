"""A seeded order of the numbers below n that is never written down: place -> number, in constant memory.

A balanced Feistel network permutes the numbers below a power of four that is at least n; a result outside is permuted
again until it is inside (cycle walking), which keeps the map a permutation. Source: J. Black, P. Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002, the generalised Feistel and cycle-walking constructions. The round function is
splitmix64's finaliser (S. Vigna); the order is for shuffling, not for secrets. It is the same on every machine.
"""

from __future__ import annotations

import hashlib

ROUNDS = 6
_MASK64 = (1 << 64) - 1


class SeededPermutation:
    """`permutation[place]` for places 0 to size - 1. Example: `[SeededPermutation(3, "a")[i] for i in range(3)]`."""

    def __init__(self, size: int, seed: str) -> None:
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2) if size > 1 else 1
        self._half_mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(seed.encode("utf-8"), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        """The number at this place. Raises IndexError outside."""
        if not 0 <= place < self._size:
            raise IndexError(place)
        number = self._permuted(place)
        while number >= self._size:
            number = self._permuted(number)
        return number

    def _permuted(self, number: int) -> int:
        left, right = number >> self._half_bits, number & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


def _mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
