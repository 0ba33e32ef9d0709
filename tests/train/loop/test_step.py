"""One update: its loss, its optimizer, and how it changes the state."""

import dataclasses
import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from documents import EOS, MASK, encode, pack
from jax.sharding import PartitionSpec

from posjax.layout import Layout
from posjax.scheme import Layers
from train.config import DataConfig, TrainConfig, parse
from train.data.packing import Batch
from train.data.tokenizer import PADDING, load_tokenizer
from train.loop.optimizer import learning_rate, make_optimizer
from train.loop.step import build_program, draw_positions, mask_tokens
from train.model.mesh import make_mesh
from train.model.sharding import global_batch

SMALL = {
    "model": {"num_layers": 2, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
    "train": {"length": 8, "batch_tokens": 64, "steps": 20, "warmup_steps": 2, "learning_rate": 0.01},
}


def small(**model):
    return parse({**SMALL, "model": {**SMALL["model"], **model}})


def changed(model=None, **train):
    return parse({**SMALL, "model": {**SMALL["model"], **(model or {})}, "train": {**SMALL["train"], **train}})


def build(config, devices):
    """The program of a config over a number of devices, and their mesh."""
    mesh = make_mesh(parse({"train": {"mesh": {"data": devices}}}).train.mesh, config.train.rows)
    return build_program(config, mesh), mesh


def build_over_its_mesh(config):
    mesh = make_mesh(config.train.mesh, config.train.rows // config.train.accumulate)
    return build_program(config, mesh), mesh


def placed(mesh, batch):
    """The whole batch, sharded over the mesh."""
    return global_batch(mesh, batch, len(batch.tokens), slice(0, len(batch.tokens)))


def begin(program, parameters):
    """The first state of a program, with given parameters: compiling their initialization takes as long as an update.

    The parameters are copied, because an update reuses the memory of its arguments.
    """
    shapes = program.abstract.parameters
    return program.begin(jax.tree.map(lambda x, leaf: jax.device_put(x.copy(), leaf.sharding), parameters, shapes))


def random_parameters(program):
    """Normal numbers, and gains around 1, for tests that do not need the program's own initialization."""
    random = np.random.default_rng(0)

    def draw(path, leaf):
        numbers = random.normal(0, 0.2, leaf.shape) + ("gain" in jax.tree_util.keystr(path))
        return numbers.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, program.abstract.parameters)


def run(program, mesh, batch, state, steps=3):
    """The last state and all losses."""
    losses = []
    with jax.set_mesh(mesh):
        for _ in range(steps):
            before = jax.tree.leaves(state.parameters)
            state, metrics = program.update(state, placed(mesh, batch))
            assert all(leaf.is_deleted() for leaf in before), "the update takes the buffers it is given"
            losses.append(float(metrics.loss))
    return state, losses


@pytest.fixture(scope="module")
def batch() -> Batch:
    rows = pack([encode(b"to be, or not to be"), encode(b"that is the question"), encode(b"whether nobler")], 8)
    return rows.batch(np.arange(8))


@pytest.fixture(scope="module")
def one_device():
    return build(small(), 1)


@pytest.fixture(scope="module")
def first(one_device):
    """The parameters that most tests begin with."""
    return jax.tree.map(np.array, one_device[0].initialize().parameters)


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
    keys = [jax.random.key(seed) for seed in (0, 1)]
    assert draw_positions(small(), keys[0], batch, Layout()) == {}
    randomised = parse({**SMALL, "scheme": {"name": "randomised", "max_length": 64}})
    draw = jax.jit(lambda key: draw_positions(randomised, key, batch, Layout())["positions"])
    first, second = (np.asarray(draw(key)) for key in keys)
    chex.assert_shape([first, second], batch.tokens.shape)
    assert (first != second).any()
    assert (np.diff(first) > 0).all()
    assert first.max() < 64
    equal_mean = parse({**SMALL, "scheme": "equal-mean"})
    drawn = jax.eval_shape(lambda key: draw_positions(equal_mean, key, batch, Layout()), keys[0])
    chex.assert_shape(drawn["coordinates"], (*batch.tokens.shape, 1))
    clex = {"name": "clex", "original_length": 8, "max_factor": 4, "steps": 5}
    assert int(draw_positions(parse({**SMALL, "scheme": clex}), keys[0], batch, Layout())["length"]) in (8, 16, 24, 32)


SANDWICH = {"name": "rope", "bias": {"name": "sandwich", "dbar": 16}}


@pytest.mark.parametrize("scheme", ["t5", "kerple-log", SANDWICH, {"name": "fire", "threshold": 2}], ids=str)
def test_biases_are_those_of_positions_in_each_document(scheme, batch, monkeypatch):
    """Positions count along the whole row if a shift changes nothing (not with FIRE's bias); the loss is the same."""
    config = parse({**SMALL, "scheme": scheme})

    def loss():
        program, mesh = build(config, 1)
        with jax.set_mesh(mesh):
            return float(program.loss(random_parameters(program), placed(mesh, batch)).nll)

    found = loss()
    monkeypatch.setattr(Layers, "counts_in_row", False)
    assert found == pytest.approx(loss(), rel=1e-6)


@pytest.mark.parametrize("scheme", ["t5", "kerple-log", SANDWICH, "alibi", "rope"], ids=str)
def test_packed_documents_use_the_kernel_of_a_tpu(scheme):
    shape = {"num_layers": 1, "model_dim": 128, "num_heads": 1, "mlp_dim": 8, "compute_dtype": "bfloat16"}
    config = parse({"model": shape, "train": {"length": 1024, "batch_tokens": 1024}, "scheme": scheme})
    program, mesh = build(config, 1)
    row = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    with jax.set_mesh(mesh):
        traced = program.loss.trace(program.abstract.parameters, Batch(row, row, row, row))
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_random_features_are_redrawn_every_so_many_steps(batch):
    train = {**SMALL["train"], "redraw_every": 2}
    config = parse({**SMALL, "train": train, "scheme": {"name": "performer", "num_features": 6}})
    program, mesh = build(config, 1)
    with jax.set_mesh(mesh):
        state, found = begin(program, random_parameters(program)), []
        for _ in range(4):
            found.append(np.asarray(state.parameters["stacks"][0][0]["attention"]["learned"]["linear"]["projection"]))
            state, metrics = program.update(state, placed(mesh, batch))
    assert np.isfinite(metrics.loss)
    same = [np.array_equal(a, b) for a, b in itertools.pairwise(found)]
    assert same == [True, True, False]  # the third update, of step 2, drew new features
    assert np.abs(found[-1][0] - found[-1][1]).max() > 0.1, "every layer has features of its own"


@pytest.mark.parametrize("warmup", [0, 10])
def test_learning_rate_is_a_line_and_then_half_a_cosine(warmup):
    config = TrainConfig(steps=110, warmup_steps=warmup, learning_rate=2.0, final_learning_rate=0.1)
    rate = learning_rate(config)
    cosine = [0.2 + 1.8 * (1 + np.cos(np.pi * step / (110 - warmup))) / 2 for step in range(111 - warmup)]
    expected = [*(0.2 * step for step in range(warmup)), *cosine][1:]
    np.testing.assert_allclose([rate(step) for step in range(110)], expected, rtol=1e-5)
    assert rate(0) > 0
    np.testing.assert_allclose(rate(109), 0.2, rtol=1e-6)


def test_factors_of_one_change_nothing_in_a_step(batch, first, one_device, on_one_device):
    """A second factor keeps the embedding almost constant."""
    factors = {"*/attention/*": 1.0, "embed": 1e-9}
    program, mesh = build(changed(learning_rate_factors=factors), 1)
    state, losses = run(program, mesh, batch, begin(program, first))
    assert losses[0] == on_one_device[1][0]
    chex.assert_trees_all_close(state.parameters["embed"], first["embed"], atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_in_bfloat16_take_half_the_memory_over_a_mesh(batch, first, optimizer):
    program, mesh = build_split(optimizer, moment_dtype="bfloat16")
    state, losses = run(program, mesh, batch, begin(program, first), steps=2)
    assert losses[1] < losses[0]
    chex.assert_trees_all_equal_shapes_and_dtypes(state, program.abstract)
    narrow = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.dtype == jnp.bfloat16]
    assert sum(leaf.size for leaf in narrow) == sum(leaf.size for leaf in jax.tree.leaves(state.parameters))


def test_gradients_are_clipped_to_their_global_norm():
    """The first moments of AdamW are then ``(1 - beta1)`` times gradients with a norm of 1."""
    axes = {"w": ("layers", "embed", "mlp"), "gain": ("layers", "embed")}
    parameters = {"w": np.ones((3, 2, 4), np.float32), "gain": np.ones((3, 2), np.float32)}
    optimizer = make_optimizer(TrainConfig(clip_norm=1.0), axes)
    gradients = jax.tree.map(lambda x: 100 * x, parameters)
    _, state = jax.jit(optimizer.update)(gradients, optimizer.init(parameters), parameters)
    moments = jax.tree.leaves(optax.tree_utils.tree_get(state, "mu"))
    np.testing.assert_allclose(np.sqrt(sum(np.square(m).sum() for m in moments)), 0.1, rtol=1e-5)


def assert_same_training(found, wanted):
    """Compares two pairs of final parameters and losses."""
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    chex.assert_trees_all_close(found[0], wanted[0], atol=2e-4)


def test_eight_devices_give_the_loss_of_one(batch, first, on_one_device):
    program, mesh = build(small(), 8)
    initial = program.initialize()
    copied = jax.tree.map(jnp.copy, initial)  # NumPy's view of an array would keep the update from reusing its memory
    chex.assert_trees_all_equal(copied, begin(program, first))
    assert jax.tree.map(float, copied.guard) == (0, 0, 0)
    state, losses = run(program, mesh, batch, initial)
    assert_same_training((state.parameters, losses), on_one_device)
    assert losses[-1] < losses[0]
    chex.assert_trees_all_equal_shapes_and_dtypes(state, program.abstract)
    assert all(leaf.sharding.num_devices == 8 for leaf in jax.tree.leaves(state))


def test_batches_are_split_over_the_data_axis(batch):
    arrays = placed(make_mesh(TrainConfig().mesh, 8), batch)
    chex.assert_trees_all_equal(arrays, batch)
    assert all(array.sharding.spec == PartitionSpec(("replica", "data", "fsdp"), "context") for array in arrays)
    assert all(array.addressable_shards[0].data.shape == (1, 8) for array in arrays)


def test_padding_does_not_matter(batch, first, one_device, on_one_device):
    padding = batch.segment_ids < 0
    assert padding.any()
    other = batch._replace(tokens=np.where(padding, 7, batch.tokens))
    assert run(*one_device, other, begin(one_device[0], first))[1] == on_one_device[1]


def test_bfloat16_keeps_float32_parameters(batch, first, on_one_device):
    program, mesh = build(small(compute_dtype="bfloat16"), 1)
    state, losses = run(program, mesh, batch, begin(program, first))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.parameters)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(losses, on_one_device[1], rtol=2e-2)
    assert losses != on_one_device[1]


@pytest.mark.parametrize(
    "train", [{"loss_chunks": 5}, *(pytest.param(train, marks=pytest.mark.wide) for train in ({}, {"accumulate": 4}))]
)
def test_remat_and_unrolled_layers_change_no_loss(batch, first, on_one_device, train):
    """Together with a loss in chunks; in the wide grid also without it, and with accumulation."""
    program, mesh = build(changed({"remat": "full", "scan_layers": False}, **train), 1)
    state, losses = run(program, mesh, batch, begin(program, first))
    assert_same_training((state.parameters, losses), on_one_device)


def test_masked_token_training_learns_and_draws_new_masks_at_each_step(batch, first):
    program, mesh = build(small(causal=False), 1)
    _, losses = run(program, mesh, batch, begin(program, first), steps=20)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3
    assert len(set(losses)) == 20


MESHES = [
    {"accumulate": 2, "mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "loss_chunks": 2},
    {"mesh": {"replica": 2, "data": 1, "fsdp": 2, "context": 2}, "context": {"strategy": "ring"}},
    {"accumulate": 4, "mesh": {"data": 2}},
    {"loss_chunks": 5},
    {"mesh": {"replica": 2, "data": 1, "fsdp": 4}},
    {"mesh": {"data": 2, "context": 4}},
    {"mesh": {"data": 2, "context": 2, "tensor": 2}, "context": {"strategy": "ring"}},
]
"""One thing at a time, or two; the models with every option below take them all."""


@pytest.mark.wide
@pytest.mark.parametrize("train", MESHES, ids=str)
def test_parts_chunks_and_meshes_change_no_loss(batch, first, on_one_device, train):
    program, mesh = build_over_its_mesh(changed(**train))
    state, losses = run(program, mesh, batch, begin(program, first))
    assert_same_training((state.parameters, losses), on_one_device)


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


def alone_and_over_a_mesh(batch, model, remat, **train):
    """Final parameters and losses on one device and over a mesh, and the parameters that both start from."""
    program, mesh = build(small(**model), 1)
    parameters = random_parameters(program)
    alone = run(program, mesh, batch, begin(program, parameters))
    program, mesh = build_over_its_mesh(changed({**model, "remat": remat}, **train))
    spread = run(program, mesh, batch, begin(program, parameters))
    return *((jax.tree.map(np.asarray, state.parameters), losses) for state, losses in (alone, spread)), parameters


IN_PARTS = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "accumulate": 2, "loss_chunks": 2}
IN_CHUNKS = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "loss_chunks": 2}
IN_A_RING = {
    "mesh": {"replica": 2, "data": 1, "context": 2, "tensor": 2},
    "context": {"strategy": "ring"},
}


@pytest.mark.parametrize(
    ("model", "remat", "train"),
    [
        (EVERYTHING, "full", IN_PARTS),
        (RMS, "none", IN_A_RING),
        pytest.param(EVERYTHING, "full", IN_CHUNKS, marks=pytest.mark.wide),
        pytest.param(RMS, "full", IN_CHUNKS, marks=pytest.mark.wide),
        pytest.param(RMS, "full", IN_A_RING | {"loss_chunks": 2}, marks=pytest.mark.wide),
    ],
    ids=["layer norm in parts", "rms norm in a ring", "layer norm", "rms norm", "rms norm in a ring and chunks"],
)
def test_meshes_remat_and_chunks_change_no_loss_of_a_model_with_every_option(batch, model, remat, train):
    alone, spread, before = alone_and_over_a_mesh(batch, model, remat, **train)
    assert_same_training(spread, alone)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), spread[0], before)
    assert all(jax.tree.leaves(moved)), "every parameter has a gradient"


@pytest.mark.wide
def test_a_key_head_that_devices_share_changes_no_loss(batch):
    """One key head over two devices along `tensor`, and nothing else."""
    mesh = {"data": 2, "tensor": 2}
    alone, spread, _ = alone_and_over_a_mesh(batch, {"num_kv_heads": 1}, "none", mesh=mesh)
    assert_same_training(spread, alone)


def build_split(optimizer, **train):
    """The program of an optimizer over a mesh that splits its moments."""
    return build_over_its_mesh(changed(optimizer=optimizer, mesh={"data": 1, "fsdp": 4, "tensor": 2}, **train))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_moments_are_split_like_parameters(optimizer):
    program, _ = build_split(optimizer)
    up = program.abstract.parameters["stacks"][0][0]["mlp"]["up"]
    assert up.sharding.spec == PartitionSpec(None, ("fsdp", "context"), "tensor")
    leaves = jax.tree.leaves(program.abstract.optimizer)
    held = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves)
    assert held < sum(leaf.size for leaf in leaves) / 3


@pytest.fixture(scope="module")
def muon():
    """Muon at its full rate from the first update, without weight decay."""
    return build_split("muon", warmup_steps=0, weight_decay=0.0)


@pytest.mark.parametrize(
    "optimizer", ["muon", "adafactor", *(pytest.param(name, marks=pytest.mark.wide) for name in ("adamw", "warm muon"))]
)
def test_optimizers_learn_over_a_mesh(batch, first, muon, optimizer):
    program, mesh = muon if optimizer == "muon" else build_split(optimizer.removeprefix("warm "))
    state, losses = run(program, mesh, batch, begin(program, first), steps=8)
    assert losses[-1] < losses[0] - 0.2
    chex.assert_trees_all_equal_shapes_and_dtypes(state, program.abstract)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == [
        leaf.sharding for leaf in jax.tree.leaves(program.abstract)
    ]


def test_muon_orthogonalizes_the_matrix_of_each_layer_alone(batch, first, one_device, muon):
    """In each layer, the singular values of an update are of similar size with Muon, and not with AdamW."""
    spread = {}
    for name, (program, mesh) in {"adamw": one_device, "muon": muon}.items():
        state, _ = run(program, mesh, batch, begin(program, first), steps=1)
        after, before = (tree["stacks"][0][0]["attention"]["o"] for tree in (state.parameters, first))
        moved = np.asarray(after) - before
        sizes = [np.linalg.svd(layer.reshape(16, 16), compute_uv=False) for layer in moved]
        spread[name] = [size[len(size) // 2] / size[0] for size in sizes]
    assert min(spread["muon"]) > 0.6 > max(spread["adamw"])


def test_only_the_named_parameters_change(batch, first):
    program, mesh = build(changed(trainable=["*/attention/[qk]"]), 1)
    after = run(program, mesh, batch, begin(program, first))[0].parameters
    unchanged = jax.tree.map(np.array_equal, first, after)
    attention = unchanged["stacks"][0][0]["attention"]
    assert [attention[name] for name in "qkvo"] == [False, False, True, True]
    assert unchanged["embed"]
    assert unchanged["stacks"][0][0]["mlp"]["up"]
    with pytest.raises(ValueError, match=r"train.trainable: 'keys' names no parameter; .* embed, .*attention/k"):
        build(changed(trainable=["keys"]), 1)


@pytest.fixture(scope="module")
def guarded():
    """A program with every guard, and a z-loss."""
    return build(changed(stop_after_skips=2, spike_factor=1.5, z_loss=0.1), 1)


def test_an_update_that_is_not_finite_is_left_out_and_counted(batch, first, guarded):
    program, mesh = guarded
    poisoned = {**first, "norm": {"gain": first["norm"]["gain"] * np.nan}}
    state = begin(program, poisoned)
    kept = jax.tree.map(np.asarray, (state.parameters, state.optimizer))
    with jax.set_mesh(mesh):
        for expected in (1, 2, 3):
            state, metrics = program.update(state, placed(mesh, batch))
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
        state, metrics = program.update(with_norm(begin(program, first), 1e-3), placed(mesh, batch))
        norm = float(metrics.gradient_norm)
        assert norm > 1.5e-3
        assert int(metrics.skipped) == 1
        chex.assert_trees_all_equal(state.parameters, first)
        state, after = program.update(with_norm(state, 0.8 * norm), placed(mesh, batch))
    assert (int(after.skipped), int(after.skipped_in_row)) == (1, 0)
    np.testing.assert_allclose(state.guard.norm, 0.95 * 0.8 * norm + 0.05 * norm, rtol=1e-6)


def test_z_loss_moves_the_gradient_and_not_the_reported_loss(batch, first, one_device, guarded):
    losses, norms = [], []
    for program, mesh in (one_device, guarded):
        with jax.set_mesh(mesh):
            _, metrics = program.update(begin(program, first), placed(mesh, batch))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.gradient_norm))
    assert losses[0] == losses[1]
    assert abs(norms[1] - norms[0]) > 1e-3


def test_a_step_of_131072_tokens_holds_no_square():
    """One layer, compiled but not run: no array of length x length."""
    length = 131072
    config = changed({"num_layers": 1}, length=length, batch_tokens=length, mesh={"data": 1}, loss_chunks=10)
    mesh = make_mesh(config.train.mesh, 1)
    program = build_program(config, mesh)
    rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with jax.set_mesh(mesh):
        compiled = program.update.lower(program.abstract, Batch(rows, rows, rows, rows)).compile()
    # 1024 float32 numbers a token. A square with even one bit a pair would take four times as much.
    assert compiled.memory_analysis().temp_size_in_bytes < length * 4096
