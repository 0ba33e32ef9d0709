"""Tied models, whose files may hold the embedding, the head or both, under any of their names."""

import chex
import jax
import numpy as np
import pytest
from nn.huggingface import released
from nn.huggingface.released import rewritten
from refusals import refused

from posjax.nn import from_pretrained
from posjax.nn.huggingface import FAMILIES, read_config
from posjax.nn.huggingface.files import TensorFolder


def renamed(tensors, old, new):
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


EMBEDDINGS = {
    "llama": "model.embed_tokens.weight",
    "bloom": "transformer.word_embeddings.weight",
    "gpt_neox": "gpt_neox.embed_in.weight",
}


@pytest.mark.parametrize("name", ["llama", "gpt_neox", pytest.param("bloom", marks=pytest.mark.wide)])
def test_a_tied_model_needs_only_one_of_embedding_and_head(name, tmp_path):
    heads = ["lm_head.weight", "embed_out.weight"] if name == "gpt_neox" else ["lm_head.weight"]
    model = released.random_decoder(released.CASES[name], tie_word_embeddings=True)
    for head in heads:
        folder = rewritten(model, tmp_path / head, lambda tensors, head=head: renamed(tensors, EMBEDDINGS[name], head))
        assert TensorFolder(folder).entries.keys() & {EMBEDDINGS[name], *heads} == {head}
        chex.assert_trees_all_equal(*map(released.parameters, (from_pretrained(folder), model)))


@pytest.mark.parametrize(("name", "head"), [("llama", "lm_head.weight"), ("gpt_neox", "embed_out.weight")])
@pytest.mark.parametrize("missing", ["embedding", "head"])
def test_an_untied_model_needs_both(name, head, missing, tmp_path):
    lost = head if missing == "head" else EMBEDDINGS[name]
    model = released.random_decoder(released.CASES[name], tie_word_embeddings=False)
    folder = rewritten(model, tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    refused(lost, lambda: from_pretrained(folder))


@pytest.mark.parametrize("name", ["llama-yarn", "mpt", "falcon"])
def test_a_tied_head_may_be_stored_all_the_same(name, tmp_path):
    values = released.CASES[name] | {"tie_word_embeddings": True}
    views = FAMILIES[values["model_type"]].tensors(read_config(values))
    head, embedding = views["head"].name, views["embed"].name
    model = released.random_decoder(values)
    folder = rewritten(model, tmp_path, lambda tensors: tensors | {head: tensors[embedding]})
    assert head in TensorFolder(folder).entries
    found = from_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, *(released.parameters(each) for each in (found, model)))


@pytest.mark.parametrize("row", [0, -1])
def test_a_head_that_differs_from_its_tied_embedding_is_refused(row, tmp_path):
    """Also in one number, of the first or of the last row of a large vocabulary."""
    model = released.random_decoder(released.CASES["llama-yarn"], vocab_size=5000, hidden_size=8)

    def change(tensors):
        head = tensors["model.embed_tokens.weight"].copy()
        head[row, 3] += 1
        return tensors | {"lm_head.weight": head}

    refused("lm_head.weight", lambda: from_pretrained(rewritten(model, tmp_path, change)))
