"""The loop of a stage without a model: when it logs, saves, measures and stops. Its parts are stand-ins."""

import threading
from contextlib import contextmanager, nullcontext
from dataclasses import make_dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from train.checkpoint.local import LocalCheckpoint
from train.checkpoint.manager import Checkpoint
from train.config import MonitorConfig, parse
from train.loop import fit as loop
from train.loop.fit import Diverged, Run, Stage, _Evaluation, _refuse_divergence, _stream_seed, finite
from train.loop.loss import Losses

METRICS = SimpleNamespace(loss=1.5, gradient_norm=np.float32(np.inf), learning_rate=0.1, skipped=2, skipped_in_row=0)


def stage(number=1, first_step=10, **train):
    """A stage of 13 updates, the second of a run, whose state is the number of updates."""
    train = {"steps": 13, "warmup_steps": 0, "length": 8, "batch_tokens": 32, "log_every": 4} | train
    config = parse({"train": {"checkpoint_every": 6, **train}})
    program = SimpleNamespace(update=lambda state, batch: (state + 1, METRICS))
    return Stage(number, first_step, config, "mesh", program, SimpleNamespace(apply=lambda x: x), None, None)


class Watching:
    """A monitor, and places for checkpoints, that write down what they are told."""

    def __init__(self):
        self.told, self.goodput = {"log": [], "save": [], "local": [], "begin": []}, self
        self.checkpoints, self.local = self.saving("save"), self.saving("local")
        self.step = self.tokens = None

    def saving(self, where):
        return SimpleNamespace(save=lambda step, stage, state, stream: self.told[where].append((step, state, stream)))

    def begin(self):
        self.told["begin"].append(self.step)

    def pause(self):
        pass

    def spend(self, kind):
        pass

    @contextmanager
    def spending(self, kind):
        yield

    def next(self, stream):
        return SimpleNamespace(segment_ids=None)

    def before(self, step, state):
        assert step == state + 1

    def after(self, step, loss):
        self.step = step

    def write(self, step, segment_ids, **values):
        self.told["log"].append(step)
        self.values = values


def run(stages, watching=None):
    watching = watching or Watching()
    steps = stages[-1].last_step if stages else 1
    config = SimpleNamespace(seed=0, monitor=MonitorConfig(), steps=steps)
    return Run(config, stages, watching.checkpoints, watching.local, watching, threading.Event())


@pytest.fixture
def trained(monkeypatch):
    """A function that trains a stage from a step, to a step at which the run is preempted."""
    monkeypatch.setattr(loop, "batches", lambda *_: SimpleNamespace(get_state=lambda: "place"))
    monkeypatch.setattr(loop, "rows_of_process", lambda mesh, rows: slice(0, rows))
    monkeypatch.setattr(loop, "global_batch", lambda mesh, batch, rows, part: batch)

    def train(own, start=10, preempted=None):
        watching = Watching()
        watching.step = start
        monkeypatch.setattr(loop, "reached_preemption", lambda step, stop: step == preempted)
        monkeypatch.setattr(Run, "_first_state", lambda self, stage, saved, stream: (start, start))
        result = run([stage(0, 0, steps=10), own], watching)._train_stage(own, None)
        assert all((state, place) == (step, "place") for step, state, place in watching.told["save"])
        return result, {
            name: [n[0] if name in ("save", "local") else n for n in v] for name, v in watching.told.items()
        }

    return train


LOCAL = {"local_every": 3, "local_folder": "/mnt/none"}


@pytest.mark.parametrize(
    ("start", "begin", "log", "save", "local"),
    [
        (10, 15, [14, 18, 22, 23], [16, 22, 23], [13, 19]),
        (16, 21, [18, 22, 23], [22, 23], [19]),
        (20, 22, [22, 23], [22, 23], []),
        (22, 22, [23], [23], []),
        (23, None, [], [], []),
    ],
)
def test_steps_of_a_stage_are_counted_from_its_beginning(trained, start, begin, log, save, local):
    """The clock begins after five steps, or before the last one of a short rest."""
    assert trained(stage(**LOCAL), start) == (
        (23, False),
        {"begin": [begin] if begin else [], "log": log, "save": save, "local": local},
    )
    assert trained(stage(), start)[1]["local"] == []


def test_a_preempted_stage_is_saved_at_this_step(trained):
    assert trained(stage(**LOCAL), preempted=12) == (
        (12, False),
        {"begin": [], "log": [], "save": [12], "local": []},
    )


@pytest.mark.parametrize(("stop_loss", "last", "reached"), [(1.6, 14, True), (1.5, 23, False), (0, 23, False)])
def test_a_stage_ends_at_the_first_logged_loss_below_the_one_to_stop_at(trained, stop_loss, last, reached):
    result, told = trained(stage(stop_loss=stop_loss))
    assert result == (last, reached)
    assert told["save"][-1] == told["log"][-1] == last


@pytest.mark.parametrize(
    ("saved", "begun"),
    [
        (None, [(0, None), (1, (10, 0)), (2, (23, 1))]),
        ((4, 0), [(0, (4, 0)), (1, (10, 0)), (2, (23, 1))]),
        ((10, 0), [(1, (10, 0)), (2, (23, 1))]),
        ((22, 1), [(1, (22, 1)), (2, (23, 1))]),
        ((25, 2), [(2, (25, 2))]),
    ],
)
@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_resumes_with_the_stage_that_is_not_done(monkeypatch, saved, begun, stopped):
    """A run that is asked to stop does so after the first of them."""
    started = []
    stages = [stage(0, 0, steps=10), stage(), stage(2, 23, steps=2)]
    own = run(stages)

    def train_stage(self, stage, saved):
        started.append((stage.number, saved and (saved.step, saved.stage)))
        if stopped:
            own.stop.set()
        return stage.last_step, False

    monkeypatch.setattr(Run, "_newest", lambda self, lasting: lasting)
    monkeypatch.setattr(Run, "_train_stage", train_stage)
    monkeypatch.setattr(jax, "set_mesh", lambda mesh: nullcontext())
    heard = []
    monkeypatch.setattr(loop, "listen", lambda step, stop: heard.append(step))
    result = own._train(saved and Checkpoint(*saved, None))
    assert started == (begun[:1] if stopped else begun)
    last = begun[0][0] if stopped else 2
    assert result == (stages[last].last_step, last == 2)
    assert heard == [saved[0] if saved else 0]


def test_a_line_counts_the_tokens_of_the_stages_before():
    stages = [stage(0, 0, steps=10, batch_tokens=64), stage(), stage(2, 23)]
    watching = Watching()
    run(stages, watching)._log(stages[1], 14, METRICS, None, {"held_out_loss": 3.0})
    wanted = {"loss": 1.5, "gradient_norm": None, "learning_rate": 0.1, "skipped": 2, "held_out_loss": 3.0}
    assert watching.values == wanted | {"tokens": 10 * 64 + 4 * 32}


def test_stages_follow_each_other_and_what_is_odd_about_them_is_said(monkeypatch):
    monkeypatch.setattr(loop, "_build", lambda config, before: (config, before, "program"))
    monkeypatch.setattr(loop, "placement", lambda config, mesh: SimpleNamespace(layout="layout"))
    monkeypatch.setattr(loop, "training_rows", lambda config, log: f"rows of {config.train.length}")
    monkeypatch.setattr(loop, "replicated_parameters", lambda config, mesh: "copies" if mesh is None else "")
    monkeypatch.setattr(loop, "warnings_of_shared_text", lambda config: ["shared"])
    monkeypatch.setattr(loop, "trained_changes", lambda config, scheme: {"factor": 2})
    monkeypatch.setattr(loop, "_held_out", lambda config: None)
    released = SimpleNamespace(name="released", options={"factor": 2})
    every = [SimpleNamespace(scheme=released, train=SimpleNamespace(length=n, steps=k)) for n, k in ((8, 7), (16, 3))]
    config = SimpleNamespace(stages=every, every_stage=every, stage_names=["first", "last"])
    lines = []
    stages = loop.prepare(config, lines.append)
    assert [(each.number, each.first_step, each.last_step, each.rows) for each in stages] == [
        (0, 0, 7, "rows of 8"),
        (1, 7, 10, "rows of 16"),
    ]
    said = 'the released scheme, with {"factor": 2}'
    assert lines == [f"stage first: {said}", "warning: copies", f"stage last: {said}", "warning: shared"]
    lines.clear()
    loop.prepare(SimpleNamespace(stages=[], every_stage=every[:1], stage_names=["first"]), lines.append)
    assert lines == [said, "warning: copies", "warning: shared"]


@pytest.mark.parametrize(("path", "first"), [("", "drawn"), ("model", "begun with what was released")])
def test_a_new_run_starts_from_drawn_or_released_parameters(monkeypatch, path, first):
    monkeypatch.setattr(loop, "initial_parameters", lambda config, mesh: "what was released")
    program = SimpleNamespace(initialize=lambda: "drawn", begin=lambda parameters: f"begun with {parameters}")
    config = SimpleNamespace(init=SimpleNamespace(path=path))
    assert run([])._first_state(SimpleNamespace(config=config, program=program, mesh=None), None, None) == (first, 0)


@pytest.mark.parametrize(("scheme", "wanted"), [("released", 3.0), ("rope", 6.0)])
def test_released_parameters_are_converted_to_another_scheme(monkeypatch, scheme, wanted):
    program = SimpleNamespace(abstract=SimpleNamespace(parameters="shapes"))
    monkeypatch.setattr(loop, "as_released", lambda config: "released config")
    monkeypatch.setattr(loop, "build_program", lambda config, mesh: program)
    monkeypatch.setattr(loop, "open_source", lambda path: f"files of {path}")
    monkeypatch.setattr(loop, "decoder_config", lambda config: f"decoder of the {config}")
    monkeypatch.setattr(loop, "convert", lambda before, config, parameters: 2 * parameters)
    given = ("files of model", {"a": 1}, "decoder of the released config", "shapes")
    monkeypatch.setattr(loop, "read_parameters", lambda *found: 3.0 if found == given else None)
    config = SimpleNamespace(init=SimpleNamespace(path="model", values={"a": 1}), scheme=SimpleNamespace(name=scheme))
    assert loop.initial_parameters(config, None) == wanted


def test_a_saved_run_resumes_from_its_state_and_its_place_in_the_text(monkeypatch):
    own, seen = run([]), []
    own.checkpoints.restore = lambda saved, abstract: f"lasting, as {abstract}"
    own.local.restore = lambda saved, abstract: f"local, as {abstract}"
    stream = SimpleNamespace(set_state=seen.append)
    monkeypatch.setattr(Run, "_continued", lambda self, stage, saved: f"stage {stage.number} after {saved.stage}")
    config = SimpleNamespace(init=SimpleNamespace(path="model"))
    current = SimpleNamespace(number=1, config=config, program=SimpleNamespace(abstract="shapes"))
    for saved, state in (
        (Checkpoint(14, 1, "place"), "lasting, as shapes"),
        (LocalCheckpoint(14, 1, "another"), "local, as shapes"),
        (Checkpoint(14, 0, None), "stage 1 after 0"),
    ):
        assert own._first_state(current, saved, stream) == (state, 14)
    assert seen == ["place", "another"]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stage_begins_with_converted_parameters_and_kept_moments(monkeypatch, keep):
    Held = make_dataclass("Held", ["parameters", "optimizer"], frozen=True)
    abstract = Held("shapes", None)
    monkeypatch.setattr(loop, "build_program", lambda config, mesh: SimpleNamespace(abstract=abstract))
    monkeypatch.setattr(loop, "convert", lambda before, config, parameters: 2 * parameters)
    monkeypatch.setattr(loop, "kept_moments", lambda before, begun: f"{before}, but {begun}")
    own = run([stage(0, 0)])
    own.checkpoints.restore = lambda saved, asked: Held(3.0, "old moments") if asked is abstract else None
    own.checkpoints.restore_parameters = lambda saved, asked: 5.0 if asked == "shapes" else None
    config = SimpleNamespace(train=SimpleNamespace(keep_moments=keep))
    program = SimpleNamespace(begin=lambda parameters: Held(float(parameters), "a new count"))
    found = own._continued(SimpleNamespace(config=config, program=program, mesh=None), Checkpoint(13, 0, None))
    assert found == (Held(6.0, "old moments, but a new count") if keep else Held(10.0, "a new count"))


def test_the_newest_checkpoint_is_the_local_one_if_there_is_one():
    own = run([])
    assert replace(own, local=None)._newest("lasting") == "lasting"
    for local, newest in (("local", "local"), (None, "lasting")):
        own.local.newest = lambda states, lasting, found=local: found
        assert own._newest("lasting") == newest


@pytest.mark.parametrize(
    ("step", "in_row", "refused"), [(15, 2, False), (15, 3, True), (12, 2, False), (23, 2, False), (12, 3, True)]
)
def test_a_training_has_diverged_after_as_many_skips_in_a_row_as_allowed(step, in_row, refused):
    metrics = SimpleNamespace(**{**vars(METRICS), "skipped_in_row": in_row})
    with pytest.raises(Diverged, match=f"at step {step} .* {in_row} updates") if refused else nullcontext():
        _refuse_divergence(stage(stop_after_skips=3), step, metrics)


@pytest.mark.parametrize(("step", "in_row", "refused"), [(11, 1, False), (12, 2, True), (12, 1, False)])
def test_a_stage_without_an_update_has_diverged(step, in_row, refused):
    metrics = SimpleNamespace(**{**vars(METRICS), "skipped_in_row": in_row})
    with pytest.raises(Diverged) if refused else nullcontext():
        _refuse_divergence(stage(steps=2), step, metrics)


class Rows:
    """Ten rows, of which a batch has the numbers."""

    def __len__(self):
        return 10

    def batch(self, numbers):
        return numbers


@pytest.mark.parametrize(
    ("rows", "tokens", "wanted"),
    [
        (4, 63, [[0, 1], [3, 5], [7, 9]]),
        (4, 8, [[0, 9]]),
        (4, 10**6, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
        (40, 10**6, [[*(n * 9 // 19 for n in range(20))]]),
    ],
)
def test_held_out_rows_are_spread_over_all_in_batches_of_a_part_of_a_step(monkeypatch, rows, tokens, wanted):
    monkeypatch.setattr(loop, "rows_of_process", lambda mesh, rows: slice(0, rows))
    config = parse({"train": {"length": 8, "batch_tokens": 8 * rows, "accumulate": 2}})
    own = SimpleNamespace(config=config, mesh=None, held_out=Rows(), on_devices=lambda rows, size, part: rows.tolist())
    found = _Evaluation(own, MonitorConfig(evaluate_every=10, evaluate_tokens=tokens), 0)._batches
    assert found == wanted


def test_the_held_out_loss_is_measured_at_the_first_log_step_after_it_is_due(monkeypatch):
    monkeypatch.setattr(loop, "rows_of_process", lambda mesh, rows: slice(0, rows))
    own = SimpleNamespace(
        config=parse({"train": {"length": 8, "batch_tokens": 16}}),
        mesh=None,
        held_out=Rows(),
        on_devices=lambda rows, size, part: rows,
        program=SimpleNamespace(loss=lambda scale, rows: Losses(scale * rows.sum(), 0, (rows > 3).sum())),
        last_step=47,
    )
    monitor = MonitorConfig(evaluate_every=10, evaluate_tokens=8 * 6)
    evaluation = _Evaluation(own, monitor, 15)
    # Rows 0, 1, 3, 5, 7, 9, of which three have a token that counts.
    due = [step for step in (16, 19, 21, 24, 29, 30, 31, 46, 47) if evaluation.measure(step, 2)]
    assert due == [21, 30, 46, 47]
    assert _Evaluation(own, monitor, 9).measure(10, 2) == {"held_out_loss": 2 * 25 / 3}
    one_batch = MonitorConfig(evaluate_every=10, evaluate_tokens=16)
    for count, loss in ((0.0, 0.0), (1.0, 3.0)):
        own.program.loss = lambda scale, rows, count=count: Losses(3 * count, 0.0, count)
        assert _Evaluation(own, one_batch, 9).measure(10, 2) == {"held_out_loss": loss}


@pytest.mark.parametrize(("tokens", "every", "rows"), [(9, 1, "rows of 8"), (8, 1, None), (8, 0, None)])
def test_held_out_text_must_fill_more_than_a_row(monkeypatch, tokens, every, rows):
    monkeypatch.setattr(loop, "held_out_sample", lambda config: SimpleNamespace(tokens=tokens))
    monkeypatch.setattr(loop, "pack_sample", lambda sample, length: f"rows of {length}")
    config = parse({"train": {"length": 8, "batch_tokens": 16}, "monitor": {"evaluate_every": every}})
    with (
        nullcontext() if rows or not every else pytest.raises(ValueError, match="has 8 tokens, too few for a row of 8")
    ):
        assert loop._held_out(config) == rows


def test_seeds_of_stages_are_far_apart():
    assert [_stream_seed(5, number) for number in range(3)] == [5, 104_734, 209_463]
    assert _stream_seed(2**32 - 1, 1) == 104_728


@pytest.mark.parametrize(("value", "wanted"), [(1.5, 1.5), (np.float32(-2), -2.0), (np.inf, None), (np.nan, None)])
def test_numbers_that_are_not_finite_are_written_as_none(value, wanted):
    assert finite(value) == wanted
