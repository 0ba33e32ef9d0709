"""Mixtures of experts in training: the balance loss, the moved corrections, the loads, and the axis of experts."""

import jax
import numpy as np
import pytest
from documents import encode, pack
from updates import begin, build, config_of, placed, random_parameters

from posjax.nn.experts import Load, balance_loss
from posjax.nn.specs import Experts
from train.data.packing import Batch
from train.loop.fit import expert_rows
from train.model.build import Setup
from train.model.sharding import named_sharding
from train.plan.hlo import parse as read_program
from train.plan.network import axes_of, groups_of, kind_of

SIGMOID = {"score": "sigmoid", "correction": True, "groups": 2, "groups_kept": 1, "group_best": 2, "scale": 2.5}
MIXTURE = {"count": 8, "per_token": 2, "router": SIGMOID, "shared_dim": 12, "dense": [0], "dense_dim": 20}
MODEL = {"num_layers": 3, "num_heads": 4, "remat": "attention", "experts": MIXTURE | {"balance": 0.02}}
MESH = {"data": 1, "expert": 2, "tensor": 2}
LINES = (b"to be, or not to be" * 3, b"that is the question" * 2, b"whether 'tis nobler in the mind to suffer")


def ten_updates(sizes, **train):
    """The last parameters, the losses and the loads of ten updates over a mesh."""
    train = {"mesh": sizes, "correction_rate": 0.02} | train
    program, mesh = build("rope", MODEL, **train)
    rows, _ = pack([encode(line) for line in LINES], 8).batch(np.arange(8)), []
    state, losses, loads = begin(program, random_parameters(program)), [], []
    with jax.set_mesh(mesh):
        for _ in range(10):
            state, metrics = program.update(program.given, state, placed(mesh, rows))
            losses.append(float(metrics.loss))
            loads.append(jax.device_get(metrics.loads))
    return jax.device_get(state.parameters), losses, loads


@pytest.fixture(scope="module")
def one_device():
    return ten_updates({"data": 1})


def test_ten_updates_over_the_axis_of_experts_are_those_of_one_device(one_device):
    parameters, losses, loads = ten_updates(MESH)
    wanted, wanted_losses, wanted_loads = one_device
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), parameters, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), loads, wanted_loads)


def test_corrections_move_against_the_loads_of_every_layer(one_device):
    """Each update moves them by its rate, up where an expert has less than the mean load."""
    parameters, _, loads = one_device
    program, _ = build("rope", MODEL)
    before = random_parameters(program)["stacks"][1][0]["mlp"]["correction"]
    tokens = np.stack([each[1][0].tokens for each in loads])
    assert loads[0][0][0] is None
    moved = 0.02 * np.sign(tokens.mean(-1, keepdims=True) - tokens).sum(0)
    found = parameters["stacks"][1][0]["mlp"]["correction"]
    np.testing.assert_allclose(found, before + moved, atol=1e-6)
    row = expert_rows(loads[0])
    np.testing.assert_array_equal(row["expert_tokens"], tokens[0])
    assert row["expert_load_max"] == pytest.approx((tokens[0].max(-1) / tokens[0].mean(-1)).max())


@pytest.mark.wide
def test_tokens_go_to_their_experts_over_the_axis_of_experts_alone():
    """In the compiled step, whose collectives ``plan`` counts: numbers of experts, rows there and back, and again.

    Weights go with the rows.
    """
    program, mesh = build("rope", MODEL, mesh={"data": 1, "fsdp": 2, "expert": 2})
    rows = jax.ShapeDtypeStruct((8, 8), np.int32, sharding=named_sharding(mesh, ("batch", "length")))
    with jax.set_mesh(mesh):
        text = program.update.lower(program.given, program.abstract, Batch(rows, rows, rows, rows)).compile().as_text()
    lines = [line for lines in read_program(text).computations.values() for line in lines]
    exchanges = [line for line in lines if kind_of(line) == "all-to-all"]
    assert {axes_of(dict(mesh.shape), groups_of(line, 4)) for line in exchanges} == {"expert"}
    room = int(1.5 * 2 * 16) // 2  # rows of a device for each, of two experts for each of its 16 tokens
    sizes = sorted(sum(array.bytes for array in line.results) for line in exchanges)
    assert sizes == [2 * room * 4] * 5 + [2 * room * 16 * 4] * 5


def test_frozen_corrections_stay():
    parameters, _, _ = ten_updates({"data": 1}, trainable=["*/attention/*"])
    program, _ = build("rope", MODEL)
    wanted = random_parameters(program)["stacks"][1][0]["mlp"]["correction"]
    np.testing.assert_array_equal(parameters["stacks"][1][0]["mlp"]["correction"], wanted)


def test_the_balance_loss_is_that_of_transformers():
    """Over the tokens of all layers together, without padding."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(3, 2, 7, 5)).astype(np.float32)  # layers, rows, tokens, experts
    mask = np.arange(7) < np.array([[5], [7]])
    theirs = tuple(torch.tensor(layer.reshape(-1, 5)) for layer in logits)
    wanted = modeling.load_balancing_loss_func(theirs, 5, 2, torch.tensor(mask.astype(int)))
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    taken = np.argsort(np.argsort(-logits, -1), -1) < 2
    of_layers = [Load(*((part[n] * mask[..., None]).sum((0, 1)) for part in (taken, scores))) for n in range(3)]
    loads = ((of_layers[0], None), (Load(*map(np.stack, zip(*of_layers[1:], strict=True))),))
    np.testing.assert_allclose(balance_loss(Experts(5, 2), loads), wanted, rtol=1e-5)


def test_the_weight_of_the_balance_loss_is_that_of_the_release_unless_it_is_given():
    for given, wanted in ((None, 0.02), (0.5, 0.5), (0.0, 0.0)):
        program_config = {"balance_loss": given} if given is not None else {}
        assert Setup(config_of("rope", MODEL, **program_config)).balance_weight == wanted
