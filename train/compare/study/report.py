"""The report of a study: a sentence for each length, tables, a figure, one page."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from train.compare.study.cells import PASSKEY, TEXT, is_to_be_searched
from train.config import Config, dump
from train.model.build import own_length
from train.report import ends, style
from train.report.groups import groups
from train.report.numbers import Estimate, estimate
from train.report.page import FIGURE, INDEX, About, Picture, page
from train.report.tables import Table, show_table
from train.runtime.machine import own_versions, processor

Row = Mapping[str, Any]


def write(config: Config, directory: Path, rows: Sequence[Row], console: Console) -> None:
    """Writes ``figure.png`` and ``index.html``, and shows the sentences and tables; nothing until a text has a loss."""
    done = [row for row in rows if row["kind"] in (TEXT, PASSKEY)]
    if not any(row["kind"] == TEXT and not row["error"] for row in done):
        return
    sentences, found = findings(config, done), tables(config, done)
    text = [row for row in done if row["kind"] == TEXT]
    picture = Picture(FIGURE, draw(config, done), _ALT, _caption(text))
    (directory / FIGURE).write_bytes(picture.png)
    about = _about(config, done)
    whole = page(about, [picture], found, findings=sentences, notes=_notes(config, done), remark=_ERRORS)
    (directory / INDEX).write_text(whole, encoding="utf-8")
    for sentence in sentences:
        console.print(sentence, markup=False)
    for table in found:
        show_table(table, console)
    console.print(f"{directory / INDEX} has the figure, the tables, the config and the versions.", markup=False)


_ERRORS = "In sentences ± is the standard error over texts of the difference between two extensions."


def _about(config: Config, rows: Sequence[Row]) -> About:
    names = list(dict.fromkeys(row["text"] for row in rows if row["kind"] == TEXT))
    model = config.model
    return About(
        title=f"{config.init.path.rstrip('/').rpartition('/')[2]} beyond its {own_length(config):,} tokens",
        text=f"Texts: {', '.join(names)}",
        model=f"{model.num_layers} layers of {model.model_dim} with {model.num_heads} heads, not trained any further",
        config=dump(config),
        versions={**own_versions(), "cpu": processor()},
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def labels(config: Config, rows: Sequence[Row]) -> list[str]:
    """The extensions that have a result, in the order of the config."""
    known = [entry.label for entry in config.compare.schemes]
    found = {row["label"] for row in rows}
    return [label for label in known if label in found]


def lengths(rows: Sequence[Row]) -> list[int]:
    """The lengths that have a result, in ascending order."""
    return sorted({row["length"] for row in rows})


def losses(rows: Sequence[Row], label: str, length: int) -> dict[str, float]:
    """The loss of the last tokens of every text, by its name."""
    mine = [row for row in rows if row["kind"] == TEXT and (row["label"], row["length"]) == (label, length)]
    return {row["text"]: row["nll"] for row in mine if not row["error"]}


def at_length(
    config: Config, rows: Sequence[Row], label: str, length: int, texts: Collection[str] = ()
) -> Estimate | None:
    """Mean over texts, and the standard deviation of the changes; None unless all texts have a number.

    The texts are those that all extensions share at this length, unless `texts` names them. A change is the loss of a
    text minus that of the model as released at its own length; if that is not measured, at the nearest shorter length,
    else at the shortest one.
    """
    texts, found = set(texts) or shared_texts(rows, length), losses(rows, label, length)
    if not texts or not texts <= found.keys():
        return None
    mean, levels = statistics.fmean(found[text] for text in texts), _levels(config, rows, texts)
    changes = estimate(found[text] - levels[text] for text in sorted(texts)) if levels else None
    return Estimate(mean, None if changes is None else changes.spread)


def shared_texts(rows: Sequence[Row], length: int) -> set[str]:
    """The texts that all extensions without an error have read at a length, so that means are over the same texts."""
    mine = [row for row in rows if row["kind"] == TEXT and row["length"] == length]
    failed = {row["label"] for row in mine if row["error"]}
    found = [losses(mine, label, length).keys() for label in {row["label"] for row in mine} - failed]
    return set.intersection(*map(set, found)) if found else set()


def common_texts(rows: Sequence[Row]) -> set[str]:
    """The texts that are shared at every length, so that a line over lengths uses the same texts."""
    return set.intersection(*(shared_texts(rows, length) for length in lengths(rows)))


def _levels(config: Config, rows: Sequence[Row], texts: Collection[str]) -> dict[str, float]:
    """The losses of these texts for the model as released; empty unless all of them are measured."""
    plain, own = plain_label(config), own_length(config)
    measured = [n for n in lengths(rows) if set(texts) <= losses(rows, plain, n).keys()]
    at = max((n for n in measured if n <= own), default=min(measured, default=0))
    return losses(rows, plain, at)


def plain_label(config: Config) -> str:
    """The label of the model without an extension; empty if it is not studied."""
    return next((entry.label for entry in config.compare.schemes if not entry.extend), "")


def findings(config: Config, rows: Sequence[Row]) -> list[str]:
    """A sentence for each length: which extension is best, by how much, and whether texts agree."""
    return [sentence for length in lengths(rows) if (sentence := _finding(config, rows, length))]


def _finding(config: Config, rows: Sequence[Row], length: int) -> str:
    found = {label: at_length(config, rows, label, length) for label in labels(config, rows)}
    means = {label: value.mean for label, value in found.items() if value is not None}
    if len(means) < 2:
        return ""
    # Rounded as in the text, so that ties keep the order of the config.
    order, plain = sorted(means, key=lambda label: round(means[label], 3)), plain_label(config)
    best = order[0]
    written = {label: {text: round(nll, 3) for text, nll in losses(rows, label, length).items()} for label in order}
    others = [label for label in order[1:] if written[label] != written[best]]
    if not others:
        return f"At {length:,} tokens all are alike, {means[best]:.3f} nats per token."
    named = dict.fromkeys([*([plain] if plain in others else []), *others[:1]])
    first = f"no extension is better than {best}" if best == plain else f"{best} is best"
    behind = "".join(f"; {label} is {_difference(rows, length, best, label)}" for label in named)
    return f"At {length:,} tokens {first}, {means[best]:.3f} nats per token{behind}."


def _difference(rows: Sequence[Row], length: int, best: str, other: str) -> str:
    """By how much an extension is behind the best, in words: mean over texts, its standard error, number of texts."""
    one, two = losses(rows, best, length), losses(rows, other, length)
    behind = [two[text] - one[text] for text in sorted(shared_texts(rows, length))]
    if len(behind) < 2:
        return f"{behind[0]:.3f} behind, on one text"
    error = statistics.stdev(behind) / math.sqrt(len(behind))
    worse = sum(each > 0 for each in behind)
    return f"{statistics.fmean(behind):.3f} ± {error:.3f} behind, on {worse} of {len(behind)} texts"


def _scored(rows: Sequence[Row]) -> int:
    return next(row["sizes"]["scored"] for row in rows if row["kind"] == TEXT)


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(config: Config, rows: Sequence[Row]) -> list[Table]:
    """The loss at the end of the context, the pass key, and costs."""
    text = [row for row in rows if row["kind"] == TEXT]
    own, at = own_length(config), lengths(text)
    texts = len({row["text"] for row in text})
    over = "one text" if texts == 1 else f"mean over {texts} texts at most; {_SPREAD}"
    title = f"Loss of the last {_scored(rows):,} tokens, in nats per token ({over})"
    header = ("extension", *(_column(text, n, own, texts) for n in at))
    body = [(label, *(_shown(at_length(config, rows, label, n)) for n in at)) for label in labels(config, text)]
    found = [Table(title, header, tuple(body))]
    keys = [row for row in rows if row["kind"] == PASSKEY]
    return [*found, *([_passkeys(config, keys)] if keys else []), _costs(config, text)]


def _column(rows: Sequence[Row], length: int, own: int, texts: int) -> str:
    """A length, in tokens and as a multiple of the model's own; and its number of texts, if others have more."""
    found = len({row["text"] for row in rows if row["length"] == length})
    fewer = "" if found == texts else f", {found} of {texts} texts"
    return f"{length:,} ({length / own:.3g}x{fewer})"


_SPREAD = "± is the standard deviation over texts of the change from the model as released at its own length"


def _shown(value: Estimate | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.3f}" + ("" if value.spread is None else f" ±{value.spread:.3f}")


def _passkeys(config: Config, rows: Sequence[Row]) -> Table:
    """The share found at each length and depth."""
    columns = sorted({(row["length"], row["depth"]) for row in rows})
    header = ("pass key found in %", *(f"{length:,} at {depth:.2f}" for length, depth in columns))
    found = {(row["label"], row["length"], row["depth"]): row for row in rows if not row["error"]}

    def share(label: str, column: tuple) -> str:
        row = found.get((label, *column))
        return "-" if row is None else f"{100 * row['accuracy']:.0f}"

    cases = rows[0]["sizes"]["cases"]
    body = [(label, *(share(label, column) for column in columns)) for label in labels(config, rows)]
    title = f"Pass key by length and depth ({cases} case{'s' if cases > 1 else ''} each)"
    return Table(title, header, tuple(body))


def _costs(config: Config, rows: Sequence[Row]) -> Table:
    """Tokens a second and the memory of one pass, at the longest length of the study."""
    longest = lengths(rows)[-1]
    body = []
    for label in labels(config, rows):
        mine = [row for row in rows if (row["label"], row["length"]) == (label, longest) and not row["error"]]
        # The fastest of the texts: other load can only slow it down.
        speed = f"{max(row['tokens_per_second'] for row in mine):,.0f}" if mine else "-"
        held = [row["memory_bytes"] for row in mine if row["memory_bytes"] is not None]
        memory = f"{max(held) / 2**20:,.0f}" if held else "-"
        body.append((label, speed, memory))
    header = ("extension", f"tokens/s at {longest:,}", "MiB of parameters and activations")
    return Table("Cost of one pass", header, tuple(body))


def _notes(config: Config, rows: Sequence[Row]) -> list[str]:
    """The missing measurements with reasons, and the length for which LongRoPE's factors were searched."""
    failed = {f"{row['label']} at {row['length']:,}: {row['error']}" for row in rows if row["error"]}
    shown, asked = labels(config, rows), filter(is_to_be_searched, config.compare.schemes)
    length = config.compare.search.length or 2 * own_length(config)
    searched = f"factors and temperature are those searched for {length:,} tokens, at every length"
    return [*sorted(failed), *(f"{entry.label}: {searched}" for entry in asked if entry.label in shown)]


# --- figure -----------------------------------------------------------------------------------------------------------

_ALT = "Loss at the end of the context against its length, and loss by position, one line for each extension"
_CAPTION = (
    "Above: the mean loss of the same last {scored:,} tokens of {texts}, with ever more of the text before them. A "
    "falling line says that more context helps. Below: the mean loss in parts of the texts of the longest length, by "
    "the number of tokens before, from 16 on. The axes end 1.5 nats above the lowest value."
)
_ROOM = 1.5


def _caption(rows: Sequence[Row]) -> str:
    texts = ", ".join(sorted(common_texts(rows))) or "the texts of each length"
    return _CAPTION.format(scored=_scored(rows), texts=texts)


def draw(config: Config, rows: Sequence[Row]) -> bytes:
    """Loss against length above loss by position, as a PNG; a column for each kind of extension if there are many."""
    text = [row for row in rows if row["kind"] == TEXT]
    names = labels(config, [row for row in text if not row["error"]])
    kinds = [{"label": name, "base": None, "family": _kind(config, name)} for name in names]
    columns = groups(kinds)
    figure = style.new_figure(1.5 + 5.2 * len(columns), 9.5)
    panels = figure.subplots(2, len(columns), sharey="row", squeeze=False)
    for (above, below), group in zip(panels.T, columns, strict=True):
        looks = style.lines(kinds, group.labels, group.reference)
        _draw_lengths(above, config, text, looks)
        _draw_positions(below, config, text, looks)
        above.set_title(group.title, fontsize=11, fontweight="bold", loc="left")
    for (first, *_), label in zip(panels, (f"of the last {_scored(rows):,} tokens", "by position"), strict=True):
        first.set_ylabel(f"nats per token, {label}")
    figure.suptitle(_about(config, rows).title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return style.png(figure)


def _kind(config: Config, label: str) -> str:
    """What an extension changes first: the title of its panel."""
    (entry,) = [entry for entry in config.compare.schemes if entry.label == label]
    return next((title for slot, title in _KINDS.items() if slot in entry.extend), "others")


_KINDS = {"frequencies": "frequencies", "remap": "distances remapped", "mask": "windows"}


def _draw_lengths(panel: Any, config: Config, rows: Sequence[Row], looks: Mapping[str, style.Look]) -> None:
    """The mean loss of the last tokens against the length of the text."""
    drawn, texts = [], common_texts(rows)
    for name, look in looks.items():
        values = {n: at_length(config, rows, name, n, texts) for n in lengths(rows)}
        found = {n: value.mean for n, value in values.items() if value is not None}
        if found:
            style.plot(panel, name, look, {n: Estimate(mean) for n, mean in found.items()})
            ends.name(panel, name, look.colour, list(found), list(found.values()))
        drawn += found.values()
    style.length_axis(panel, lengths(rows), own_length(config))
    _axis(panel, drawn)
    panel.set_xlabel("context in tokens (times the model's own length, dotted)")


def _draw_positions(panel: Any, config: Config, rows: Sequence[Row], looks: Mapping[str, style.Look]) -> None:
    """The mean loss in each part of the texts of the longest length, from 16 tokens on."""
    longest, later = lengths([row for row in rows if not row["error"]])[-1], []
    texts = shared_texts(rows, longest)
    for name, look in looks.items():
        if at_length(config, rows, name, longest) is None:
            continue
        mine = [row for row in rows if (row["label"], row["length"]) == (name, longest) and row["text"] in texts]
        before = mine[0]["position_ends"]
        means = [statistics.fmean(row["position_nll"][n] for row in mine) for n in range(len(before))]
        points = [(end, mean) for end, mean in zip(before, means, strict=True) if end >= 16]
        if not points:
            continue
        (line,) = panel.plot(*zip(*points, strict=True), color=look.colour, linewidth=1.6)
        line.set_dashes(look.dashes or (None, None))
        ends.name(panel, name, look.colour, *zip(*points, strict=True))
        later += [mean for end, mean in points if end >= 64]
    _axis(panel, later)
    panel.set_xscale("log", base=2)
    panel.axvline(own_length(config), color="#555555", linestyle=":", linewidth=1.3)
    panel.set_xlabel(f"tokens before, in a text of {longest:,}")


def _axis(panel: Any, values: Sequence[float]) -> None:
    low = min(values, default=0.0)
    panel.set_ylim(low - 0.05, min(max(values, default=1.0) + 0.05, low + _ROOM))
    panel.grid(True, color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
