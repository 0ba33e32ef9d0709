"""What is measured of a trained model."""

from dataclasses import dataclass

from train.settings.checks import check, check_positive


@dataclass(frozen=True)
class EvaluateConfig:
    """Perplexity on the held-out documents, in windows of each length."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    tokens: int = 131072  # tokens measured at each length
    batch_tokens: int = 4096  # tokens computed at a time

    def __post_init__(self):
        check_positive("evaluate", self, "tokens", "batch_tokens")
        check(bool(self.lengths), "evaluate.lengths is empty: name at least one length")
        check(min(self.lengths) > 1, f"evaluate.lengths must all be above 1, found {min(self.lengths)}")
        rising = all(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        check(rising, f"evaluate.lengths must rise, found {list(self.lengths)}")
        longest = self.lengths[-1]
        for name in ("tokens", "batch_tokens"):
            value = getattr(self, name)
            check(value >= longest, f"evaluate.{name} must hold the longest window ({longest}), found {value}")
