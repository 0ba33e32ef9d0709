"""From text to batches: documents, tokens, packed rows, and a deterministic, resumable stream of batches."""

from train.data.cache import TOKENS
from train.data.packing import Batch, PackedRows, pack, pack_sample
from train.data.pipeline import (
    batches,
    held_out_documents,
    held_out_sample,
    training_rows,
    warnings_of_shared_text,
)
from train.data.sources import Document, documents
from train.data.tokenizer import (
    BOS,
    EOS,
    MASK,
    PADDING,
    VOCABULARY_SIZE,
    Tokenizer,
    decode,
    encode,
    ends_of_text,
    load_tokenizer,
)

__all__ = [
    "BOS",
    "EOS",
    "MASK",
    "PADDING",
    "TOKENS",
    "VOCABULARY_SIZE",
    "Batch",
    "Document",
    "PackedRows",
    "Tokenizer",
    "batches",
    "decode",
    "documents",
    "encode",
    "ends_of_text",
    "held_out_documents",
    "held_out_sample",
    "load_tokenizer",
    "pack",
    "pack_sample",
    "training_rows",
    "warnings_of_shared_text",
]
