"""From text to batches: documents, tokens, packed rows, and a deterministic, resumable stream of batches."""

from train.data.cache import TOKENS
from train.data.packing import Batch, PackedRows, pack_sample
from train.data.pipeline import (
    batches,
    held_out_documents,
    held_out_sample,
    training_rows,
    warnings_of_shared_text,
)
from train.data.tokenizer import PADDING, Tokenizer, ends_of_text, load_tokenizer

__all__ = [
    "PADDING",
    "TOKENS",
    "Batch",
    "PackedRows",
    "Tokenizer",
    "batches",
    "ends_of_text",
    "held_out_documents",
    "held_out_sample",
    "load_tokenizer",
    "pack_sample",
    "training_rows",
    "warnings_of_shared_text",
]
