"""Options of ``config.json`` that change the logits are read as transformers reads them.

Options that are refused are in ``test_refusals_released.py``.
"""

import json

import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released
from nn.huggingface.theirs import TOKENS, assert_close, logits, random_model

from posjax.nn import from_pretrained

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_transformers"),
]

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default"}
YARN = released.rope(1e4, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
OPTIONS = {
    "windows without rope": ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    "windows by layer types": ("smollm3", {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 5}),
    "a window that is not used": ("smollm3", {"sliding_window": 5}),
    "more layers than there are": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
    "the rule of one kind": ("gemma3_text", {"rope_parameters": {FULL: released.rope(1e3)}}),
    "no base": ("gemma3_text", {"rope_parameters": {FULL: DEFAULT, SLIDING: DEFAULT}}),
    "outer bases": (
        "gemma3_text",
        {"rope_parameters": {FULL: DEFAULT, SLIDING: DEFAULT}, "rope_theta": 77.0, "rope_local_base_freq": 33.0},
    ),
    "scaling of full layers": ("gemma3_text", {"rope_scaling": LINEAR}),
    "scaling first": ("llama", {"rope_scaling": LINEAR, "rope_parameters": released.rope(1e3)}),
    "scaling first, neox": ("gpt_neox", {"rope_scaling": LINEAR, "rope_parameters": released.rope(1e3)}),
    "share of another family": ("cohere2", {"rotary_pct": 1.0}),
    "base alone": ("gpt_oss", {"rope_theta": 500.0, "rope_parameters": None}),
    "experts": ("gpt_oss", {"num_local_experts": None, "num_experts": 4}),
    "one mscale": ("llama-yarn", {"rope_parameters": YARN | {"mscale_all_dim": 0.7}}),
    "both mscales": ("llama-yarn", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    "a factor beside mscales": (
        "llama-yarn",
        {"rope_parameters": YARN | {"attention_factor": 0.7, "mscale": 0.5, "mscale_all_dim": 0.7}},
    ),
    "no length": (
        "qwen2",
        {"max_position_embeddings": None, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "no window": ("qwen2", {"sliding_window": None}),
    "no options of attention": ("mpt", {"attn_config": None}),
    "one option of attention": ("mpt", {"attn_config": {"softmax_scale": 0.3}}),
}


def changed(name):
    """The config of a case. Keys with the value None are left out, except ``sliding_window``."""
    case, changes = OPTIONS[name]
    values = released.CASES[case] | changes
    kept = {key: value for key, value in values.items() if value is not None or key == "sliding_window"}
    return json.loads(json.dumps(kept))


BY_DEFAULT = ("windows by layer types", "outer bases", "a factor beside mscales")


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.wide) for name in OPTIONS]
)
def test_an_option_means_what_it_means_to_transformers(name, tmp_path):
    model = random_model(changed(name))
    model.save_pretrained(tmp_path)
    released.write_config(tmp_path, changed(name))
    found = nnx.jit(lambda model, tokens: model(tokens))(from_pretrained(tmp_path), TOKENS)
    assert_close(np.asarray(found), logits(model, TOKENS))
