"""The report of a study: a sentence for each length, tables, a figure, one page."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from train.compare.study.cells import PASSKEY, TEXT, is_to_be_searched
from train.config import Config, dump
from train.model.build import model_length
from train.report import style
from train.report.figures import Panel, draw_panels, groups, powers, titled
from train.report.numbers import Estimate, Row, estimate, grouped, labels, lengths, of
from train.report.page import FIGURE, INDEX, About, Picture, page, publish
from train.report.tables import Table, show_parts, shown, table, whole
from train.runtime.machine import own_versions, processor


def write(config: Config, directory: Path, rows: Sequence[Row], console: Console) -> None:
    """Writes ``figure.png`` and ``index.html``, and shows the sentences and tables; nothing until a text has a loss."""
    text, keys = in_order(config, rows, TEXT), in_order(config, rows, PASSKEY)
    if all(row["error"] for row in text):
        return
    about, sentences, found = _about(config, text), findings(config, rows), tables(config, rows)
    picture = Picture(FIGURE, draw(config, text, about.title), _ALT, _caption(text))
    notes = _notes(config, [*text, *keys])
    publish(directory, [picture], page(about, [picture], found, findings=sentences, notes=notes, remark=_ERRORS))
    place = f"{directory / INDEX} has the figure, the tables, the config and the versions."
    show_parts(console, sentences, found, [place])


_ERRORS = "In sentences ± is the standard error over texts of the difference between two extensions."


def _about(config: Config, text: Sequence[Row]) -> About:
    model = config.model
    return About(
        title=f"{config.init.path.rstrip('/').rpartition('/')[2]} beyond its {model_length(config):,} tokens",
        text=f"Texts: {', '.join(grouped(text, 'text'))}",
        model=f"{model.num_layers} layers of {model.model_dim} with {model.num_heads} heads, not trained any further",
        config=dump(config),
        versions={**own_versions(), "cpu": processor()},
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def in_order(config: Config, rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of one kind, in the order of the config's extensions."""
    mine = [row for row in rows if row["kind"] == kind]
    return [row for entry in config.compare.schemes for row in of(mine, entry.label)]


def losses(text: Sequence[Row], label: str, length: int) -> dict[str, float]:
    """The loss of the last tokens of every text, by its name."""
    mine = [row for row in of(text, label) if row["length"] == length and not row["error"]]
    return {row["text"]: row["nll"] for row in mine}


def at_length(config: Config, text: Sequence[Row], label: str, length: int) -> Estimate | None:
    """Mean over the shared texts, and the standard deviation of the changes; None unless all of them have a number.

    A change is the loss of a text minus that of the model as released at its own length; if that is not measured, at
    the nearest shorter length, else at the shortest one.
    """
    texts, found = shared_texts(text, length), losses(text, label, length)
    if not texts or not texts <= found.keys():
        return None
    levels = _levels(config, text, texts)
    changes = estimate(found[name] - levels[name] for name in sorted(texts)) if levels else None
    return Estimate(statistics.fmean(found[name] for name in texts), changes and changes.spread)


def shared_texts(text: Sequence[Row], length: int) -> set[str]:
    """The texts that all extensions without an error have read at a length, so that means are over the same texts."""
    mine = grouped([row for row in text if row["length"] == length], "label")
    found = [{row["text"] for row in rows} for rows in mine.values() if not any(row["error"] for row in rows)]
    return set.intersection(*found) if found else set()


def common_texts(text: Sequence[Row]) -> set[str]:
    """The texts that are shared at every length, so that a line over lengths uses the same texts."""
    return set.intersection(*(shared_texts(text, length) for length in lengths(text)))


def _levels(config: Config, text: Sequence[Row], texts: Collection[str]) -> dict[str, float]:
    """The losses of these texts for the model as released; empty unless all of them are measured."""
    plain, own = plain_label(config), model_length(config)
    measured = [n for n in lengths(text) if set(texts) <= losses(text, plain, n).keys()]
    return losses(text, plain, max((n for n in measured if n <= own), default=min(measured, default=0)))


def plain_label(config: Config) -> str:
    """The label of the model without an extension; empty if it is not studied."""
    return next((entry.label for entry in config.compare.schemes if not entry.extend), "")


def _scored(text: Sequence[Row]) -> int:
    return text[0]["sizes"]["scored"]


# --- sentences and tables ---------------------------------------------------------------------------------------------


def findings(config: Config, rows: Sequence[Row]) -> list[str]:
    """A sentence for each length: which extension is best, by how much, and whether texts agree."""
    text = in_order(config, rows, TEXT)
    return [sentence for length in lengths(text) if (sentence := _finding(config, text, length))]


def _finding(config: Config, text: Sequence[Row], length: int) -> str:
    found = {label: at_length(config, text, label, length) for label in labels(text)}
    # Rounded as in the sentence, so that ties keep the order of the config.
    means = {label: round(value.mean, 3) for label, value in found.items() if value is not None}
    if len(means) < 2:
        return ""
    order, plain = sorted(means, key=means.__getitem__), plain_label(config)
    best = order[0]
    written = {label: {name: round(nll, 3) for name, nll in losses(text, label, length).items()} for label in order}
    others = [label for label in order[1:] if written[label] != written[best]]
    if not others:
        return f"At {length:,} tokens all are alike, {means[best]:.3f} nats per token."
    named = dict.fromkeys([*([plain] if plain in others else []), *others[:1]])
    first = f"no extension is better than {best}" if best == plain else f"{best} is best"
    behind = "".join(f"; {label} is {_difference(text, length, best, label)}" for label in named)
    return f"At {length:,} tokens {first}, {means[best]:.3f} nats per token{behind}."


def _difference(text: Sequence[Row], length: int, best: str, other: str) -> str:
    """By how much an extension is behind the best, in words: mean over texts, its standard error, number of texts."""
    one, two = losses(text, best, length), losses(text, other, length)
    behind = [two[name] - one[name] for name in sorted(shared_texts(text, length))]
    if len(behind) < 2:
        return f"{behind[0]:.3f} behind, on one text"
    error = statistics.stdev(behind) / math.sqrt(len(behind))
    worse = sum(each > 0 for each in behind)
    return f"{statistics.fmean(behind):.3f} ± {error:.3f} behind, on {worse} of {len(behind)} texts"


def tables(config: Config, rows: Sequence[Row]) -> list[Table]:
    """The loss at the end of the context, the pass key, and costs."""
    text, keys = in_order(config, rows, TEXT), in_order(config, rows, PASSKEY)
    return [_losses(config, text), *([_passkeys(keys)] if keys else []), _costs(text)]


def _losses(config: Config, text: Sequence[Row]) -> Table:
    """The mean loss at each length, whose column names the number of its texts if others have more."""
    own, texts = model_length(config), {n: len(grouped(mine, "text")) for n, mine in grouped(text, "length").items()}
    most = len(grouped(text, "text"))
    fewer = {n: "" if found == most else f", {found} of {most} texts" for n, found in texts.items()}
    over = "one text" if most == 1 else f"mean over {most} texts at most; {_SPREAD}"
    title = f"Loss of the last {_scored(text):,} tokens, in nats per token ({over})"
    at = lengths(text)
    body = {label: [shown(at_length(config, text, label, n), "{:.3f}".format) for n in at] for label in labels(text)}
    return table(title, [f"{n:,} ({n / own:.3g}x{fewer[n]})" for n in at], body, "extension")


_SPREAD = "± is the standard deviation over texts of the change from the model as released at its own length"


def _passkeys(keys: Sequence[Row]) -> Table:
    """The share found at each length and depth."""
    columns = sorted(grouped(keys, "length", "depth"))
    found = {(row["label"], row["length"], row["depth"]): row["accuracy"] for row in keys if not row["error"]}
    shares = {label: [found.get((label, *column)) for column in columns] for label in labels(keys)}
    body = {label: ["-" if each is None else whole(100 * each) for each in mine] for label, mine in shares.items()}
    cases = keys[0]["sizes"]["cases"]
    title = f"Pass key by length and depth ({cases} case{'s' if cases > 1 else ''} each)"
    return table(title, [f"{length:,} at {depth:.2f}" for length, depth in columns], body, "pass key found in %")


def _costs(text: Sequence[Row]) -> Table:
    """Tokens a second and the memory of one pass, at the longest length of the study."""
    longest = lengths(text)[-1]
    read = [row for row in text if row["length"] == longest and not row["error"]]

    def most(label: str, column: str, unit: int = 1) -> str:
        # Of speed, that of the fastest of the texts: other load can only slow it down.
        found = [row[column] for row in of(read, label) if row[column] is not None]
        return whole(max(found) / unit) if found else "-"

    body = {label: (most(label, "tokens_per_second"), most(label, "memory_bytes", 2**20)) for label in labels(text)}
    header = (f"tokens/s at {longest:,}", "MiB of parameters and activations")
    return table("Cost of one pass", header, body, "extension")


def _notes(config: Config, rows: Sequence[Row]) -> list[str]:
    """The missing measurements with reasons, and the length for which LongRoPE's factors were searched."""
    failed = {f"{row['label']} at {row['length']:,}: {row['error']}" for row in rows if row["error"]}
    asked = [entry.label for entry in config.compare.schemes if is_to_be_searched(entry)]
    length = config.compare.search.length or 2 * model_length(config)
    searched = f"factors and temperature are those searched for {length:,} tokens, at every length"
    return [*sorted(failed), *(f"{label}: {searched}" for label in asked if label in labels(rows))]


# --- figure -----------------------------------------------------------------------------------------------------------

_ALT = "Loss at the end of the context against its length, and loss by position, one line for each extension"
_CAPTION = (
    "Left: the mean loss of the same last {scored:,} tokens of {texts}, with ever more of the text before them. A "
    "falling line says that more context helps. Right: the mean loss in parts of the texts of the longest length, by "
    "the number of tokens before, from 16 on. The axes end 1.5 nats above the lowest value."
)
_FIRST = 16  # position that is drawn
_KINDS = {"frequencies": "frequencies", "remap": "distances remapped", "mask": "windows"}


def _caption(text: Sequence[Row]) -> str:
    texts = ", ".join(sorted(common_texts(text))) or "the texts of each length"
    return _CAPTION.format(scored=_scored(text), texts=texts)


def draw(config: Config, text: Sequence[Row], title: str) -> bytes:
    """Loss against length beside loss by position; a row for each kind of extension if there are many."""
    kinds = {entry.label: _kind(entry.extend) for entry in config.compare.schemes}
    rows = [{**row, "base": None, "family": kinds[row["label"]], "seed": 0} for row in text if not row["error"]]
    own, longest = model_length(config), lengths(rows)[-1]
    ends, parts = partial(_by_length, text), partial(_by_position, text, longest)
    places = [n for n in powers(longest) if n >= _FIRST]
    columns = {
        f"the last {_scored(text):,} tokens": (
            ends,
            partial(_axes, "context in tokens", lengths(text), own, _values(rows, ends)),
        ),
        "by position": (
            parts,
            partial(_axes, f"tokens before, in a text of {longest:,}", places, own, _values(rows, parts, 64)),
        ),
    }
    panels = [
        Panel(titled(group, what), rows, group, points, axes)
        for group in groups(rows)
        for what, (points, axes) in columns.items()
    ]
    return draw_panels(panels, "nats per token", share="col", height=3.4, title=title)


def _by_length(text: Sequence[Row], mine: Sequence[Row], _: str) -> style.Points:
    """The mean loss of the last tokens against the length of the text, over the same texts at every length."""
    texts = {n: common_texts(text) or shared_texts(text, n) for n in lengths(mine)}
    found = grouped([row for row in mine if row["text"] in texts[row["length"]]], "length")
    complete = {n: rows for n, rows in found.items() if len(rows) == len(texts[n])}
    return {n: Estimate(statistics.fmean(row["nll"] for row in complete[n])) for n in sorted(complete)}


def _by_position(text: Sequence[Row], longest: int, mine: Sequence[Row], _: str) -> style.Points:
    """The mean loss in each part of the texts of the longest length."""
    texts = shared_texts(text, longest)
    read = [row for row in mine if row["length"] == longest and row["text"] in texts]
    if not read or len(read) < len(texts):
        return {}
    means = map(statistics.fmean, zip(*(row["position_nll"] for row in read), strict=True))
    parts = zip(read[0]["position_ends"], means, strict=True)
    return {end: Estimate(mean) for end, mean in parts if end >= _FIRST}


def _values(rows: Sequence[Row], points: Callable[..., style.Points], least: int = 0) -> list[float]:
    """The losses of all lines, from a length or position on."""
    lines = [points(of(rows, label), label) for label in labels(rows)]
    return [point.mean for line in lines for at, point in line.items() if at >= least]


def _axes(across: str, ticks: Sequence[int], own: int, values: Sequence[float], panel: Any) -> None:
    style.loss_axis(panel, values)
    style.length_axis(panel, across, ticks, own, "the model's own length")


def _kind(extend: Mapping[str, Any]) -> str:
    """What an extension changes first: the title of its panels."""
    return next((title for slot, title in _KINDS.items() if slot in extend), "others")
