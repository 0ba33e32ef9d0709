"""Which text to read, and how it becomes rows of tokens."""

from dataclasses import dataclass
from typing import Literal

from train.config.settings.checks import check, check_fraction, check_positive


@dataclass(frozen=True)
class SourceConfig:
    """One part of a mixture: its files, and its share of the training."""

    paths: tuple[str, ...] = ()  # as `data.paths`
    weight: float = 1.0  # this part's share of the training tokens, beside the weights of the others
    text_key: str = "text"
    messages_key: str = ""  # as `data.messages_key`


@dataclass(frozen=True)
class DataConfig:
    """Which text to read, and how it becomes rows of tokens.

    A .txt or .py file is a document; .jsonl (each perhaps .gz or .zst), .parquet and .array_record have a document in
    each line, row or record. Paths may be URLs, such as gs://bucket/*.txt. Whole documents are held out.
    """

    source: Literal["stdlib", "files"] = "stdlib"  # Python's own standard library, or `paths`, or `mixture`
    paths: tuple[str, ...] = ()  # files, or globs of files
    mixture: tuple[SourceConfig, ...] = ()  # instead of `paths`: several, with weights
    text_key: str = "text"  # the key or column of the text
    messages_key: str = ""  # the key of a conversation's messages, as messages; text_key is then not read
    bad_records: float = 0.01  # the largest share of a part's lines and rows that may have no text; these are left out
    held_out: float = 0.05  # share of the documents kept from training, for evaluation
    held_out_tokens: int = 2**26  # the most tokens that are held out, 64 Mi; at least one document is held out
    tokenizer: str = "bytes"  # or a tokenizer.json of Hugging Face, a .model of SentencePiece, or a GGUF file
    chat_template: str = ""  # a file with a template of conversations, instead of the tokenizer's own
    special_tokens: Literal["added", "own"] = (
        "added"  # added: new ids for those of the four that a tokenizer lacks; own: only those that it has
    )
    packing: Literal["concatenate", "best-fit"] = "concatenate"  # how documents fill rows: see train.data.packing
    cache: str = ""  # folder or URL of the tokens; {output}/tokens when empty, and none for the bytes of a small corpus

    def __post_init__(self):
        check_fraction("data.held_out", self.held_out)
        check(0 <= self.bad_records <= 1, f"data.bad_records must be from 0 to 1, found {self.bad_records}")
        check_positive("data", self, "held_out_tokens")
        if self.source == "files":
            self._check_files()
        else:
            check(not self.paths, f"data.paths is read only with data.source=files, found source {self.source!r}")
            check(not self.mixture, f"data.mixture is read only with data.source=files, found source {self.source!r}")
            check(not self.messages_key, "data.messages_key is read only with data.source=files")
        check(
            self.tokenizer == "bytes" or self.tokenizer.endswith((".json", ".model", ".gguf")),
            "data.tokenizer must be 'bytes', a tokenizer.json of Hugging Face, a .model of SentencePiece or a GGUF "
            f"file, found {self.tokenizer!r}",
        )
        check(
            not self.has_conversations or self.tokenizer.endswith((".json", ".gguf")),
            "data.messages_key: conversations need the chat template of a tokenizer.json or a GGUF file; "
            f"data.tokenizer is {self.tokenizer!r}",
        )

    def _check_files(self) -> None:
        both = self.paths and self.mixture
        check(not both, "data.paths and data.mixture are two ways to name the text; put the paths into the mixture")
        check(
            bool(self.paths or self.mixture),
            "data.paths is empty: name the files to read (.txt, .jsonl, .parquet, ...), or globs of them",
        )
        for number, part in enumerate(self.mixture):
            check(bool(part.paths), f"data.mixture[{number}].paths is empty: name its files, or globs of them")
            check_positive(f"data.mixture[{number}]", part, "weight")

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The parts of the mixture; a mixture of one where there is none."""
        return self.mixture or (SourceConfig(self.paths, 1.0, self.text_key, self.messages_key),)

    @property
    def has_conversations(self) -> bool:
        """Whether a part has conversations, of which only the assistant's turns are learned."""
        return any(part.messages_key for part in self.parts)
