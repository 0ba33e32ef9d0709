"""One update: its loss, its optimizer, and how it changes the state."""

import collections
import dataclasses
import itertools
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from documents import EOS, MASK, encode, pack
from jax.sharding import PartitionSpec
from refusals import refused
from updates import begin, build, config_of, placed, random_parameters, run

from posjax.layout import Layout
from train.config import DataConfig
from train.data.packing import Batch
from train.data.tokenizer import PADDING, load_tokenizer
from train.loop.step import draw_positions, mask_tokens
from train.model.build import Setup, scheme_of
from train.model.sharding import named_sharding
from train.plan.hlo import parse as read_program
from train.plan.network import COLLECTIVES, groups_of, kind_of


@pytest.fixture(scope="module")
def batch() -> Batch:
    rows = pack([encode(b"to be, or not to be"), encode(b"that is the question"), encode(b"whether nobler")], 8)
    return rows.batch(np.arange(8))


@pytest.fixture(scope="module")
def one_device():
    return build()


@pytest.fixture(scope="module")
def first(one_device):
    """The parameters that most tests begin with."""
    return jax.tree.map(np.array, one_device[0].initialize(one_device[0].given.seed).parameters)


@pytest.fixture(scope="module")
def on_one_device(one_device, first, batch):
    program, mesh = one_device
    state, losses = run(program, mesh, batch, begin(program, first))
    return jax.tree.map(np.asarray, state.parameters), losses


def test_masked_tokens_are_bytes_of_documents_only():
    tokens = np.tile(np.array([256, 65, 66, EOS, PADDING], np.int32), (200, 20))
    segments = np.where(tokens == PADDING, -1, 0)
    mask = jax.jit(partial(mask_tokens, rate=0.25, tokenizer=load_tokenizer(DataConfig())))
    masked, labels = map(np.asarray, mask(jax.random.key(0), tokens, segments))
    chosen = labels >= 0
    assert 0.22 < chosen[tokens < 256].mean() < 0.28
    assert not chosen[tokens >= 256].any()
    np.testing.assert_array_equal(masked == MASK, chosen)
    np.testing.assert_array_equal(np.where(chosen, labels, masked), tokens)


def test_positions_are_drawn_as_the_scheme_says(batch):
    def draw(scheme, seed=0):
        built = scheme_of(config_of(scheme))
        return jax.jit(lambda key: draw_positions(built, key, batch, Layout()))(jax.random.key(seed))

    assert draw("rope") == {}
    first, second = (np.asarray(draw({"name": "randomised", "max_length": 64}, seed)["positions"]) for seed in (0, 1))
    assert first.shape == batch.tokens.shape
    assert (first != second).any()
    assert (np.diff(first) > 0).all()
    assert first.max() < 64
    chex.assert_shape(draw("equal-mean")["coordinates"], (*batch.tokens.shape, 1))
    clex = {"name": "clex", "original_length": 8, "max_factor": 4, "steps": 5}
    assert int(draw(clex)["length"]) in (8, 16, 24, 32)


SANDWICH = {"name": "rope", "bias": {"name": "sandwich", "dbar": 16}}


@pytest.mark.parametrize("scheme", ["t5", SANDWICH, {"name": "fire", "threshold": 2}, "rope"], ids=str)
def test_packed_documents_have_the_losses_that_they_have_alone(scheme):
    row = pack([encode(b"one"), encode(b"ab")], 8).batch([0, 0])
    there = row.segment_ids == np.array([[0], [1]])
    alone = row._replace(labels=np.where(there, row.labels, -1), segment_ids=np.where(there, row.segment_ids, -1))
    program, mesh = build(scheme)
    with jax.set_mesh(mesh):
        parameters = random_parameters(program)
        found, wanted = (program.loss(parameters, placed(mesh, rows)) for rows in (row, alone))
    np.testing.assert_allclose(found, 2 * np.array(wanted), rtol=2e-6)


@pytest.mark.parametrize("scheme", ["t5", "rope"])
def test_packed_documents_use_the_kernel_of_a_tpu(scheme):
    model = {"num_layers": 1, "model_dim": 128, "num_heads": 1, "compute_dtype": "bfloat16"}
    program, mesh = build(scheme, model, length=1024, batch_tokens=1024)
    row = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    with jax.set_mesh(mesh):
        traced = program.loss.trace(program.abstract.parameters, Batch(row, row, row, row))
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_random_features_are_redrawn_every_so_many_steps(batch):
    program, mesh = build({"name": "performer", "num_features": 6}, redraw_every=2)
    with jax.set_mesh(mesh):
        state, found = begin(program, random_parameters(program)), []
        for _ in range(4):
            found.append(np.asarray(state.parameters["stacks"][0][0]["attention"]["learned"]["linear"]["projection"]))
            state, metrics = program.update(program.given, state, placed(mesh, batch))
    assert np.isfinite(metrics.loss)
    same = [np.array_equal(a, b) for a, b in itertools.pairwise(found)]
    assert same == [True, True, False]  # the third update, of step 2, drew new features
    assert np.abs(found[-1][0] - found[-1][1]).max() > 0.1, "every layer has features of its own"


def assert_same_training(found, wanted):
    """Compares two pairs of final parameters and losses."""
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    chex.assert_trees_all_close(found[0], wanted[0], atol=2e-4)


def test_eight_devices_give_the_loss_of_one(batch, first, on_one_device):
    program, mesh = build(mesh={"data": 8})
    initial = program.initialize(program.given.seed)
    copied = jax.tree.map(jnp.copy, initial)  # NumPy's view of an array would keep the update from reusing its memory
    chex.assert_trees_all_equal(copied, begin(program, first))
    assert jax.tree.map(float, copied.guard) == (0, 0, 0)
    state, losses = run(program, mesh, batch, initial)
    assert_same_training((state.parameters, losses), on_one_device)
    assert losses[-1] < losses[0]
    chex.assert_trees_all_equal_shapes_and_dtypes(state, program.abstract)
    assert all(leaf.sharding.num_devices == 8 for leaf in jax.tree.leaves(state))


def test_padding_does_not_matter(batch, first, one_device, on_one_device):
    padding = batch.segment_ids < 0
    assert padding.any()
    other = batch._replace(tokens=np.where(padding, 7, batch.tokens))
    assert run(*one_device, other, begin(one_device[0], first))[1] == on_one_device[1]


def test_bfloat16_keeps_float32_parameters(batch, first, on_one_device):
    program, mesh = build("rope", {"compute_dtype": "bfloat16"})
    state, losses = run(program, mesh, batch, begin(program, first))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.parameters)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(losses, on_one_device[1], rtol=2e-2)
    assert losses != on_one_device[1]


REMAT = {"num_layers": 1, "remat": "full", "implementation": "blockwise"}


@pytest.mark.parametrize(
    ("model", "train"), [({}, {}), (REMAT, {"accumulate": 4, "loss_chunks": 4})], ids=["whole", "parts"]
)
def test_a_step_in_bfloat16_counts_every_row(model, train):
    """Equal rows have equal gradients. A sum in bfloat16 would stop growing after 256 of them."""
    scheme = {"name": "t5", "num_buckets": 4, "max_distance": 6, "norm": {"name": "qk-norm"}}
    narrow = {"num_heads": 4, "num_kv_heads": 2, "compute_dtype": "bfloat16"}
    program, mesh = build(scheme, narrow | model, batch_tokens=512 * 8, clip_norm=1e9, **train)
    parameters, gradients = random_parameters(program), []
    tokens = np.tile(np.random.default_rng(0).integers(0, 4, 8, np.int32), (512, 1))
    for labelled in (1, 512):
        labels = np.where(np.arange(512)[:, None] < labelled, tokens * 7 % 5, -1).astype(np.int32)
        rows = Batch(tokens, np.tile(np.arange(8, dtype=np.int32), (512, 1)), np.zeros_like(tokens), labels)
        with jax.set_mesh(mesh):
            state, _ = program.update(program.given, begin(program, parameters), placed(mesh, rows))
        gradients.append(jax.tree.leaves(optax.tree_utils.tree_get(state.optimizer, "mu")))
    for wanted, found in zip(*gradients, strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted)


def test_masked_token_training_learns_and_draws_new_masks_at_each_step(batch, first):
    program, mesh = build("rope", {"causal": False})
    _, losses = run(program, mesh, batch, begin(program, first), steps=20)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3
    assert len(set(losses)) == 20


def test_remat_unrolled_layers_and_a_loss_in_chunks_change_no_loss(batch, first, on_one_device):
    program, mesh = build("rope", {"remat": "full", "scan_layers": False}, loss_chunks=5)
    state, losses = run(program, mesh, batch, begin(program, first))
    assert_same_training((state.parameters, losses), on_one_device)


IN_PARTS = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "accumulate": 2, "loss_chunks": 2}
IN_A_RING = {"mesh": {"replica": 2, "data": 1, "context": 2, "tensor": 2}, "context": {"strategy": "ring"}}
EVERYTHING = {
    "norm": {"kind": "layer", "bias": True},
    "residual": {"norm": "both", "parallel": True, "scale": 0.5},
    "activation": "geglu-exact",
    "biases": ["qkv", "output", "mlp", "head"],
    "embedding_norm": True,
    "query_scale": 0.5,
    "logit_scale": 0.5,
    "attention_softcap": 4.0,
    "logit_softcap": 3.0,
}
RMS = {
    "num_kv_heads": 1,
    "projection_norm": True,
    "norm": {"unit_offset": True},
    "residual": {"norm": "after"},
    "embedding_scale": 1.0,
}
"""With one key head, which attention repeats over the two devices along `tensor`."""


@pytest.mark.parametrize(
    ("model", "remat", "train"),
    [
        (EVERYTHING, "full", IN_PARTS),
        (RMS, "none", IN_A_RING),
        pytest.param(RMS, "full", IN_A_RING | {"loss_chunks": 2}, marks=pytest.mark.wide),
    ],
    ids=["layer norm in parts", "rms norm in a ring", "rms norm in a ring and chunks"],
)
def test_meshes_remat_and_chunks_change_no_loss_of_a_model_with_every_option(batch, model, remat, train):
    program, mesh = build("rope", model)
    parameters = random_parameters(program)
    state, losses = run(program, mesh, batch, begin(program, parameters))
    alone = jax.tree.map(np.asarray, state.parameters), losses
    program, mesh = build("rope", {**model, "remat": remat}, **train)
    state, losses = run(program, mesh, batch, begin(program, parameters))
    assert_same_training((state.parameters, losses), alone)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), alone[0], parameters)
    assert all(jax.tree.leaves(moved)), "every parameter has a gradient"


LATENTS = {"rank": 12, "rotated": 8, "unrotated": 4, "value": 6, "query_rank": 10}


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_latent_attention_trains_on_a_mesh_as_on_one_device(batch, optimizer):
    found = []
    for sizes in ({"data": 1}, {"data": 1, "fsdp": 2, "tensor": 2}):
        program, mesh = build("rope", {"latent": LATENTS}, optimizer=optimizer, mesh=sizes)
        state, losses = run(program, mesh, batch, begin(program, random_parameters(program)), steps=10)
        found.append((jax.device_get(state.parameters), losses))
    assert_same_training(*found)
    assert losses[-1] < losses[0]


DELTA = {"num_heads": 4, "key_dim": 4, "num_key_heads": 2}
GATED = {"num_layers": 4, "attention_gate": "elementwise"}


@pytest.mark.parametrize(
    ("scheme", "model", "mesh"),
    [
        (DELTA | {"name": "gated-delta"}, {}, {"data": 2, "tensor": 2}),
        pytest.param(
            DELTA | {"name": "qwen3-next", "share": 0.5},
            GATED | {"remat": "full"},
            {"data": 1, "fsdp": 2, "tensor": 2},
            marks=pytest.mark.wide,
        ),
    ],
    ids=["delta", "delta, attention and a gate"],
)
def test_ten_updates_of_gated_delta_on_four_devices_are_those_of_one(batch, scheme, model, mesh):
    found = []
    for sizes in ({"data": 1}, mesh):
        program, devices = build(scheme, model, mesh=sizes, learning_rate=1e-3)
        state, losses = run(program, devices, batch, begin(program, random_parameters(program)), steps=10)
        found.append((jax.tree.map(np.asarray, state.parameters), losses))
    assert_same_training(*found)


SLICES = {"replica": 2, "data": 1, "fsdp": 4}
SPLIT = {"replica": 2, "data": 1, "fsdp": 2, "context": 2}
EXPERTS = {"remat": "full", "experts": {"count": 4, "per_token": 2, "balance": 0.05, "shared_dim": 8}}


@pytest.mark.parametrize(
    ("scheme", "model", "mesh"),
    [
        ({"name": "randomised", "max_length": 64}, {}, SLICES),
        ("t5", EXPERTS, SPLIT),
        pytest.param("equal-mean", {"implementation": "dense"}, SLICES, marks=pytest.mark.wide),
        pytest.param("rope", {"causal": False}, {"replica": 8, "data": 1}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_replicas_that_add_up_their_own_parts_give_the_gradient_of_one_device(scheme, model, mesh):
    """First moments, which are a tenth of the gradient."""
    lines = (b"to be, or not to be" * 3, b"that is the question" * 2, b"whether 'tis nobler in the mind to suffer")
    rows, found = pack([encode(line) for line in lines], 8).batch(np.arange(16) % 15), []
    for sizes in ({"data": 1}, mesh):
        train = {"batch_tokens": 128, "accumulate": 2, "clip_norm": 1e9, "mesh": sizes}
        program, devices = build(scheme, model, **train)
        ordered = jax.tree.map(Setup(config_of(scheme, model, **train), devices).placement.layout.apply, rows)
        with jax.set_mesh(devices):
            state, metrics = program.update(
                program.given, begin(program, random_parameters(program)), placed(devices, ordered)
            )
        found.append([metrics.loss, *jax.tree.leaves(optax.tree_utils.tree_get(state.optimizer, "mu"))])
    for wanted, leaf in zip(*found, strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-6 * np.abs(wanted).max(), rtol=0)


def runs(module, computation, times=1):
    """Every instruction of a program, and how often it runs."""
    for line in module.computations[computation]:
        yield times, line
        trips = (module.trips(line) or 1) if line.opcode == "while" else 1
        for name in module.called(line):
            yield from runs(module, name, times * trips)


def test_gradients_go_over_the_replicas_once_a_step():
    """Bytes that a step on virtual devices sums over two slices of four devices, by how often the sum runs."""
    program, mesh = build(mesh=SLICES, accumulate=4, batch_tokens=256)
    rows = jax.ShapeDtypeStruct((32, 8), jnp.int32, sharding=named_sharding(mesh, ("batch", "length")))
    with jax.set_mesh(mesh):
        text = program.update.lower(program.given, program.abstract, Batch(rows, rows, rows, rows)).compile().as_text()
    module, sizes = read_program(text), collections.Counter()
    for times, line in runs(module, module.entry):
        if kind_of(line) in COLLECTIVES and any(len({n // 4 for n in group}) > 1 for group in groups_of(line, 8)):
            sizes[times] += sum(array.bytes for array in line.results)
    held = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(program.abstract.parameters)]
    size = 4 * sum(map(math.prod, held))
    assert size <= sizes[1] <= 1.2 * size
    assert sizes.keys() == {1}, "nothing in a loop"


def build_split(optimizer, **train):
    """The program of an optimizer over a mesh that splits its moments."""
    return build(optimizer=optimizer, mesh={"data": 1, "fsdp": 4, "tensor": 2}, **train)


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw", "bfloat16"), ("muon", "bfloat16"), ("adafactor", "float32")]
)
def test_moments_are_split_like_parameters_and_first_moments_may_be_narrow(optimizer, dtype):
    program, _ = build_split(optimizer, moment_dtype=dtype)
    up = program.abstract.parameters["stacks"][0][0]["mlp"]["up"]
    assert up.sharding.spec == PartitionSpec(None, ("fsdp", "context"), "tensor")
    leaves = jax.tree.leaves(program.abstract.optimizer)
    held = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves)
    assert held < sum(leaf.size for leaf in leaves) / 3
    narrow = sum(leaf.size for leaf in leaves if leaf.dtype == jnp.bfloat16)
    size = sum(leaf.size for leaf in jax.tree.leaves(program.abstract.parameters))
    assert narrow == (size if dtype == "bfloat16" else 0)


def test_muon_learns_over_a_mesh(batch, first):
    program, mesh = build_split("muon", moment_dtype="bfloat16")
    state, losses = run(program, mesh, batch, begin(program, first), steps=8)
    assert losses[-1] < losses[0] - 0.2
    chex.assert_trees_all_equal_shapes_and_dtypes(state, program.abstract)
    for leaf, wanted in zip(*map(jax.tree.leaves, (state, program.abstract)), strict=True):
        assert leaf.sharding == wanted.sharding


def test_only_the_named_parameters_change(batch, first):
    program, mesh = build(trainable=["*/attention/[qk]"])
    after = run(program, mesh, batch, begin(program, first))[0].parameters
    unchanged = jax.tree.map(np.array_equal, first, after)
    attention = unchanged["stacks"][0][0]["attention"]
    assert [attention[name] for name in "qkvo"] == [False, False, True, True]
    assert unchanged["embed"]
    assert unchanged["stacks"][0][0]["mlp"]["up"]
    refused("train.trainable", lambda: build(trainable=["keys"]))


@pytest.fixture(scope="module")
def guarded():
    """A program with every guard, and a z-loss."""
    return build(stop_after_skips=2, spike_factor=1.5, z_loss=0.1)


def test_an_update_that_is_not_finite_is_left_out_and_counted(batch, first, guarded):
    program, mesh = guarded
    poisoned = {**first, "norm": {"gain": first["norm"]["gain"] * np.nan}}
    state = begin(program, poisoned)
    kept = jax.tree.map(np.asarray, (state.parameters, state.optimizer))
    with jax.set_mesh(mesh):
        for expected in (1, 2, 3):
            state, metrics = program.update(program.given, state, placed(mesh, batch))
            assert (int(metrics.skipped), int(metrics.skipped_in_row), int(state.step)) == (expected,) * 3
            assert float(metrics.learning_rate) == pytest.approx(0.005), "a skipped update does not count"
    chex.assert_trees_all_equal((state.parameters, state.optimizer), kept)


def with_norm(state, norm):
    """The state with `norm` as its running mean of gradient norms."""
    mean = jax.device_put(np.float32(norm), state.guard.norm.sharding)
    return dataclasses.replace(state, guard=state.guard._replace(norm=mean))


def test_spikes_are_left_out_by_the_running_mean_of_norms(batch, first, guarded):
    program, mesh = guarded
    with jax.set_mesh(mesh):
        state, metrics = program.update(program.given, with_norm(begin(program, first), 1e-3), placed(mesh, batch))
        norm = float(metrics.gradient_norm)
        assert norm > 1.5e-3
        assert int(metrics.skipped) == 1
        chex.assert_trees_all_equal(state.parameters, first)
        state, after = program.update(program.given, with_norm(state, 0.8 * norm), placed(mesh, batch))
    assert (int(after.skipped), int(after.skipped_in_row)) == (1, 0)
    np.testing.assert_allclose(state.guard.norm, 0.95 * 0.8 * norm + 0.05 * norm, rtol=1e-6)


def test_the_objective_is_the_mean_loss_and_a_share_of_the_z_loss(batch, first, guarded):
    """The loss that is reported is without the z-loss."""
    program, mesh = guarded
    with jax.set_mesh(mesh):
        arrays = placed(mesh, batch)

        def objective(parameters):
            losses = program.loss(parameters, arrays)
            return (losses.nll + 0.1 * losses.z) / losses.count, losses.nll / losses.count

        gradients, loss = jax.jit(jax.grad(objective, has_aux=True))(first)
        _, metrics = program.update(program.given, begin(program, first), arrays)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(metrics.gradient_norm, optax.tree.norm(gradients), rtol=1e-5)


def test_a_step_of_131072_tokens_holds_no_square():
    """One layer, compiled but not run: no array of length x length."""
    length = 131072
    program, mesh = build("rope", {"num_layers": 1}, length=length, batch_tokens=length, loss_chunks=10)
    rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with jax.set_mesh(mesh):
        compiled = program.update.lower(program.given, program.abstract, Batch(rows, rows, rows, rows)).compile()
    # 1024 float32 numbers a token. A square with even one bit a pair would take four times as much.
    assert compiled.memory_analysis().temp_size_in_bytes < length * 4096
