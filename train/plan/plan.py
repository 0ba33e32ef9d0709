"""The plan of a config on a pod: memory, FLOPs, traffic, and a predicted step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh

from posjax._checks import check
from train.checkpoint.restore import entry_in_stage
from train.config import Config
from train.model.build import Setup
from train.model.flops import Flops, maxtext_flops, update_flops
from train.model.mesh import AXES, EXPERT, check_rows, check_slices, mesh_shape
from train.plan.compiling import (
    EVALUATION,
    Allocation,
    CompiledStep,
    DeviceMemory,
    batch_of_evaluation,
    compile_step,
    does_not_fit,
)
from train.plan.gpus import Nodes
from train.plan.hlo import parse
from train.plan.kernels import Kernels, visited_share
from train.plan.network import Network
from train.plan.pods import Pod
from train.plan.roofline import GPUKernels, NodeNetwork, Roofline
from train.plan.timeline import Simulator, Tally
from train.runtime.flags import variable_of


@dataclass(frozen=True)
class Plan:
    """The compiler's facts on a step, and the prediction from them."""

    setup: Setup
    pod: Pod | Nodes
    axes: dict[str, int]
    memory: DeviceMemory
    flops: Flops
    tally: Tally
    flags: str = ""  # compiler flags of the step
    share: float = 1.0  # the share of an update's FLOPs that the step executes: a third for a forward pass alone
    largest: tuple[Allocation, ...] = ()  # temporary arrays of the step

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.tally.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the FLOPs of `update_flops`, over the peak FLOPs of all chips in `seconds`."""
        return self._utilisation(self.flops)

    @property
    def maxtext_mfu(self) -> float:
        """Model FLOPs utilisation by MaxText's count."""
        return self._utilisation(maxtext_flops(self.setup))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one chip."""
        return self.setup.config.train.batch_tokens / self.seconds / self.pod.chips

    @property
    def problem(self) -> str | None:
        """Why the step cannot run, if it is too large. The compiler for TPUs refuses such a step itself."""
        used, has = self.memory.total, self.pod.hbm_bytes
        return does_not_fit(used, has) if used > has else None

    @property
    def rows_that_fit(self) -> int:
        """How many rows at a time fit at least into the memory of the devices.

        As if all temporary memory grew with the rows; that of gradients and gathered parameters does not.
        """
        memory, train = self.memory, self.setup.config.train
        free = self.pod.hbm_bytes - memory.total + memory.temp
        return max(0, int(train.rows // train.accumulate * free / max(memory.temp, 1.0)))

    def _utilisation(self, flops: Flops) -> float:
        return self.share * flops.total / (self.seconds * self.pod.chips * self.pod.peak_flops)


def check_split(config: Config, pod: Pod | Nodes) -> Setup:
    """What a config means on a pod. Raises ValueError for rows, heads or a length that the mesh cannot split, or slices
    that it cannot span."""
    sizes, train = mesh_shape(config.train.mesh, pod.devices), config.train
    check_slices(sizes, pod.slices)
    check_rows(sizes, train.rows // train.accumulate)
    setup = Setup(config, mesh_of(sizes))
    decoder = setup.decoder
    for layer in set(decoder.every_layer):
        setup.placement.check(
            sizes,
            batch=train.rows // train.accumulate,
            length=train.length,
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            scheme=layer.scheme,
        )
    return setup


def mesh_of(axes: dict[str, int]) -> AbstractMesh:
    """A mesh of these sizes without devices."""
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def make_plan(config: Config, pod: Pod | Nodes, timeout: int = 3600, flags: str | None = None) -> Plan:
    """Compiles the step of a config without stages and predicts its time; see `train.plan.compiling.compile_step`."""
    setup = check_split(config, pod)  # an error names the key and comes at once, even without a compiler
    return plan_of(setup, pod, compile_step(config, pod, timeout, flags))


def plan_evaluation(config: Config, pod: Pod | Nodes, timeout: int = 3600, flags: str | None = None) -> Plan:
    """Compiles what `evaluate` computes of a batch at the longest of ``evaluate.lengths``, and predicts its time.

    The last stage is used, under the config's extension. The plan's config has the length, rows and mesh of this batch
    under ``train``.
    """
    last = config.every_stage[-1]
    last = replace(last, scheme=entry_in_stage(config.scheme, config, last))
    compiled = compile_step(last, pod, timeout, flags, EVALUATION)
    measured = replace(last, train=batch_of_evaluation(last, pod.devices, pod.slices))
    return replace(plan_of(Setup(measured, mesh_of(compiled.axes)), pod, compiled), share=1 / 3)


def plan_of(setup: Setup, pod: Pod | Nodes, compiled: CompiledStep) -> Plan:
    """The plan of a config on a mesh with a compiled step."""
    tally = simulator_of(pod, compiled, kernels_of(setup, pod, compiled.axes)).run()
    flops, flags = update_flops(setup), compiled.flags or ""
    return Plan(setup, pod, compiled.axes, compiled.memory, flops, tally, flags, largest=compiled.largest)


def kernels_of(setup: Setup, pod: Pod | Nodes, axes: dict[str, int]) -> Kernels | GPUKernels:
    """The kernels of a step, for the masks of a config and the layout of a mesh, perhaps of another trainer."""
    decoder, train = setup.decoder, setup.config.train
    kind = GPUKernels if isinstance(pod, Nodes) else Kernels
    return kind(pod, visited_share(decoder.layers, train.length, decoder.causal), _tokens_spread(setup, axes))


def simulator_of(pod: Pod | Nodes, compiled: CompiledStep, kernels: Kernels | GPUKernels) -> Simulator:
    """The simulation of a compiled step, of any trainer."""
    if isinstance(pod, Nodes):
        return Roofline(parse(compiled.text), NodeNetwork(pod, compiled.axes), kernels)
    network = Network(pod, _in_a_slice(compiled.axes, pod.slices), compiled.coordinates)
    return Simulator(parse(compiled.text), network, kernels)


def _in_a_slice(axes: dict[str, int], slices: int) -> dict[str, int]:
    """The mesh of one slice. Slices are along `replica`; in a mesh without it, along the first axis whose size is a
    multiple of `slices`.
    """
    split = "replica" if "replica" in axes else next((name for name, size in axes.items() if size % slices == 0), None)
    check(split is not None, f"--slices: expected a mesh that {slices} slices divide, found {axes}")
    return {**axes, split: axes[split] // slices}


def _tokens_spread(setup: Setup, axes: dict[str, int]) -> float:
    """The tokens of a row on one device, or in a group of devices that exchange heads, if the layout spreads them over
    the row.

    Infinity for a layout that keeps tokens in order, and for a mesh with other axes than ours, whose layout is unknown.
    """
    if set(axes) - {EXPERT} != set(AXES):
        return float("inf")
    placed = Setup(setup.config, mesh_of(axes)).placement
    width = placed.ulysses if "ring-ulysses" in placed.strategies else 1
    return width * setup.config.train.length / placed.layout.shards if placed.layout.reorders else float("inf")


def mesh_text(axes: dict[str, int]) -> str:
    """``fsdp 64 x context 8``: the axes with more than one device."""
    return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one device"


def compiled_with(flags: str, chip: str) -> str:
    """The flags of the compiler for a chip, and how to set them for a run."""
    needed = f'these flags, which a run needs too: export {variable_of(chip)}="{flags}"'
    return f"compiled with {needed}" if flags else "compiled without flags of the compiler"
