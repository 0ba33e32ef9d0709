"""The data section of a config: a bad value gives an error of one line; the documents and splits of a mixture."""

import hashlib

import pytest
from documents import split

from train.config import differences, dump, parse, parse_text
from train.data.pipeline import training_rows
from train.data.sources import all_documents


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "files"}, r"data.paths is empty: name the files to read \(.txt, .jsonl, .parquet, ...\)"),
        ({"paths": ["a.txt"]}, r"data.paths is read only with data.source=files, found source 'stdlib'"),
        ({"mixture": [{"paths": "a.txt"}]}, r"data.mixture is read only with data.source=files"),
        (
            {"source": "files", "paths": "a.txt", "mixture": [{"paths": "b.txt"}]},
            r"data.paths and data.mixture are two",
        ),
        ({"source": "files", "mixture": [{"weight": 2.0}]}, r"data.mixture\[0\].paths is empty"),
        ({"source": "files", "mixture": [{"paths": "a"}, {"paths": "b", "weight": 0}]}, r"mixture\[1\].weight must be"),
        (
            {"source": "files", "mixture": [{"paths": "a", "weights": 1}]},
            r"data.mixture\[0\].* 'weights'; did you mean",
        ),
        ({"source": "files", "mixture": {"paths": "a"}}, r"data.mixture: expected a list"),
        ({"tokenizer": "gpt2"}, r"data.tokenizer must be 'bytes', a tokenizer.json .* found 'gpt2'"),
        ({"packing": "bestfit"}, r"data.packing: unknown value 'bestfit'; did you mean 'best-fit'"),
        ({"cache": 3}, r"data.cache: expected text, found 3"),
        ({"held_out": 1.0}, r"data.held_out must be at least 0 and below 1"),
    ],
)
def test_bad_values_are_one_line(data, message):
    with pytest.raises(ValueError, match=message) as error:
        parse({"data": data})
    assert "\n" not in str(error.value)


@pytest.fixture
def folder(tmp_path):
    for name, count in (("a", 8), ("b", 3), ("lone", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 5)
    return tmp_path


def mixture(folder, *names, held_out=0.05):
    parts = [{"paths": [f"{folder}/{name}/*.txt"], "weight": 1.0 + index} for index, name in enumerate(names)]
    return {"data": {"source": "files", "mixture": parts, "held_out": held_out}, "train": {"length": 8}}


def test_a_mixture_survives_the_config_file(folder):
    config = parse(mixture(folder, "a", "b"))
    assert parse_text(dump(config), "config.yaml") == config
    assert differences(config, parse(mixture(folder, "b", "a")))


@pytest.mark.parametrize("share", [1e-9, 0.3, 0.999999])
def test_every_part_is_trained_on_and_some_are_held_out(folder, share):
    config = parse(mixture(folder, "lone", "a", "b", held_out=share)).data
    texts = split(config)
    train, held_out = ([text.split()[0] for text in side] for side in texts)
    assert set(train) == {b"lone", b"a", b"b"}
    assert len(train) + len(held_out) == 12
    assert held_out.count(b"lone") == 0
    if share < 1e-3:
        names = [f"{number}.txt" for number in range(8)]  # b has the first three of these too
        lowest = min(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        assert f"{texts[1][0].split()[1].decode()}.txt" == lowest
    if share > 0.99:
        assert len(train) == 3


def test_a_split_does_not_depend_on_the_other_parts(folder):
    alone = parse(mixture(folder, "a", held_out=0.4)).data
    mixed = parse(mixture(folder, "a", "b", held_out=0.4)).data
    assert [text for text in split(mixed)[1] if text.startswith(b"a")] == split(alone)[1]


def test_parts_with_nothing_to_hold_out_or_in_common(folder):
    with pytest.raises(ValueError, match="the text is a single document, so none can be held out"):
        training_rows(parse(mixture(folder, "lone")))
    with pytest.raises(ValueError, match=r"data.mixture: .*/0.txt is in part 0 and in part 1"):
        training_rows(parse(mixture(folder, "lone", "*")))
    for number in range(3):
        (folder / "b" / f"{number}.txt").write_text("")
    with pytest.raises(ValueError, match=r"no text in .*/b/0.txt and 2 more files; every document is empty"):
        training_rows(parse(mixture(folder, "a", "b")))


def test_text_keys_of_parts_differ(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": "one"}')
    (tmp_path / "b.jsonl").write_text('{"y": "two"}')
    parts = [{"paths": f"{tmp_path}/{name}.jsonl", "text_key": key} for name, key in (("a", "x"), ("b", "y"))]
    config = parse({"data": {"source": "files", "mixture": parts, "held_out": 0.0}}).data
    assert [text for _, text in all_documents(config)] == [b"one", b"two"]
