"""From text to batches: documents, byte tokens, packed rows, and a deterministic, resumable stream of batches."""

from train.data.packing import Batch, PackedRows, pack
from train.data.pipeline import batches, training_rows
from train.data.sources import Document, documents
from train.data.tokenizer import BOS, EOS, MASK, PADDING, VOCABULARY_SIZE, decode, encode

__all__ = [
    "BOS",
    "EOS",
    "MASK",
    "PADDING",
    "VOCABULARY_SIZE",
    "Batch",
    "Document",
    "PackedRows",
    "batches",
    "decode",
    "documents",
    "encode",
    "pack",
    "training_rows",
]
