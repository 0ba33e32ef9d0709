"""What a run reports and watches while it runs."""

from dataclasses import dataclass

from train.config.settings.checks import check, check_not_negative


@dataclass(frozen=True)
class MonitorConfig:
    """What a run reports and watches while it runs; nothing here changes a number of the training.

    Metrics are written every `train.log_every` steps.
    """

    tensorboard: bool = True
    wandb: str = ""  # a project of Weights & Biases, if it is installed
    profile: tuple[int, ...] = ()  # [first, last]: a profiler trace of these steps
    evaluate_every: int = 0  # steps between measurements of held-out perplexity at the training length; 0: never
    evaluate_tokens: int = 8192  # held-out tokens of such a measurement
    watchdog_seconds: float = 1800.0  # a longer step is reported, with what every thread is doing; 0: never
    compilation_cache: str = "auto"  # a folder or URL for compiled programs; auto: in the user's cache; "" for none

    def __post_init__(self):
        first_and_last = len(self.profile) in (0, 2) and list(self.profile) == sorted(self.profile)
        check(first_and_last, f"monitor.profile must be [first step, last step], found {list(self.profile)}")
        check_not_negative("monitor", self, "evaluate_every", "evaluate_tokens", "watchdog_seconds")
