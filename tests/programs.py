"""Programs that the runs of a test file share, which are traced and compiled once."""

from contextlib import contextmanager

import pytest

from train.loop import fit, start


@contextmanager
def shared_programs():
    """Inside it, runs that differ in their text, name or place alone share a program, and check their model once."""
    built, checked = {}, set()
    build_program, check_model = fit.build_program, fit.check_model

    def key(config):
        return repr((config.seed, config.model, config.scheme, config.init.values, config.train, config.data.tokenizer))

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

    with pytest.MonkeyPatch.context() as patch:
        for module in (fit, start):
            patch.setattr(module, "build_program", build_once)
        patch.setattr(fit, "check_model", check_once)
        yield
