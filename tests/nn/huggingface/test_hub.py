"""Models by their names, from a local server that answers as the Hugging Face hub does."""

import json
import shutil
import sys

import hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.huggingface import released
from refusals import refused

from posjax.nn import from_pretrained, save_pretrained

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.constants")
NAME = "people/tiny"
VALUES = released.LLAMA | {"model_type": "llama"}
TOKENS = jnp.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models, the second one in several files, with files of other formats beside them."""
    folders = [tmp_path_factory.mktemp("models") / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        decoder = released.random_decoder(VALUES, num_hidden_layers=1 + seed)
        save_pretrained(decoder, folder, max_file_bytes=10**9 if seed == 0 else 40_000)
        (folder / "tokenizer.json").write_text("{}")
        for other in ("pytorch_model.bin", "model.onnx", "consolidated.safetensors", "original/model.safetensors"):
            (folder / other).parent.mkdir(exist_ok=True)
            (folder / other).write_bytes(b"not to be read")
    return folders


@pytest.fixture
def served(models, monkeypatch, tmp_path):
    """A hub with the first model, from which this process downloads into an empty cache."""
    with hub.running() as server:
        server.add(NAME, models[0])
        for name, value in {"ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + hub.TEMPLATE)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield server


def assert_same(found, folder):
    """Both models have the same parameters, bit for bit."""
    one, other = (jax.tree.leaves(released.parameters(model)) for model in (found, from_pretrained(folder)))
    assert len(one) == len(other)
    for each, wanted in zip(one, other, strict=True):
        np.testing.assert_array_equal(each, wanted)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_name_is_the_folder_at_the_hub(served, models):
    found = from_pretrained(NAME)
    np.testing.assert_array_equal(found(TOKENS), from_pretrained(models[0])(TOKENS))
    assert served.downloaded() == {"config.json", "tokenizer.json", "model.safetensors"}


def test_only_the_files_of_the_index_are_downloaded(served, models):
    served.add("people/parts", models[1])
    assert_same(from_pretrained("people/parts"), models[1])
    index = "model.safetensors.index.json"
    parts = set(json.loads((models[1] / index).read_text())["weight_map"].values())
    assert len(parts) > 1
    assert served.downloaded() == {"config.json", "tokenizer.json", index, *parts}


@pytest.mark.filterwarnings("ignore:.*only the text part")
def test_files_of_other_parts_than_text_are_not_downloaded(served, models, tmp_path):
    folder = shutil.copytree(models[1], tmp_path / "seeing")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"vision_tower.norm.weight": "vision.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "vision.safetensors").write_bytes(b"not to be read")
    (folder / "preprocessor_config.json").write_text("{}")
    text = VALUES | {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    served.add("people/seeing", folder)
    assert_same(from_pretrained("people/seeing"), models[1])
    assert served.downloaded().isdisjoint({"vision.safetensors", "preprocessor_config.json"})


def test_a_revision_is_a_branch_or_a_commit(served, models):
    first = served.refs[NAME, "main"]
    served.add(NAME, models[1], branch="long")
    assert_same(from_pretrained(f"{NAME}@long"), models[1])
    served.add(NAME, models[1])
    assert_same(from_pretrained(NAME), models[1])
    assert_same(from_pretrained(f"{NAME}@{first}"), models[0])


def test_a_commit_that_is_cached_needs_no_server(served, models):
    name = f"{NAME}@{served.refs[NAME, 'main']}"
    from_pretrained(name)
    asked = len(served.asked)
    assert_same(from_pretrained(name), models[0])
    assert len(served.asked) == asked


def test_a_local_folder_of_that_name_comes_first(served, models):
    save_pretrained(from_pretrained(models[1]), NAME)
    assert_same(from_pretrained(NAME), models[1])
    assert not served.asked


def test_the_tokenizer_of_a_name_is_copied(served, tmp_path):
    save_pretrained(from_pretrained(NAME), tmp_path / "copy", like=NAME)
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "{}"


def test_offline_the_cache_is_enough(served, models, monkeypatch):
    """Also when another program filled it, which does not note the files that a model does not have."""
    for file in ("config.json", "model.safetensors"):
        huggingface_hub.hf_hub_download(NAME, file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(served.asked)
    assert_same(from_pretrained(NAME), models[0])
    assert len(served.asked) == asked


def test_a_gated_model_is_read_with_a_token(served, models, monkeypatch):
    served.gated.add(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    assert_same(from_pretrained(NAME), models[0])


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_the_same_model_by_the_name(served, quiet_transformers):
    from nn.huggingface import theirs

    model = theirs.transformers.AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="eager").eval()
    theirs.assert_close(from_pretrained(NAME)(TOKENS), theirs.logits(model, np.asarray(TOKENS)))


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_models_that_are_not_there(served, tmp_path):
    refused("people/other", lambda: from_pretrained("people/other"), FileNotFoundError)
    refused(f"{NAME}@lost", lambda: from_pretrained(f"{NAME}@lost"), FileNotFoundError)
    folder = tmp_path / "pickle"
    folder.mkdir()
    served.add("people/empty", folder)
    refused("people/empty", lambda: from_pretrained("people/empty"), FileNotFoundError)
    released.write_config(folder, VALUES)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    refused("people/empty", lambda: from_pretrained("people/empty"), FileNotFoundError)


def test_a_gated_model_without_a_token_is_refused(served):
    served.gated.add(NAME)
    refused(NAME, lambda: from_pretrained(NAME), PermissionError)


def test_without_network_or_offline_a_model_that_is_not_cached_is_refused(served, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(NAME, lambda: from_pretrained(NAME), FileNotFoundError)
    assert not served.asked
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    nobody = "http://127.0.0.1:1"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", nobody + hub.TEMPLATE)
    refused(NAME, lambda: from_pretrained(NAME), OSError)


def test_without_the_package_the_extra_is_named(served, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(NAME, lambda: from_pretrained(NAME), ModuleNotFoundError)
    refused("hf", lambda: from_pretrained(NAME), ModuleNotFoundError)
