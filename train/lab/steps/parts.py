"""Which part of a decoder an instruction of a compiled step belongs to, in a program of any trainer.

Three properties decide it, the most reliable first: the sizes of its matrix products, its name in the traced function
(``op_name``), and the sizes of the largest array that it produces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from posjax.nn import DecoderConfig
from train.lab.steps.products import Product, products_of
from train.plan.hbm_traffic import LOOKUPS, is_lookup
from train.plan.hlo import Array, Instruction, Module

MLP = "MLP"
PROJECTIONS = "projections of attention"
AROUND = "around attention"
ATTENTION = "attention without a kernel"
LOGITS = "logits and loss"
EMBEDDING = "embedding"
NORMS = "norms, residuals, scan"
OPTIMIZER = "optimizer"
OTHER = "other"
PARTS = (MLP, PROJECTIONS, AROUND, ATTENTION, LOGITS, EMBEDDING, NORMS, OPTIMIZER, OTHER)

FORWARD, AGAIN, BACKWARD, NEITHER = "forward", "again", "backward", ""
PASSES = (FORWARD, AGAIN, BACKWARD, NEITHER)

_SMALLEST_SHARD = 256
"""A dimension may be split over devices; a part smaller than this identifies nothing."""

_EMBEDDING_NAME = re.compile(r"embed(?!\w*[./]attend)", re.IGNORECASE)
_HEAD_NAME = re.compile(r"logits|unembed|lm_head|cross_entropy|softmax_loss", re.IGNORECASE)
_NORM_NAME = re.compile(r"norm", re.IGNORECASE)
_MLP_NAME = re.compile(r"\bmlp|feed_forward|ffn|moe", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"attention|attn|rotary|rope|splash|flash|[qkv]_proj|query|kv_proj", re.IGNORECASE)
_ATTEND_NAME = re.compile(r"attend|blockwise|dot_product_attention|softmax", re.IGNORECASE)
_LAYER_NAME = re.compile(r"while/body|closed_call|layer", re.IGNORECASE)


@dataclass(frozen=True)
class Widths:
    """The sizes by which parts are distinguished."""

    model: int
    hidden: int
    vocabulary: int
    heads: tuple[int, ...]  # of queries, and of keys
    head: int
    length: int
    devices: int = 1  # over which each of them may be split

    @classmethod
    def of(cls, decoder: DecoderConfig, length: int, devices: int) -> Widths:
        """The sizes of a decoder: those of its last layer, if layers differ."""
        layer = decoder.of_layer(decoder.num_layers - 1)
        heads = (layer.num_heads, layer.num_kv_heads)
        return cls(layer.model_dim, layer.mlp_dim, layer.vocab_size, heads, layer.head_dim, length, devices)

    def shards(self, size: int) -> set[int]:
        """A size, and its shards' sizes if it is split over devices, except those that equal another whole size."""
        others = {self.model, self.hidden, self.vocabulary, self.length, self.head, *self.heads} - {size}
        others |= {heads * self.head for heads in self.heads}
        return {size} | (self._split(size) - others)

    def features(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape without its token dimension: the first size that is the length or a part of it, except the last
        dimension.

        So a vocabulary or hidden width that equals the length is not confused with it.
        """
        tokens = {self.length} | self._split(self.length)
        index = next((n for n, size in enumerate(shape[:-1]) if size in tokens), None)
        return shape if index is None else shape[:index] + shape[index + 1 :]

    def _split(self, size: int) -> set[int]:
        counts = (n for n in range(1, self.devices + 1) if self.devices % n == 0 and size % n == 0)
        return {size // n for n in counts if size // n >= _SMALLEST_SHARD}


def pass_of(op_name: str) -> str:
    """The pass of an instruction; `NEITHER` for the optimizer, which is not differentiated."""
    if "rematted_computation" in op_name:
        return AGAIN
    if "transpose(" in op_name:
        return BACKWARD
    return FORWARD if "jvp(" in op_name or "checkpoint" in op_name else NEITHER


def part_of(module: Module, computation: str, line: Instruction, widths: Widths) -> str:
    """The decoder part of an instruction that is neither a kernel nor a collective."""
    found = list(products_of(module, computation, line))
    if found:
        return _of_products(found, line.op_name, widths)
    if pass_of(line.op_name) == NEITHER and line.op_name and not _LAYER_NAME.search(line.op_name):
        return OPTIMIZER
    return _of_name(module, line, widths) or _of_sizes(line, widths)


def _of_products(found: list[Product], op_name: str, widths: Widths) -> str:
    shapes = (shape for product in found for shape in (product.left, product.right, product.result))
    sizes = {size for shape in shapes for size in widths.features(shape)}
    if sizes & widths.shards(widths.vocabulary):
        named = _EMBEDDING_NAME.search(op_name) and not _HEAD_NAME.search(op_name)
        return EMBEDDING if named or any(product.looks_up for product in found) else LOGITS
    if sizes & widths.shards(widths.hidden):
        return MLP
    if widths.model not in sizes and any(_is_of_heads(product, op_name, widths) for product in found):
        return ATTENTION
    return PROJECTIONS if sizes & {widths.head, *widths.shards(widths.model)} else OTHER


def _is_of_heads(product: Product, op_name: str, widths: Widths) -> bool:
    """Whether a product is done for every head: the scores, or the weighted values.

    Both operands and the result have heads and tokens; parameters have no tokens. If the tokens are split, the name
    decides.
    """
    sides = (set(product.left), set(product.right), set(product.result))
    has_tokens = all(widths.length in side for side in sides) or bool(_ATTEND_NAME.search(op_name))
    return has_tokens and any(all(heads in side for side in sides) for heads in widths.heads)


def _of_name(module: Module, line: Instruction, widths: Widths) -> str | None:
    """The part by the instruction's name, or by the size of the vocabulary in a result; None if neither decides."""
    name = line.op_name
    in_layer = bool(_LAYER_NAME.search(name))
    if _HEAD_NAME.search(name):
        return LOGITS
    # whether it is, or prepares, a gather or scatter
    looks_up = is_lookup(module, line) or any(word in name.rpartition("/")[2] for word in LOOKUPS)
    if _EMBEDDING_NAME.search(name) or (not in_layer and looks_up):
        return EMBEDDING
    if {size for array in line.results for size in widths.features(array.shape)} & widths.shards(widths.vocabulary):
        return LOGITS
    for pattern, part in ((_NORM_NAME, NORMS), (_MLP_NAME, MLP), (_ATTENTION_NAME, AROUND)):
        if pattern.search(name):
            return part
    return None


def _of_sizes(line: Instruction, widths: Widths) -> str:
    largest = max(line.results, key=lambda array: array.bytes, default=Array("f32", ()))
    sizes = set(widths.features(largest.shape))
    if sizes & widths.shards(widths.hidden):
        return MLP
    if _has_heads(sizes, widths):
        return AROUND
    made = {size for array in line.results for size in array.shape}
    return NORMS if _LAYER_NAME.search(line.op_name) or made & {widths.model, widths.length} else OTHER


def _has_heads(sizes: set[int], widths: Widths) -> bool:
    """Whether an array has a dimension of heads, or of their features (or half of these, as in rotations), and no
    larger one."""
    wide = widths.shards(widths.model) | widths.shards(widths.hidden)
    return bool(sizes & {widths.head, widths.head // 2, *widths.heads}) and not sizes & wide
