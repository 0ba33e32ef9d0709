"""Every mistake in a config, a command line or a file is one line on standard error, before anything compiles."""

import gzip
import re

import jax
import pytest
from programs import shared_programs

from train import cli

CONFIG = """
data: {source: files, paths: [text/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 16, num_heads: 2, mlp_dim: 16}
train: {length: 16, batch_tokens: 256, steps: 20, warmup_steps: 2}
evaluate: {lengths: [16, 32], tokens: 32, batch_tokens: 32}
monitor: {compilation_cache: ""}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a valid config, `mine.yaml`, its text, and some broken tokenizers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "text").mkdir()
    for index in range(6):
        text = f"the {index}th of the texts, and not the longest of them. " * 8
        (tmp_path / "text" / f"{index}.txt").write_text(text)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "broken.json").write_text('{"model": ')
    (tmp_path / "pointer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def programs():
    """No program of another file is cached, and mistakes outside the model are found after one tracing for all."""
    jax.clear_caches()
    with shared_programs():
        yield


class Compiled(Exception):
    pass


@pytest.fixture(autouse=True)
def nothing_compiles():
    """Raises `Compiled` when JAX has compiled a program; single operations of `lax` and random keys do not count."""

    def listen(event, *_, fun_name="", **__):
        name = fun_name.removeprefix("jit(").removesuffix(")")
        small = hasattr(jax.lax, name) or name == "_threefry_seed"
        if event == "/jax/core/compile/backend_compile_duration" and not small:
            raise Compiled(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)


def refused(capsys, *arguments):
    """The error message of a command with a mistake, without "error: "."""
    try:
        status = cli.main(arguments)
    except SystemExit as stopped:  # the command line cannot be parsed
        status = stopped.code
    printed = capsys.readouterr()
    assert status == 2, printed
    assert printed.err.startswith("error: ")
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    assert not printed.out
    return printed.err.removeprefix("error: ")


def words(value):
    return " ".join(value) if isinstance(value, list) else ""


GENERATE = ["generate", "mine.yaml", "--prompt", "x"]
PLAN = ["plan", "mine.yaml", "--topology"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fitt", "mine.yaml"], "'fitt'; did you mean 'fit'"),
        (["fit"], "required: CONFIG; "),
        (["fit", "mine.yaml", "--steps=3"], r"--steps=3; .*train\.steps="),
        (["fit", "mine.yaml", "--tracebak"], "--tracebak; did you mean '--traceback'"),
        ([*GENERATE, "--topk=5"], "--topk=5; did you mean '--top-k'"),
        (["fit", "mine.yaml", "train.steps"], "train.steps"),
        (["fit", "mine.yaml", "train.stepz=3"], "'stepz'; did you mean 'steps'"),
        (["fit", "none.yaml"], "none.yaml"),
        (["fit", "text"], "'text'; it is a folder"),
        (["compare", "mine.yaml"], "compare.schemes"),
        (["compare", "mine.yaml", "train.steps=0", "init=/nowhere"], "/nowhere"),
        (["evaluate", "mine.yaml"], "runs/mine"),
        ([*GENERATE, "--tokens", "-1"], "--tokens"),
        ([*GENERATE, "--tokens", "many"], "--tokens"),
        (["bench", "mine.yaml"], "'data'"),
        (["plan", "mine.yaml"], "--topology"),
        ([*PLAN, "v9z:2x2"], "--topology.*v9z"),
        ([*PLAN, "v5e:3x5x7"], "--topology.*v5e:3x5x7"),
        ([*PLAN, "v5e:2x4", "train.mesh={fsdp: 3}"], "train.mesh"),
        ([*PLAN, "v5e:2x4", "--sweep", "-3"], "--sweep"),
        ([*PLAN, "v5e:2x4", "--slices", "2"], "train.mesh.replica"),
    ],
    ids=words,
)
def test_command_lines(capsys, arguments, message):
    assert re.search(message, refused(capsys, *arguments))


CONTEXT = "train.mesh={data: 2, context: 4}"
SEQUENCE = "train.mesh={data: 1, context: 8}"
HYBRID = "scheme={name: hwfa, length: 16, window: 3}"


@pytest.mark.parametrize(
    ("named", "overrides"),
    [
        ("train.accumulate", ["train.accumulate=3"]),
        ("train.loss_chunks", ["train.loss_chunks=7"]),
        ("train.trainable", ["train.trainable=[nothing.*]"]),
        ("train.context.strategy", ["train.context.strategy=[]"]),
        ("train.context.strategy", ["train.context.strategy=[ring, auto]"]),
        ("implementation", ["model.implementation=flash"]),
        ("num_kv_heads", ["model.num_kv_heads=3"]),
        ("model.vocab_size", ["model.vocab_size=100"]),
        ("name", ["name=../elsewhere"]),
        ("train.mesh", [f"train.mesh.data={2**40}"]),
        ("train.mesh", ["train.mesh={data: -1, fsdp: -1}"]),
        ("8 devices", ["train.batch_tokens=48"]),
        ("'tensor'", ["train.mesh={data: 2, tensor: 4}"]),
        ("length", ["train.length=20", "train.batch_tokens=320", SEQUENCE]),
        ("zigzag", ["train.length=24", "train.batch_tokens=384", SEQUENCE, "train.context.layout=zigzag"]),
        ("strategy='ulysses'", [CONTEXT, "train.context.strategy=ulysses"]),
        ("ulysses", [CONTEXT, "train.context={strategy: ring-ulysses, ulysses: 3}"]),
        ("strategy='neighbour'", [CONTEXT, "train.context.strategy=neighbour", "model.num_layers=2", HYBRID]),
        ("ring", [CONTEXT, "train.context.strategy=ring", "scheme=cope"]),
        ("context", [CONTEXT, "scheme=linear-elu"]),
        ("context", [CONTEXT, "scheme={name: gated-delta, num_heads: 4, key_dim: 8}"]),
        ("'coca'; did you mean 'coca-", ["scheme=coca"]),
        ("'bas'", ["scheme={name: rope, bas: 3}"]),
        ("causal", ["scheme={name: xpos}", "model.causal=false"]),
        ("scheme.max_length=16", ["scheme={name: learned, max_length: 8}"]),
        ("scheme.max_length=32", ["stages=[{}, {train: {length: 32}}]", "scheme={name: learned, max_length: 16}"]),
        ("stages[1]", ["stages=[{}, {train: {lenght: 4}}]"]),
        ("'a' appears twice", ["stages=[{name: a}, {name: a}]"]),
        ("stages[1]: train.trainable", ["stages=[{}, {train: {trainable: [nothing]}}]"]),
        ("stages[1]: scheme", ["scheme=alibi", "stages=[{}, {scheme: coca-strict}]"]),
        ("monitor.profile", ["monitor.profile=[5, 3]"]),
        ("monitor.profile", ["monitor.profile=[10, 30]"]),
        ("monitor.watchdog_seconds", ["monitor.watchdog_seconds=-1"]),
        ("text/", ["data.paths=[text]"]),
        ("data.tokenizer", ["data.tokenizer=mine.yaml"]),
        ("broken.json", ["data.tokenizer=broken.json"]),
        ("git lfs pull", ["data.tokenizer=pointer.json"]),
        ("data.bad_records", ["data.bad_records=1.5"]),
        ("data.packing", ["data.packing=best"]),
        ("data.mixture", ["data.mixture=[{paths: [text/*.txt], weight: -1}]", "data.paths=[]"]),
        ("none/*.txt", ["data.mixture=[{paths: [none/*.txt]}]", "data.paths=[]"]),
        ("data: the corpus", ["train.length=4096", "train.batch_tokens=32768"]),
    ],
    ids=words,
)
def test_a_mistake_names_its_key_or_what_would_work(capsys, named, overrides):
    assert named in refused(capsys, "fit", "mine.yaml", *overrides)


def test_a_cache_that_is_a_file(capsys):
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        found = refused(capsys, "fit", "mine.yaml", "monitor.compilation_cache=mine.yaml")
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
    assert "monitor.compilation_cache" in found


def test_a_project_of_wandb_without_wandb(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "monitor.wandb" in refused(capsys, "fit", "mine.yaml", "monitor.wandb=mine")


def lines(*texts):
    return "".join(text + "\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("empty.txt", b"", "no text"),
        ("one.txt", b"one short document", "data.held_out=0"),
        ("broken.jsonl", lines('{"text": "a', "no JSON", "[1, 2"), "JSON"),
        ("other.jsonl", lines('{"texts": "a"}', '{"texts": "b"}'), "data.text_key=texts"),
        ("cut.jsonl.gz", gzip.compress(lines('{"text": "a"}') * 99, mtime=0)[:40], "cut.jsonl.gz"),
        ("bad.parquet", b"PAR1 and nothing else", "bad.parquet"),
        ("bad.jsonl.zst", b"not compressed either", "bad.jsonl.zst"),
        ("table.csv", b"a,b\n1,2\n", "jsonl"),
    ],
)
def test_files_of_which_none_can_be_read(capsys, folder, name, content, hint):
    (folder / name).write_bytes(content)
    found = refused(capsys, "fit", "mine.yaml", f"data.paths=[{name}]")
    assert hint in found
    assert name in found or name == "one.txt"


@pytest.mark.parametrize(
    ("content", "hint"),
    [(b"- 1\n- 2\n", "bad.yaml"), (b"name: \xff\xfe\n", "UTF-8"), (b"train:\n\tsteps: 3\n", "bad.yaml, line 2")],
)
def test_config_files(capsys, folder, content, hint):
    (folder / "bad.yaml").write_bytes(content)
    assert hint in refused(capsys, "fit", "bad.yaml")


@pytest.mark.parametrize("place", ["runs", "runs/mine"])
def test_a_folder_of_runs_or_a_run_that_is_a_file(capsys, folder, place):
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text("a file")
    assert place in refused(capsys, "fit", "mine.yaml")


@pytest.fixture
def run(folder):
    """The directory of a run of the config that has started but has no checkpoint."""
    directory = folder / "runs" / "mine"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n')
    return directory


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("thesis.tex", "years of work", "thesis.tex"),
        ("config.yaml", "train: {lenght: 3}\n", "'lenght'"),
        ("metrics.jsonl", "no JSON\n", "metrics.jsonl"),
    ],
)
def test_a_directory_that_is_damaged_or_has_other_things(capsys, run, name, content, hint):
    (run / name).write_text(content)
    assert hint in refused(capsys, "fit", "mine.yaml")
    assert (run / name).read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "mine.yaml", "model.num_layers=2"], "model.num_layers was 1, now 2"),
        (["evaluate", "runs/mine", "train.length=32"], "train.length was 16, now 32"),
        (["generate", "runs/mine", "scheme=alibi"], "scheme"),
        (["generate", "runs/mine", "scheme.extend={bias: alibi}"], "bias|checkpoint"),
        (["evaluate", "runs/mine"], "runs/mine has no .*checkpoint"),
        (["generate", "runs/mine", "--prompt", "x"], "runs/mine has no .*checkpoint"),
    ],
    ids=words,
)
@pytest.mark.usefixtures("run")
def test_what_a_run_that_began_cannot_do(capsys, arguments, message):
    assert re.search(message, refused(capsys, *arguments))
