"""Shuffling as a function: a keyed permutation, computed on demand.

It uses its own integer mixing (splitmix64), so that the numbers are the same on every platform and NumPy version.
"""

from math import isqrt

import numpy as np

ROUNDS = 8  # with fewer, some orders of five or six items are more frequent than others
GAMMA = np.uint64(0x9E3779B97F4A7C15)  # constants of splitmix64
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix64(x: np.ndarray) -> np.ndarray:
    """The step of splitmix64 from state x (uint64) to its output; mix64(s + k · GAMMA) is a stream over k."""
    x = x + GAMMA
    x = (x ^ (x >> np.uint64(30))) * FACTOR_1
    x = (x ^ (x >> np.uint64(27))) * FACTOR_2
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int | np.ndarray) -> np.ndarray:
    """One key (uint64) from several numbers; if one is an array, one key per value."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        number = np.array([part % 2**64], dtype=np.uint64) if isinstance(part, int) else part.astype(np.uint64)
        key = mix64(key ^ number)
    return key


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """The item at position i in the permutation of 0…n−1 that `key` selects; both may be arrays.

    A Feistel network on pairs (left, right) of Z_a × Z_b with a · b just above n; a result of n or more is mapped
    again (cycle walking), which happens for fewer than 1/√n of the positions.
    """
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    sizes = np.uint64(a), np.uint64(b)
    place, key = np.broadcast_arrays(i.astype(np.uint64), key)
    place = _feistel(place, key, *sizes)
    while len(outside := np.flatnonzero(place >= np.uint64(n))):
        place[outside] = _feistel(place[outside], key[outside], *sizes)
    return place.astype(np.int64)


def _feistel(place: np.ndarray, key: np.ndarray, a: np.uint64, b: np.uint64) -> np.ndarray:
    left: np.ndarray = place // b
    right: np.ndarray = place % b
    for step in range(0, 2 * ROUNDS, 2):
        left = (left + mix64(key ^ (right << np.uint64(8)) ^ np.uint64(step)) % a) % a
        right = (right + mix64(key ^ (left << np.uint64(8)) ^ np.uint64(step + 1)) % b) % b
    return left * b + right
