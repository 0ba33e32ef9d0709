"""Rows as an evaluation writes them, for tests of reports."""

import math

LENGTHS = (32, 64, 128, 256, 512)


def text(label, perplexities, *, base=None, family="", seed=0, lengths=LENGTHS, train_length=32, **others):
    """Rows of perplexity for one scheme and seed, on 16,384 tokens; None is a failed evaluation."""
    return [
        {
            "label": label, "base": base, "family": family, "seed": seed, "length": length,
            "train_length": train_length, "window_perplexity": value, "window_nll": value and math.log(value),
            "window_tokens": 16384 if value else 0, "last_perplexity": value and value + 0.5, "last_length": 32,
            "last_tokens": 2048 if value else 0, "sliding_tokens": 0, "tokens_per_second": 50_000.0,
            "train_tokens_per_second": None if base else 30_000.0, "peak_memory_bytes": 700 * 2**20,
            "error": None if value else "no memory", **others,
        }
        for length, value in zip(lengths, perplexities, strict=False)
    ]  # fmt: skip


def task(name, label, shares, *, seed=0, lengths=LENGTHS, chance=0.01, base=None, family="", cases=40, depth=None):
    """Rows of a task for one scheme and seed."""
    return [
        {
            "label": label, "base": base, "family": family, "seed": seed, "train_length": 32, "task": name,
            "length": length, "depth": depth, "accuracy": share, "chance": chance, "cases": cases, "error": None,
        }
        for length, share in zip(lengths, shares, strict=False)
    ]  # fmt: skip


FAMILIES = {
    "absolute embeddings and none": ["nope", "sinusoidal"],
    "rotations": ["rope", "p-rope", "xpos", "pope", "vo-rope"],
    "biases": ["alibi", "t5", "kerple-log", "sandwich", "fire", "fox", "cope", "scale-invariant"],
    "windows and distances": ["window", "hwfa", "hwfa2", "rnope-swa", "inverse-leaky"],
    "CoCA": ["coca-strict", "coca-slack"],
    "linear attention": ["linear-elu", "performer"],
    "scales, norms, drawn positions": ["key-norm", "cosine", "ssmax", "randomised", "log-n"],
}
EXTENSIONS = {
    "rope": [
        "dynamic NTK",
        "dynamic YaRN",
        "ReRoPE",
        "ReRoPE, log n",
        "Self-Extend",
        "dual chunks",
        "window 32",
        "sinks",
    ],
    "coca-strict": ["dynamic NTK"],
    "inverse-leaky": ["then plain"],
    "hwfa2": ["ReRoPE"],
}


def zoo(seeds=4):
    """Forty schemes of all families, with seeds. Their curves end at seven values, so the labels there are crowded."""
    rows = []
    for family, roots in FAMILIES.items():
        for root in roots:
            names = [root, *(f"{root} + {name}" for name in EXTENSIONS.get(root, ()))]
            for name in names:
                for seed in range(seeds):
                    about = {"base": None if name == root else root, "family": family, "seed": seed}
                    rise = (len(rows) % 7) ** 3 / 50
                    rows += text(name, [5.0 + n * rise + seed / 50 for n in range(len(LENGTHS))], **about)
    return rows
