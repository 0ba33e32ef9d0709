"""The model ``posjax`` of lm-eval: a run or a released model behind the three methods that its tasks call.

What is scored, and where texts are cut, is decided as in lm-eval's own adapter of transformers (``hf``), whose base
class does most of it: a text that is too long loses its beginning.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from posjax import nn
from posjax.scheme.choices import check_reach
from train.checkpoint.restore import config_of, entry_in_stage, restore
from train.config.settings.checks import check
from train.data.tokenizer import ends_of_text
from train.evaluate.decoder import predictor_of
from train.evaluate.mesh import mesh_for, use_mesh, whole
from train.evaluate.predictor import Predictor, after
from train.evaluate.saved import check_causal
from train.evaluate.written import Writer, padded, rounded
from train.model.build import Setup, check_vocabulary, evaluated_scheme, model_length

_LOOKBACK = 8  # tokens more than a stop string has bytes, in which it is looked for

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request of lm-eval: the strings that it is kept under, the tokens of a context, and those to be scored after it."""


@register_model("posjax")
class PosjaxLM(TemplateLM):
    """A run or a released model, with any extension, on all devices.

    Args:
        path: a run's directory, the folder, GGUF file or name of a released model, as for ``evaluate``.
        batch_size: rows that are computed at a time; ``auto`` for as many as ``evaluate.batch_tokens`` has tokens for.
        max_length: the most tokens that the model sees, by default its own length; with ``scheme.extend`` the longest
            of ``evaluate.lengths``, to which the extension reaches.
        max_batch_size: given by lm-eval, and not needed.
        device: given by lm-eval, and not read: JAX has devices of its own.
        tokenizer: not read; lm-eval gives it to tasks that count tokens, as RULER's.
        **overrides: keys of the config and their values, as ``scheme.extend``.

    Raises:
        FileNotFoundError: without the model.
        ValueError: for a model that does not predict the next token, overrides that would need a new training, and a
            length that the model refuses.
    """

    def __init__(
        self,
        path: str,
        batch_size: int | str | None = 1,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        tokenizer: str | None = None,
        **overrides: Any,
    ):
        super().__init__()
        written = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()
        ]
        self._path, config = path, config_of(path, written)
        check_causal(config)
        setup = Setup(config)
        check_vocabulary(setup)
        self._tokens = setup.tokenizer
        self.vocabulary = config.model.vocab_size or self._tokens.vocabulary_size
        self.max_length = max_length or (max(config.evaluate.lengths) if config.scheme.extend else model_length(config))
        automatic = str(batch_size).startswith("auto")
        self.batch_size = max(1, config.evaluate.batch_tokens // self.max_length) if automatic else int(batch_size or 1)
        self._mesh = mesh_for(config, rows=self.batch_size)
        stage, model = restore(path, config, mesh=self._mesh)
        entry = entry_in_stage(config.scheme, config, stage)
        self._model = model.with_scheme(evaluated_scheme(stage, entry, self.max_length))
        check_reach(self._model.config.layers.reach, "max_length", self.max_length)
        with use_mesh(self._mesh):
            self._predictor, self._parameters = predictor_of(self._model, config.seed, self._mesh)
        self._rows, ends = self._predictor.filled(self.batch_size), ends_of_text(config.data, self._tokens)
        self._writer = Writer(self._model, self._rows, self.max_length, ends, config.seed, self._mesh)

    # What the base class asks for.

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        return self._tokens.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, or the end of a document where there is none."""
        return self._tokens.bos

    @property
    def max_gen_toks(self) -> int:
        """The most tokens of an answer, for a task that does not say it, as in the adapter ``hf``."""
        return 256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, as of a prompt; False leaves out what the tokenizer puts before it."""
        found = self._tokens.prompt(string.encode(), opening=add_special_tokens is not False).tolist()
        beyond = [token for token in found if token >= self.vocabulary]
        check(not beyond, f"the model has {self.vocabulary} tokens, and no embedding for {beyond[:1]}")
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows of the model's length that share one token."""
        texts = [request.args[0] for request in requests]
        windows: list[list[Scored]] = []
        for text in texts:
            cut = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
            windows.append([(None, *make_disjoint_window(window)) for window in cut])
        scores = iter(self._loglikelihood_tokens([window for each in windows for window in each]))
        totals = [sum(next(scores)[0] for _ in each) for each in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """The log-probability of every continuation, and whether each of its tokens is the likeliest one."""
        found: list[Any] = [None] * len(requests)
        for batch in self._batches(requests):
            asked: list[list[tuple[int, int]]] = []  # by row, the places where a token is predicted, and the token
            spans: list[tuple[int, int, slice]] = []  # the number of a request, its row, and what is asked for it there
            for row, (tokens, numbers) in enumerate(batch):
                asked.append([])
                for number in numbers:
                    wanted, first = requests[number][2], len(asked[row])
                    asked[row] += zip(range(len(tokens) - len(wanted), len(tokens)), wanted, strict=True)
                    spans.append((number, row, slice(first, len(asked[row]))))
            best, loss = self._scores([tokens for tokens, _ in batch], asked)
            for number, row, span in spans:
                right = bool((best[row, span] == requests[number][2]).all())
                found[number] = -float(loss[row, span].astype(np.float64).sum()), right
        for (strings, _, _), answer in zip(requests, found, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return found

    def _batches(self, requests: Sequence[Scored]) -> Iterator[list[tuple[tuple[int, ...], list[int]]]]:
        """Rows of tokens, the longest first, and the requests that are scored in each: choices of one token share one.

        For a scheme that depends on the length, rows of one batch have the same.
        """
        rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            check(0 < len(continuation) <= self.max_length, _too_long(len(continuation), self.max_length))
            rows[tuple((context + continuation)[-(self.max_length + 1) : -1])].append(number)
        ordered = sorted(rows.items(), key=lambda item: -len(item[0]))
        depends = self._model.config.layers.reads_length
        groups = [list(group) for _, group in groupby(ordered, lambda item: len(item[0]) if depends else 0)]
        size = self.batch_size
        return (group[start : start + size] for group in groups for start in range(0, len(group), size))

    def _scores(
        self, inputs: Sequence[Sequence[int]], asked: Sequence[list[tuple[int, int]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest token at the asked places of every row, and the loss of the asked token, [rows, asked] each."""
        longest, most = max(map(len, inputs)), rounded(max(map(len, asked)))
        length = padded(self._model.config.layers, longest, self.max_length)
        tokens = np.zeros((self._rows, length), np.int32)
        places = np.zeros((2, self._rows, most), np.int32)
        for row, (given, wanted) in enumerate(zip(inputs, asked, strict=True)):
            tokens[row, : len(given)] = given
            places[:, row, : len(wanted)] = np.transpose(wanted)
        with use_mesh(self._mesh):
            return jax.device_get(_after(self._predictor, self._parameters, tokens, *places))

    # Generation.

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after every context, up to a string that ends it."""
        found: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=str)].append(number)
        for numbers in groups.values():
            options = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
            texts = self._texts_after([self.tok_encode(requests[number].args[0]) for number in numbers], options)
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _texts_after(self, contexts: Sequence[list[int]], options: dict[str, Any]) -> list[str]:
        eos = self._decoded([self.eot_token_id], special=True)
        until, new = handle_stop_sequences(options.pop("until", None), eos=eos), options.pop("max_gen_toks")
        room = self.max_length - new
        check(room > 0, f"max_gen_toks: {new} new tokens leave no room for a context in {self.max_length} (max_length)")
        stops = [stop for stop in until if stop]
        lookback = _LOOKBACK + max((len(stop.encode()) for stop in stops), default=0)

        def is_over(tokens: list[int]) -> bool:
            recent = self._decoded(tokens[-lookback:], special=True)  # a stop string may be a special token
            return any(stop in recent for stop in stops)

        cut = [context[-room:] for context in contexts]
        generated = self._writer.after(cut, new, _sampling(options), is_over)
        return [postprocess_generated_text(self._decoded(tokens), until, None) for tokens in generated]

    def _decoded(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens, without special tokens unless asked for."""
        kept = [token for token in tokens if special or token not in self._tokens.special]
        return self._tokens.text(kept).decode(errors="replace")

    # Chats.

    @property
    def tokenizer_name(self) -> str:
        """A name under which lm-eval keeps requests."""
        return str(self._path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template that writes the prompts, if asked for."""
        return self._tokens.chat.source() if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; without the prompt for an answer, the last message is left open."""
        return self._tokens.chat.prompt(chat_history, is_open=not add_generation_prompt)


@functools.partial(jax.jit, static_argnums=0)
def _after(predictor: Predictor, parameters: Any, tokens: Any, at: Any, targets: Any) -> Any:
    """`after`, as every process can read it."""
    return jax.tree.map(whole, after(predictor, parameters, tokens, at, targets, tokens.shape[1]))


def _too_long(tokens: int, length: int) -> str:
    return f"a continuation of {tokens} tokens cannot be scored with max_length={length}"


def _sampling(options: dict[str, Any]) -> nn.Sampling:
    """How tokens are chosen, from a task's options. Raises ValueError for others than those of `nn.Sampling`."""
    draws = options.pop("do_sample", False)
    known = {name: options.pop(name) for name in ("temperature", "top_k", "top_p") if name in options}
    options.pop("use_cache", None)
    check(not options, f"gen_kwargs: {', '.join(options)} is not known; temperature, top_k and top_p are")
    return nn.Sampling(**{"temperature": 1.0, **known}) if draws else nn.Sampling(temperature=0)
