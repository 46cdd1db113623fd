# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints are kept: whole or not at all, whoever writes at the same time, and never believed unseen."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import sys
import threading

import pytest

from agentsandbox.client.checkpoints import CheckpointStore, Manifest, as_store
from agentsandbox.errors import CheckpointError, ConfigurationError

from .trees import entry

pytestmark = pytest.mark.anyio

DATA = b"contents\n" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


def file(content=DATA, mode=0o644, **more):
    return entry("f", stat.S_IFREG | mode, content, **more)


def directory(**more):
    return entry("d", stat.S_IFDIR | 0o755, **more)


ENTRIES = {"/w": directory(modified=7), "/w/a": file(), "/w/caf\udce9": entry("l", stat.S_IFLNK | 0o777, b"\xe9")}
MANIFEST = Manifest.of(["/w"], ENTRIES)


@pytest.fixture(params=["directory", "URL"])
def store(request, tmp_path):
    """A store of each kind."""
    if request.param == "directory":
        return CheckpointStore(tmp_path / "store")
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    return CheckpointStore("memory://store/checkpoints")


def names(place):
    """All files of a directory."""
    return sorted(os.path.relpath(os.path.join(top, one), place) for top, _, ones in os.walk(place) for one in ones)


async def test_what_was_saved_is_loaded_again(store):
    """By an id that is the SHA-256 of its canonical form, names that are no text included."""
    assert store.store(DIGEST, len(DATA), io.BytesIO(DATA)) is True
    id = await store.save(MANIFEST)
    taken = []

    assert id == MANIFEST.id == hashlib.sha256(MANIFEST.dump()).hexdigest()
    assert MANIFEST == await store.load(id)
    assert set() == await store.missing({DIGEST: len(DATA)})
    await store.check({DIGEST: (len(DATA), "/w/a")})
    store.read(DIGEST, len(DATA), "/w/a", taken.append)
    assert DATA == b"".join(taken)


async def test_what_is_not_there_is_missing(store):
    """By contents and by size."""
    assert {DIGEST} == await store.missing({DIGEST: len(DATA)})


async def test_a_checkpoint_that_does_not_exist_is_refused_by_name(store):
    """The error says which, and where it was looked for."""
    id = "0" * 64
    with pytest.raises(CheckpointError, match=f"^there is no checkpoint {id} in "):
        await store.load(id)


@pytest.mark.parametrize("id", ["", "abc", "../../etc/passwd", "G" * 64, "A" * 64, None, 7], ids=repr)
async def test_what_is_no_id_is_refused(store, id):
    """Nothing is looked for."""
    with pytest.raises(CheckpointError, match="is no id of a checkpoint: 64 hexadecimal digits are one"):
        await store.load(id)


async def test_contents_that_are_missing_are_named(store):
    """With the path that they are for."""
    with pytest.raises(CheckpointError, match=f"^the contents {DIGEST} of '/w/a' are missing in "):
        await store.check({DIGEST: (len(DATA), "/w/a")})


async def test_what_arrives_and_is_not_what_it_is_called_is_not_stored(store):
    """Other bytes, or too few."""
    assert store.store(DIGEST, len(DATA), io.BytesIO(DATA.upper())) is False
    assert store.store(DIGEST, len(DATA), io.BytesIO(DATA[:-1])) is False
    assert {DIGEST} == await store.missing({DIGEST: len(DATA)})


@pytest.mark.parametrize(
    "damage", [b"x" + DATA[1:], DATA[:-1], DATA + b"x", b""], ids=["other", "short", "long", "empty"]
)
async def test_contents_that_are_damaged_are_named(tmp_path, damage):
    """They are read before anything is done with them."""
    store = CheckpointStore(tmp_path)
    store.store(DIGEST, len(DATA), io.BytesIO(DATA))
    (tmp_path / f"contents/{DIGEST[:2]}/{DIGEST}").write_bytes(damage)
    with pytest.raises(CheckpointError, match=f"^the contents {DIGEST} of '/w/a' are damaged in "):
        await store.check({DIGEST: (len(DATA), "/w/a")})


async def test_contents_of_a_wrong_size_are_written_again(tmp_path):
    """What a crash cut short does not stay so for ever."""
    CheckpointStore(tmp_path).store(DIGEST, len(DATA), io.BytesIO(DATA))
    (tmp_path / f"contents/{DIGEST[:2]}/{DIGEST}").write_bytes(b"")

    assert {DIGEST} == await CheckpointStore(tmp_path).missing({DIGEST: len(DATA)})


async def test_a_manifest_that_is_damaged_is_refused(tmp_path):
    """One byte is enough."""
    store = CheckpointStore(tmp_path)
    id = await store.save(MANIFEST)
    path = tmp_path / f"checkpoints/{id[:2]}/{id}.json"
    path.write_bytes(path.read_bytes().replace(b"/w/a", b"/w/b"))
    with pytest.raises(CheckpointError, match=f"^checkpoint {id} is damaged in "):
        await store.load(id)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "is no manifest"),
        (b"[]", "is no manifest"),
        (b"nonsense", "is no manifest"),
        (b'{"version":2}', "is of version 2, and not of 1$"),
        (b'{"version":1,"scope":["/w"],"entries":{}}', "a directory of the scope is not there"),
        (
            b'{"version":1,"scope":["/w"],"entries":{"/w":["d",16877,0,0,0,0,[]],"/etc/x":["d",16877,0,0,0,0,[]]}}',
            "'/etc/x' is in no directory of the scope",
        ),
        (
            b'{"version":1,"scope":["/w"],"entries":{"/w":["d",16877,0,0,0,0,[]],"/w/../x":["d",16877,0,0,0,0,[]]}}',
            "leads elsewhere",
        ),
        (b'{"version":1,"scope":["/w"],"entries":{"/w":["f",16877,0,0,0,0,[]]}}', "kind 'f' with mode 40755"),
        (b'{"version":1,"scope":["/w"],"entries":{"/w":["d","x",0,0,0,0,[]]}}', "a property that is no number"),
    ],
    ids=["empty", "list", "no JSON", "later", "no root", "outside", "above", "kind", "mode"],
)
async def test_a_manifest_that_makes_no_sense_is_refused_although_its_hash_is_right(tmp_path, text, message):
    """Whoever wrote it."""
    id = hashlib.sha256(text).hexdigest()
    path = tmp_path / f"checkpoints/{id[:2]}/{id}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        await CheckpointStore(tmp_path).load(id)


async def test_writers_of_the_same_contents_do_not_disturb_each_other(tmp_path):
    """All of them at once, and every reader sees all of it or nothing."""
    barrier, results = threading.Barrier(8), []

    def write():
        store = CheckpointStore(tmp_path)
        barrier.wait()
        results.append(store.store(DIGEST, len(DATA), io.BytesIO(DATA)))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [True] * 8 == results
    assert [f"contents/{DIGEST[:2]}/{DIGEST}"] == names(tmp_path)


class Full(io.BytesIO):
    """A disk that is full after the first bytes."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    """Neither half a file nor one under another name."""
    store = CheckpointStore(tmp_path)

    def full(descriptor, mode):
        os.close(descriptor)
        return Full()

    monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(CheckpointError, match=r" cannot be written to: No space left on device$"):
        store.store(DIGEST, len(DATA), io.BytesIO(DATA))
    monkeypatch.undo()

    assert [] == names(tmp_path)
    assert {DIGEST} == await store.missing({DIGEST: len(DATA)})


async def test_a_place_that_cannot_be_written_to_is_a_clear_error(tmp_path):
    """A file is in the way."""
    (tmp_path / "store").write_text("")
    with pytest.raises(CheckpointError, match=r"store cannot be written to: Not a directory$"):
        await CheckpointStore(tmp_path / "store").save(MANIFEST)


async def test_nothing_half_written_stays_in_a_store_behind_a_url(monkeypatch):
    """A file system that fails in the middle of it."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    store = CheckpointStore("memory://store")

    def fail(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(memory), "mv", fail)
    with pytest.raises(CheckpointError, match="cannot be written to: No space left on device"):
        store.store(DIGEST, len(DATA), io.BytesIO(DATA))

    assert {} == memory.store


async def test_a_url_of_a_directory_is_that_directory(tmp_path):
    """Written in one step, as there."""
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    await CheckpointStore(f"file://{tmp_path}").save(MANIFEST)

    assert MANIFEST == await CheckpointStore(tmp_path).load(MANIFEST.id)


def test_a_url_without_fsspec_names_the_extra(monkeypatch):
    """And a directory needs none."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ConfigurationError, match=r"pip install 'agentsandbox\[checkpoints\]'; a directory needs nothing"
    ):
        CheckpointStore("s3://bucket/prefix")


def test_a_url_of_an_unknown_kind_is_refused():
    """In fsspec's words."""
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(ConfigurationError, match="there is no file system for 'nonsense://x'"):
        CheckpointStore("nonsense://x")


def test_a_store_is_named_or_refused(tmp_path):
    """A store, a directory, a URL; never nothing."""
    store = CheckpointStore(tmp_path)

    assert store is as_store(store)
    assert f"<CheckpointStore {str(tmp_path)!r}>" == repr(as_store(str(tmp_path)))
    with pytest.raises(ConfigurationError, match="where are checkpoints kept"):
        as_store(None)
    with pytest.raises(ConfigurationError, match="this one is empty"):
        as_store("")
    with pytest.raises(ConfigurationError, match="is a directory, which takes no options"):
        CheckpointStore(tmp_path, key="x")


def test_an_id_is_of_the_contents_and_not_of_what_is_by_chance():
    """Order, names outside of the scope, sockets, and when the scope's own directories were written to do not count."""
    linked = {"/w": directory(), "/w/a": file(group="/w/a", links=3), "/w/b": file(group="/w/a", links=3)}
    renamed = {"/w/b": file(group="/w/b", links=2), "/w/a": file(group="/w/b", links=2), "/w": directory(modified=9)}
    alone = {"/w": directory(), "/w/a": file(group="/w/a", links=2), "/w/s": entry("o", stat.S_IFSOCK | 0o755)}
    plain = {"/w": directory(), "/w/a": file()}

    assert Manifest.of(["/w"], linked).id == Manifest.of(["/w"], renamed).id
    assert Manifest.of(["/w"], alone).id == Manifest.of(["/w"], plain).id
    assert ("/w/s",) == Manifest.of(["/w"], alone).skipped
    assert Manifest.of(["/w"], plain).id != Manifest.of(["/w"], linked).id


@pytest.mark.parametrize(
    "other",
    [
        file(DATA + b"x"),
        file(mode=0o755),
        file(uid=1),
        file(gid=1),
        file(modified=1),
        file(flags=16),
        file(attributes=(("user.a", "00"),)),
        entry("l", stat.S_IFLNK | 0o777, b"a"),
    ],
    ids=["contents", "mode", "owner", "group", "time", "flags", "attributes", "type"],
)
def test_whatever_is_restored_counts_for_the_id(other):
    """One property is enough for another id."""
    assert MANIFEST.id != Manifest.of(["/w"], {**ENTRIES, "/w/a": other}).id


def test_a_manifest_counts_its_files():
    """Bytes of regular files."""
    assert len(DATA) == MANIFEST.size
    assert ["/w/a"] == [path for path, _ in MANIFEST.files]
