"""Every mistake in a config, a command line or a file is one line on standard error, before anything compiles."""

import gzip
import re

import jax
import pytest

from train import cli
from train.config import parse_text
from train.loop import fit as loop
from train.loop.step import build_program
from train.model.mesh import make_mesh

CONFIG = """
data: {source: files, paths: [text/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 16, num_heads: 2, mlp_dim: 16}
train: {length: 16, batch_tokens: 256, steps: 20, warmup_steps: 2}
evaluate: {lengths: [16, 32], tokens: 32, batch_tokens: 32}
monitor: {compilation_cache: ""}
"""


CONTEXT = "train.mesh={data: 1, context: 8}"
HYBRID = "scheme={name: hwfa, length: 16, window: 3}"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a valid config, `mine.yaml`, and its text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "text").mkdir()
    for index in range(6):
        (tmp_path / "text" / f"{index}.txt").write_text(
            f"the {index}th of the texts, and not the longest of them. " * 8
        )
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


class Compiled(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def no_program_is_cached():
    """Clears programs of other test files: a cached program does not compile, so `nothing_compiles` would miss it."""
    jax.clear_caches()


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


@pytest.fixture(scope="module")
def program():
    """The program of the valid config."""
    config = parse_text(CONFIG, "here")
    return build_program(config, make_mesh(config.train.mesh, config.train.rows))


@pytest.fixture
def traced_once(program, monkeypatch):
    """For mistakes outside the model, which are found after tracing. It saves half a second in each test."""
    monkeypatch.setattr(loop, "build_program", lambda config, mesh: program)


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


def test_compiling_is_noticed():
    with pytest.raises(Compiled):
        jax.jit(lambda x: x + 1)(1.0)


def test_the_config_without_a_mistake_is_read():
    assert parse_text(CONFIG, "here").train.rows == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fitt", "mine.yaml"], "'fitt'.*fit"),
        (["fit"], "CONFIG"),
        (["fit", "mine.yaml", "--stepz", "3"], "--stepz"),
        (["fit", "mine.yaml", "train.steps"], "train.steps"),
        (["fit", "none.yaml"], "no config file 'none.yaml'"),
        (["fit", "text"], "no config file 'text'"),
        (["fit", "mine.yaml", "=3"], "override '=3': write key.path=value"),
        (["fit", "mine.yaml", "train.steps=[1"], "override 'train.steps=\\[1'.*not valid YAML"),
        (["fit", "mine.yaml", "train.steps.x=1"], "train.steps is a value, not a section"),
        (["compare", "mine.yaml"], "compare.schemes is empty"),
        (["evaluate", "mine.yaml"], "runs/mine is neither a run nor a released model"),
        (["evaluate", "mine.yaml", "evaluate.tasks=[paskey]"], "evaluate.tasks.*'paskey'; did you mean 'passkey'"),
        (["generate", "text", "--prompt", "x"], "text is neither a run nor a released model"),
        (["generate", "mine.yaml", "--prompt", "x", "--tokens", "-1"], "--tokens must not be negative, found -1"),
        (["generate", "mine.yaml", "--prompt", "x", "--tokens", "many"], "--tokens.*'many'"),
        (["bench", "mine.yaml"], "unknown key 'data'"),
        (["plan", "mine.yaml"], "--topology"),
        (["plan", "mine.yaml", "--topology", "v9z:2x2"], "--topology.*v9z.*v5e"),
        (
            ["plan", "mine.yaml", "--topology", "v5e:3x5x7"],
            "--topology: pods of v5e have 2 dimensions.*v5e:16x16.*v5e:3x5x7",
        ),
        (["plan", "mine.yaml", "--topology", "v5e"], "--topology.*v5p:8x8x8.*'v5e'"),
        (["plan", "mine.yaml", "--topology", "v5e:2x4", "train.mesh={fsdp: 3}"], r"train.mesh \(.*8.*would work"),
        (["plan", "mine.yaml", "--topology", "v5e:2x4", "--sweep", "-3"], "--sweep: .*found -3"),
        (["plan", "mine.yaml", "--topology", "v5e:2x4", "--slices", "2"], "train.mesh.replica=2 would work"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_lines(capsys, arguments, message):
    assert re.search(message, refused(capsys, *arguments))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian={}", "unknown key 'trian'; did you mean 'train'"),
        ("train.lenght=4", "train: unknown key 'lenght'; did you mean 'length'"),
        ("train.mesh.tensors=2", "train.mesh: unknown key 'tensors'; did you mean 'tensor'"),
        ("train.steps=1.5", "train.steps: expected a whole number, found 1.5"),
        ("train.steps=", "train.steps: expected a whole number, found None"),
        ("train.learning_rate=fast", "train.learning_rate: expected a number, found 'fast'"),
        ("train.learning_rate=.inf", "train.learning_rate: expected a finite number"),
        ("train.optimizer=adam", "train.optimizer: unknown value 'adam'; did you mean 'adamw'"),
        ("model.remat=ful", "model.remat: unknown value 'ful'; did you mean 'full'"),
        ("train.context.strategy=rings", "train.context.strategy: unknown value 'rings'; did you mean 'ring'"),
        (
            "train.context.strategy=[ring, ulises]",
            "train.context.strategy: unknown value 'ulises'; did you mean 'ulysses'",
        ),
        ("train.context.strategy=[]", "train.context.strategy is empty: name at least one of auto, ring"),
        (
            "train.context.strategy=[ring, auto]",
            "train.context.strategy: 'auto' .* cannot be in a list with others, found .'ring', 'auto'.; ",
        ),
        ("train.context.layout=zigzags", "train.context.layout: unknown value 'zigzags'; did you mean 'zigzag'"),
        ("model.implementation=flash", "implementation.*'flash'.*blockwise"),
        ("train.steps=2", r"train.warmup_steps must be .* below train.steps \(2\), found 2"),
        ("train.batch_tokens=100", r"multiple of train.length \(16\), found 100; 96 would work"),
        ("train.accumulate=3", "train.accumulate must divide the 16 rows of a batch, found 3.*(2|4) would work"),
        (f"train.accumulate={2**40}", f"divide the 16 rows of a batch, found {2**40}; 16 would work"),
        (f"train.mesh.data={2**40}", rf"train.mesh \(data={2**40}\) needs .* whose product is 8 would work"),
        (f"train.loss_chunks={2**40}", "train.loss_chunks.*260.*would work"),
        ("scheme=coca", r"unknown scheme 'coca'; did you mean 'coca-\w+'.*64 are known, among them coca-.*README.md"),
        ("train.loss_chunks=7", "train.loss_chunks.*260.*7.*would work"),
        ("train.stop_after_skips=0", "train.stop_after_skips must be positive"),
        ("train.trainable=[nothing.*]", "train.trainable.*'nothing.*'.*embed"),
        ("model.num_heads=3", "num_heads"),
        ("model.num_kv_heads=3", "num_kv_heads"),
        ("model.vocab_size=100", "model.vocab_size: the tokenizer has 260 tokens, found 100"),
        ("name=../elsewhere", "name: .*output, found '../elsewhere'"),
        ("name=/elsewhere", "name: .*output, found '/elsewhere'"),
        ("seed=-1", "seed must be at least 0"),
    ],
)
def test_values(capsys, override, message):
    assert re.search(message, refused(capsys, "fit", "mine.yaml", override))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.mesh={data: -1, fsdp: -1}"], "train.mesh: only one axis.*data and fsdp"),
        (["train.mesh={data: 3, fsdp: 3}"], r"train.mesh \(data=3, fsdp=3\) needs 9 devices.*8.*would work"),
        (["train.mesh={data: -1, tensor: 3}"], "train.mesh.*multiple of 3.*8.*would work"),
        (["train.batch_tokens=48"], "3 rows.*8 devices.*would work"),
        (["train.mesh={data: 2, tensor: 4}"], "axis 'tensor'.* 4 devices.* 2 query heads.* would work"),
        (
            ["train.length=20", "train.batch_tokens=320", CONTEXT],
            "length must be a multiple of 8 .*found 20; 16 would work",
        ),
        (
            ["train.length=24", "train.batch_tokens=384", CONTEXT, "train.context.layout=zigzag"],
            "length must be a multiple of 16 for a zigzag layout .*found 24; 32 would work",
        ),
        (
            ["train.mesh={data: 2, context: 4}", "train.context.strategy=ulysses"],
            "strategy='ulysses'.* 2 query heads .*use 'ring-ulysses' with ulysses=2",
        ),
        (
            ["train.mesh={data: 2, context: 4}", "train.context={strategy: ring-ulysses, ulysses: 3}"],
            "strategy='ring-ulysses'.*ulysses must divide the 4 shards.*found 3; use 'ring'",
        ),
        (["train.mesh={data: 2, context: 4}", "train.context.strategy=neighbour"], "neighbour.*window"),
        (
            ["train.mesh={data: 2, context: 4}", "train.context.strategy=[neighbour, ulysses]"],
            "strategy='neighbour': .*window.*; strategy='ulysses': .* 2 query heads",
        ),
        (
            ["train.mesh={data: 2, context: 4}", "train.context.strategy=neighbour", "model.num_layers=2", HYBRID],
            "strategy='neighbour': .*if only some layers have a window, give both names, 'neighbour' and then 'ring'",
        ),
        (["train.mesh={data: 2, context: 4}", "train.context.strategy=ring", "scheme=cope"], "(?i)cope.*ring"),
        (["train.mesh={data: 2, context: 4}", "scheme=linear-elu"], "linear.*context"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_meshes(capsys, overrides, message):
    assert re.search(message, refused(capsys, "fit", "mine.yaml", *overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scheme=ropes"], "unknown scheme 'ropes'; did you mean 'rope'"),
        (["scheme={name: rope, bas: 3}"], "'bas'.*base"),
        (["scheme={name: xpos}", "model.causal=false"], "(?i)xpos"),
        (
            ["scheme={name: learned, max_length: 8}"],
            "scheme: learned has 8 positions, .* is 16; scheme.max_length=16 would work",
        ),
        (
            ["stages=[{}, {train: {length: 32}}]", "scheme={name: learned, max_length: 16}"],
            "scheme: learned has 16 positions, .* is 32; scheme.max_length=32 would work",
        ),
        (["stages=3"], "stages: expected a list, found 3"),
        (["stages=[{trian: {}}]"], r"stages\[0\].*unknown key 'trian'; did you mean 'train'"),
        (["stages=[{}, {train: {lenght: 4}}]"], r"stages\[1\]: train: unknown key 'lenght'; did you mean 'length'"),
        (["stages=[{}, {train: {length: 24}}]"], r"stages\[1\]: train.batch_tokens must be a multiple"),
        (["stages=[{}, {train: {steps: 2}}]"], r"stages\[1\]: train.warmup_steps"),
        (["stages=[{}, {scheme: ropes}]"], r"stages\[1\].*unknown scheme 'ropes'; did you mean 'rope'"),
        (["stages=[{name: a}, {name: a}]"], "stages.*'a' appears twice"),
        (
            ["stages=[{}, {train: {mesh: {data: 2, tensor: 4}}}]"],
            r"stages\[1\].*axis 'tensor'.* 2 query heads.* would work",
        ),
        (["stages=[{}, {train: {trainable: [nothing]}}]"], r"stages\[1\].*train.trainable.*'nothing'"),
        (
            ["scheme=alibi", "stages=[{}, {scheme: coca-strict}]"],
            r"stages\[1\]: scheme: 'coca-strict' cannot start from the weights of 'alibi'.*would work",
        ),
        (
            ["scheme=coca-strict", "stages=[{}, {scheme: rope}]"],
            r"stages\[1\]: scheme: 'rope' cannot start from the weights of 'coca-strict'.*would work",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_schemes_and_stages(capsys, overrides, message):
    assert re.search(message, refused(capsys, "fit", "mine.yaml", *overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("monitor.profile=[5, 3]", r"monitor.profile must be \[first step, last step\], found \[5, 3\]"),
        ("monitor.profile=[5]", r"monitor.profile must be \[first step, last step\], found \[5\]"),
        ("monitor.profile=[10, 30]", r"monitor.profile must lie between steps 1 and 20, .*found \[10, 30\]"),
        ("monitor.profile=[0, 3]", r"monitor.profile must lie between steps 1 and 20, .*found \[0, 3\]"),
        ("monitor.watchdog_seconds=-1", "monitor.watchdog_seconds must not be negative, found -1"),
    ],
)
def test_monitors(capsys, override, message):
    assert re.search(message, refused(capsys, "fit", "mine.yaml", override))


def test_a_cache_that_is_a_file(capsys):
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        found = refused(capsys, "fit", "mine.yaml", "monitor.compilation_cache=mine.yaml")
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
    assert re.search("monitor.compilation_cache: cannot write into '.*mine.yaml'; name another folder", found)


def test_a_project_of_wandb_without_wandb(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "monitor.wandb=mine: the package is not installed" in refused(
        capsys, "fit", "mine.yaml", "monitor.wandb=mine"
    )


def lines(*texts):
    return "".join(text + "\n" for text in texts).encode()


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "no text in .*empty.txt"),
        ("one.txt", b"one short document", "single document.*data.held_out=0"),
        ("broken.jsonl", lines('{"text": "a', "no JSON", "[1, 2"), "broken.jsonl.*JSON"),
        ("other.jsonl", lines('{"texts": "a"}', '{"texts": "b"}'), "other.jsonl.*data.text_key=texts"),
        ("cut.jsonl.gz", gzip.compress(lines('{"text": "a"}') * 99, mtime=0)[:40], "cut.jsonl.gz"),
        ("plain.jsonl.gz", b"not compressed at all", "plain.jsonl.gz"),
        ("bad.parquet", b"PAR1 and nothing else", "bad.parquet"),
        ("bad.jsonl.zst", b"not compressed either", "bad.jsonl.zst"),
        ("table.csv", b"a,b\n1,2\n", "table.csv.*txt.*jsonl"),
    ],
)
def test_files_of_which_none_can_be_read(capsys, folder, name, content, message):
    (folder / name).write_bytes(content)
    assert re.search(message, refused(capsys, "fit", "mine.yaml", f"data.paths=[{name}]"))


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.paths=[nothing/*.txt]"], "data.paths: no file matches 'nothing/\\*.txt'"),
        (["data.paths=[text]"], "no file matches 'text'; for all of a folder write text/"),
        (["data.paths=[]"], "data.paths is empty"),
        (["data.source=stdlib"], "data.paths is read only with data.source=files"),
        (["data.held_out=1"], "data.held_out must be at least 0 and below 1"),
        (["data.tokenizer=none.json"], "data.tokenizer.*none.json"),
        (["data.tokenizer=mine.yaml"], "data.tokenizer must be .*tokenizer.json.*'mine.yaml'"),
        (["data.tokenizer=broken.json"], "data.tokenizer.*broken.json"),
        (["data.tokenizer=broken.model"], "data.tokenizer.*broken.model"),
        (["data.tokenizer=pointer.json"], "data.tokenizer.*pointer.json.*git lfs pull"),
        (["data.bad_records=1.5"], "data.bad_records must be from 0 to 1, found 1.5"),
        (["data.packing=best"], "data.packing: unknown value 'best'.*best-fit"),
        (["data.mixture=[{paths: [text/*.txt], weight: -1}]", "data.paths=[]"], "data.mixture.*weight.*-1"),
        (["data.mixture=[{path: text}]", "data.paths=[]"], r"data.mixture\[0\]: unknown key 'path'.*'paths'"),
        (["data.mixture=[{paths: [none/*.txt]}]", "data.paths=[]"], r"no file matches 'none/\*.txt'"),
        (["train.length=4096", "train.batch_tokens=32768"], "data: the corpus has"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_data(capsys, folder, overrides, message):
    (folder / "broken.json").write_text('{"model": ')
    (folder / "broken.model").write_bytes(b"no model of pieces")
    (folder / "pointer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert re.search(message, refused(capsys, "fit", "mine.yaml", *overrides))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1\n- 2\n", "bad.yaml: a config is a mapping of keys to values"),
        (b"train: {steps: 3\n", "bad.yaml, line 2: not valid YAML"),
        (b"name: \xff\xfe\n", "bad.yaml.*UTF-8"),
        (b"train:\n\tsteps: 3\n", "bad.yaml, line 2: not valid YAML"),
    ],
)
def test_config_files(capsys, folder, content, message):
    (folder / "bad.yaml").write_bytes(content)
    assert re.search(message, refused(capsys, "fit", "bad.yaml"))


@pytest.mark.usefixtures("traced_once")
def test_a_folder_of_runs_that_is_a_file(capsys, folder):
    (folder / "runs").write_text("a file")
    assert "runs" in refused(capsys, "fit", "mine.yaml")


def test_a_run_directory_that_is_a_file(capsys, folder):
    (folder / "runs").mkdir()
    (folder / "runs" / "mine").write_text("a file")
    assert "runs/mine is a file; choose another name" in refused(capsys, "fit", "mine.yaml")


@pytest.fixture
def run(folder):
    """The directory of a run of the config that has started but has no checkpoint."""
    directory = folder / "runs" / "mine"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n')
    return directory


def test_a_directory_with_other_things(capsys, run):
    (run / "thesis.tex").write_text("years of work")
    assert "runs/mine has files that are not of a run (thesis.tex); choose another name" in refused(
        capsys, "fit", "mine.yaml"
    )


def test_a_run_of_another_config(capsys, run):
    found = refused(capsys, "fit", "mine.yaml", "model.num_layers=2")
    assert "runs/mine belongs to another config: model.num_layers was 1, now 2. Choose another name" in found


def test_a_run_whose_config_is_damaged(capsys, run):
    (run / "config.yaml").write_text("train: {lenght: 3}\n")
    assert "'lenght'" in refused(capsys, "fit", "mine.yaml")


@pytest.mark.usefixtures("traced_once")
def test_invalid_metrics(capsys, run):
    (run / "metrics.jsonl").write_text("no JSON\n")
    assert "metrics.jsonl" in refused(capsys, "fit", "mine.yaml")


@pytest.mark.parametrize("command", [["evaluate"], ["generate", "--prompt", "x"]])
def test_a_run_without_a_checkpoint(capsys, run, command):
    found = refused(capsys, command[0], "runs/mine", *command[1:])
    assert re.search("runs/mine has no .*checkpoint.*train it first", found)


def test_what_a_trained_run_cannot_change(capsys, run):
    found = refused(capsys, "evaluate", "runs/mine", "train.length=32")
    assert "runs/mine is trained, so this cannot change: train.length was 16, now 32" in found
