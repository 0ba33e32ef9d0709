"""Generates text with a saved run, and writes it as its tokens come."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from posjax import nn
from posjax.scheme.choices import check_reach
from train.checkpoint.restore import config_of, entry_in_stage, restore
from train.config.settings.checks import check
from train.data.tokenizer import Tokenizer, ends_of_text
from train.evaluate.decoder import drawn_in_use, empty_cache, to_decode
from train.evaluate.mesh import mesh_for, use_mesh
from train.evaluate.saved import check_causal
from train.model.build import Setup, check_vocabulary, evaluated_scheme

_UNFINISHED = "\ufffd".encode()
"""The result of some tokenizers for an incomplete character."""
_CONTEXT = 16
"""Number of tokens at the end of a prompt that are decoded together with the text after it; a whole long prompt would
be slow."""


@dataclass(frozen=True)
class SamplingOptions:
    """How many tokens are generated, and how each is chosen.

    Attributes:
      tokens: the maximal number of generated tokens; the end of the document stops earlier.
      temperature, top_k, top_p: see `nn.Sampling`.
      seed: of the draws.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("tokens", "top_k", "seed"):
            option, value = f"--{name.replace('_', '-')}", getattr(self, name)
            found = f"must be a whole number of at least 0 and below 2**32, found {value}"
            check(isinstance(value, Integral) and 0 <= value < 2**32, f"{option} {found}")
        try:
            self.choice  # noqa: B018
        except ValueError as error:  # its message begins with the name of the field
            raise ValueError(f"--{str(error).replace('top_p', 'top-p')}") from None

    @property
    def choice(self) -> nn.Sampling:
        """How each token is chosen."""
        return nn.Sampling(self.temperature, self.top_k, self.top_p)


def tokens_after(
    model: nn.Decoder,
    prompt: Int[np.ndarray, "prompt"],
    sampling: SamplingOptions,
    ends: Set[int],
    mesh: Mesh | None = None,
) -> Iterator[int]:
    """Yields the tokens after a prompt, until one of `ends` (see `ends_of_text`) or the maximal number.

    A given mesh must be in use; parameters and the cache are split over it. Schemes that depend on the current length
    use the length of prompt and generated tokens together, from the first chunk on.

    Raises ValueError if the logits are not finite.
    """
    if sampling.tokens == 0:
        return
    steps = nn.stream(
        to_decode(model, mesh),
        np.asarray(prompt, np.int32)[None],
        sampling.tokens,
        sampling=sampling.choice,
        stop=ends,
        key=jax.random.key(sampling.seed),
        positions=drawn_in_use(model, len(prompt) + sampling.tokens, sampling.seed, 1).positions,
        init_cache=partial(empty_cache, mesh=mesh),
    )
    for n, (token,) in enumerate(steps):
        check(token >= 0, f"the model gives no finite logits after {len(prompt) + n} tokens; generate fewer")
        if token in ends:
            return
        yield int(token)


def generate(
    directory: str | Path,
    prompt: str,
    sampling: SamplingOptions,
    overrides: Sequence[str] = (),
    write: Callable[[str], object] | None = None,
) -> str:
    """Continues a prompt with the model saved in `directory`, passing the prompt and the text to `write` as they are
    decoded.

    Without `write` the first process prints them, with a final line break, so standard output has the whole text.

    Special tokens that are spelled out in the prompt are recognised, so a chat model can be used with its own format.
    `overrides` may change keys that did not affect the training: ``scheme.extend``, to run beyond the training length.

    Returns the text without the prompt. Raises FileNotFoundError without a trained run, and ValueError for overrides
    that would need a new training, for models that do not predict the next token, for a prompt without a token, and for
    more tokens than a learned embedding has positions.
    """
    write = write or _print
    config = config_of(directory, overrides)
    check_causal(config)
    setup = Setup(config)
    check_vocabulary(setup)
    tokenizer = setup.tokenizer
    tokens = tokenizer.prompt(prompt.encode("utf-8"))
    _check_embedded(tokens, config.model.vocab_size or tokenizer.vocabulary_size)
    check(len(tokens) > 0, "--prompt is empty, and this tokenizer puts no BOS before a text; give at least one word")
    mesh = mesh_for(config, rows=1)
    stage, model = restore(directory, config, mesh=mesh)
    entry = entry_in_stage(config.scheme, config, stage)
    total = len(tokens) + sampling.tokens
    model = model.with_scheme(evaluated_scheme(stage, entry, total))
    check_reach(model.config.layers.reach, "--tokens, together with those of the prompt", total)
    ends = ends_of_text(config.data, tokenizer)
    write(prompt)
    with use_mesh(mesh):
        text = _written(tokens_after(model, tokens, sampling, ends, mesh), tokens, tokenizer, write)
    if write is _print:
        _print("\n")
    return text


def _print(text: str) -> None:
    if jax.process_index() == 0:
        print(text, end="", flush=True)


def _check_embedded(tokens: Int[np.ndarray, "prompt"], vocabulary: int) -> None:
    """Raises ValueError for tokens without an embedding: a released tokenizer may have more special tokens than the
    model."""
    beyond = tokens[tokens >= vocabulary]
    check(not beyond.size, f"--prompt: the model has {vocabulary} tokens, and no embedding for {beyond[:1].tolist()}")


def _written(
    tokens: Iterable[int], prompt: Int[np.ndarray, "prompt"], tokenizer: Tokenizer, write: Callable[[str], object]
) -> str:
    """Passes the text of tokens after a prompt to `write` as they are decoded, in complete characters, and returns
    it."""
    decoder, found = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    recent = prompt[-_CONTEXT:].tolist()  # some tokenizers leave out the space of a text's first token
    decoded = tokenizer.decode(np.asarray(recent))
    written = len(decoded)
    for token in tokens:
        recent.append(token)
        # The text of a token can depend on those before it: spaces, and characters of several tokens.
        decoded = tokenizer.decode(np.asarray(recent))
        if decoded.endswith(_UNFINISHED):
            continue
        piece, written = decoder.decode(decoded[written:]), len(decoded)
        write(piece)
        found += piece
    rest = decoder.decode(decoded[written:], final=True)
    write(rest)
    return found + rest
