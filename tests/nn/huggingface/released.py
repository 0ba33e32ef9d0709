"""Tiny models of every family as values of ``config.json``, and helpers for their tensors."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.nn import Decoder, save_pretrained
from posjax.nn.huggingface import FAMILIES, files, load, read_config
from posjax.nn.huggingface.files import TensorFolder

VOCAB = 101
SPECIAL = {"vocab_size": VOCAB, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Heads have 12 channels, which is not hidden_size / num_attention_heads.
LLAMA = SPECIAL | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GPT = SPECIAL | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
NEOX = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "head_dim")} | {
    "model_type": "gpt_neox",
    "hidden_size": 48,
    "rotary_pct": 0.5,
    "rotary_emb_base": 5000.0,
}
PHI3 = LLAMA | {"model_type": "phi3", "sliding_window": None, "tie_word_embeddings": False}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 2.2, 2.4, 2.6, 3.6],
    "original_max_position_embeddings": 32,
}
FALCON = SPECIAL | {
    "model_type": "falcon",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "alibi": False,
    "bias": False,
}


def rope(base, **others):
    return {"rope_type": "default", "rope_theta": base} | others


YARN = {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict] = {
    "llama": LLAMA
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}
    | {"rope_parameters": rope(5e3, rope_type="llama3", factor=4.0, **LLAMA3)},
    "llama-yarn": LLAMA
    | {"model_type": "llama", "tie_word_embeddings": True, "hidden_act": "gelu"}
    | {"rope_parameters": rope(1e4, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 9, "rope_parameters": rope(1e6)},
    "qwen2": {key: LLAMA[key] for key in LLAMA if key != "head_dim"}
    | {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "num_hidden_layers": 3}
    | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": LLAMA | {"model_type": "qwen3", "attention_bias": True, "rope_parameters": rope(1e6)},
    "smollm3": LLAMA
    | {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "rope_parameters": rope(2e6)},
    "granite": LLAMA
    | {"model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3}
    | {"logits_scaling": 4.0, "attention_bias": True},
    "gemma2": LLAMA
    | {"model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 9, "query_pre_attn_scalar": 24}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": LLAMA
    | {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 9, "query_pre_attn_scalar": 24}
    | {"layer_types": MIXED}
    | {
        "rope_parameters": {"full_attention": rope(1e6, rope_type="linear", factor=8.0), "sliding_attention": rope(1e4)}
    },
    "olmo2": LLAMA | {"model_type": "olmo2", "attention_bias": True},
    "phi3": PHI3 | {"sliding_window": 9, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)},
    "phi3-longrope": {key: PHI3[key] for key in PHI3 if key != "head_dim"}
    | {"hidden_size": 48, "original_max_position_embeddings": 32, "rope_parameters": LONG},
    "cohere2": LLAMA
    | {"model_type": "cohere2", "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 9}
    | {"logit_scale": 0.25, "rope_theta": 5e4},
    "gpt_oss": LLAMA
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
    | {"rope_parameters": rope(1.5e5, rope_type="yarn", factor=4.0, truncate=False, **YARN)},
    "gpt_neox": NEOX | {"hidden_act": "gelu"},
    "gpt_neox-in-turn": NEOX | {"hidden_act": "gelu_new", "use_parallel_residual": False, "attention_bias": False},
    "gpt2": GPT | {"model_type": "gpt2"},
    "gptj": GPT | {"model_type": "gptj", "rotary_dim": 8, "tie_word_embeddings": False},
    "bloom": SPECIAL | {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 6},
    "mpt": SPECIAL
    | {"model_type": "mpt", "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64, "expansion_ratio": 4}
    | {"attn_config": {"alibi": True, "softmax_scale": 0.2}},
    "falcon": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    "falcon-7b": FALCON | {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    "falcon-bias": FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "activation": "gelu_new"},
    "falcon-11b": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
}


STATED = {"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0}
PARTIAL = rope(1e4, partial_rotary_factor=0.5)
WHOLE_HEADS = {key: LLAMA[key] for key in LLAMA if key != "head_dim"}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
# Smaller weights than elsewhere: the norm behind the delta rule divides by sums that random weights make nearly zero.
# With 0.15 the largest error of a logit, over the largest logit of transformers in float64, is for posjax and for
# transformers in float32: Qwen3-Next 9e-6 and 1.4e-5, Qwen3.5 with experts 1.8e-5 and 1.3e-4; with 0.07 less than 3e-6
# and than 6e-6.
DELTA = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_num_key_heads": 2}
DELTA |= {"initializer_range": 0.07}
MULTIPLIERS = {"embedding_multiplier": 12, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 4}
GEMMA4 = (
    LLAMA
    | {
        "model_type": "gemma4_text",
        "initializer_range": 0.05,  # scores are not divided by the root of the size, so larger ones round more
        "num_hidden_layers": 3,
        "layer_types": [*MIXED[:2], "full_attention"],
        "sliding_window": 9,
        "attention_k_eq_v": True,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": VOCAB,
        "rope_parameters": {
            "full_attention": rope(1e6, rope_type="proportional", partial_rotary_factor=0.25),
            "sliding_attention": rope(1e4),
        },
    }
)
LATENT = {key: LLAMA[key] for key in LLAMA if key != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
# The keys of a release's config.json that change nothing here are among them.
LATER: dict[str, dict] = {
    "ministral": LLAMA | {"model_type": "ministral", "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 9},
    "ministral3": LLAMA
    | {"model_type": "ministral3", "sliding_window": None}
    | {
        "rope_parameters": STATED
        | rope(1e6, rope_type="yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)
    },
    "internlm3": LLAMA | {"model_type": "internlm3", "qkv_bias": True, "bias": True, "rope_parameters": rope(5e7)},
    "seed_oss": LLAMA
    | {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
    | {"attention_dropout": 0.1, "residual_dropout": 0.1, "rope_parameters": rope(1e7)},
    "ernie4_5": LLAMA | {"model_type": "ernie4_5", "use_bias": True, "rope_parameters": rope(5e5)},
    "helium": WHOLE_HEADS
    | {"model_type": "helium", "head_dim": 16, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-8},
    "cwm": LLAMA
    | {"model_type": "cwm", "num_hidden_layers": 5, "sliding_window": 9, "mlp_bias": True}
    | {"rope_parameters": rope(1e6, rope_type="llama3", factor=16.0, **LLAMA3)},
    "granitemoehybrid": LLAMA
    | {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0}
    | {"layer_types": ["full_attention"] * 2, "shared_intermediate_size": 80, "position_embedding_type": "rope"}
    | MULTIPLIERS,
    "granitemoehybrid-nope": LLAMA
    | {"model_type": "granitemoehybrid", "num_local_experts": 0, "attention_bias": True}
    | {"layer_types": ["full_attention"] * 2, "shared_intermediate_size": 80, "position_embedding_type": "nope"},
    "hyperclovax": LLAMA
    | {"model_type": "hyperclovax", "attention_bias": True, "use_post_norm": True, "rope_parameters": rope(1e8)}
    | MULTIPLIERS,
    "vaultgemma": LLAMA
    | {"model_type": "vaultgemma", "num_hidden_layers": 3, "sliding_window": 9, "query_pre_attn_scalar": 24}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma4_text": GEMMA4,
    "gemma": LLAMA | {"model_type": "gemma", "attention_bias": True, "hidden_act": "gelu"},
    "olmo3": LLAMA
    | {"model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 9, "attention_bias": True}
    | {
        "rope_parameters": {
            "full_attention": STATED | rope(5e5, rope_type="yarn", attention_factor=1.2),
            "sliding_attention": rope(5e5),
        }
    },
    "olmo": WHOLE_HEADS | {"model_type": "olmo", "clip_qkv": 0.8, "attention_bias": True, "rope_parameters": rope(1e4)},
    "exaone4": LLAMA
    | {"model_type": "exaone4", "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 9}
    | {"sliding_window_pattern": "LGL", "rope_parameters": rope(1e6, rope_type="llama3", factor=16.0, **LLAMA3)},
    "exaone4-full": LLAMA
    | {"model_type": "exaone4", "layer_types": ["full_attention"] * 2, "sliding_window": None}
    | {"sliding_window_pattern": None, "tie_word_embeddings": True},
    "glm": LLAMA | {"model_type": "glm", "attention_bias": True, "rope_parameters": PARTIAL},
    "glm4": LLAMA | {"model_type": "glm4", "attention_bias": True, "rope_parameters": PARTIAL},
    "cohere": LLAMA | {"model_type": "cohere", "logit_scale": 0.25, "attention_bias": True, "use_qk_norm": False},
    # The other keys are those of Command R+ (2024).
    "cohere-norms": LLAMA
    | {"model_type": "cohere", "use_qk_norm": True, "attention_bias": False, "attention_dropout": 0.0}
    | {"layer_norm_eps": 1e-5, "logit_scale": 0.8333333333333334, "rope_theta": 75000000.0, "use_cache": True},
    "starcoder2": LLAMA
    | {"model_type": "starcoder2", "sliding_window": 9, "use_bias": True, "norm_epsilon": 1e-4}
    | {"mlp_type": "default", "norm_type": "layer_norm", "residual_dropout": 0.1},
    "stablelm": WHOLE_HEADS
    | {"model_type": "stablelm", "use_qkv_bias": True, "num_attention_heads": 2, "partial_rotary_factor": 0.25},
    "stablelm-parallel": WHOLE_HEADS
    | {"model_type": "stablelm", "use_parallel_residual": True, "rope_parameters": PARTIAL},
    # The other keys are those of StableLM 2 12B.
    "stablelm-norms": WHOLE_HEADS
    | {"model_type": "stablelm", "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False}
    | {"partial_rotary_factor": 0.5, "rope_theta": 10000, "layer_norm_eps": 1e-5}
    | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": True},
    "nemotron": LLAMA | {"model_type": "nemotron", "mlp_bias": True, "partial_rotary_factor": 0.5, "norm_eps": 1e-4},
    "arcee": LLAMA | {"model_type": "arcee", "mlp_bias": True, "rope_parameters": STATED | rope(1e4, rope_type="yarn")},
    "qwen3_5_text": LLAMA
    | {"model_type": "qwen3_5_text", "head_dim": 16, "num_hidden_layers": 5, "full_attention_interval": 2}
    | {"attention_bias": True, "linear_conv_kernel_dim": 3}
    | DELTA,
    "qwen3_5_moe_text": LLAMA
    | {"model_type": "qwen3_5_moe_text", "head_dim": 16, "num_hidden_layers": 4, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
    | DELTA,
    "qwen3_next": LLAMA
    | {"model_type": "qwen3_next", "head_dim": 16, "num_hidden_layers": 5, "num_experts": 4, "norm_topk_prob": False}
    | {"layer_types": ["full_attention", *["linear_attention"] * 4], "mlp_only_layers": [3]}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
    | DELTA,
    "lara_mini": LLAMA
    | {"model_type": "lara_mini", "num_hidden_layers": 7, "sliding_window": 9, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
    | DELTA,
    "afmoe": LLAMA
    | {"model_type": "afmoe", "num_hidden_layers": 5, "sliding_window": 9, "num_experts": 4, "num_shared_experts": 2}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "route_scale": 1.7, "mup_enabled": True}
    | {"attention_bias": True},
    "phi": LLAMA | {"model_type": "phi", "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    # The other keys are those of Hunyuan-7B-Instruct.
    "hunyuan_v1_dense": LLAMA
    | {"model_type": "hunyuan_v1_dense", "attention_bias": True, "attention_head_dim": 12, "rope_theta": 10000.0}
    | {"rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"} | MSCALES}
    | {"attention_dropout": 0.0, "cla_share_factor": 2, "eod_token_id": 3, "norm_type": "rms", "use_cla": False}
    | {"mlp_bias": False, "pretraining_tp": 1, "use_qk_norm": True, "use_rotary_pos_emb": True},
    "hunyuan_v1_dense-linear": LLAMA
    | {"model_type": "hunyuan_v1_dense", "rope_parameters": rope(1e4, rope_type="linear", factor=4.0)},
    # The other keys are those of nanochat-d32.
    "nanochat": WHOLE_HEADS
    | {"model_type": "nanochat", "num_key_value_heads": 4, "final_logit_softcapping": 15.0, "attention_bias": False}
    | {"rope_theta": 10000.0, "qkv_bias": False, "logits_soft_cap": 15.0, "hidden_act": "relu2"},
    "nanochat-bias": LLAMA | {"model_type": "nanochat", "attention_bias": True, "final_logit_softcapping": 2.0},
    # The other keys are those of Apertus-8B-Instruct-2509.
    "apertus": WHOLE_HEADS
    | {"model_type": "apertus", "hidden_act": "xielu", "rope_theta": 12000000, "attention_bias": False}
    | {"rope_scaling": LLAMA3 | {"factor": 8.0, "rope_type": "llama3"}, "hidden_dropout": 0.0, "mlp_bias": False}
    | {"post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-5},
    "apertus-bias": LLAMA
    | {"model_type": "apertus", "attention_bias": True, "hidden_act": "xielu", "rope_parameters": rope(1e4)},
    # The other keys are those of StarCoder.
    "gpt_bigcode": GPT
    | {"model_type": "gpt_bigcode", "activation_function": "gelu", "multi_query": True, "n_inner": 80}
    | {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True}
    | {"inference_runner": 0, "max_batch_size": None, "max_sequence_length": None, "pad_key_length": True}
    | {"pre_allocate_kv_cache": False, "validate_runner_input": True, "attn_pdrop": 0.1},
    "gpt_bigcode-heads": GPT | {"model_type": "gpt_bigcode", "multi_query": False, "tie_word_embeddings": False},
    # The other keys are those of OPT-6.7B.
    "opt": SPECIAL
    | {"model_type": "opt", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 80}
    | {"max_position_embeddings": 64, "activation_function": "relu", "word_embed_proj_dim": 48}
    | {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True, "layerdrop": 0.0}
    | {"layer_norm_elementwise_affine": True, "init_std": 0.15, "pad_token_id": 1, "prefix": "</s>"},
    "opt-no-bias": SPECIAL
    | {"model_type": "opt", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_dim": 96}
    | {"max_position_embeddings": 64, "activation_function": "gelu", "enable_bias": False, "init_std": 0.15}
    | {"tie_word_embeddings": False},
    "minicpm3": LATENT
    | {"model_type": "minicpm3", "attention_bias": True, "mlp_bias": True, "dim_model_base": 16, "scale_depth": 0.7}
    | {"rms_norm_eps": 1e-4, "rope_parameters": STATED | rope(1e4, rope_type="yarn", mscale=0.7, mscale_all_dim=1.0)},
    "minicpm3-null": LATENT
    | {"model_type": "minicpm3", "q_lora_rank": None, "v_head_dim": None, "scale_depth": None, "dim_model_base": None}
    | {"rope_parameters": LONG | {"short_factor": LONG["short_factor"][:4], "long_factor": LONG["long_factor"][:4]}},
    "youtu": LATENT
    | {"model_type": "youtu", "attention_bias": True, "tie_word_embeddings": False}
    | {"rope_parameters": STATED | rope(1e4, rope_type="yarn", mscale=1.0, mscale_all_dim=0.8)},
    "youtu-half": LATENT | {"model_type": "youtu", "rope_interleave": False, "q_lora_rank": None},
}
"""Families whose parity is in the wide grid alone."""

TWO_OF_SIX = {"num_experts": 6, "num_experts_per_tok": 2}
OF_EIGHT = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2}
MIXTURES: dict[str, dict] = {
    "mixtral": LLAMA
    | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}
    | {"rope_parameters": rope(1e6), "router_aux_loss_coef": 0.02},
    "qwen2_moe": WHOLE_HEADS
    | TWO_OF_SIX
    | {"model_type": "qwen2_moe", "num_hidden_layers": 4, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    | {"shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
    "qwen3_moe": LLAMA
    | TWO_OF_SIX
    | {"model_type": "qwen3_moe", "num_hidden_layers": 4, "moe_intermediate_size": 40, "decoder_sparse_step": 2}
    | {"norm_topk_prob": True, "attention_bias": True},
    "olmoe": WHOLE_HEADS | TWO_OF_SIX | {"model_type": "olmoe", "clip_qkv": 0.8},
    "flex_olmo": WHOLE_HEADS | TWO_OF_SIX | {"model_type": "flex_olmo", "norm_topk_prob": True},
    "granitemoe": WHOLE_HEADS
    | {"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2}
    | MULTIPLIERS,
    "granitemoeshared": WHOLE_HEADS
    | {"model_type": "granitemoeshared", "num_local_experts": 6, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 48}
    | MULTIPLIERS,
    "glm4_moe": LLAMA
    | OF_EIGHT
    | {"model_type": "glm4_moe", "num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "use_qk_norm": True}
    | {"attention_bias": True, "routed_scaling_factor": 1.5, "rope_parameters": PARTIAL},
    "solar_open": LLAMA | OF_EIGHT | {"model_type": "solar_open", "rope_parameters": rope(1e6)},
    "dots1": LLAMA
    | OF_EIGHT
    | {"model_type": "dots1", "num_hidden_layers": 3, "first_k_dense_replace": 1, "norm_topk_prob": True}
    | {"sliding_window": 9, "max_window_layers": 2},
    "exaone_moe": LLAMA
    | TWO_OF_SIX
    | {"model_type": "exaone_moe", "num_hidden_layers": 4, "moe_intermediate_size": 40, "num_shared_experts": 2}
    | {"sliding_window": 9, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "hy_v3": LLAMA
    | TWO_OF_SIX
    | {"model_type": "hy_v3", "num_hidden_layers": 3, "moe_intermediate_size": 40, "num_shared_experts": 2}
    | {"router_scaling_factor": 1.5, "attention_bias": True},
    "mellum": LLAMA
    | TWO_OF_SIX
    | {"model_type": "mellum", "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 9}
    | {"moe_intermediate_size": 40, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    | {"rope_parameters": {"full_attention": rope(1e6), "sliding_attention": rope(1e4)}},
    "hunyuan_v1_moe": LLAMA
    | {"model_type": "hunyuan_v1_moe", "num_experts": 6, "moe_topk": [2, 2], "attention_bias": True},
    "ernie4_5_moe": LLAMA
    | {"model_type": "ernie4_5_moe", "num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 2}
    | {"moe_intermediate_size": 40, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "minimax_m2": LLAMA
    | {"model_type": "minimax_m2", "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 6},
    "cohere2_moe": LLAMA
    | TWO_OF_SIX
    | {"model_type": "cohere2_moe", "num_hidden_layers": 4, "num_shared_experts": 2, "sliding_window": 9}
    | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 72, "expert_selection_fn": "sigmoid"},
    "llama4_text": LLAMA
    | {"model_type": "llama4_text", "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 1}
    | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 72, "attention_chunk_size": 16, "floor_scale": 8},
}
MIXTURES |= {
    "gemma4_text-experts": GEMMA4
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40},
    "deepseek_v2": LATENT
    | OF_EIGHT
    | {"model_type": "deepseek_v2", "num_hidden_layers": 3, "first_k_dense_replace": 1, "topk_method": "greedy"}
    | {"q_lora_rank": None, "routed_scaling_factor": 1.5},
    "deepseek_v2-groups": LATENT
    | OF_EIGHT
    | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    | {"attention_bias": True, "routed_scaling_factor": 16.0}
    | {"rope_parameters": STATED | rope(1e4, rope_type="yarn", mscale=0.707, mscale_all_dim=0.707)},
    "deepseek_v3": LATENT
    | OF_EIGHT
    | {"model_type": "deepseek_v3", "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    | {"attention_bias": True, "rope_parameters": STATED | rope(1e4, rope_type="yarn", mscale=0.8, mscale_all_dim=1.0)},
    "deepseek_v3-half": LATENT
    | OF_EIGHT
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    | {"rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None},
    "glm4_moe_lite": LATENT
    | OF_EIGHT
    | {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    | {"n_group": 2, "topk_group": 1, "rope_parameters": rope(1e6)},
    "sarvam_mla": LATENT | OF_EIGHT | {"model_type": "sarvam_mla", "num_hidden_layers": 3, "q_lora_rank": None},
    "mistral4": LATENT
    | OF_EIGHT
    | {"model_type": "mistral4", "n_group": 4, "topk_group": 2}
    | {
        "rope_parameters": STATED
        | rope(1e4, rope_type="yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)
    },
}
LATER |= MIXTURES
CASES |= LATER

WHOLE = ("llama", "gpt_oss", "gpt_neox")
"""Families of different kinds, with every test in the default run. Of the others the wide grid has the parity."""


def cases(*default: str) -> list:
    """The cases as parameters of a test; those that are not named here are in the wide grid."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.wide) for name in CASES]


def random_decoder(values: dict, **changes) -> Decoder:
    """A decoder for these values of ``config.json``, with random normal parameters, also for biases and gains."""
    config = read_config(values | changes)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(draw.normal(0, 0.2, leaf.shape), leaf.dtype), state))


def parameters(decoder: Decoder) -> dict:
    return nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


def stored(folder: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the package safetensors."""
    from safetensors.numpy import load_file

    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(folder: str | Path, other: str | Path) -> None:
    """Two folders hold tensors of the same names, dtypes, shapes and bits."""
    found, wanted = stored(folder), stored(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def config_of(folder: str | Path) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def write_config(folder: str | Path, values: dict) -> None:
    (Path(folder) / "config.json").write_text(json.dumps(values))


def write_tensors(folder: str | Path, tensors: dict[str, np.ndarray], max_bytes: int = 10**9) -> list[str]:
    """Writes tensors into files of at most ``max_bytes`` each; returns the names of the files."""
    layouts = files.lay_out({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, max_bytes)
    files.create(Path(folder), layouts)
    for layout in layouts:
        for name, entry in layout.entries.items():
            files.writable(Path(folder), entry)[...] = tensors[name]
    return [layout.file for layout in layouts]


def tensor_shapes(values: dict) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a model by their names."""
    config = read_config(values)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    stored_parameters = load.stored(FAMILIES[values["model_type"]], config, nnx.to_pure_dict(state))
    return {name: each.view.tensor_shape(each.sizes) for each in stored_parameters for name in each.tensors}


def rewritten(model, folder, change):
    """A folder with the model, after ``change`` has edited its tensors."""
    save_pretrained(model, folder / "before")
    source = TensorFolder(folder / "before")
    tensors = {name: np.array(source.tensor(name)) for name in source.entries}
    (folder / "after").mkdir(parents=True)
    write_tensors(folder / "after", change(tensors))
    (folder / "after" / "config.json").write_bytes((folder / "before" / "config.json").read_bytes())
    return folder / "after"
