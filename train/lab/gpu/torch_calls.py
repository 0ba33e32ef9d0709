"""Measures calls of torch: scaled_dot_product_attention, and FlexAttention compiled. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from train.config import Config, load
from train.lab.gpu.jobs import (
    DOCUMENT,
    FORWARD,
    GENERATE,
    NEW_TOKENS,
    ROWS,
    STEP,
    WINDOW,
    Job,
    Options,
    Shape,
    milliseconds,
)


class Measurements:
    """The calls of torch on the GPU, or on the CPU if torch finds none."""

    def __init__(self, jobs: Sequence[Job], options: Options):
        self._options = options
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._compiled = None, None  # what was compiled last, for both directions of a shape

    def about(self) -> dict[str, str]:
        """The platform: ``gpu`` or ``cpu``."""
        return {"platform": "gpu" if self._device == "cuda" else "cpu"}

    def works(self) -> bool:
        """Whether the device still computes: after some errors it does no more."""
        try:
            self._wait(torch.ones(8, device=self._device) + 1)
        except RuntimeError:
            return False
        return True

    def measure(self, job: Job) -> dict[str, float]:
        """The time of a job in milliseconds; of a training step also tokens a second, and memory."""
        try:
            if job.what == STEP:
                return self._step()
            if job.what == GENERATE:
                return self._generation(job)
            return {"ms": self._attention_ms(job)}
        finally:
            if self._device == "cuda":
                torch.cuda.empty_cache()  # memory for the other processes

    def _attention_ms(self, job: Job) -> float:
        attend = self._attention(job.library, job.shape)
        *qkv, cotangent = self._tensors(job.shape)

        def run():
            out = attend(*qkv)
            return out if job.what == FORWARD else torch.autograd.grad(out, qkv, cotangent)

        return milliseconds(run, self._wait, self._options.row_seconds)

    def _step(self) -> dict[str, float]:
        """A step of transformers' decoder of the same shape: compiled, SDPA, bfloat16 autocast, fused AdamW."""
        settings = load(self._options.step)
        on_gpu = self._device == "cuda"
        decoder = self._decoder(settings)
        tokens = self._tokens(settings.train.rows, settings)
        optimizer = torch.optim.AdamW(decoder.parameters(), fused=on_gpu)
        compiled = torch.compile(decoder)

        def run():
            with torch.autocast(self._device, torch.bfloat16):
                loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(run, self._wait, self._options.row_seconds)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        return {"ms": ms, "tokens_per_second": tokens.numel() / ms * 1e3, "gibibytes": peak / 2**30}

    def _generation(self, job: Job) -> dict[str, float]:
        """Greedy tokens of transformers' decoder of the same shape, with a static cache and a compiled step."""
        settings, rows = load(self._options.generation), ROWS[job.shape.form]
        decoder = self._decoder(settings).to(torch.bfloat16).eval()
        prompt = self._tokens(rows, settings)[:, :-NEW_TOKENS]
        options = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None}
        whole = partial(decoder.generate, prompt, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, **options)
        first = partial(decoder.generate, prompt, min_new_tokens=1, max_new_tokens=1, **options)
        of_both = [milliseconds(call, self._wait, self._options.row_seconds) for call in (whole, first)]
        ms = (of_both[0] - of_both[1]) / (NEW_TOKENS - 1)  # without the prompt
        return {"ms": ms, "tokens_per_second": rows / ms * 1e3}

    def _tokens(self, rows: int, settings: Config) -> torch.Tensor:
        shape = rows, settings.train.length
        return torch.randint(0, settings.model.vocab_size, shape, device=self._device)

    def _decoder(self, settings: Config) -> torch.nn.Module:
        """transformers' decoder of a config's shape, in float32."""
        from transformers import LlamaConfig, LlamaForCausalLM  # imported here, because it takes seconds

        model = settings.model
        shape = LlamaConfig(
            hidden_size=model.model_dim,
            intermediate_size=model.mlp_dim,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            vocab_size=model.vocab_size,
            tie_word_embeddings=model.tied_head,
            max_position_embeddings=settings.train.length,
            attn_implementation="sdpa",
        )
        with torch.device(self._device):
            return LlamaForCausalLM(shape)

    def _wait(self, _: Any) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _tensors(self, shape: Shape) -> list[torch.Tensor]:
        """q, k, v, which want gradients, and a cotangent: ``[1, heads, length, size]`` in bfloat16."""
        torch.manual_seed(0)
        size = (1, shape.heads, shape.length, shape.size)
        tensors = [torch.randn(size, device=self._device, dtype=torch.bfloat16) for _ in range(4)]
        for tensor in tensors[:3]:
            tensor.requires_grad_()
        return tensors

    def _attention(self, library: str, shape: Shape) -> Callable:
        """The attention of a library, a function of q, k and v."""
        if library == "torch sdpa":
            return partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
        known, attend = self._compiled
        if known != shape:
            torch._dynamo.reset()  # after a few shapes torch would compile no more, and run slowly
            attend = self._flex(shape)
            self._compiled = shape, attend
        return attend

    def _flex(self, shape: Shape) -> Callable:
        def causal(batch, head, i, j):
            return i >= j

        def window(batch, head, i, j):
            return (i >= j) & (i - j < WINDOW)

        documents = torch.arange(shape.length, device=self._device) // DOCUMENT

        def packed(batch, head, i, j):
            return (i >= j) & (documents[i] == documents[j])

        slopes = [2 ** (-8 * (head + 1) / shape.heads) for head in range(shape.heads)]
        slopes = torch.tensor(slopes, device=self._device)

        def alibi(score, batch, head, i, j):
            return score - slopes[head] * (i - j)

        mask = {"window": window, "packed": packed}.get(shape.form, causal)
        block_mask = create_block_mask(mask, None, None, shape.length, shape.length, device=self._device)
        score_mod = alibi if shape.form == "alibi" else None
        compiled = torch.compile(flex_attention, dynamic=False)
        return partial(compiled, score_mod=score_mod, block_mask=block_mask)
