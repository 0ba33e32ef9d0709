"""From text to batches: documents, tokens, packed rows, and a deterministic, resumable stream of batches."""
