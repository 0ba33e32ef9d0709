"""Bad values for a decoder are refused by name: its config, its inputs, its cache and its scheme."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import config, preset
from flax import nnx
from refusals import refused

import posjax as pj
from posjax import scales
from posjax.nn import Decoder, DecoderConfig, Experts, Latent, Norm, Residual, Router
from posjax.positions import Range

ROPE, LINEAR = pj.scheme("rope"), pj.scheme("linear-elu")
TOKENS = jnp.zeros((3, 4), jnp.int32)
LATENT = Latent(rank=8, rotated=8, unrotated=4, value=4)


def sized(**options):
    return lambda: config(**{"scheme": ROPE} | options)


def called(tokens=TOKENS, **options):
    """A forward pass; computing its shapes is enough for the errors."""
    return lambda: jax.eval_shape(lambda: Decoder(config(ROPE), rngs=nnx.Rngs(0))(tokens, **options))


def decoded(scheme=ROPE, tokens=TOKENS[:, :1], causal=True, **options):
    def run():
        model = Decoder(config(scheme, causal=causal), rngs=nnx.Rngs(0))
        return model.decode(tokens, model.init_cache(3, 8), length=8, **options)

    return lambda: jax.eval_shape(run)


def other_scheme(name):
    return lambda: jax.eval_shape(lambda: Decoder(config(ROPE), rngs=nnx.Rngs(0)).with_scheme(preset(name)).embed[...])


REFUSED = [
    ("norm.kind", lambda: Norm("batch")),
    ("norm.eps", lambda: Norm(eps=-1e-6)),
    ("norm.eps", lambda: Norm(eps="1e-6")),
    ("norm.bias", lambda: Norm(bias=True)),
    ("norm.gain", lambda: Norm("layer", bias=True, gain=False)),
    ("residual.norm", lambda: Residual("befor")),
    ("residual.scale", lambda: Residual(scale=float("nan"))),
    ("residual.shared_norm", lambda: Residual(shared_norm=True)),
    ("residual.shared_norm", lambda: Residual("after", parallel=True, shared_norm=True)),
    ("residual.first_norm", lambda: Residual("after", first_norm=False)),
    ("residual.first_norm", lambda: Residual(parallel=True, shared_norm=True, first_norm=False)),
    ("experts.count", lambda: Experts(0, 1)),
    ("experts.per_token", lambda: Experts(2, 3)),
    ("experts.per_token", lambda: Experts(8, 3, Router(groups=4, groups_kept=1))),
    ("experts.router.groups", lambda: Experts(8, 2, Router(groups=3))),
    ("experts.router.groups_kept", lambda: Router(groups=2, groups_kept=3)),
    ("experts.router.group_best", lambda: Experts(8, 2, Router(groups=4, groups_kept=2, group_best=3))),
    ("experts.router.score", lambda: Router("tanh")),
    ("experts.shared_gate", lambda: Experts(8, 2, shared_gate=True)),
    ("experts.balance", lambda: Experts(8, 2, balance=-1.0)),
    ("num_kv_heads", sized(num_kv_heads=3)),
    ("model_dim", sized(model_dim=30)),
    ("head_dim", sized(head_dim=7)),
    ("mlp_dim", sized(mlp_dim=2.5)),
    ("norm", sized(norm="rms")),
    ("experts.dense", sized(experts=Experts(4, 2, dense=(0, 1)))),
    ("implementation", sized(implementation="flash")),
    ("num_layers", sized(num_layers=0)),
    ("num_layers", sized(scheme=pj.Layers((((ROPE,), 3),)), num_layers=4)),
    ("activation", sized(activation="swigul")),
    ("projection_norm", sized(projection_norm="all")),
    ("head_norms", sized(head_norms=True)),
    ("head_norms", sized(head_norms=True, projection_norm=True, norm=Norm("layer"))),
    ("biases", sized(biases=("qvk",))),
    ("remat", sized(remat="dot")),
    ("compute_dtype", sized(compute_dtype="float16")),
    ("embedding_scale", sized(embedding_scale=0)),
    ("embedding_scale", sized(embedding_scale="1")),
    ("query_scale", sized(query_scale=float("inf"))),
    ("query_scale", sized(query_scale=0.3, scheme=LINEAR)),
    ("logit_scale", sized(logit_scale=None)),
    ("attention_softcap", sized(attention_softcap=0.0)),
    ("logit_softcap", sized(logit_softcap=-1.0)),
    ("softcap", sized(attention_softcap=2.0, scheme=LINEAR)),
    ("scheme", sized(scheme="rope", num_layers=2)),
    ("symmetric=True", sized(scheme=pj.scheme("alibi"), causal=False)),
    ("bidirectional=True", sized(scheme=pj.scheme("t5"), causal=False)),
    ("embedding", lambda: pj.Layers((((preset("sinusoidal"), ROPE), 1),))),
    ("tokens", called(TOKENS[0])),
    ("tokens", called(TOKENS[:, :0])),
    ("segment_ids", called(segment_ids=TOKENS[:, :3])),
    ("positions", called(positions=Range(0, 3))),
    ("positions", called(positions=TOKENS[:2])),
    ("coordinates", called(coordinates=np.zeros((3, 4)))),
    ("coordinates", called(coordinates=np.zeros((2, 4, 2)))),
    ("segment_ids", called(segment_ids=[[0] * 4] * 3)),
    ("valid", decoded(valid=np.ones((3, 2), bool))),
    ("valid", decoded(valid=np.ones((3, 1)))),
    ("positions", decoded(positions=Range(0, 1))),
    ("bidirectional", decoded(causal=False)),
    ("chunk", decoded(tokens=TOKENS)),
    (
        "caches half-width keys",
        decoded(preset("coca-strict").replace(scale=scales.LogN(8)), coordinates=TOKENS[:, :1, None]),
    ),
    ("experts.norms", sized(experts=Experts(4, 2, norms=True), residual=Residual("after"))),
    ("latent.rank", lambda: Latent(0, 8, 4, 4)),
    ("latent.query_rank", lambda: Latent(8, 8, 4, 4, query_rank=0)),
    ("latent.norm", lambda: Latent(8, 8, 4, 4, norm=Norm("layer"))),
    ("head_dim", sized(latent=LATENT, num_kv_heads=None, head_dim=16)),
    ("num_kv_heads", sized(latent=LATENT)),
    ("projection_norm", sized(latent=LATENT, num_kv_heads=None, projection_norm=True)),
    ("clip_qkv", sized(latent=LATENT, num_kv_heads=None, clip_qkv=2.0)),
    ("scheme", other_scheme("t5")),
    ("scheme", other_scheme("coca-strict")),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[f"{n} {name}" for n, (name, _) in enumerate(REFUSED)])
def test_a_bad_value_is_refused_by_name(name, call):
    refused(name, call)


def test_the_nearest_name_is_suggested():
    with pytest.raises(ValueError, match=r"norm\.kind: unknown value 'lay'; did you mean 'layer'\?"):
        Norm("lay")


def test_default_widths():
    wide = DecoderConfig(24, 1, 96, 4)
    assert (wide.head_dim, wide.num_kv_heads, wide.mlp_dim) == (24, 4, 256)
    assert DecoderConfig(24, 1, 96, 4, activation="gelu").mlp_dim == 384
