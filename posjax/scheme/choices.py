"""One choice for each slot, and the properties that follow from the choices."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

from posjax import masks
from posjax._slots import Features
from posjax.scheme import slots

_PLAIN = Features()


@dataclasses.dataclass(frozen=True)
class Choices:
    """The slots of a ``Scheme``, which describes them; None for an empty slot."""

    embedding: slots.EmbeddingSlot | None = None
    norm: slots.NormSlot | None = None
    features: slots.FeatureSlot | None = None
    scale: slots.ScaleSlot | None = None
    bias: slots.BiasSlot | None = None
    mask: masks.Mask | None = None
    remap: slots.RemapSlot | None = None
    sinks: slots.SinkSlot | None = None
    linear: slots.LinearSlot | None = None
    training_positions: slots.PositionRule | None = None

    @property
    def maps(self) -> slots.FeatureSlot:
        """The features; the plain projections if there are none."""
        return _PLAIN if self.features is None else self.features

    @property
    def reads_length(self) -> bool:
        """Whether the scheme depends on the current length (dynamic NTK, LongRoPE's switch)."""
        return self.maps.reads_length

    @property
    def reads_tokens(self) -> bool:
        """Whether ``attend`` needs the gates that ``prepare`` computes from the tokens (FoX)."""
        return self.bias is not None and self.bias.reads_tokens

    @property
    def rotates(self) -> bool:
        """Whether the features have frequencies, which ``extend`` may change."""
        return self.maps.frequencies is not None

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing."""
        chosen = (self.embedding, self.features, self.scale, self.bias, self.mask, self.remap)
        # A shift rotates queries and keys, and random features then give another estimate of the same kernel.
        estimated = self.linear is not None and self.linear.random and self.rotates
        return not estimated and all(spec is None or spec.shift_invariant for spec in chosen)

    @property
    def kept_keys(self) -> tuple[int, int] | None:
        """``(first, recent)``: how many first and most recent keys a causal query can see; None if all.

        Also None for CoPE, which needs the keys in order: a ring buffer does not keep their order.
        """
        if self.bias is not None and self.bias.contextual:
            return None
        found = [mask.kept_keys for mask in (self.mask, self._far_mask) if mask is not None]
        return next((bounds for bounds in found if bounds is not None), None)

    @property
    def own_mask(self) -> masks.Mask | None:
        """The masks of the mask slot and the remap slot, combined by ``&``."""
        return all_of(self.mask, self._far_mask)

    @property
    def _far_mask(self) -> masks.Mask | None:
        return None if self.remap is None else self.remap.mask()

    def reads_positions(self, options: Mapping[str, Any]) -> bool:
        """Whether a call of ``attend`` with these options depends on positions."""
        chosen, mask = (self.features, self.scale, self.bias, self.mask, self.remap), options.get("mask")
        if options.get("causal", True) or any(spec is not None for spec in chosen):
            return True
        return mask is not None and masks.as_mask(mask).reads_positions


SLOT_NAMES = ("frequencies", *(field.name for field in dataclasses.fields(Choices)))
"""The slots that ``replace`` and ``extend`` accept."""


def all_of(*parts: masks.Mask | None) -> masks.Mask | None:
    """The ``&`` of all masks that are not None; None if all are None."""
    found = [part for part in parts if part is not None]
    return None if not found else functools.reduce(operator.and_, found)
