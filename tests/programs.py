"""Programs that the runs of a test file share, which are traced and compiled once."""

from contextlib import contextmanager

import pytest

from train.data.tokenizer import load_tokenizer
from train.loop import fit


@contextmanager
def shared_programs():
    """Inside it, runs that differ in their text, name or place alone share a program, and are checked once.

    Of a tokenizer a program knows the size, and the special tokens where it predicts masked ones.
    """
    built, checked = {}, set()
    build_program, check_model, check_continues = fit.build_program, fit.check_model, fit.check_continues

    def key(config):
        size = config.model.vocab_size or load_tokenizer(config.data).vocabulary_size
        tokenizer = size if config.model.causal else config.data
        return repr((config.seed, config.model, config.scheme, config.init.values, config.train, tokenizer))

    def build_once(config, mesh):
        whole = key(config), mesh
        if whole not in built:
            built[whole] = build_program(config, mesh)
        return built[whole]

    def check_once(config):
        whole = key(config), repr(config.data)
        if whole not in checked:
            check_model(config)
        checked.add(whole)

    def check_pair_once(before, after):
        pair = key(before), key(after)
        if pair not in checked:
            check_continues(before, after)
        checked.add(pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "build_program", build_once)
        patch.setattr(fit, "check_model", check_once)
        patch.setattr(fit, "check_continues", check_pair_once)
        yield
