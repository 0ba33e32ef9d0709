"""Schemes that differ from layer to layer."""

import dataclasses

from posjax._checks import check, check_count, describe
from posjax.scheme.registry import check_known
from posjax.scheme.scheme import Scheme

MOST_LAYERS = 2**16
"""Many times the layers of the deepest models; a larger number is a mistake."""


def check_layers(num_layers: int) -> None:
    """Raises ValueError unless the number of layers is whole, above 0 and at most ``MOST_LAYERS``."""
    check_count("num_layers", num_layers)
    check(num_layers <= MOST_LAYERS, f"num_layers must be at most {MOST_LAYERS}, found {describe(num_layers)}")


@dataclasses.dataclass(frozen=True)
class Layers:
    """Schemes that differ from layer to layer: a sequence of patterns of schemes, each repeated.

    ``Layers((((local, local, globe), 7), ((local,), 2)))`` are 23 layers. A model scans over each pattern.

    Args:
        patterns: ``((schemes of one period, repeats), ...)``.

    Raises:
        ValueError: for empty patterns, for more than ``MOST_LAYERS`` layers, or for layers with different embeddings or
            training positions.
    """

    patterns: tuple[tuple[tuple[Scheme, ...], int], ...]

    def __post_init__(self):
        check(bool(self.patterns), "patterns is empty: name at least one ((scheme, ...), repeats)")
        for schemes, repeats in self.patterns:
            check(bool(schemes) and repeats > 0, f"patterns: every period needs schemes and repeats, found {repeats}")
        check(self.count <= MOST_LAYERS, f"patterns: at most {MOST_LAYERS} layers are possible, found {self.count}")
        for scheme in self.kinds:
            check(isinstance(scheme, Scheme), f"patterns: expected posjax.Scheme, found {describe(scheme)}")
        for name in ("embedding", "training_positions"):
            values = {getattr(scheme, name) for scheme in self.kinds}
            check(len(values) == 1, f"patterns: all layers must name the same {name}, found {describe(values)}")

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The scheme of every layer, in order."""
        return tuple(scheme for schemes, repeats in self.patterns for _ in range(repeats) for scheme in schemes)

    @property
    def kinds(self) -> tuple[Scheme, ...]:
        """The schemes of one period of every pattern: each scheme of a layer at least once, in order."""
        return tuple(scheme for schemes, _ in self.patterns for scheme in schemes)

    @property
    def count(self) -> int:
        """The number of layers."""
        return sum(len(schemes) * repeats for schemes, repeats in self.patterns)

    @property
    def embedding(self):
        """The embedding added to the token embeddings."""
        return self.kinds[0].embedding

    @property
    def reach(self) -> int | None:
        """How many positions the embedding encodes; see ``Scheme.reach``."""
        return self.kinds[0].reach

    @property
    def training_positions(self):
        """How positions are drawn in training."""
        return self.kinds[0].training_positions

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing in any layer."""
        return all(scheme.shift_invariant for scheme in self.kinds)

    @property
    def counts_in_row(self) -> bool:
        """Whether tokens of packed documents get the positions of their row instead of those in their document.

        True if some layer has a bias, none has features, and no layer changes when all positions of a document are
        shifted. The TPU kernels of biases by distance, such as T5's, need a ``Range``.
        """
        biased = any(scheme.bias is not None for scheme in self.kinds)
        without_features = all(scheme.features is None for scheme in self.kinds)
        return biased and without_features and self.shift_invariant

    @property
    def reads_length(self) -> bool:
        """Whether some layer depends on the current length."""
        return any(scheme.reads_length for scheme in self.kinds)

    def attend(self, *arguments, **options):
        """Raises ValueError: use the ``attend`` of one scheme in ``schemes``."""
        raise ValueError("attend: these are the schemes of several layers; call the attend of one, schemes[n].attend")

    def extend(self, *, layers: str = "all", **changes) -> "Layers":
        """The same layers with the same changes to their schemes; see ``Scheme.extend``.

        Args:
            layers: ``"all"``, or only the ``"full"`` layers, without a mask, or only the ``"local"`` layers, with a
                mask. Changes of frequencies or remap skip layers that rotate nothing; layers of Gated DeltaNet, whose
                state reads no positions, skip all changes but those of the embedding and the training positions.
            changes: see ``Scheme.extend``.

        Raises:
            ValueError: if no layer is changed, and as ``Scheme.extend``.
        """
        check_known("layers", layers, ("all", "full", "local"))

        def selected(scheme: Scheme) -> bool:
            return layers == "all" or (layers == "local") == (scheme.mask is not None)

        def extended(scheme: Scheme) -> Scheme:
            if not selected(scheme):
                return scheme
            if scheme.is_delta:
                applicable = {k: v for k, v in changes.items() if k in ("embedding", "training_positions")}
            else:
                applicable = {k: v for k, v in changes.items() if scheme.rotates or k not in ("frequencies", "remap")}
            return scheme.extend(**applicable)

        chosen = [scheme for scheme in self.kinds if selected(scheme)]
        check(bool(chosen), f"layers: this scheme has no {layers!r} layer")
        which = "" if layers == "all" else f"{layers!r} "
        for name in ("frequencies", "remap"):
            rotating = any(scheme.rotates for scheme in chosen)
            check(rotating or name not in changes, f"{name}: no {which}layer of this scheme rotates anything")
        return Layers(tuple((tuple(map(extended, schemes)), repeats) for schemes, repeats in self.patterns))


def uniform(scheme: Scheme | Layers, num_layers: int) -> Layers:
    """One scheme for all layers as ``Layers``; ``Layers`` are returned unchanged.

    Raises:
        ValueError: if ``Layers`` have another number of layers, and for more than ``MOST_LAYERS``.
    """
    if not isinstance(scheme, Layers):
        made = isinstance(scheme, Scheme)
        check(made, f"scheme: expected posjax.Scheme, as posjax.scheme(name) makes it, found {describe(scheme)}")
        check_layers(num_layers)
        return Layers((((scheme,), num_layers),))
    wanted = scheme.count == num_layers
    check(wanted, f"scheme names {scheme.count} layers, but num_layers is {describe(num_layers)}")
    return scheme
