"""Text from a saved run: the prompt decoded in chunks, then token after token."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from posjax import nn
from posjax._checks import check
from train.checkpoint.restore import config_of, entry_in_stage, restore
from train.data import Tokenizer, ends_of_text, load_tokenizer
from train.evaluate.decoder import cache_for, decoding, drawn_in_use, read
from train.evaluate.saved import check_causal
from train.model.build import check_vocabulary, evaluated_scheme

_UNFINISHED = "\ufffd".encode()
"""What some tokenizers decode the first bytes of a character to."""


@dataclass(frozen=True)
class Draws:
    """How the next token is chosen.

    Attributes:
      tokens: how many are generated at most; the end of the document ends it earlier.
      temperature: of the distribution that is drawn from; 0 takes the likeliest token.
      top_k: draw from so many of the likeliest tokens; 0 for all.
      seed: of the draws.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0

    def __post_init__(self):
        for name in ("tokens", "temperature", "top_k", "seed"):
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            if value < 0:
                raise ValueError(f"{option} must not be negative, found {value}")
            if not value < 2**32:
                raise ValueError(f"{option} must be below 2**32, found {value}")


def choose(
    key: Key[Array, ""], logits: Float[Array, "rows vocabulary"], temperature: float, top_k: int
) -> Int[Array, "rows"]:
    """The next token of every row, drawn from ``softmax(logits / temperature)``, perhaps of the likeliest alone."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)


def tokens_after(
    model: nn.Decoder, prompt: Int[np.ndarray, "prompt"], sampling: Draws, ends: Set[int]
) -> Iterator[int]:
    """Yields the tokens that follow a prompt, until one of `ends` (see `ends_of_text`) or as many as asked for.

    Schemes that read the current length go by that of prompt and generated tokens together, from the first chunk on.

    Raises ValueError for a model that gives no finite logits there, such as a learned embedding past its table.
    """
    prompts = jnp.asarray(prompt, jnp.int32)[None]
    total = len(prompt) + sampling.tokens
    graph, state = nnx.split(model)
    step = jax.jit(decoding(graph, drawn_in_use(model, total, sampling.seed, 1), total))
    draw = jax.jit(partial(choose, temperature=sampling.temperature, top_k=sampling.top_k))
    last, cache = jax.jit(partial(read, step))(state, cache_for(graph, state, prompts, total), prompts)
    for n in range(sampling.tokens):
        if not np.isfinite(last).all():
            raise ValueError(f"the model gives no finite logits after {len(prompt) + n} tokens; generate fewer")
        token = draw(jax.random.fold_in(jax.random.key(sampling.seed), n), last)
        if int(token[0]) in ends:
            return
        yield int(token[0])
        logits, cache = step(state, cache, token[:, None].astype(jnp.int32), np.ones((1, 1), bool))
        last = logits[:, -1]


def generate(
    directory: str | Path,
    prompt: str,
    sampling: Draws,
    overrides: Sequence[str] = (),
    write: Callable[[str], object] | None = None,
) -> str:
    """Continues a prompt with the model saved in `directory`, handing the text to `write`, or printing it, as it comes.

    Special tokens that the prompt spells out are those tokens, so a chat model can be asked in its own form.
    `overrides` may change what training did not depend on: ``scheme.extend``, to run past the training length.

    Returns the text without the prompt. Raises FileNotFoundError without a trained run, and ValueError for overrides
    that would need another training, for models that do not predict the next token, and for a prompt without a token.
    """
    write = write or partial(print, end="", flush=True)
    config = config_of(directory, overrides)
    check_causal(config)
    check_vocabulary(config)
    tokenizer = load_tokenizer(config.data)
    tokens = tokenizer.prompt(prompt.encode("utf-8"))
    _check_embedded(tokens, config.model.vocabulary or tokenizer.vocabulary_size)
    check(len(tokens) > 0, "--prompt is empty, and this tokenizer puts no BOS before a text; give at least one word")
    stage, model = restore(directory, config)
    entry = entry_in_stage(config.scheme, config, stage)
    model = model.with_scheme(evaluated_scheme(stage, entry, len(tokens) + sampling.tokens))
    return _written(tokens_after(model, tokens, sampling, ends_of_text(config.data, tokenizer)), tokenizer, write)


def _check_embedded(tokens: Int[np.ndarray, "prompt"], vocabulary: int) -> None:
    """A released tokenizer may have special tokens that the model has not."""
    beyond = tokens[tokens >= vocabulary]
    check(not beyond.size, f"--prompt: the model has {vocabulary} tokens, and no embedding for {beyond[:1].tolist()}")


def _written(tokens: Iterable[int], tokenizer: Tokenizer, write: Callable[[str], object]) -> str:
    """Hands the text of tokens to `write` as they come, whole characters at a time, and returns it."""
    text, found = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    made: list[int] = []
    written, whole = 0, b""
    for token in tokens:
        made.append(token)
        # What a token adds can depend on those before it: spaces, and characters of several tokens.
        whole = tokenizer.decode(np.asarray(made))
        if whole.endswith(_UNFINISHED):
            continue
        piece, written = text.decode(whole[written:]), len(whole)
        write(piece)
        found += piece
    rest = text.decode(whole[written:], final=True)
    write(rest)
    return found + rest
