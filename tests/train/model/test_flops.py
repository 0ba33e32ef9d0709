"""FLOPs of an update: against masks written out pair by pair, the parameter tree, and closed forms."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from posjax import scheme as preset
from posjax.masks import Band, Beyond, Causal, Chunked, ChunksApart, Dilated, FirstTokens, GlobalFirst, Prefix, Window
from posjax.nn import Decoder, DecoderConfig, Experts, Latent, logical_axes
from posjax.remap import LMInfinite
from posjax.rotary import Rotary
from posjax.scheme import Layers, Scheme
from train.config import Config, ModelConfig, SchemeConfig, TrainConfig
from train.model.build import Setup
from train.model.flops import decoder_flops, maxtext_flops, prefix_pairs, product_parameters, update_flops

DISTANCES = {
    "window": Window(5),
    "band": Band(6),
    "beyond": Beyond(4),
    "chunks apart": ChunksApart(3, 1, 2),
    "chunks far apart": ChunksApart(3, 2),
    "prefix": Prefix(7),
    "lambda": Window(5) | FirstTokens(3),
    "longformer": Dilated(3, 4) | GlobalFirst(2),
    "of three": (Chunked(8) & Window(5)) | FirstTokens(1) | Prefix(4),
}


def dense(mask, length):
    """The mask as a matrix of zeros and ones."""
    positions = np.arange(length)
    return np.broadcast_to(mask.allowed(positions, positions), (length, length)).astype(int)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DISTANCES)
def test_pairs_are_those_of_the_mask_written_out(name, causal):
    mask = Causal() & DISTANCES[name] if causal else DISTANCES[name]
    counts = [dense(mask, length).sum() for length in range(1, 24)]
    np.testing.assert_array_equal(prefix_pairs(mask, 23), [0, *counts])


def test_without_a_mask_every_token_sees_every_token_and_long_rows_need_no_square():
    np.testing.assert_array_equal(prefix_pairs(None, 9), np.arange(10) ** 2)
    n = 2**20
    assert prefix_pairs(Causal(), n)[-1] == n * (n + 1) // 2
    assert prefix_pairs(Causal() & Window(4096), n)[-1] == 4096 * 4097 // 2 + (n - 4096) * 4096


PACKED = np.stack([np.repeat([0, -1, 1, 2, -1], [11, 3, 20, 9, 5]), np.repeat([0, 1, -1], [30, 1, 17])])
"""Segment ids of documents of several lengths, with padding between and after them."""


def packed(mask, ids):
    """The number of allowed pairs in packed rows, by NumPy; positions restart in each document."""
    total = 0
    for row in ids:
        for number in set(row[row >= 0]):
            total += dense(mask, int((row == number).sum())).sum()
    return total


@pytest.mark.parametrize("name", ["window", "lambda", "longformer", "prefix"])
def test_packed_documents(name):
    """A pair costs 2 x 3 x 4 heads x 2 x 6 FLOPs, with heads of size 6."""
    decoder = DecoderConfig(260, 1, 24, 4, scheme=Scheme(mask=DISTANCES[name]))
    assert decoder_flops(decoder, PACKED).attention == 6 * 4 * 12 * packed(Causal() & DISTANCES[name], PACKED)


def test_layers_and_heads_with_different_masks():
    remap = LMInfinite(6, 2)
    layers = Layers((((Scheme(mask=Window(5)), Scheme()), 2), ((Scheme(features=Rotary(), remap=remap),), 1)))
    window, full, row = dense(Causal() & Window(5), 20).sum(), 20 * 21 // 2, np.zeros((1, 20), np.int32)
    found = decoder_flops(DecoderConfig(260, 5, 24, 4, scheme=layers), row)
    assert found.attention == 6 * 4 * 12 * (2 * window + 2 * full + dense(Causal() & remap.mask(), 20).sum())
    dilated = Scheme(mask=Dilated(3, (1, 1, 4, 4)))
    found = decoder_flops(DecoderConfig(260, 1, 24, 4, scheme=dilated), row)
    assert found.attention == 6 * 2 * 12 * sum(dense(Causal() & Dilated(3, d), 20).sum() for d in (1, 4))


def test_linear_attention_has_a_state_in_place_of_pairs():
    linear = dataclasses.replace(LLAMA, scheme=SchemeConfig("linear-elu"))
    assert update_flops(Setup(linear)).attention == 2 * 12 * 4 * 16 * 16 * 128


DELTA = {"num_heads": 4, "key_dim": 8, "value_dim": 6, "num_key_heads": 2}


def test_gated_delta_reads_its_state_for_keys_and_queries_and_writes_it():
    delta = dataclasses.replace(LLAMA, scheme=SchemeConfig("gated-delta", options=DELTA))
    assert update_flops(Setup(delta)).attention == 2 * 18 * 4 * 8 * 6 * 128


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("rope", {}, {}),
        ("coca-strict", {}, {"tied_head": False}),
        ("gemma3", {"num_layers": 7}, {}),
        ("qwen3-next", {"num_layers": 7} | DELTA, {"attention_gate": "elementwise", "head_dim": 8}),
        ("rope", {}, {"attention_gate": "head"}),
    ],
)
def test_parameters_are_the_matrices_of_the_model(name, options, more):
    config = DecoderConfig(260, 7, 24, 4, num_kv_heads=2, scheme=preset(name, **options), **more)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    axes = jax.tree.leaves(logical_axes(model), is_leaf=lambda x: isinstance(x, tuple))
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))]
    named = [[name for name in own if name not in (None, "layers")] for own in axes]
    matrices = [s for s, own in zip(shapes, named, strict=True) if "embed" in own and len(own) > 1]
    looked_up = 0 if config.tied_head else 260 * 24
    assert product_parameters(config) == sum(map(np.prod, matrices)) - looked_up


@pytest.mark.parametrize(("activation", "matrices"), [("geglu", 3), ("gelu-exact", 2), ("relu", 2)])
def test_gates_count_as_a_third_matrix_and_biases_and_norms_do_not_count(activation, matrices):
    """Of a mixture of five experts a token uses two; its router has a column for each of the five."""
    options = {"biases": ("qkv", "output", "mlp", "head"), "projection_norm": True, "embedding_norm": True}
    config = DecoderConfig(260, 3, 24, 4, mlp_dim=40, activation=activation, **options)
    assert product_parameters(config) == 24 * (3 * (4 * 24 + matrices * 40) + 260)
    config = DecoderConfig(260, 3, 24, 4, mlp_dim=40, activation=activation, experts=Experts(5, 2))
    assert product_parameters(config) == 24 * (3 * (4 * 24 + 2 * matrices * 40 + 5) + 260)


LLAMA = Config(
    model=ModelConfig(2, 64, num_heads=4, num_kv_heads=2, mlp_dim=128, vocab_size=1000, tied_head=False),
    train=TrainConfig(length=32, batch_tokens=128),
)


def test_an_update_by_hand():
    matrices = 2 * 64 * (64 + 32 + 32 + 64 + 3 * 128) + 64 * 1000
    found = update_flops(Setup(LLAMA))
    assert found.parameters == 6 * matrices * 128
    # Q K^T and P V, two FLOPs a multiply-add, times 3 for both passes, layers x heads x rows x pairs x head size.
    assert found.attention == 2 * 2 * 3 * 2 * 4 * 4 * (32 * 33 / 2) * 16
    assert found.total == found.parameters + found.attention


def test_padding_and_other_documents_cost_nothing():
    ids = np.tile(PACKED[:, :32], (2, 1))
    found, whole = decoder_flops(Setup(LLAMA).decoder, ids), update_flops(Setup(LLAMA))
    assert found.parameters == whole.parameters * (ids >= 0).sum() / ids.size
    assert found.attention == whole.attention * packed(Causal(), ids) / (4 * 32 * 33 / 2)


def test_features_that_are_wider_than_a_head():
    wide = dataclasses.replace(LLAMA, scheme=SchemeConfig("pope"))
    assert update_flops(Setup(wide)).attention == update_flops(Setup(LLAMA)).attention * 3 / 2


@pytest.mark.parametrize("query_rank", [None, 20])
def test_latent_attention_counts_its_matrices_and_both_sizes_of_a_head(query_rank):
    latent = Latent(12, 8, 6, 10, query_rank)
    config = DecoderConfig(260, 3, 24, 4, latent=latent, scheme=preset("rope"))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))]
    gains = 3 * (12 + (query_rank or 0) + 2 * 24) + 24
    assert product_parameters(config) == sum(map(np.prod, shapes)) - gains
    row = np.zeros((1, 20), np.int32)
    assert decoder_flops(config, row).attention == 6 * 3 * 4 * (20 * 21 // 2) * (8 + 6 + 10)


def test_the_convention_of_maxtext_counts_half_a_square():
    assert maxtext_flops(Setup(LLAMA)).parameters == update_flops(Setup(LLAMA)).parameters
    assert maxtext_flops(Setup(LLAMA)).attention / update_flops(Setup(LLAMA)).attention == pytest.approx(32 / 33)
