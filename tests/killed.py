"""Training runs that stop as if they were killed: nothing more is saved."""

import pytest

from train.loop import fit as loop


def killed(config, directory, after, monkeypatch):
    """Runs ``fit``, interrupts it after step ``after``, and returns the first step that it made."""
    steps = []

    def before(self, step, state):
        steps.append(step)
        if step > after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Monitor, "before", before)
        with pytest.raises(KeyboardInterrupt):
            loop.fit(config, directory)
    return steps[0]
