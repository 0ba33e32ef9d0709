"""Bad arguments of the diagnostics are refused in one line that names them."""

import numpy as np
import pytest
from refusals import refused

import posjax as pj
from posjax import diagnostics, rotary

ROPE, ALIBI = pj.scheme("rope"), pj.scheme("alibi")
Q = np.ones((1, 4, 2, 8), np.float32)
CALLS = [
    ("pairing", lambda: diagnostics.rotary_anomaly(Q, Q, rotary.Plain(), pairing="halves")),
    ("heads", lambda: diagnostics.rotary_anomaly(Q, np.ones((1, 4, 3, 8)), rotary.Plain())),
    ("k", lambda: diagnostics.rotary_anomaly(Q, np.ones((1, 5, 2, 8)), rotary.Plain())),
    ("planes", lambda: diagnostics.rotary_anomaly(Q, Q, np.ones(5))),
    ("length", lambda: diagnostics.turns(rotary.Plain(), 0, head_dim=128)),
    ("head_dim", lambda: diagnostics.turns(rotary.Plain(), 16)),
    ("powers", lambda: diagnostics.exactness(rotary.Plain(), head_dim=128, powers=range(30, 33))),
    ("powers", lambda: diagnostics.exactness(rotary.Plain(), head_dim=128, powers=range(2))),
    ("samples", lambda: diagnostics.exactness(rotary.Plain(), head_dim=128, samples=0)),
    ("learned", lambda: diagnostics.exactness(rotary.Frequencies(np.ones(4, np.float32)))),
    ("query", lambda: diagnostics.weights(ROPE, 4, query=4, num_heads=1, head_dim=2)),
    ("length", lambda: diagnostics.weights(ROPE, 0)),
    ("scheme", lambda: diagnostics.weights(pj.Layers((((ROPE,), 2),)), 4)),
    ("scheme", lambda: diagnostics.entropy(pj.scheme("linear-elu"), Q, Q)),
    ("distances", lambda: diagnostics.weight_curve(ROPE, np.array([], int))),
    ("share", lambda: diagnostics.receptive_field(ALIBI, 16, share=0)),
    ("share", lambda: diagnostics.receptive_field(ALIBI, 16, share=1.5)),
    ("layers", lambda: diagnostics.receptive_field(ALIBI, 16, layers=0)),
    ("anomaly", lambda: diagnostics.plot_anomaly(diagnostics.Anomaly(*np.zeros((6, 3, 2, 8))))),
    ("statistic", lambda: diagnostics.plot_anomaly(diagnostics.Anomaly(*np.zeros((6, 3, 8))), statistic="zones")),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CALLS)])
def test_bad_calls_are_refused(name, call):
    refused(name, call)
