"""The weights that one stage takes over from another."""

import jax
import numpy as np
import pytest
from flax import nnx

from train.config import parse
from train.model.build import build_model
from train.model.convert import check_continues, convert

MODEL = {"num_layers": 2, "model_dim": 8, "num_heads": 1, "mlp_dim": 8, "vocab_size": 260}

INTERLEAVED = {"name": "rope", "features": {"name": "rotary", "pairing": "interleaved"}}


def config(scheme, **model):
    return parse({"model": MODEL | model, "scheme": scheme})


def numbered(before):
    """Parameters of a config that are all different."""
    shapes = nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(build_model(before))))
    leaves, tree = jax.tree.flatten(shapes)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = (np.arange(end - leaf.size, end).reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True))
    return jax.tree.unflatten(tree, [part.astype(np.float32) for part in parts])


def test_neighbouring_channels_are_one_plane_where_they_are_paired_so():
    after = {"name": "coca", "variant": "slack", "pairing": "interleaved"}
    before, after = config(INTERLEAVED), config({"name": "rope", "features": after})
    old = numbered(before)
    new = convert(before, after, old)
    k, t = (tree["stacks"][0][0]["attention"]["k"] for tree in (old, new))
    np.testing.assert_allclose(t, (k[..., 0::2] + k[..., 1::2]) / 2)
    for name in ("q", "v"):
        assert new["stacks"][0][0]["attention"][name] is old["stacks"][0][0]["attention"][name]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (INTERLEAVED, "coca-slack"),
        ("coca-slack", "rope"),
        ("alibi", "coca-slack"),
        ("coca-slack", "coca-tied"),
        ({"name": "rope", "frequencies": {"name": "default", "partial_rotary_factor": 0.5}}, "coca-slack"),
    ],
)
def test_only_rope_with_the_same_planes_turns_into_coca(before, after):
    with pytest.raises(ValueError, match="cannot start from the weights of"):
        check_continues(config(before), config(after))


def test_a_parameter_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"mlp/\w+ was \(.*\) and must be"):
        check_continues(config("rope"), config("rope", mlp_dim=16))


def test_a_scheme_continues_from_itself():
    for scheme in ("rope", "coca-slack", "t5"):
        check_continues(config(scheme), config(scheme))
