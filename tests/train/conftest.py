"""Fixtures of the tests of training."""

import io
from contextlib import redirect_stdout

import pytest
from released_models import write_released

from train.loop.fit import fit


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The folder of a tiny released model with its tokenizer, and the model."""
    folder = tmp_path_factory.mktemp("released") / "tiny"
    folder.mkdir()
    return folder, write_released(folder)


@pytest.fixture
def unpainted(monkeypatch):
    """Figures are not rendered as PNG, which takes most of a report's time. Only tests of reports render them."""
    monkeypatch.setattr("train.report.style.png", lambda figure: b"")


class Terminal(io.StringIO):
    """A standard output that calls a function when a run prints a step."""

    def __init__(self, step, then):
        super().__init__()
        self.step, self.then = f"step {step}/", then

    def write(self, text):
        if self.step in text:
            self.then()
        return super().write(text)


@pytest.fixture
def fit_until():
    """A function that trains, and calls another when a step is printed."""

    def train(config, directory, step, then):
        with redirect_stdout(Terminal(step, then)):
            return fit(config, directory, progress="run")

    return train


@pytest.fixture
def killed(fit_until):
    """A function that trains until a step is printed; then the run fails, and as if it was killed it saves no more."""

    def fail():
        raise BrokenPipeError

    def train(config, directory, step):
        with pytest.raises(BrokenPipeError):
            fit_until(config, directory, step, fail)

    return train


@pytest.fixture
def resumed(capsys):
    """A function that trains a run to its end and returns the first step that it printed."""

    def train(config, directory):
        capsys.readouterr()
        assert fit(config, directory, progress="run").finished
        return int(capsys.readouterr().out.partition("step ")[2].partition("/")[0])

    return train
