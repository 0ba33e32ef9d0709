"""What tiles cost on each chip, in cycles of the compiler's schedule, as ``python -m train bench --costs`` writes them.

For blocks ``(queries, keys, part)`` of causal attention with head size 128 in bfloat16: a whole tile, a masked tile,
and what a row of tiles costs beside its tiles. The sizes of other calls' tiles are chosen by the same numbers.
"""

FORWARD = {
    "v4": {
        (1024, 2048, 512): (10110, 12395, 1481),
    },
    "v5e": {
        (1024, 2048, 512): (8421, 8445, 1071),
        (1024, 1024, 512): (4226, 4338, 1071),
    },
    "v5p": {
        (1024, 2048, 512): (8338, 8495, 1357),
    },
    "v6e": {
        (1024, 2048, 512): (4322, 4568, 1242),
    },
    "7x": {
        (1024, 2048, 512): (5099, 5568, 1002),
    },
}

BACKWARD = {
    "v4": {
        (1024, 1024, 512): (10442, 10838, 869),
    },
    "v5e": {
        (1024, 1024, 512): (10240, 10240, 500),
    },
    "v5p": {
        (1024, 1024, 512): (10240, 10240, 744),
    },
    "v6e": {
        (1024, 1024, 512): (5423, 5580, 450),
        (2048, 2048, 512): (21049, 21612, 821),
    },
    "7x": {
        (1024, 1024, 512): (5120, 5163, 583),
    },
}
