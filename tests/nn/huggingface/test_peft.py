"""Adapters in peft's layout: peft over transformers' model computes what the decoder computes, whoever wrote them."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released
from nn.huggingface.theirs import TOKENS, assert_close, logits, random_model, torch, transformers
from refusals import refused

from posjax.nn import LoRA, add_adapters, from_pretrained, merge_adapters, save_pretrained
from posjax.nn.huggingface import load_adapter, save_adapter
from posjax.nn.huggingface.load import named_parameters

peft = pytest.importorskip("peft")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"vocab_size": released.VOCAB, "max_position_embeddings": 64}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SIZES}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
FAMILIES = [
    pytest.param(LLAMA, id="llama"),
    pytest.param({**LLAMA, "model_type": "phi3", "pad_token_id": 0, "eos_token_id": 1}, id="phi3, fused"),
    pytest.param(
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": released.VOCAB},
        id="gpt2, fused and transposed",
        marks=pytest.mark.wide,
    ),
    pytest.param({"model_type": "gpt_neox", **SIZES}, id="gpt_neox, fused by heads", marks=pytest.mark.wide),
    pytest.param(
        {
            "model_type": "deepseek_v3",
            **SIZES,
            "num_key_value_heads": 4,
            **LATENT,
            **MIXTURE,
            "first_k_dense_replace": 1,
        },
        id="deepseek_v3, latents and experts",
        marks=pytest.mark.wide,
    ),
    pytest.param(
        {**LLAMA, "model_type": "qwen3_next", "head_dim": 8, **DELTA, **QWEN}
        | {"layer_types": ["linear_attention", "full_attention"]},
        id="qwen3_next, gates and Gated DeltaNet",
        marks=pytest.mark.wide,
    ),
]


def with_numbers(decoder):
    """The decoder with random numbers in all adapters."""
    random = np.random.default_rng(0)
    graph, state = nnx.split(decoder)

    def drawn(path, leaf):
        if "adapters" not in jax.tree_util.keystr(path):
            return leaf
        return jnp.asarray(random.normal(0, 0.15, leaf.shape), jnp.float32)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(drawn, state))


def ours(decoder):
    return np.asarray(decoder(jnp.asarray(TOKENS)))


def read_by_peft(folder, model):
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        return peft.PeftModel.from_pretrained(model, folder).eval()


def written_by_peft(model, folder, **options):
    """A LoRA of peft with random numbers over a model, saved into the folder."""
    torch.manual_seed(1)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2))
    adapted.save_pretrained(folder)
    return adapted


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "base"
    random_model(LLAMA).save_pretrained(folder)
    return folder


@pytest.mark.parity
@pytest.mark.parametrize("values", FAMILIES)
def test_peft_reads_what_is_written_and_writes_what_is_read(values, tmp_path):
    model = random_model(values)
    model.save_pretrained(tmp_path / "base")
    base, family = from_pretrained(tmp_path / "base"), values["model_type"]
    paths = ("*",) if base.config.experts is None else ("attention/*", "delta/*")[: 1 + ("layer_types" in values)]
    decoder = with_numbers(add_adapters(base, LoRA(4, 8.0, paths), rngs=nnx.Rngs(1)))
    found, before = ours(decoder), ours(base)
    assert np.abs(found - before).max() > 0.1 * np.abs(before).max()
    assert_close(ours(merge_adapters(decoder)), found)
    save_adapter(decoder, tmp_path / "ours", family=family)
    theirs = read_by_peft(tmp_path / "ours", model)
    assert_close(found, logits(theirs, TOKENS))
    theirs.save_pretrained(tmp_path / "theirs")
    assert_close(ours(load_adapter(base, tmp_path / "theirs", family=family)), found)


@pytest.mark.parity
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 5, "use_rslora": True}, id="rslora"
        ),
        pytest.param(
            {
                "target_modules": ["q_proj", "o_proj", "down_proj"],
                "rank_pattern": {"o_proj": 5, "layers.1.self_attn.q_proj": 2},
                "alpha_pattern": {"down_proj": 3, "layers.0.self_attn.q_proj": 11},
                "modules_to_save": ["embed_tokens", "input_layernorm", "norm"],
            },
            id="patterns and whole modules",
        ),
        pytest.param({"target_modules": ["k_proj"], "layers_to_transform": [1]}, id="one layer"),
    ],
)
def test_what_peft_writes_is_read(options, llama, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    adapted = written_by_peft(model, tmp_path, **options)
    decoder = load_adapter(from_pretrained(llama), tmp_path)
    assert decoder.config.lora.rank_stabilized == options.get("use_rslora", False)
    assert_close(ours(decoder), logits(adapted, TOKENS))


def test_adapters_of_mlps_beside_experts_are_refused(tmp_path):
    """peft 0.21 would take them for adapters of experts."""
    model = released.random_decoder({**LLAMA, "model_type": "qwen2_moe", **QWEN})
    decoder = add_adapters(model, LoRA(paths=("mlp/*",)), rngs=nnx.Rngs(0))
    refused("mlp/shared/gate", lambda: save_adapter(decoder, tmp_path / "new"))
    refused("mlp/up", lambda: add_adapters(model, LoRA(paths=("mlp/up",)), rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def adapter(llama, tmp_path_factory):
    """A written adapter, and its decoder."""
    folder = tmp_path_factory.mktemp("adapter") / "written"
    spec = LoRA(2, 4.0, ("attention/[qv]",))
    decoder = with_numbers(add_adapters(from_pretrained(llama), spec, rngs=nnx.Rngs(1)))
    save_adapter(decoder, folder, trained=["norm/gain"])
    return folder, decoder


def test_a_new_adapter_changes_nothing_and_its_base_stays(llama):
    base = from_pretrained(llama)
    decoder = add_adapters(base, LoRA(4, paths=("attention/[qv]", "mlp/*")), rngs=nnx.Rngs(1))
    chex.assert_trees_all_equal(ours(decoder), ours(base))
    before, after = (dict(named_parameters(nnx.to_pure_dict(nnx.state(each)))) for each in (base, decoder))
    chex.assert_trees_all_equal({name: after[name] for name in before}, before)
    new = {name.partition("adapters/")[2] for name in after.keys() - before.keys()}
    assert new == {f"{name}/{part}" for name in ("q", "v", "gate", "up", "down") for part in "ab"}
    chex.assert_shape(after["stacks/0/0/attention/adapters/v/b"], (2, 4, 2, 8))


def test_the_written_files_name_the_modules(adapter):
    settings = json.loads((adapter[0] / "adapter_config.json").read_text())
    wanted = {"r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["model.norm"]}
    assert {key: settings[key] for key in wanted} == wanted
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(adapter[0] / "adapter_model.safetensors")
    chex.assert_shape(tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"], (16, 2))
    assert len(tensors) == 9


def changed(adapter, folder, **settings):
    """A copy of the written adapter with other settings."""
    folder.mkdir()
    for file in adapter[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ],
)
def test_more_than_lora_is_refused_by_name(adapter, llama, tmp_path, settings, named):
    folder = changed(adapter, tmp_path / "other", **settings)
    refused(named, lambda: load_adapter(from_pretrained(llama), folder))


def test_what_does_not_belong_together_is_refused(adapter, llama, tmp_path):
    (folder, decoder), base, new = adapter, from_pretrained(llama), tmp_path / "new"
    refused("merge_adapters", lambda: load_adapter(decoder, folder))
    refused("merge_adapters", lambda: save_pretrained(decoder, new))
    refused("no adapters", lambda: save_adapter(base, new))
    refused("holds an adapter already", lambda: save_adapter(decoder, folder))
    refused("q_proj", lambda: save_adapter(decoder, new, trained=["*/attention/q"]))
    refused("mlp/out", lambda: add_adapters(base, LoRA(paths=("attention/q", "mlp/out")), rngs=nnx.Rngs(0)))
    refused("phi3", lambda: load_adapter(base, folder, family="phi3"))
    assert not new.exists()
