"""Reading and writing released models: folders in the layout of Hugging Face, and GGUF files (read only).

fsspec, gguf, huggingface_hub and tokenizers (``pip install -e ".[hf]"``) are imported only if they are needed.
"""

from posjax.nn.huggingface.load import from_pretrained
from posjax.nn.huggingface.peft import load_adapter, save_adapter
from posjax.nn.huggingface.registry import FAMILIES, read_config
from posjax.nn.huggingface.save import save_pretrained
from posjax.nn.huggingface.text_parts import TEXT_PARTS

__all__ = [
    "FAMILIES",
    "TEXT_PARTS",
    "from_pretrained",
    "load_adapter",
    "read_config",
    "save_adapter",
    "save_pretrained",
]
