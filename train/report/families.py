"""The family of a method, by which figures of many schemes are split."""

from posjax import Layers, Scheme, coca

ABSOLUTE, ROTATIONS, BIASES = "absolute embeddings and none", "rotations", "biases"
WINDOWS, COCA, LINEAR = "windows and distances", "CoCA", "linear attention"
OTHER = "scales, norms, drawn positions"
FAMILIES = (ABSOLUTE, ROTATIONS, BIASES, WINDOWS, COCA, LINEAR, OTHER)
"""The families, in the order of the figures."""


def family(scheme: Scheme | Layers) -> str:
    """One of `FAMILIES`, by the slots that the scheme fills.

    A scheme that fills several belongs to the first of: linear attention, biases, windows and remapped distances, CoCA,
    the rest beside rotations (scales, norms, sinks, drawn positions), rotations, embeddings. The slots of all layers
    count together.
    """
    layers = scheme.kinds if isinstance(scheme, Layers) else (scheme,)

    def filled(*slots: str) -> bool:
        return any(getattr(layer, slot) is not None for layer in layers for slot in slots)

    found = {
        LINEAR: filled("linear"),
        BIASES: filled("bias"),
        WINDOWS: filled("mask", "remap"),
        COCA: any(isinstance(layer.features, coca.Coca | coca.PartlyCollinear) for layer in layers),
        OTHER: filled("scale", "norm", "sinks", "training_positions"),
        ROTATIONS: filled("features"),
    }
    return next((name for name, is_so in found.items() if is_so), ABSOLUTE)
