"""Replacing slots of a scheme, and what may be replaced after training."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax

from posjax import rotary
from posjax._checks import check, shown
from posjax.scheme.choices import SLOT_NAMES, Choices
from posjax.scheme.parameters import LEARNING, init_spec
from posjax.scheme.registry import check_known, slot

C = TypeVar("C", bound=Choices)


def replaced(scheme: C, changes: Mapping[str, Any]) -> C:
    """The scheme with some slots replaced, the frequency rule last; see ``Scheme.replace``.

    Raises:
        ValueError: for an unknown slot, name or option, or a frequency rule for a scheme without rotation.
    """
    for name in changes:
        check_known("slot", name, SLOT_NAMES)
    changes = dict(changes)
    rule = changes.pop("frequencies", None)
    made = {name: _resolved(scheme, name, value) for name, value in changes.items()}
    changed = dataclasses.replace(scheme, **made)
    if rule is None:
        return changed
    check(changed.rotates, "frequencies: this scheme rotates nothing, so it has no frequencies")
    features = _with_rule(changed.features, _resolved(changed, "frequencies", rule))
    return dataclasses.replace(changed, features=features)


def _resolved(scheme, slot_name: str, value):
    """A spec from ``{"name": ...}``; a frequency rule keeps the options that it does not change."""
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    check("name" in options, f"{slot_name}: expected a spec or {{'name': ...}}, found {shown(value)}")
    if slot_name == "frequencies":
        options = _inherited(scheme.features.frequencies, options["name"]) | options
    return slot(slot_name, options.pop("name"), **options)


def _inherited(before: rotary.FrequencyRule, name: str) -> dict[str, Any]:
    """The options that a frequency rule by name inherits from ``before``, the rule that it replaces."""
    check(
        before.partial_rotary_factor == 1 or isinstance(before, rotary.Proportional) == (name == "proportional"),
        f"frequencies: {name!r} would not rotate the pairs that {shown(before)} does, because the share of "
        "p-RoPE differs from that of partial rotary; pass the rule itself if that is intended",
    )
    return {key: getattr(before, key) for key in ("base", "head_dim", "partial_rotary_factor")}


def _with_rule(features, rule):
    """The features with another rule; M-RoPE and RoPE-Tie keep their axes and replace their inner rule."""
    before = features.frequencies
    if (
        isinstance(before, rotary.MRoPE | rotary.RoPETie)
        and isinstance(rule, rotary.FrequencyRule)
        and rule.num_axes == 1
    ):
        defaults = {name: getattr(type(before), name) for name in ("base", "head_dim", "partial_rotary_factor")}
        rule = dataclasses.replace(before, rule=rule, **defaults)
    return dataclasses.replace(features, frequencies=rule)


def check_same_parameters(before: Choices, after: Choices) -> None:
    """Raises ValueError, naming the slot, unless two schemes have parameters and projections of the same shapes."""
    features = (scheme.features for scheme in (before, after) if scheme.features is not None)
    sizes = (size for size in (spec.own_head_dim for spec in features) if size is not None)
    head_dim = next(sizes, 64)
    for name in ("embedding", *LEARNING):
        _check_slot(name, getattr(before, name), getattr(after, name), head_dim)
    check(
        before.maps.widths == after.maps.widths,
        f"features: {shown(after.features)} needs other projections than {shown(before.features)}; train it instead",
    )


def _check_slot(name: str, before, after, head_dim: int) -> None:
    if before == after:
        return
    has, needs = _shapes(before, head_dim), _shapes(after, head_dim)
    why = f"{name}: {shown(after)} needs parameters {needs}, but the model has {has}; train it instead"
    check(has == needs, why)


def _shapes(spec, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a spec's parameters for a head of this size; the other sizes are arbitrary."""
    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": head_dim, "model_dim": 64}
    return jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(lambda: init_spec(spec, jax.random.key(0), sizes)))
