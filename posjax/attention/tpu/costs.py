"""What tiles cost on each chip, in bundles of the compiler's schedule, about one cycle each.

For blocks ``(queries, keys, part)`` of causal attention with head size 128 in bfloat16: a whole tile, a masked tile,
and what a row of tiles costs beside its tiles. The sizes of other calls' tiles are chosen by the same numbers.
``python -m train bench --costs`` measures them anew, in cycles with stalls.
"""

FORWARD = {
    "v4": {
        (1024, 2048, 512): (10110, 12395, 1481),
    },
    "v5e": {
        (1024, 4096, 1024): (16384, 17544, 1078),
        (1024, 4096, 512): (16663, 16682, 1078),
        (1024, 2048, 512): (8422, 8454, 1078),
        (1024, 1024, 512): (4241, 4350, 1078),
        (512, 1024, 512): (2150, 2129, 686),
    },
    "v5p": {
        (1024, 2048, 512): (8338, 8495, 1357),
    },
    "v6e": {
        (1024, 4096, 1024): (8417, 8769, 1093),
        (1024, 4096, 512): (8426, 8887, 1093),
        (1024, 2048, 512): (4322, 4568, 1074),
        (1024, 1024, 512): (2271, 2416, 1071),
        (512, 1024, 512): (1255, 1343, 746),
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
