"""The command line: ``python -m train COMMAND CONFIG [key.path=value ...]``.

A command imports what it needs only when it runs, so help and errors in a config appear at once.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.config import load
from train.config.config import about_sections, keys_beside_sections
from train.config.settings.checks import check, nearest
from train.runtime.lines import in_lines
from train.runtime.paths import is_store_error

INTERRUPTED = 130  # the exit status of a program that was stopped by Ctrl-C
WRONG_INPUT = 2
DAMAGED = 1


def fit(path: str, overrides: Sequence[str]) -> int:
    """train one config, or resume it"""
    config = load(path, overrides)
    import jax

    from train.loop.fit import fit
    from train.runtime.distributed import processes

    with processes():
        result = fit(config, progress=config.name)
        first = jax.process_index() == 0
    if first:
        _tell(config, result)
    return 0 if result.finished else INTERRUPTED


def _tell(config: Any, result: Any) -> None:
    """Prints the result of a training in one line."""
    from train.monitor.meter import share

    if not result.finished:
        print(f"stopped after {result.steps} of {config.steps} steps; the same command resumes")
        return
    loss = "loss not finite" if result.final_loss is None else f"loss {result.final_loss:.4f}"
    speed = f"{result.tokens_per_second:,.0f} tokens/s" if result.tokens_per_second else "speed not measured"
    memory = f"{result.peak_memory_bytes / 2**20:,.0f} MiB at most"
    goodput = f" · goodput {share(result.seconds):.0%}" if result.seconds else ""
    print(f"{result.directory}: {result.steps} steps · {loss} · {speed} · {memory}{goodput}")


def tokenize(path: str, overrides: Sequence[str], job: int | None, jobs: int | None, workers: int | None) -> None:
    """build, or resume building, the cache of tokens that fit reads, on all cores and several hosts or jobs"""
    config = load(path, overrides)
    from train.data.tokenize import tokenize

    tokenize(config, print, job, jobs, workers)


def compare(path: str, overrides: Sequence[str]) -> None:
    """train and evaluate several schemes over one config, or measure a released model under many extensions"""
    config = load(path, overrides)
    from train.compare.compare import compare

    compare(config)


def evaluate(path: str, overrides: Sequence[str]) -> None:
    """measure a trained run or a released model"""
    directory = _run_of(path, overrides)
    from train.evaluate.saved import evaluate
    from train.runtime.distributed import processes

    with processes():
        evaluate(directory, overrides)


def _run_of(path: str, overrides: Sequence[str]) -> str | Path:
    """The location of the run or released model that an argument names: the argument itself, or a config's run."""
    url = "://" in path and not path.endswith((".yaml", ".yml"))
    if url or Path(path).is_dir() or path.endswith(".gguf"):
        return path
    if path.endswith((".yaml", ".yml")) or Path(path).is_file():
        return load(path, overrides).directory
    from posjax.nn.huggingface.hub import is_name  # imports jax

    if not is_name(path):
        hint = "models at the Hugging Face hub have names as org/name"
        raise FileNotFoundError(f"there is no run, released model or config at {path!r}; {hint}")
    return path


def generate(path: str, overrides: Sequence[str], prompt: str, **sampling: float) -> None:
    """continue a prompt with a trained run or a released model"""
    directory = _run_of(path, overrides)
    from train.evaluate.generate import SamplingOptions, generate
    from train.runtime.distributed import processes

    with processes():
        generate(directory, prompt, SamplingOptions(**sampling), overrides)


def lm_eval(path: str, overrides: Sequence[str], arguments: Sequence[str]) -> None:
    """measure a trained run or a released model on tasks of lm-eval; its own options come after --"""
    model = _run_of(path, overrides)
    from train.harness.command import lm_eval
    from train.runtime.distributed import processes

    with processes():
        lm_eval(model, overrides, arguments)


def export(path: str, overrides: Sequence[str], folder: str, dtype: str | None, adapter: bool) -> None:
    """write a trained run, or a released model with an extension, in the layout of Hugging Face"""
    directory = _run_of(path, overrides)
    from train.checkpoint.export import export, export_adapter

    if adapter:
        check(dtype is None, "--dtype: adapters are written in float32; leave it out")
        export_adapter(directory, folder, overrides)
        print(f"{folder} holds the adapters")
        return
    export(directory, folder, overrides, dtype=dtype)
    print(f"{folder} holds the model")


def search(path: str, overrides: Sequence[str], length: int, **sizes: int) -> None:
    """search LongRoPE's factors for a trained run or a released model with RoPE"""
    directory = _run_of(path, overrides)
    from train.evaluate.search import search
    from train.runtime.distributed import processes

    with processes():
        search(directory, overrides, length, **sizes)


def verify(path: str, overrides: Sequence[str]) -> int:
    """read every checkpoint of a run completely, and report damage"""
    directory = _run_of(path, overrides)
    from train.checkpoint.reading import verify
    from train.runtime.distributed import print_once, processes

    with processes():
        whole = verify(directory, print_once())
    return 0 if whole else DAMAGED


def languages(path: str, overrides: Sequence[str]) -> None:
    """train encoders on formal languages and grids, and test them on longer and larger ones"""
    from train.lab.formal_languages import LanguagesConfig, run

    run(load(path, overrides, LanguagesConfig))


def bench(path: str, overrides: Sequence[str], schedule: str | None, costs: str | None, loop: bool) -> None:
    """time attention and its memory against other libraries, side by side"""
    if loop:
        from train.lab.bench_loop import bench_loop

        bench_loop(load(path, overrides))
        return
    from train.lab.bench import BenchConfig, bench

    config = load(path, overrides, BenchConfig)
    if schedule is not None:
        from train.lab.schedule.bench import bench_schedules

        bench_schedules(config.schedule, schedule, config.directory)
    if costs is not None:
        from train.lab.schedule.costs import write_costs

        write_costs(config.schedule, costs)
    if schedule is None and costs is None and config.gpu is None:
        bench(config)
    elif schedule is None and costs is None:
        from train.lab.gpu.bench import bench_gpu

        bench_gpu(config.gpu, config.directory)


def plan(
    path: str,
    overrides: Sequence[str],
    topology: str,
    slices: int,
    sweep: int,
    flags: str | None,
    evaluate: bool,
    **steps: Any,
) -> None:
    """compile a config's step, or its evaluation, for TPUs or GPUs without one, and predict memory and speed"""
    config = load(path, overrides)
    if any(steps.values()):
        from train.lab.steps.compare_steps import compare_steps

        compare_steps(config, topology, slices, **steps, flags=flags, sweep=sweep, evaluate=evaluate)
        return
    from train.plan.report import plan

    plan(config, topology, slices, sweep, flags, evaluate)


COMMANDS: dict[str, Callable[..., int | None]] = {
    command.__name__: command
    for command in (fit, tokenize, compare, evaluate, generate, lm_eval, search, export, verify, languages, bench, plan)
}
"""Every command by name; it returns its exit status, or None for 0."""
_YAML = "a YAML file, on this machine or at a URL"
_MODEL = (
    "a run's directory, whose newest checkpoint is taken, or the folder of a released model in the layout of Hugging "
    "Face, each on this machine or at a URL; a GGUF file on this machine; the name of a model at the Hugging Face hub, "
    "as org/name or org/name@revision; or the YAML file that a run was made from, whose URL ends in .yaml or .yml"
)
_CONFIGS = {
    "compare": f"{_YAML}, with compare.schemes",
    "evaluate": _MODEL,
    "generate": _MODEL,
    "lm_eval": _MODEL,
    "search": _MODEL,
    "export": _MODEL,
    "verify": "a run's directory, on this machine or at a URL; or the YAML file that it was made from, whose URL ends "
    "in .yaml or .yml",
    "languages": f"{_YAML}, as configs/languages.yaml; it has the keys of LanguagesConfig in "
    "train/lab/formal_languages/config.py",
    "bench": f"{_YAML}, as configs/bench.yaml or configs/gpu.yaml; it has the keys of BenchConfig in "
    "train/lab/bench.py, and with --loop those of a config of fit",
}
"""The help on CONFIG of every command for which CONFIG is not just `_YAML`."""
_ARGUMENTS = {
    "bench": {
        "--schedule": {"metavar": "CHIPS", "help": "compile TPU kernels for these chips instead, as in v5e,v6e"},
        "--costs": {
            "metavar": "CHIPS",
            "help": "write the cost of tiles on these chips, by which TPU kernels choose their tiles",
        },
        "--loop": {"action": "store_true", "help": "time the training loop of a config and its bare jitted step"},
    },
    "export": {
        "folder": {"metavar": "FOLDER", "help": "to be written, local or at a URL"},
        "--dtype": {"help": "of the tensors (that of a released model; float32 for a run)"},
        "--adapter": {
            "action": "store_true",
            "help": "write the adapters of model.lora alone, in the layout of peft, instead of merging them",
        },
    },
    "generate": {
        "--prompt": {"default": "", "help": "the text to continue"},
        "--tokens": {"type": int, "default": 200, "help": "the maximal number of new tokens (200)"},
        "--temperature": {"type": float, "default": 0.8, "help": "of the draws; 0 takes the likeliest token (0.8)"},
        "--top-k": {"type": int, "default": 0, "help": "draw from this many of the likeliest tokens; 0 for all (0)"},
        "--top-p": {
            "type": float,
            "default": 1.0,
            "help": "draw from the fewest likeliest tokens whose probability reaches this; 1 for all (1)",
        },
        "--seed": {"type": int, "default": 0, "help": "of the draws (0)"},
    },
    "plan": {
        "--topology": {
            "required": True,
            "metavar": "POD",
            "help": "as in v5p:8x8x8 or h100:8; chips are v5e, v5p, v6e, 7x, h100 and h200",
        },
        "--slices": {"type": int, "default": 1, "metavar": "N", "help": "how many of these slices, joined by DCN (1)"},
        "--sweep": {
            "type": int,
            "nargs": "?",
            "const": 8,
            "default": 0,
            "metavar": "N",
            "help": "compile N (8) meshes, remat policies and context strategies instead, and rank them",
        },
        "--evaluate": {
            "action": "store_true",
            "help": "plan the evaluation of a batch at the longest of evaluate.lengths, instead of a train step",
        },
        "--keep": {"metavar": "FOLDER", "help": "the folder in which to keep the compiled step"},
        "--against": {
            "metavar": "FOLDER",
            "action": "append",
            "default": [],
            "help": "compare a step kept in this folder, of any trainer, with ours; given twice, with each other",
        },
        "--flags": {
            "metavar": "FLAGS",
            "help": "compile with these and LIBTPU_INIT_ARGS, instead of the flags recommended for the chip, as in "
            '--flags="--xla_a=1 --xla_b=2"; --flags= for none',
        },
    },
    "search": {
        "--length": {"type": int, "required": True, "help": "the length to reach, beyond the training length"},
        "--population": {"type": int, "default": 64, "help": "rules at the start (64)"},
        "--iterations": {"type": int, "default": 40, "help": "generations (40)"},
        "--seed": {"type": int, "default": 0, "help": "of the search (0)"},
    },
    "tokenize": {
        "--job": {
            "type": int,
            "metavar": "N",
            "help": "the number of this job, from 0",
        },
        "--jobs": {"type": int, "metavar": "N", "help": "how many jobs share the files"},
        "--workers": {"type": int, "metavar": "N", "help": "processes of this job (one per core)"},
    },
}
"""The options of a command, in addition to a config and overrides."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 2 for a wrong input or a missing package, 130 when interrupted.

    `verify` returns 1 for a run with a damaged checkpoint.

    An error is printed as one line on standard error, ``error: ...``, and a warning as ``warning: ...``. If a command
    needs one run and gets the folder of a comparison, the list of the runs in it follows. ``--traceback`` shows where
    the error was raised.
    """
    options = _parse(arguments)
    name, traceback = options.pop("command"), options.pop("traceback")
    command = COMMANDS[name]
    if not traceback:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # gcsfs logs the traceback of every error it raises
    try:
        with _warnings_in_lines():
            return command(options.pop("config"), options.pop("overrides"), **options) or 0
    except Exception as error:
        if traceback or not (isinstance(error, ValueError | OSError | ImportError) or is_store_error(error)):
            raise
        print("error:", in_lines(error), file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("stopped" + ("; the same command resumes" if name in _RESUMABLE else ""), file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _warnings_in_lines() -> Iterator[None]:
    """Prints each warning in one line, without the code that it comes from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print("warning:", in_lines(message), file=sys.stderr)
        yield


_RESUMABLE = ("fit", "tokenize", "compare")


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, as all other code does."""

    def error(self, message: str) -> None:
        self.exit(WRONG_INPUT, f"error: {message}; see {self.prog} --help\n")


def _parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    """The arguments by name; overrides may be anywhere after the config."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    _check_command(parser, arguments)
    others = {}
    if arguments[:1] == ["lm_eval"]:  # whose own options are after --
        stop = arguments.index("--") if "--" in arguments else len(arguments)
        arguments, others = arguments[:stop], {"arguments": arguments[stop + 1 :]}
    options, rest = parser.parse_known_args(arguments)
    strange = [argument for argument in rest if argument.startswith("-") or "=" not in argument]
    if strange:
        hint = _nearest_option(strange, options.command)
        options.parser.error(f"unrecognized arguments: {' '.join(strange)}{hint}")
    del options.parser
    options.overrides = [*options.overrides, *rest]
    return vars(options) | others


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends the program if the first argument names no command, and suggests the nearest one."""
    name = next(iter(arguments), "--help")
    if not name.startswith("-") and name not in COMMANDS:
        parser.error(f"unknown command {name!r}{nearest(name, list(COMMANDS))} (known: {', '.join(COMMANDS)})")


def _nearest_option(strange: Sequence[str], command: str) -> str:
    """A hint at the option nearest to the first unknown one; if none is near, at how a key of the config is set."""
    known = [name for name in (*_ARGUMENTS.get(command, {}), "--traceback") if name.startswith("-")]
    found = next((argument.partition("=")[0] for argument in strange if argument.startswith("-")), "")
    return nearest(found, known) or "; a key of the config is set as in train.steps=100"


def _parser() -> _Parser:
    end = "python -m train COMMAND --help says what CONFIG may be and which options there are."
    parser = _Parser(prog="python -m train", description="Train and compare position schemes.", epilog=end)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.__doc__, description=command.__doc__, **_end_of_help(name))
        sub.add_argument("config", metavar="CONFIG", help=_CONFIGS.get(name, _YAML))
        for argument, settings in _ARGUMENTS.get(name, {}).items():
            sub.add_argument(argument, **settings)
        sub.add_argument(
            "overrides",
            metavar="key.path=value",
            nargs="*",
            default=(),  # without a default, messages name it as required
            help="replaces a value of the config, as train.steps=100",
        )
        sub.add_argument("--traceback", action="store_true", help="show where an error was raised")
        sub.set_defaults(parser=sub)
    return parser


def _end_of_help(command: str) -> dict[str, Any]:
    """The help text on the keys of a config; `languages` and `bench` have keys of their own."""
    if command in ("languages", "bench"):
        return {}
    if command != "fit":
        return {"epilog": "python -m train fit --help lists the sections of a config."}
    sections = [f"  {name:10}{about}" for name, about in about_sections().items()]
    beside = f"beside them: {', '.join(keys_beside_sections())}"
    all_keys = "every key and its default: train/config/settings/, or the config.yaml of any run"
    lines = ["sections of a config:", *sections, beside, all_keys, "how they go together: docs/training.md"]
    return {"epilog": "\n".join(lines), "formatter_class": argparse.RawDescriptionHelpFormatter}
