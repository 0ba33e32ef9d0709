"""The plan of a config on a pod: memory, FLOPs, traffic, and a predicted step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from train.config import Config
from train.model.build import decoder_config, placement
from train.model.flops import Flops, maxtext_flops, update_flops
from train.model.mesh import check_rows, check_slices, mesh_shape
from train.plan.compiling import Memory, compile_step
from train.plan.hlo import parse
from train.plan.kernels import Kernels, visited_share
from train.plan.network import Fabric
from train.plan.pods import Pod
from train.plan.timeline import Player, Tally


@dataclass(frozen=True)
class Plan:
    """What the compiler says of a step, and what is predicted from it."""

    config: Config
    pod: Pod
    axes: dict[str, int]
    memory: Memory
    flops: Flops
    tally: Tally

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        return self.tally.seconds

    @property
    def fits(self) -> bool:
        """Whether a device has the memory. A program that the compiler has made does, but for what it cannot see."""
        return self.memory.total <= self.pod.hbm_bytes

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: what `update_flops` counts, over what the chips could do in that time."""
        return self._utilisation(self.flops)

    @property
    def maxtext_mfu(self) -> float:
        """The same by MaxText's count."""
        return self._utilisation(maxtext_flops(self.config))

    @property
    def tokens_per_second(self) -> float:
        """Of one chip."""
        return self.config.train.batch_tokens / self.seconds / self.pod.chips

    def _utilisation(self, flops: Flops) -> float:
        return flops.total / (self.seconds * self.pod.chips * self.pod.peak_flops)


def check_split(config: Config, on: Pod) -> None:
    """Raises ValueError for rows, heads or a length that the mesh cannot share, or slices that it cannot span."""
    sizes, train = mesh_shape(config.train.mesh, on.devices), config.train
    check_slices(sizes, on.slices)
    check_rows(sizes, train.rows // train.accumulate)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    decoder = decoder_config(config)
    for scheme in set(decoder.layers.schemes):
        placement(config, mesh).check(
            sizes,
            batch=train.rows // train.accumulate,
            length=train.length,
            heads=decoder.num_heads,
            kv_heads=decoder.num_kv_heads,
            scheme=scheme,
        )


def make_plan(config: Config, on: Pod, timeout: int = 3600) -> Plan:
    """Compiles the step of a config without stages and predicts its time; see `train.plan.compiling.compile_step`."""
    check_split(config, on)  # by name and at once, also where there is no compiler
    flops, decoder = update_flops(config), decoder_config(config)
    compiled = compile_step(config, on, timeout)
    share = visited_share(decoder.layers, config.train.length, decoder.causal)
    in_a_slice = {**compiled.axes, "replica": compiled.axes["replica"] // on.slices}
    fabric = Fabric(on, in_a_slice, compiled.places)
    spread = _tokens_spread(config, compiled.axes)
    tally = Player(parse(compiled.text), fabric, Kernels(on, share, spread)).play()
    return Plan(config, on, compiled.axes, compiled.memory, flops, tally)


def _tokens_spread(config: Config, axes: dict[str, int]) -> float:
    """Of a row in a group of devices that exchange heads, or on one, where its layout spreads them over the row."""
    where = placement(config, AbstractMesh(tuple(axes.values()), tuple(axes)))
    width = where.ulysses if "ring-ulysses" in where.strategies else 1
    return width * config.train.length / where.layout.shards if where.layout.moves else float("inf")


def stages(config: Config) -> Iterator[tuple[str, Config]]:
    """Every stage of a config by name; the config itself where it has none."""
    return zip(config.stage_names, config.every_stage, strict=True)
