"""Ranks meshes, remat policies and context strategies of a config on a pod.

There are hundreds of candidates, and compiling one takes a minute. So candidates that cannot be split or, by a rough
count of memory, cannot fit are left out. Of the rest, those that look fastest by a rough count of work and traffic are
compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from rich.console import Console
from rich.table import Table

from posjax.nn import DecoderConfig
from posjax.nn.config import REMAT
from train.config import Config, TrainConfig
from train.model.build import Setup
from train.model.flops import head_sizes, product_parameters, update_flops
from train.plan.compiling import DoesNotCompile, compiler_flags
from train.plan.gpus import IN_A_NODE, Nodes
from train.plan.plan import Plan, check_split, compiled_with, make_plan, mesh_text
from train.plan.pods import GIB, Pod
from train.runtime.lines import in_a_line

SWEPT = ("ring", "all-gather", "ulysses")

_HEADROOM = 1.3
"""A candidate is left out if its rough memory is more than this many times the HBM of a device."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a config."""

    setup: Setup
    axes: dict[str, int]
    bytes: float  # of HBM on a device, rough
    seconds: float  # of a step, rough

    @property
    def name(self) -> str:
        """The mesh, the policy, and, if the sequence is split, the strategy."""
        split = f", {self.setup.config.train.context.strategy}" if self.axes["context"] > 1 else ""
        return f"{mesh_text(self.axes)}, {self.setup.config.model.remat}{split}"


def sweep(
    config: Config, pod: Pod | Nodes, count: int, console: Console, flags: str | None = None
) -> list[tuple[Candidate, Plan | str]]:
    """Compiles `count` candidates and prints them, the fastest first; those that do not compile come last, with the
    reason.

    Raises ValueError if there is no candidate at all.
    """
    found = sorted(candidates(config, pod), key=lambda one: one.seconds)
    chosen = [one for one in found if one.bytes <= pod.hbm_bytes * _HEADROOM][:count]
    if not chosen:
        raise ValueError(
            f"--sweep: none of {len(found)} ways to split the work over {pod.name} fits into its memory; more chips, "
            "more train.accumulate, or more train.loss_chunks would help"
        )
    results = [(one, _attempt(one, pod, console, flags)) for one in chosen]
    results.sort(key=lambda pair: pair[1].seconds if isinstance(pair[1], Plan) else float("inf"))
    console.print(_table(results, pod, len(found)))
    console.print(f"All were {compiled_with(compiler_flags(pod.generation, flags), pod.generation)}", highlight=False)
    return results


def _attempt(one: Candidate, pod: Pod | Nodes, console: Console, flags: str | None) -> Plan | str:
    console.print(f"[dim]{one.name} ...[/dim]")
    try:
        plan = make_plan(one.setup.config, pod, flags=flags)
    except (DoesNotCompile, ValueError) as error:
        return in_a_line(error, 400)
    return plan.problem or plan


def candidates(config: Config, pod: Pod | Nodes) -> Iterator[Candidate]:
    """All candidates that split evenly, by powers of two along each axis."""
    devices = pod.devices // pod.slices
    powers = [2**n for n in range(devices.bit_length()) if devices % 2**n == 0]
    for fsdp, context, tensor in itertools.product(powers, repeat=3):
        experts = config.train.mesh.expert
        if devices % (fsdp * context * tensor * experts):
            continue
        if isinstance(pod, Nodes) and context * tensor > IN_A_NODE:
            continue  # every layer would wait for the network between nodes
        split = {"fsdp": fsdp, "context": context, "tensor": tensor}
        axes = {"replica": pod.slices, "data": devices // prod(split.values()) // experts, **split}
        axes |= {"expert": experts} if experts > 1 else {}
        for remat, strategy in itertools.product(REMAT, SWEPT if context > 1 else ("auto",)):
            changed = _changed(config, axes, remat, strategy, pod)
            if changed is not None:
                yield Candidate(changed, axes, rough_bytes(changed, axes), rough_seconds(changed, axes, pod))


def _changed(config: Config, axes: dict[str, int], remat: str, strategy: str, pod: Pod | Nodes) -> Setup | None:
    """What the config means with these changes; None if it cannot be split this way."""
    mesh = dataclasses.replace(config.train.mesh, **axes)
    context = dataclasses.replace(config.train.context, strategy=strategy)
    train = dataclasses.replace(config.train, mesh=mesh, context=context)
    changed = dataclasses.replace(config, train=train, model=dataclasses.replace(config.model, remat=remat), stages=())
    try:
        return check_split(changed, pod)
    except ValueError:
        return None


def _tokens(train: TrainConfig, axes: dict[str, int]) -> float:
    """Tokens that one device processes at a time."""
    shares = prod(axes.get(name, 1) for name in ("replica", "data", "fsdp", "expert", "context"))
    return train.batch_tokens / train.accumulate / shares


def rough_bytes(setup: Setup, axes: dict[str, int]) -> float:
    """HBM of a device: state, gradients, what a layer keeps for each token, one active layer, and the logits.

    State and gradients are 16 bytes a parameter, for AdamW in float32; two layers' parameters are gathered in bfloat16.
    """
    decoder, config, tensor = setup.decoder, setup.config, axes["tensor"]
    tokens = _tokens(config.train, axes)
    parameters = _all_parameters(decoder)
    state = 16 * parameters / (axes["fsdp"] * axes.get("expert", 1) * axes["context"]) / tensor
    gathered = 4 * parameters / decoder.num_layers / tensor / axes.get("expert", 1)
    # Numbers of a token inside a layer: projections and hidden units.
    inner = max(map(_inner_numbers, decoder.every_layer)) / tensor
    width, attended = decoder.model_dim, max(map(_attended_numbers, decoder.every_layer)) / tensor
    kept = {
        "none": 2 * inner + width,
        "dots": inner + width + attended,
        "offload": width + attended,
        "attention": width + attended,
        "full": width,
    }
    logits = 8 * tokens * decoder.vocab_size / tensor / config.train.loss_chunks
    activations = 2 * tokens * decoder.num_layers * kept[config.model.remat]
    return state + gathered + activations + 4 * tokens * (inner + 2 * decoder.model_dim) + logits


def _inner_numbers(layer: DecoderConfig) -> int:
    hidden = 3 * layer.mlp_dim * (1 if layer.experts is None else layer.experts.per_token)
    if layer.scheme.is_delta:
        return 2 * sum(layer.scheme.linear.channels) + hidden
    return sum(head_sizes(layer)) * (layer.num_heads + layer.num_kv_heads) + hidden


def _attended_numbers(layer: DecoderConfig) -> int:
    return layer.scheme.linear.channels[-1] if layer.scheme.is_delta else head_sizes(layer)[1] * layer.num_heads


def _all_parameters(decoder: DecoderConfig) -> int:
    """The parameters in memory: also those of the experts that a token does not use."""
    embedding = 0 if decoder.tied_head else decoder.vocab_size * decoder.model_dim
    mixtures = [layer for layer in decoder.every_layer if layer.experts is not None]
    unused = sum((layer.experts.count - layer.experts.per_token) * layer.mlp_dim for layer in mixtures)
    return product_parameters(decoder) + embedding + (3 if decoder.gated else 2) * unused * decoder.model_dim


def rough_seconds(setup: Setup, axes: dict[str, int], pod: Pod | Nodes) -> float:
    """A rough time of a step: the longest of work, links and exchange between slices, plus the waits of layers.

    Work runs at 60% of the peak, with a third more for the part that the backward pass runs again. Over the links,
    parameters are gathered twice over `fsdp` and `context` and their gradients scattered once, in bfloat16, and keys
    and values circulate around `context` three times. To k slices each device sends its share of the gradients,
    4 P / devices x (k - 1) / k bytes for each of ``train.accumulate`` parts. With `tensor`, every layer waits for four
    all-reduces of its tokens' activations.
    """
    decoder, parts = setup.decoder, setup.config.train.accumulate
    tokens = _tokens(setup.config.train, axes) * parts
    flops = update_flops(setup)
    again = {"attention": flops.total - flops.attention, "full": flops.total}.get(setup.config.model.remat, 0.0)
    work = (flops.total + again / 3) / (0.6 * pod.chips * pod.peak_flops)
    link = 2e9 * pod.links.link
    each = 2 * tokens / link
    gathered = 6 * _all_parameters(decoder) / axes["tensor"] / axes.get("expert", 1) * parts / link
    inside = 8 * each * decoder.num_layers * decoder.model_dim * (axes["tensor"] > 1)
    keys = sum(layer.num_kv_heads * sum(head_sizes(layer)) for layer in decoder.every_layer)
    around = 3 * each * keys * (axes["context"] - 1)
    shared = 4 * _all_parameters(decoder) * parts * pod.slices / pod.chips
    crossed = shared * (pod.slices - 1) / pod.slices / (1e9 * pod.links.dcn)
    return max(work, gathered * (axes["fsdp"] * axes["context"] > 1) + around, crossed) + inside


def _table(results: list[tuple[Candidate, Plan | str]], pod: Pod | Nodes, count: int) -> Table:
    title = f"{len(results)} of {count} ways to run it on {pod.name}, predicted"
    table = Table("mesh, remat, context", "HBM GiB", "step s", "MFU", "tokens/s/chip", title=title)
    for one, found in results:
        numbers = ["", "", "", found]
        if isinstance(found, Plan):
            size, tokens = f"{found.memory.total / GIB:,.1f}", f"{found.tokens_per_second:,.0f}"
            numbers = [size, f"{found.seconds:.4g}", f"{found.mfu:.1%}", tokens]
        table.add_row(one.name, *numbers)
    return table
