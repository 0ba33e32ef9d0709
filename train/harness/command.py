"""``python -m train lm_eval``: lm-eval's own command line, for a run or a released model."""

import os
import posixpath
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from posjax.nn.huggingface.hub import file_on_disk
from train.checkpoint.restore import config_of
from train.config.settings.checks import check


def lm_eval(location: str | Path, overrides: Sequence[str], arguments: Sequence[str]) -> None:
    """Runs lm-eval's command line with the model ``posjax`` at a location and with overrides of its config.

    All processes compute every request together, and the first one reports.

    Raises ModuleNotFoundError without the package, and ValueError without a task.
    """
    try:
        import lm_eval.__main__ as harness
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ModuleNotFoundError('lm_eval needs the package lm-eval: pip install -e ".[lm-eval]"') from None
    import train.harness.model  # noqa: F401  registers the model

    example = "python -m train lm_eval RUN -- --tasks arc_easy"
    check(bool(arguments), f"lm_eval: its own options come after --, at least the tasks, as in {example}")
    os.environ["LOCAL_RANK"] = str(jax.process_index())  # by which lm-eval knows who reports
    model = ["--model", "posjax", "--model_args", f"path={location}", *_tokenizer_of(location, overrides), *overrides]
    sys.argv = ["lm_eval", "run", *model, *arguments]
    harness.cli_evaluate()


def _tokenizer_of(location: str | Path, overrides: Sequence[str]) -> list[str]:
    """The folder of the model's tokenizer, as an argument that lm-eval gives to tasks that count tokens, as RULER's."""
    path = config_of(location, overrides).data.tokenizer
    return [f"tokenizer={posixpath.dirname(file_on_disk(path))}"] if path.endswith("tokenizer.json") else []
