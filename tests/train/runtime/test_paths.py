"""Paths in an object store, read through gcsfs."""

import fsspec
import pytest
from object_store import of_the_store, serving

from train.runtime.paths import look_anew, names_in, path


@pytest.fixture
def store(monkeypatch):
    """A local server in place of Google's store."""
    system = pytest.importorskip("gcsfs").GCSFileSystem
    with serving() as (store, address):
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        system.clear_instance_cache()
        yield store
        system.clear_instance_cache()


def test_what_others_write_into_an_object_store_is_seen(store):
    """gcsfs caches listings, so it misses what TensorStore and other processes write."""
    store.put("bucket", "run/first", b"")
    folder = path("gs://bucket/run")
    assert names_in(folder) == ["first"]
    store.put("bucket", "run/second", b"")
    assert not (folder / "second").exists()
    look_anew(folder)
    assert (folder / "second").exists()
    store.put("bucket", "run/third", b"")
    assert names_in(folder) == ["first", "second", "third"]
    assert names_in(path("gs://bucket/none")) == []
    assert isinstance(folder.fs, fsspec.get_filesystem_class("gs"))
