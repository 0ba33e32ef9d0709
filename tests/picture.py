"""Checks the picture that README shows, in the rows of a comparison: ``python tests/picture.py RESULTS.jsonl``.

At 16 times the training length sinusoidal and RoPE are clearly worse than at it, ALiBi is not, CoCA is between RoPE and
ALiBi, and dynamic NTK helps RoPE.
"""

import json
import sys
from pathlib import Path


def growth(rows: list[dict]) -> dict[str, float]:
    """For each scheme, its perplexity at the longest length over that at the shortest."""
    found = {(row["label"], row["length"]): row["window_perplexity"] for row in rows}
    lengths = sorted({length for _, length in found})
    return {label: found[label, lengths[-1]] / found[label, lengths[0]] for label, _ in found}


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    found = growth(rows)
    print({label: round(value, 2) for label, value in found.items()})
    assert found["sinusoidal"] > 2, "sinusoidal should rise"
    assert found["alibi"] < 1.1, "ALiBi should stay flat"
    assert 1.1 < found["coca-strict"] < found["rope"], "CoCA should be between ALiBi and RoPE"
    assert found["rope + dynamic NTK"] < 0.95 * found["rope"], "dynamic NTK should help RoPE"
    assert found["rope"] > 2, "RoPE should rise"


if __name__ == "__main__":
    main()
