"""One stage of training, the devices it runs on, and what is reported while it runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from train.config.settings.checks import (
    check,
    check_fraction,
    check_not_negative,
    check_positive,
    check_row_length,
    divisor_near,
    unknown,
)

STRATEGY_NAMES = ("auto", "ring", "all-gather", "ulysses", "ring-ulysses", "neighbour")


@dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each axis of the mesh; one of them may be -1, which means all remaining devices.

    The batch is split over `replica`, `data`, `fsdp` and `expert`, the sequence over `context`, heads and hidden units
    over `tensor`. Parameters and moments are split over `fsdp`, `expert`, `context` and `tensor`, and replicated over
    `replica` and `data`. The experts of a mixture are split over `expert`: tokens go to their devices and back.
    """

    key = "train.mesh"  # the name of this section in messages

    replica: int = 1  # slices of a multi-slice pod, connected by the data-centre network
    data: int = -1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        for name, size in vars(self).items():
            check(size == -1 or size > 0, f"{self.key}.{name} must be positive, or -1 for all, found {size}")
        rest = [name for name, size in vars(self).items() if size == -1]
        found = " and ".join(rest)
        check(len(rest) < 2, f"{self.key}: only one axis can take all that are left, found -1 for {found}")


@dataclass(frozen=True)
class ContextConfig:
    """How attention works on a sequence that is split over the mesh axis `context`; see `posjax.attention.sharded`.

    `strategy` is one of `STRATEGY_NAMES`, or a list of them without `auto`, as in `[neighbour, ring]`: each layer uses
    the first that supports it. `auto` chooses for each layer by the bytes that are moved.
    """

    strategy: tuple[str, ...] | str = "auto"
    layout: Literal["auto", "contiguous", "zigzag"] = "auto"  # auto: zigzag where a ring is causal
    ulysses: int = 1  # number of devices that exchange heads with each other, in ring-ulysses

    def __post_init__(self):
        check_positive("train.context", self, "ulysses")
        _check_strategies(self.strategies)
        object.__setattr__(self, "strategy", self.strategies if len(self.strategies) > 1 else self.strategies[0])

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names in `strategy`, the preferred one first; a list of one name is that name."""
        return (self.strategy,) if isinstance(self.strategy, str) else tuple(self.strategy or ())


def _check_strategies(names: tuple[str, ...]) -> None:
    check(bool(names), f"train.context.strategy is empty: name at least one of {', '.join(STRATEGY_NAMES)}")
    for name in names:
        if name not in STRATEGY_NAMES:
            raise unknown("train.context.strategy", name, STRATEGY_NAMES, "value")
    check(
        len(names) == 1 or "auto" not in names,
        f"train.context.strategy: 'auto' compares all strategies for each layer and cannot be in a "
        f"list with others, found {list(names)}; "
        "give 'auto', or a list without it",
    )


@dataclass(frozen=True)
class TrainConfig:
    """One run of training: `steps` updates of `batch_tokens` tokens each, in rows of `length` tokens."""

    length: int = 32
    batch_tokens: int = 2048  # tokens of a batch, over all devices
    accumulate: int = 1  # parts of a batch, computed one after the other
    steps: int = 700  # 0 measures a released model without training
    stop_loss: float = 0.0  # the run ends at the first logged loss below this, in nats per token; 0: after all steps
    optimizer: Literal["adamw", "muon", "adafactor"] = "adamw"
    learning_rate: float = 3e-3  # the peak, reached after warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after warm-up
    final_learning_rate: float = 0.1  # the end of a cosine or a line, as a share of the peak
    warmup_steps: int = 50
    learning_rate_factors: Mapping = field(default_factory=dict)  # by patterns of the names of parameters
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of first moments
    keep_moments: bool = False  # whether a stage continues with the optimizer's moments of the stage before
    ema: float = 0.0  # decay of the exponential moving average of the trained parameters; 0: none
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # on matrices only
    clip_norm: float = 1.0
    z_loss: float = 0.0  # weight of the squared log-normaliser of the logits
    balance_loss: float | None = None  # weight of the balance loss of experts; None: model.experts.balance
    correction_rate: float = 1e-3  # how far an update moves the corrections of routers
    loss_chunks: int = 1  # parts of the vocabulary that the loss is computed in, so that the full logits never exist
    spike_factor: float = 0.0  # skips an update whose gradient norm exceeds this multiple of its running mean; 0: never
    stop_after_skips: int = 10  # updates skipped in a row, for spikes or for numbers that are not finite
    # Patterns of the names of the trained parameters; when empty all of them, with model.lora those of adapters.
    trainable: tuple[str, ...] = ()
    redraw_every: int = 0  # steps between new random features of Performer; 0: the first ones are kept
    mask_rate: float = 0.15  # share of the tokens to be predicted when model.causal is false
    checkpoint_every: int = 500
    keep: int = 2  # how many of the newest checkpoints are kept
    local_every: int = 0  # steps between checkpoints on a disk of each host; 0: none
    local_folder: str = ""  # the folder of these checkpoints on every host
    log_every: int = 10
    mesh: MeshConfig = field(default_factory=MeshConfig)
    context: ContextConfig = field(default_factory=ContextConfig)

    def __post_init__(self):
        check_positive("train", self, "length", "batch_tokens", "learning_rate", "clip_norm")
        check_row_length("train.length", self.length)
        check_positive("train", self, "checkpoint_every", "keep", "log_every", "mask_rate")
        check_positive("train", self, "accumulate", "loss_chunks", "stop_after_skips")
        check_not_negative("train", self, "steps", "z_loss", "spike_factor", "stop_loss", "redraw_every")
        check_not_negative("train", self, "weight_decay", "local_every", "correction_rate")
        if self.balance_loss is not None:
            check_not_negative("train", self, "balance_loss")
        for name in ("beta1", "beta2", "ema", "mask_rate"):
            check_fraction(f"train.{name}", getattr(self, name))
        check(
            0 <= self.final_learning_rate <= 1,
            f"train.final_learning_rate is a share of the peak, from 0 to 1, found {self.final_learning_rate}",
        )
        check(
            0 <= self.warmup_steps < self.steps or self.steps == 0,
            f"train.warmup_steps must be at least 0 and below train.steps ({self.steps}), found {self.warmup_steps}",
        )
        check(
            not self.local_every or (bool(self.local_folder) and "://" not in self.local_folder),
            "train.local_every: name a folder on a disk of each host as train.local_folder, such as /mnt/disk/run, "
            f"found {self.local_folder!r}",
        )
        _check_factors(self.learning_rate_factors)
        check(
            self.moment_dtype == "float32" or self.optimizer != "adafactor",
            "train.moment_dtype is that of first moments, of which adafactor has none; leave it out, or use adamw",
        )
        rows = max(1, round(self.batch_tokens / self.length))
        check(
            self.batch_tokens % self.length == 0,
            f"train.batch_tokens must be a multiple of train.length ({self.length}), found {self.batch_tokens}; "
            f"{rows * self.length} would work",
        )
        fits = divisor_near(self.rows, self.accumulate)
        check(
            self.rows % self.accumulate == 0,
            f"train.accumulate must divide the {self.rows} rows of a batch, found {self.accumulate}; {fits} would work",
        )

    @property
    def rows(self) -> int:
        """Rows in a batch, over all devices."""
        return self.batch_tokens // self.length


def _check_factors(factors: Mapping) -> None:
    for pattern, factor in factors.items():
        right = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < math.inf
        check(
            isinstance(pattern, str) and right,
            "train.learning_rate_factors: expected patterns of parameters' names with factors above 0, found "
            f"{pattern!r}: {factor!r}; use train.trainable to freeze parameters",
        )


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
