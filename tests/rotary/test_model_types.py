"""``from_hf`` against the rotary module of every model type of transformers; runs where torch is installed too."""

import numpy as np
import pytest

from posjax.rotary import from_hf
from posjax.rotary.model_types import MODEL_TYPES, NO_ROTARY, UNREADABLE

pytest.importorskip("torch")
pytest.importorskip("transformers")

import model_types as theirs

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

WORDS = "rope_parameters|rotary_dim|rope_theta"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
READ_OR_REFUSED = {
    "no head size": lambda values: {key: value for key, value in values.items() if "head_dim" not in key},
    "another base": lambda values: values | {"rope_theta": 54_321.0},
    "null base": lambda values: values | {"rope_theta": None},
    "another share": lambda values: values | {"partial_rotary_factor": 0.75},
    "null share": lambda values: values | {"partial_rotary_factor": None},
    "plain": lambda values: values | {"rope_parameters": {"rope_type": "default", "rope_theta": 54_321.0}},
    "plain without a base": lambda values: values | {"rope_parameters": {"rope_type": "default"}},
    "YaRN": lambda values: values | {"rope_theta": 54_321.0, "rope_scaling": YARN},
}
"""Configurations that some types do not read: from_hf refuses them, or gives what transformers computes."""
MISTAKEN = {"mistral4": "without its own rope_parameters transformers rotates more channels than its keys have"}
"""Types whose rotary module does not fit their model when their config has other rope_parameters than the default."""


@pytest.fixture(scope="module")
def types():
    """The types of the table that the installed transformers has; other releases have more or fewer."""
    theirs.quiet()
    found = {name: cls for name, cls in sorted(theirs.config_classes(WORDS).items()) if name in MODEL_TYPES}
    assert len(found) > 150
    return found


def difference(values, expected):
    """ "same", "refused", or how ``from_hf`` differs from the rotations that are expected."""
    try:
        found = from_hf(values)
        found = found if isinstance(found, dict) else dict.fromkeys(expected, found)
        found = {layer: found[layer].at_length() for layer in expected}
    except ValueError:
        return "refused"
    for layer, (frequencies, factor) in expected.items():
        ours, our_factor = np.asarray(found[layer][0].value, np.float64), found[layer][1]
        if ours.shape != frequencies.shape:
            return f"{layer}: {ours.size} pairs, not {frequencies.size}"
        if not np.allclose(ours, frequencies, rtol=3e-6, atol=0) or abs(our_factor - factor) > 1e-6:
            return f"{layer}: {ours[[0, -1]]} and factor {our_factor}, not {frequencies[[0, -1]]} and {factor}"
    return "same"


def test_every_type_with_sizes_alone_has_the_rule_of_transformers(types):
    plain = {name: theirs.sizes(cls, name) for name, cls in types.items()}
    null = dict.fromkeys(("rope_parameters", "rope_scaling"))
    found = {name: difference(plain[name] | null, theirs.rotations(cls, plain[name])) for name, cls in types.items()}
    assert {name: what for name, what in found.items() if what != "same"} == {}


@pytest.mark.parametrize("case", READ_OR_REFUSED)
def test_a_setting_is_read_as_in_transformers_or_refused(types, case):
    values = {name: READ_OR_REFUSED[case](theirs.sizes(cls, name)) for name, cls in types.items()}
    found = {name: difference(values[name], theirs.tried(cls, values[name])) for name, cls in types.items()}
    wrong = {name: what for name, what in found.items() if what not in ("same", "refused") and name not in MISTAKEN}
    assert wrong == {}
    assert list(found.values()).count("same") > len(types) // 12


def test_a_configuration_as_transformers_writes_it_has_its_rule(types):
    """With all keys, also those that it computes, such as the sizes of Gemma 4's layers."""
    written = {name: cls().to_dict() for name, cls in types.items()}
    rotated = {name: theirs.tried(cls, written[name]) for name, cls in types.items()}
    found = {name: difference(written[name], rotated[name]) for name in types if rotated[name]}
    assert {name: what for name, what in found.items() if what not in ("same", "refused")} == {}
    assert list(found.values()).count("refused") < len(types) // 12


def test_types_that_no_rule_describes_are_refused():
    assert not {*UNREADABLE, *NO_ROTARY} & set(MODEL_TYPES)
    for name in (*UNREADABLE, *NO_ROTARY):
        with pytest.raises(ValueError, match=f"model_type '{name}' has (no rotary positions|a rope that no)"):
            from_hf({"model_type": name, "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4})
