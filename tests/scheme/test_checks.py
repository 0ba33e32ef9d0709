"""Slots that do not compose in a scheme, and the reasons in the errors."""

import jax.numpy as jnp
import pytest

import posjax as pj
from posjax import bias, masks, norms, scales
from posjax.scheme import Scheme


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pj.scheme("rope", scale="log-n"), r"scale: expected one of the specs of this slot or None"),
        (lambda: pj.scheme("rope", bias=bias.ALiBi), r"bias: expected one of the specs"),
        (lambda: pj.scheme("rope", norm=scales.LogN(4)), r"norm: expected one of the specs"),
        (lambda: pj.scheme("rope", mask="causal"), r"mask: expected a posjax\.masks mask or None"),
        (
            lambda: pj.scheme("coca-slack", norm=norms.KeyNorm()),
            r"norm does not compose with CoCA: .* half-width key t",
        ),
        (lambda: Scheme(mask=masks.Causal() & masks.Segments(jnp.zeros((1, 2), jnp.int32))), r"such as Segments, to"),
        (lambda: pj.scheme("cope", features={"name": "rotary"}), r"features do not compose with CoPE"),
        (lambda: pj.scheme("vo-rope", remap={"name": "rerope", "window": 4}), r"encodes position in values too"),
        (lambda: pj.scheme("xpos", remap={"name": "rerope", "window": 4}), r"remap: ReRoPE replaces the distances"),
        (lambda: pj.scheme("alibi", remap={"name": "rerope", "window": 4}), r"no features read them"),
        (lambda: pj.scheme("linear-elu", bias={"name": "alibi"}), r"bias does not compose with linear attention"),
        (lambda: pj.scheme("linear-elu", features={"name": "xpos"}), r"rotates its numerator with Rotary only"),
        (
            lambda: pj.scheme("performer", norm={"name": "key-norm"}),
            r"KeyNorm removes the norms that Performer's",
        ),
        (
            lambda: pj.scheme("linear-elu", frequencies={"name": "dynamic-ntk", "original_length": 4}),
            r"cannot follow a rule that reads the length",
        ),
        (
            lambda: pj.scheme("linear-elu", frequencies={"name": "yarn", "factor": 4, "original_length": 8}),
            r"rotates only the numerator",
        ),
        (
            lambda: pj.scheme("learned", max_length=8, training_positions={"name": "randomised"}),
            r"the learned embedding is shorter",
        ),
        (lambda: pj.scheme("alibi", training_positions={"name": "equal-mean"}), r"this scheme has neither"),
        (lambda: pj.scheme("xpos", training_positions={"name": "pose", "max_length": 65536}), r"stay below 10,000"),
    ],
)
def test_slots_that_do_not_compose_are_refused(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
