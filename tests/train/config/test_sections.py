"""The help about a config's sections, which comes from the sections themselves."""

import dataclasses

from train.config import Config, to_dict
from train.config.sections import about_sections, keys_beside_sections


def test_every_key_is_named_once():
    named = [*about_sections(), *keys_beside_sections()]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(Config))
    whole = to_dict(Config())
    assert not any(isinstance(whole[name], dict) for name in keys_beside_sections())


def test_every_section_is_described_in_one_sentence_of_plain_text():
    about = about_sections()
    assert about["data"] == "Which text to read, and how it becomes rows of tokens."
    assert about["stages"].startswith("What a stage changes")
    for line in about.values():
        assert line.endswith(".")
        assert "`" not in line
        assert len(line) <= 110
