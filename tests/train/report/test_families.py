"""The family is found by the slots that a scheme fills."""

import pytest

import posjax as pj
from train.report import families
from train.report.families import FAMILIES, family

KNOWN = {
    families.ABSOLUTE: ["nope", "sinusoidal", ("learned", {"max_length": 8})],
    families.ROTATIONS: ["rope", "p-rope", "xpos", "pope", ("smollm3", {"num_layers": 4})],
    families.BIASES: ["alibi", "t5", "fox", "cope", "scale-invariant"],
    families.WINDOWS: [
        ("window", {"size": 4}),
        ("rerope", {"window": 4}),
        ("hwfa", {"num_layers": 4, "length": 32}),
        ("rnope-swa", {"num_layers": 4, "window": 8}),
    ],
    families.COCA: ["coca-strict", "coca-slack", ("coca-planes", {"planes": (0, 4)})],
    families.LINEAR: ["linear-elu", "performer"],
    families.OTHER: ["key-norm", "ssmax", "learned-sinks", ("randomised", {"max_length": 64})],
}


def test_every_family_has_an_example():
    assert tuple(KNOWN) == FAMILIES


@pytest.mark.parametrize(
    ("name", "entry"), [(name, entry) for name, entries in KNOWN.items() for entry in entries], ids=str
)
def test_a_scheme_belongs_to_its_family(name, entry):
    preset, options = (entry, {}) if isinstance(entry, str) else entry
    assert family(pj.scheme(preset, **options)) == name


def test_a_bias_over_rotations_is_a_bias_and_a_window_of_coca_a_window():
    assert family(pj.scheme("rope", bias={"name": "alibi"})) == families.BIASES
    assert family(pj.scheme("coca-strict", mask={"name": "window", "size": 4})) == families.WINDOWS
