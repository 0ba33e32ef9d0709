"""What tiles cost on each chip, in bundles of the compiler's schedule, about one cycle each.

For blocks ``(queries, keys, part)`` of causal attention with head size 128 in bfloat16: a whole tile, a masked tile,
and what a row of tiles costs beside its tiles. The sizes of other calls' tiles are chosen by the same numbers.
``python -m train bench --costs`` measures them anew, in cycles with stalls.
"""

FORWARD = {
    "v4": {
        (1024, 2048, 512): (10151, 12521, 1380),
    },
    "v5e": {
        (1024, 4096, 1024): (16384, 17551, 1162),
        (1024, 4096, 512): (16641, 16677, 1162),
        (1024, 2048, 512): (8402, 8449, 1162),
        (1024, 1024, 512): (4242, 4341, 1162),
        (512, 1024, 512): (2177, 2129, 728),
    },
    "v5p": {
        (1024, 2048, 512): (8320, 8503, 1217),
    },
    "v6e": {
        (1024, 4096, 1024): (8415, 8771, 1312),
        (1024, 4096, 512): (8423, 8883, 1312),
        (1024, 2048, 512): (4322, 4568, 1295),
        (1024, 1024, 512): (2271, 2416, 1289),
        (512, 1024, 512): (1255, 1343, 856),
    },
    "7x": {
        (1024, 2048, 512): (4428, 4448, 1316),
    },
}

BACKWARD = {
    "v4": {
        (1024, 1024, 512): (10431, 10869, 1403),
    },
    "v5e": {
        (1024, 1024, 512): (10240, 10240, 2292),
    },
    "v5p": {
        (1024, 1024, 512): (10240, 10240, 2742),
    },
    "v6e": {
        (1024, 1024, 512): (5438, 5596, 1919),
        (2048, 2048, 512): (21066, 21629, 2269),
    },
    "7x": {
        (1024, 1024, 512): (5120, 5210, 835),
    },
}
