"""Sizes of tiles for each chip."""

from posjax.attention.tpu.schedule import Blocks

FORWARD = Blocks(1024, 2048, 512)
BACKWARD = Blocks(1024, 1024, 512)
VMEM = 100 * 2**20
BOUNDED = False
SPARE = False


def fit(largest: Blocks, queries: int, keys: int) -> Blocks:
    """Blocks no larger than these for so many tokens, nearly equal, so that little is padded; keys are taken in parts."""
    q, k = _block(queries, largest.q), _block(keys, largest.k)
    return Blocks(q, k, _divisor(k, largest.part))


def divide(largest: Blocks, queries: int, keys: int) -> Blocks:
    """The largest such blocks that cut these lengths into equal parts; the queries of a block are taken in parts."""
    q, k = _divisor(queries, largest.q), _divisor(keys, largest.k)
    return Blocks(q, k, _divisor(q, largest.part))


def _divisor(whole: int, largest: int) -> int:
    return max(n for n in range(128, min(whole, largest) + 1, 128) if whole % n == 0)


def _block(tokens: int, largest: int) -> int:
    count = -(-tokens // largest)
    unit = 128 if tokens <= 1024 else 512
    return min(largest, -(-tokens // (count * unit)) * unit)
