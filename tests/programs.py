"""A context in which the runs of a test file share programs, so that each is traced and compiled once."""

from contextlib import contextmanager

import pytest

from train.data.tokenizer import load_tokenizer
from train.loop import fit


@contextmanager
def shared_programs():
    """In this context, runs that differ only in text, name or output folder share a program and are checked once.

    A program depends on the size of the tokenizer; one that predicts masked tokens also on its special tokens.
    """
    built, checked = {}, set()
    build_program, check_model, check_continues = fit.build_program, fit.check_model, fit.check_continues

    def key(config):
        size = config.model.vocab_size or load_tokenizer(config.data).vocabulary_size
        tokenizer = size if config.model.causal else config.data
        return repr((config.seed, config.model, config.scheme, config.init.values, config.train, tokenizer))

    def build_once(setup):
        program_key = key(setup.config), setup.mesh
        if program_key not in built:
            built[program_key] = build_program(setup)
        return built[program_key]

    def check_once(setup):
        check_key = key(setup.config), repr(setup.config.data)
        if check_key not in checked:
            check_model(setup)
        checked.add(check_key)

    def check_pair_once(before, after):
        pair = key(before.config), key(after.config)
        if pair not in checked:
            check_continues(before, after)
        checked.add(pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "build_program", build_once)
        patch.setattr(fit, "check_model", check_once)
        patch.setattr(fit, "check_continues", check_pair_once)
        yield
