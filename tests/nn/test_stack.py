"""The decoder as a stack of layers: against itself, NumPy in float64, a sharded copy, and Hugging Face."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from decoders import LENGTH, NAMES, VOCAB, assert_same, config, logits_of, made, preset, run, separate
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import posjax as pj
from posjax import masks, norms, rotary
from posjax.nn import Decoder, DecoderConfig, logical_axes


def forward(settings, state=None, rows=None):
    """Logits of the rows of documents. ``state`` replaces the decoder's own parameters."""
    graph, own = made(settings)

    @jax.jit
    def run(state, tokens, positions, segments):
        return nnx.merge(graph, state)(tokens, positions=positions, segment_ids=segments)

    return np.asarray(run(own if state is None else state, *(rows or separate())))


def with_numbers(settings, numbers):
    """These numbers in the tree structure of the decoder's parameters."""
    _, state = made(settings)
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(numbers))


# --- the stack --------------------------------------------------------------------------------------------------------

T5 = preset("t5")
PATTERNS = pj.Layers((((dataclasses.replace(T5, mask=masks.Window(3)),), 2), ((T5,), 1)))


@pytest.mark.parametrize(
    ("scan", "remat"),
    # test_specs.py tests offloading in a scan, and keeping attention without a scan.
    [
        (True, "full"),
        (False, "dots"),
        pytest.param(True, "attention", marks=pytest.mark.wide),
        pytest.param(False, "none", marks=pytest.mark.wide),
        pytest.param(True, "offload", marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_scan_and_remat_change_nothing(scan, remat):
    plain = config(PATTERNS, num_layers=3)
    other = dataclasses.replace(plain, scan_layers=scan, remat=remat)
    chex.assert_trees_all_equal(*(nnx.to_pure_dict(made(each)[1]) for each in (plain, other)))
    assert_same(run(other, separate()), run(plain, separate()), 1e-5)


def logits_and_state(remat):
    graph, state = made(config(preset("rope"), remat=remat, scan_layers=False, implementation="blockwise"))
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    return lambda state: nnx.merge(graph, state)(tokens), state


def test_remat_recomputes():
    def saved(remat):
        logits, state = logits_and_state(remat)
        _, residuals = jax.eval_shape(lambda state: jax.vjp(logits, state), state)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    assert saved("full") < saved("attention") < saved("dots") < saved("none")


def test_remat_runs_attention_again_only_when_asked():
    def loops(remat):
        logits, state = logits_and_state(remat)
        gradient = jax.jit(jax.grad(lambda state: logits(state).sum()))
        return gradient.lower(state).as_text().count("stablehlo.while")

    assert loops("attention") == loops("dots") == loops("offload") < loops("full")


def rms(x, gain):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def rotate(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def numpy_block(x, p, kind):
    """One block of the decoder in float64: "local" is RoPE in a window of three, "global" is ALiBi."""
    i = np.arange(x.shape[1])
    distance = i[:, None] - i
    h = rms(x, p["attention_norm"]["gain"])
    q, k, v = (np.einsum("bte,ehd->bthd", h, p["attention"][name]) for name in "qkv")
    if kind == "local":
        q, k, bias, allowed = rotate(q, i), rotate(k, i), None, (distance >= 0) & (distance < 3)
    else:
        bias, allowed = -(2.0 ** -np.array([2, 4, 6, 8]))[:, None, None] * distance, distance >= 0
    out, _ = oracles.attention(q, k, v, bias=bias, allowed=allowed)
    x = x + np.einsum("bthd,hde->bte", out, p["attention"]["o"])
    return x + gelu(rms(x, p["mlp_norm"]["gain"]) @ p["mlp"]["up"]) @ p["mlp"]["down"]


def test_pattern_and_remainder_are_the_schemes_layer_by_layer():
    local, full = pj.scheme("rope", mask=masks.Window(3)), pj.scheme("alibi")
    layers = pj.Layers((((local, full), 2), ((local,), 1)))
    settings = config(layers, num_layers=5, activation="gelu", tied_head=False)
    logits, tokens = forward(settings), np.asarray(separate()[0])

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(made(settings)[1]))
    x = p["embed"][tokens] * np.sqrt(32)
    for pattern, repeat, index, kind in [(0, 0, 0, "local"), (0, 0, 1, "global"), (0, 1, 0, "local"),
                                         (0, 1, 1, "global"), (1, 0, 0, "local")]:  # fmt: skip
        x = numpy_block(x, jax.tree.map(lambda leaf, n=repeat: leaf[n], p["stacks"][pattern][index]), kind)
    wanted = rms(x, p["norm"]["gain"]) @ p["head"]
    for row, size in enumerate((10, 6, 16)):
        assert_same(logits[row, :size], wanted[row, :size], 1e-5)


def test_number_of_layers_must_add_up():
    with pytest.raises(ValueError, match="names 3 layers, but num_layers is 4"):
        config(PATTERNS, num_layers=4)
    with pytest.raises(ValueError, match="same embedding"):
        pj.Layers((((preset("sinusoidal"), preset("rope")), 1),))
    with pytest.raises(ValueError, match=r"expected posjax\.Scheme, found 'rope'"):
        config("rope")


# --- parameters -------------------------------------------------------------------------------------------------------


def shapes(settings):
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    return jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model)))


def test_parameter_shapes():
    found = shapes(config(preset("rope"), tied_head=False))
    block = {
        "attention": {"q": (2, 32, 4, 8), "k": (2, 32, 2, 8), "v": (2, 32, 2, 8), "o": (2, 4, 8, 32)},
        "attention_norm": {"gain": (2, 32)},
        "mlp": {"up": (2, 32, 24), "gate": (2, 32, 24), "down": (2, 24, 32)},
        "mlp_norm": {"gain": (2, 32)},
    }
    outside = {"embed": (VOCAB, 32), "head": (32, VOCAB), "norm": {"gain": (32,)}}
    assert found == outside | {"stacks": {0: {0: block}}}


def test_what_changes_parameter_shapes():
    tied, gelu_model = shapes(config(preset("rope"))), shapes(config(preset("rope"), activation="gelu"))
    assert "head" not in tied
    assert set(gelu_model["stacks"][0][0]["mlp"]) == {"up", "down"}
    projections = shapes(config(preset("coca-tied")))["stacks"][0][0]["attention"]
    assert (projections["q"], projections["k"], projections["v"]) == ((2, 32, 4, 4), (2, 32, 2, 4), (2, 32, 2, 8))
    norm = shapes(config(pj.scheme("rope", norm=norms.QKNorm())))["stacks"][0][0]["attention"]["learned"]["norm"]
    assert norm == {"q": (2, 8), "k": (2, 8)}


def test_default_widths():
    wide = DecoderConfig(VOCAB, 1, 96, 4)
    assert (wide.head_dim, wide.num_kv_heads, wide.mlp_dim) == (24, 4, 256)
    assert DecoderConfig(VOCAB, 1, 96, 4, activation="gelu").mlp_dim == 384


@pytest.mark.parametrize(
    ("name", "made_of"),
    [("t5", {"table": (8, 4)}), ("kerple-log", {"a": (4,), "p": (4,)}), ("kerple-power", {"a": (4,), "p": (4,)})],
)
def test_shared_biases_are_one_parameter_outside_the_stacks(name, made_of):
    shared = preset(name)
    windowed = dataclasses.replace(shared, mask=masks.Window(3))
    for scheme in (shared, pj.Layers((((windowed, shared), 1),))):
        found = shapes(config(scheme))
        assert found["shared"] == {0: {"bias": made_of}}
        assert "learned" not in found["stacks"][0][0]["attention"]


def test_biases_of_a_layer_are_in_the_stacks():
    found = shapes(config(pj.scheme("alibi", learned=True)))
    assert "shared" not in found
    assert found["stacks"][0][0]["attention"]["learned"] == {"bias": {"slopes": (2, 4)}}


def test_tied_head_is_the_embedding():
    tied, free = config(preset("rope")), config(preset("rope"), tied_head=False)
    same = nnx.to_pure_dict(made(tied)[1])
    numbers = same | {"head": np.asarray(same["embed"]).T}
    assert_same(forward(free, with_numbers(free, numbers)), forward(tied), 1e-5)


def test_grouped_queries_are_repeated_keys_and_values():
    few, many = config(preset("coca-slack")), config(preset("coca-slack"), num_kv_heads=4)
    parameters = nnx.to_pure_dict(made(few)[1])
    attention = parameters["stacks"][0][0]["attention"]
    for name in "kv":
        attention[name] = np.repeat(attention[name], 2, axis=2)
    assert_same(forward(many, with_numbers(many, parameters)), forward(few))


def test_bfloat16_is_close_and_keeps_float32_outside():
    plain = config(preset("coca-strict"))
    narrow = dataclasses.replace(plain, compute_dtype="bfloat16")
    chex.assert_trees_all_equal_dtypes(nnx.to_pure_dict(made(narrow)[1]), nnx.to_pure_dict(made(plain)[1]))
    (logits, gradients), wanted = run(narrow, separate()), forward(plain)
    assert logits.dtype == np.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype("float32")}
    # 8 bits of mantissa through two layers; logits are of order one.
    assert 1e-4 < np.abs(logits - wanted).max() < 0.1


# --- sharding ---------------------------------------------------------------------------------------------------------


def test_every_parameter_has_a_name_for_every_axis():
    for name in NAMES:
        model = nnx.eval_shape(lambda name=name: Decoder(config(preset(name), tied_head=False), rngs=nnx.Rngs(0)))
        axes, sizes = logical_axes(model), nnx.to_pure_dict(nnx.state(model))
        jax.tree.map(lambda leaf, names: chex.assert_rank(leaf, len(names)), sizes, axes)
    for settings in (config(PATTERNS, num_layers=3), config(pj.scheme("alibi", learned=True))):
        model = nnx.eval_shape(lambda settings=settings: Decoder(settings, rngs=nnx.Rngs(0)))
        for path, names in jax.tree_util.tree_leaves_with_path(
            logical_axes(model), is_leaf=lambda node: isinstance(node, tuple)
        ):
            assert ("layers" in names) == ("stacks" in jax.tree_util.keystr(path)), path
            assert None not in names or "bias" in jax.tree_util.keystr(path), path


def test_sharded_parameters_give_the_same_logits():
    rules = {"heads": "model", "mlp": "model", "vocab": "model", "embed": "data", "kv_heads": "data"}
    settings = config(preset("t5"), tied_head=False)
    graph, state = made(settings)
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))

    def place(leaf, names):
        axes = []
        for name in names:
            # A mesh axis can shard only one axis of an array.
            axes.append(None if rules.get(name) in axes else rules.get(name))
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    parameters = jax.tree.map(place, nnx.to_pure_dict(state), logical_axes(nnx.merge(graph, state)))
    assert parameters["stacks"][0][0]["mlp"]["up"].addressable_shards[0].data.shape == (2, 16, 6)
    rows = jax.device_get(separate())
    placed = [jax.device_put(x[:2], NamedSharding(mesh, PartitionSpec("data"))) for x in rows]
    assert_same(forward(settings, with_numbers(settings, parameters), placed), forward(settings)[:2], 1e-5)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def llama_parameters(llama):
    """The weights of a ``LlamaForCausalLM`` in the shapes of a ``Decoder`` of one pattern."""
    size, width = llama.config.head_dim, llama.config.hidden_size
    blocks = []
    for layer in llama.model.layers:
        project, mlp = layer.self_attn, layer.mlp
        blocks.append(
            {
                "attention": {
                    name: getattr(project, f"{name}_proj").weight.detach().numpy().T.reshape(width, -1, size)
                    for name in "qkv"
                }
                | {"o": project.o_proj.weight.detach().numpy().T.reshape(-1, size, width)},
                "attention_norm": {"gain": layer.input_layernorm.weight.detach().numpy()},
                "mlp": {
                    name: getattr(mlp, f"{name}_proj").weight.detach().numpy().T for name in ("up", "gate", "down")
                },
                "mlp_norm": {"gain": layer.post_attention_layernorm.weight.detach().numpy()},
            }
        )
    return {
        "embed": llama.model.embed_tokens.weight.detach().numpy() / np.sqrt(width),
        "head": llama.lm_head.weight.detach().numpy().T,
        "norm": {"gain": llama.model.norm.weight.detach().numpy()},
        "stacks": {0: {0: jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}},
    }


@pytest.mark.parity
@pytest.mark.parametrize("rule", [rotary.Plain(500.0), rotary.Llama3(8.0, 16, base=500.0)], ids=["default", "llama3"])
def test_logits_of_hugging_face_llama(rule):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            rope_parameters=rule.to_hf(),
            initializer_range=0.2,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for gain in (module.weight for module in llama.modules() if "RMSNorm" in type(module).__name__):
            gain.uniform_(0.5, 1.5)
    settings = config(pj.Scheme(features=rotary.Rotary(rule)), tied_head=False)
    model = nnx.merge(*made(settings))
    nnx.update(model, llama_parameters(llama))
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, 48))
    with torch.no_grad():
        wanted = llama(torch.tensor(tokens)).logits.numpy()
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(logits_of(model, jnp.asarray(tokens)), wanted, atol=1e-4)
