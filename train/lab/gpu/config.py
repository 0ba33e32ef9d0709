"""The section ``gpu`` of a bench's config: what is measured on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from posjax._checks import check, check_choice, check_count, check_positive
from train.config import load
from train.lab.gpu.jobs import (
    BACKWARD,
    DECODE,
    ERRORS,
    FORMS,
    FORWARD,
    GENERATE,
    LIBRARIES,
    LONGEST_BIAS,
    OTHER_TILES,
    OURS,
    ROWS,
    STEP,
    STEP_FORMS,
    SWEPT,
    TILES,
    TRANSFORMERS,
    Job,
    Options,
    Shape,
)

_COUNTS = ("timeout", "model_timeout", "threads", "error_length", "heads", "loop_length", "decode_length")
_LISTS = ("lengths", "sizes", "decode_kv_heads")


@dataclass(frozen=True)
class GpuConfig:
    """The measurements, in their order: errors, training steps, generation, times, XLA's loops, decoding, other tiles.

    Args:
        implementation: what is measured as ``posjax``; ``blockwise`` or ``dense`` need no GPU.
        libraries: what is timed beside it; those that are not installed are left out.
    """

    implementation: Literal["gpu", "blockwise", "dense"] = "gpu"
    libraries: tuple[Literal["cudnn", "torch flex", "torch sdpa", "tokamax"], ...] = tuple(
        name for name in LIBRARIES if name != OURS
    )
    seconds: int = 840  # no measurement begins later; 0 only prints what is known
    timeout: int = 120  # seconds for one measurement, compilation included
    model_timeout: int = 300  # the same for a whole model
    row_seconds: float = 0.2  # how long a row of queued calls takes, up to a hundred calls
    threads: int = 8  # that compile programs of jax
    forms: tuple[str, ...] = FORMS
    sizes: tuple[int, ...] = (64, 128)  # features of a head
    heads: int = 16
    error_length: int = 2048  # tokens; dense float32 attention must fit
    lengths: tuple[int, ...] = (16384, 4096, 65536)  # tokens, of times
    loop_length: int = 4096  # tokens, of the XLA loops
    decode_length: int = 131072  # keys that a decoded token reads in every layer
    decode_kv_heads: tuple[int, ...] = (16, 4)
    step: str = "configs/gpus/llama-1b-8k.yaml"  # the config of a training step; "" for none
    generation: str = "configs/gpus/smollm2-135m.yaml"  # the config of a model that generates; "" for none

    def __post_init__(self):
        for name in _COUNTS:
            check_count(f"gpu.{name}", getattr(self, name))
        for name in _LISTS:
            for value in getattr(self, name):
                check_count(f"gpu.{name}", value)
        for form in self.forms:
            check_choice("gpu.forms", form, FORMS)
        for count in self.decode_kv_heads:
            check(self.heads % count == 0, f"gpu.decode_kv_heads must divide the {self.heads} heads, found {count}")
        check(self.seconds >= 0, f"gpu.seconds must be at least 0, found {self.seconds}")
        check_positive("gpu.row_seconds", self.row_seconds)

    @property
    def options(self) -> Options:
        """How jobs are measured."""
        return Options(self.implementation, self.threads, self.row_seconds, self.step, self.generation)

    @property
    def jobs(self) -> Iterator[Job]:
        """Every measurement, in the order in which they are made."""
        yield from self._errors()
        yield from self.steps
        yield from self.generations
        for length in self.lengths:
            for library in LIBRARIES:
                yield from self._times(library, length)
        if "alibi" in self.forms:
            for size in self.sizes:
                yield from _both_directions("blockwise", self.shape("alibi", self.loop_length, size))
        yield from self._decoding()
        if self.implementation == "gpu":
            yield from self._other_tiles()

    def shape(self, form: str, length: int, size: int) -> Shape:
        """The shape of a call that is timed."""
        return Shape(form, length, size, self.heads, self.heads)

    @property
    def steps(self) -> Iterator[Job]:
        """Training steps; those of posjax have a profile."""
        if not self.step:
            return
        shapes = _shapes(self.step, STEP_FORMS)
        if self.libraries:  # first, since jax gives back no memory
            yield Job(STEP, TRANSFORMERS, next(shape for shape in shapes if shape.form == "rope"))
        yield from (Job(STEP, OURS, shape) for shape in shapes)

    @property
    def generations(self) -> Iterator[Job]:
        """Generated tokens, of one text and of many at once."""
        if self.generation:
            libraries = (OURS, TRANSFORMERS) if self.libraries else (OURS,)
            shapes = _shapes(self.generation, ROWS)
            yield from (Job(GENERATE, library, shape) for shape in shapes for library in libraries)

    def _errors(self) -> Iterator[Job]:
        for size in self.sizes:
            for form in self.forms:
                yield Job(ERRORS, OURS, Shape(form, self.error_length, size, heads=8, kv_heads=2))

    def _times(self, library: str, length: int) -> Iterator[Job]:
        if library != OURS and library not in self.libraries:
            return
        for size in self.sizes:
            for form in LIBRARIES[library]:
                is_array = form == "array" or (library, form) == ("tokamax", "alibi")
                too_long = is_array and length > LONGEST_BIAS
                if form in self.forms and not too_long:
                    yield from _both_directions(library, self.shape(form, length, size))

    def _decoding(self) -> Iterator[Job]:
        libraries = (OURS, "dense", *(name for name in self.libraries if name == "cudnn"))
        for kv_heads in self.decode_kv_heads:
            for size in self.sizes:
                for library in libraries:
                    yield Job(DECODE, library, Shape("decode", self.decode_length, size, self.heads, kv_heads))

    def _other_tiles(self) -> Iterator[Job]:
        for size in self.sizes:
            for form in SWEPT:
                if form in self.forms:
                    shape = self.shape(form, self.lengths[0], size)
                    yield from (Job(TILES, name, shape) for name in OTHER_TILES)


def _shapes(path: str, forms: Iterable[str]) -> list[Shape]:
    """The shape of a config's model, in several forms."""
    config = load(path)
    model = config.model
    size = model.model_dim // model.num_heads
    return [Shape(form, config.train.length, size, model.num_heads, model.num_kv_heads) for form in forms]


def _both_directions(library: str, shape: Shape) -> Iterator[Job]:
    yield Job(FORWARD, library, shape)
    yield Job(BACKWARD, library, shape)
