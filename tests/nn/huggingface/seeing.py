"""Tiny models of releases that also see, as values of ``config.json``: their text part is read."""

from nn.huggingface.released import GEMMA4, LATER, LLAMA, LLAMA3, MIXTURES, OF_EIGHT, TWO_OF_SIX, VOCAB, WHOLE_HEADS

FEW = {key: value for key, value in LLAMA.items() if key not in ("pad_token_id", "bos_token_id", "eos_token_id")}
SIGHT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT |= {"patch_size": 4, "image_size": 16, "head_dim": 16}
QWEN_SIGHT = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
QWEN_SIGHT |= {"patch_size": 4, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]}
QWEN_TOKENS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
MROPE = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]}
QWEN3_5_ROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e7}
LLAMA4_SIGHT = {key: SIGHT[key] for key in ("num_hidden_layers", "num_attention_heads", "image_size", "patch_size")}
LLAMA4_SIGHT |= {"hidden_size": 32, "intermediate_size": 128, "vision_output_dim": 32}
LLAMA4_SIGHT |= {"projector_input_dim": 32, "projector_output_dim": 32}
CLIP_SIGHT = SIGHT | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP_SIGHT = SIGHT | {"model_type": "siglip_vision_model"}
GLM_SIGHT = QWEN_SIGHT | {"image_size": 16}
GEMMA4_SIGHT = SIGHT | {"num_key_value_heads": 2, "position_embedding_size": 16}
# The text part's keys are those of a release's config.json, in sizes for tests.
TEXT_PARTS: dict[str, dict] = {
    "gemma3": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 4,
        # Gemma 3 4B says these keys alone; the vocabulary is smaller here.
        "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "vocab_size": VOCAB}
        | {"model_type": "gemma3_text", "sliding_window": 9, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "vision_config": SIGHT,
    },
    # Gemma 4 31B has these keys, with heads of 256 and 512 channels, and its last layer is the sixth of a period.
    "gemma4": {
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "text_config": GEMMA4,
        "vision_config": GEMMA4_SIGHT,
    },
    "gemma4-own-values": {
        "model_type": "gemma4",
        "text_config": GEMMA4
        | {"attention_k_eq_v": False, "attention_bias": True, "num_global_key_value_heads": None}
        | {"num_hidden_layers": 7, "layer_types": None, "use_bidirectional_attention": None},
    },
    "gemma4-experts": {
        "model_type": "gemma4",
        "text_config": MIXTURES["gemma4_text-experts"],
        "vision_config": GEMMA4_SIGHT,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified",
        "text_config": GEMMA4 | {"model_type": "gemma4_unified_text"},
    },
    "mistral3": {
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,  # transformers 4 writes none, and then means untied; transformers 5 means tied
        "text_config": FEW | {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e9, "rms_norm_eps": 1e-5},
        "vision_config": SIGHT,
    },
    "mistral3-ministral3": {
        "model_type": "mistral3",
        "tie_word_embeddings": True,
        "text_config": FEW
        | {"model_type": "ministral3", "sliding_window": None, "tie_word_embeddings": True}
        | {"rope_parameters": LATER["ministral3"]["rope_parameters"]},
        "vision_config": SIGHT,
    },
    "qwen2_vl": QWEN_TOKENS
    | {"model_type": "qwen2_vl", "tie_word_embeddings": True, "vision_config": QWEN_SIGHT | {"embed_dim": 32}}
    | {"text_config": WHOLE_HEADS | {"use_sliding_window": False, "max_window_layers": 2, "rope_scaling": MROPE}},
    "qwen2_5_vl": QWEN_TOKENS
    | {"model_type": "qwen2_5_vl", "vision_config": QWEN_SIGHT}
    | {
        "text_config": WHOLE_HEADS
        | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
        | {"rope_theta": 5e3, "rms_norm_eps": 1e-6, "rope_scaling": MROPE}
    },
    "qwen3_vl": QWEN_TOKENS
    | {"model_type": "qwen3_vl", "tie_word_embeddings": True, "vision_config": QWEN_SIGHT}
    | {
        "text_config": FEW
        | {"model_type": "qwen3_vl_text", "attention_bias": True, "tie_word_embeddings": True, "rope_theta": 5e6}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 2, 2], "rope_type": "default"}}
    },
    "qwen3_vl_moe": QWEN_TOKENS
    | {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "vision_config": QWEN_SIGHT}
    | {
        "text_config": FEW
        | TWO_OF_SIX
        | {"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 3, "moe_intermediate_size": 40}
        | {"norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1, "rope_theta": 5e6}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 2, 2], "rope_type": "default"}}
    },
    "qwen3_5": QWEN_TOKENS
    | {"model_type": "qwen3_5", "tie_word_embeddings": True, "vision_config": QWEN_SIGHT}
    | {
        "text_config": LATER["qwen3_5_text"]
        | {"tie_word_embeddings": True, "partial_rotary_factor": 0.25}
        | {"rope_parameters": QWEN3_5_ROPE | {"partial_rotary_factor": 0.25}}
    },
    "qwen3_5_moe": QWEN_TOKENS
    | {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": QWEN_SIGHT}
    | {"text_config": LATER["qwen3_5_moe_text"] | {"rope_parameters": QWEN3_5_ROPE}},
    "llama4": {
        "model_type": "llama4",
        "boi_token_index": 200080,
        "text_config": LATER["llama4_text"] | {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "factor": 8.0}},
        "vision_config": LLAMA4_SIGHT,
    },
    "glm4v": {
        "model_type": "glm4v",
        "text_config": WHOLE_HEADS
        | {"model_type": "glm4v_text", "attention_bias": True, "partial_rotary_factor": 0.5}
        | {"rope_theta": 1e4, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": GLM_SIGHT,
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        "text_config": LLAMA
        | OF_EIGHT
        | {"model_type": "glm4v_moe_text", "num_hidden_layers": 3, "first_k_dense_replace": 1}
        | {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 1]}, "partial_rotary_factor": 0.5},
        "vision_config": GLM_SIGHT,
    },
    "exaone4_5": {
        "model_type": "exaone4_5",
        "text_config": LATER["exaone4"],
        "vision_config": QWEN_SIGHT | {"num_key_value_heads": 2},
    },
    "idefics3": {
        "model_type": "idefics3",
        "text_config": WHOLE_HEADS | {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        "vision_config": SIGHT,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "tie_word_embeddings": True,
        "text_config": WHOLE_HEADS | {"model_type": "llama", "tie_word_embeddings": True},
        "vision_config": SIGHT,
    },
    "internvl": {
        "model_type": "internvl",
        "tie_word_embeddings": True,
        "text_config": WHOLE_HEADS | {"model_type": "qwen2"},
        "vision_config": SIGHT | {"image_size": [16, 16], "patch_size": [4, 4]},
    },
    "internvl-qwen3_moe": {
        "model_type": "internvl",
        "tie_word_embeddings": False,
        "text_config": MIXTURES["qwen3_moe"],
        "vision_config": SIGHT | {"image_size": [16, 16], "patch_size": [4, 4]},
    },
    # LLaVA 1.5 says little of its Vicuna.
    "llava": {
        "model_type": "llava",
        "tie_word_embeddings": False,
        "text_config": WHOLE_HEADS | {"model_type": "llama"},
        "vision_config": CLIP_SIGHT,
    },
    "llava-mistral": {
        "model_type": "llava",
        "text_config": LLAMA | {"model_type": "mistral", "rope_theta": 1e9, "sliding_window": None},
        "vision_config": SIGHT | {"model_type": "pixtral"},
    },
    "llava_next": {
        "model_type": "llava_next",
        "text_config": LLAMA | {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None},
        "vision_config": CLIP_SIGHT,
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "text_config": WHOLE_HEADS | {"model_type": "qwen2", "tie_word_embeddings": True},
        "vision_config": SIGLIP_SIGHT,
    },
    "deepseek_vl": {
        "model_type": "deepseek_vl",
        "tie_word_embeddings": False,
        "text_config": WHOLE_HEADS | {"model_type": "llama"},
        "vision_config": SIGLIP_SIGHT,
    },
    "ovis2": {
        "model_type": "ovis2",
        "hidden_size": 64,
        "vocab_size": VOCAB,
        "text_config": WHOLE_HEADS | {"model_type": "qwen2", "tie_word_embeddings": True},
        "vision_config": SIGHT | {"vocab_size": 16, "num_visual_indicator_tokens": 5, "hidden_stride": 1},
    },
    "mistral3-mistral4": {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "text_config": LATER["mistral4"] | {"tie_word_embeddings": False},
        "vision_config": SIGHT,
    },
}
"""Releases that also see, of which the text part is read."""
