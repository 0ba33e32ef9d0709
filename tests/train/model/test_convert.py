"""The weights that one stage takes over from another."""

import jax
import numpy as np
import pytest
from refusals import refused

from posjax.nn.huggingface.load import named_parameters
from train.config import parse
from train.model.build import Setup
from train.model.convert import check_continues, convert

MODEL = {"num_layers": 2, "model_dim": 8, "num_heads": 1, "mlp_dim": 8, "vocab_size": 260}

INTERLEAVED = {"name": "rope", "features": {"name": "rotary", "pairing": "interleaved"}}
NEIGHBOURS = {"name": "rope", "features": {"name": "coca", "variant": "slack", "pairing": "interleaved"}}
HALF = {"name": "rope", "frequencies": {"name": "default", "partial_rotary_factor": 0.5}}


def config(scheme, **model):
    return parse({"model": MODEL | model, "scheme": scheme})


@pytest.mark.parametrize(
    ("before", "after", "narrowed"),
    [("rope", "coca-strict", "k"), ("rope", "coca-tied", "kq"), (INTERLEAVED, NEIGHBOURS, "k")],
    ids=["strict", "tied", "interleaved"],
)
def test_rope_becomes_coca_by_the_mean_of_the_two_channels_of_each_plane(before, after, narrowed):
    before, after = config(before), config(after)
    shapes, wanted = (Setup(each).shapes for each in (before, after))
    random = np.random.default_rng(0)
    old = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    new = convert(Setup(before), Setup(after), old)
    for (name, found), (_, given), leaf in zip(
        *map(named_parameters, (new, old)), jax.tree.leaves(wanted), strict=True
    ):
        assert found.shape == leaf.shape
        if name in [f"stacks/0/0/attention/{projection}" for projection in narrowed]:
            pairs = (given[..., 0::2], given[..., 1::2]) if after.scheme.options else (given[..., :4], given[..., 4:])
            given = (pairs[0] + pairs[1]) / 2
        np.testing.assert_allclose(found, given, rtol=1e-6)


REFUSED = [("alibi", "coca-slack"), ("coca-slack", "rope"), ("coca-slack", "coca-tied"), ("rope", "t5"), ("t5", "rope")]


@pytest.mark.parametrize(("before", "after"), [*REFUSED, (INTERLEAVED, "coca-slack"), (HALF, "coca-slack")], ids=str)
def test_schemes_that_do_not_follow_from_each_other_are_refused(before, after):
    refused("scheme", lambda: check_continues(Setup(config(before)), Setup(config(after))))


def test_a_scheme_continues_from_itself_with_the_same_sizes():
    for scheme in ("rope", "coca-slack", "t5"):
        check_continues(Setup(config(scheme)), Setup(config(scheme)))
    refused("stacks/0/0/mlp/down", lambda: check_continues(Setup(config("rope")), Setup(config("rope", mlp_dim=16))))
