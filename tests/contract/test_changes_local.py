# SPDX-License-Identifier: Apache-2.0
"""What an episode changed, keeping it, and going on with it in another sandbox, on the local backend."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import warnings
from contextlib import asynccontextmanager

import anyio
import anyio.from_thread
import pytest

from agentsandbox import (
    BlockingPool,
    CheckpointError,
    CheckpointStore,
    ConfigurationError,
    Episode,
    ResetPolicy,
    SandboxClient,
    SandboxLost,
    SandboxPool,
    Status,
    UsageError,
)
from agentsandbox.backends.local import LocalBackend
from agentsandbox.backends.local.backend import Unconfined
from agentsandbox.errors import ContentTooLarge
from agentsandbox.models.command import Command

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SETUP = """
mkdir -p src/deep closed gone/with/it dir2file links && printf 'one\\ntwo\\nthree\\n' > src/a.py
printf 'no newline' > src/b.txt; printf 'bin\\0ary' > data.bin; : > empty; echo old > file2dir; echo x > file2link
ln -s src/a.py link; echo run > tool; chmod 755 tool; echo bye > gone/with/it/f; echo y > dir2file/y
echo h > links/one
ln links/one links/two; echo q > "$(printf 'caf\\351')"; echo ' s' > 'with space'; echo same > same
mkdir -p .git; echo i > .git/index
"""

EPISODE = """
printf 'one\\n2\\nthree\\nfour' > src/a.py; printf 'no newline\\n' > src/b.txt
printf 'b\\0in' > data.bin; echo full > empty
rm file2dir; mkdir file2dir; echo in > file2dir/x; rm file2link; ln -s nowhere file2link; ln -sf src/b.txt link
chmod 644 tool; rm -r gone; rm -r dir2file; echo f > dir2file
echo n > "$(printf 'caf\\351')"; echo new > "$(printf 'n\\nl')"
: > empty2; touch same; echo changed > .git/index; echo t > /tmp/t; mkfifo pipe; mkdir emptydir; chmod 700 src/deep
"""

PATCHED = [".git", "emptydir", "pipe"]
"""What no patch can say, and is therefore left out of the comparison with what git made."""


class Hydrated(LocalBackend):
    """Sandboxes in which a tree was made before anybody may use them."""

    async def create(self, spec, name):
        sandbox = await super().create(spec, name)
        result = await sandbox.session.exec(Command(command=SETUP))
        assert result.exit_code == 0, result.stderr
        return sandbox


WAYS = {"jail": {"baseline": True}, "files": {"reset": ResetPolicy(rungs=("files", "replace"))}}


@asynccontextmanager
async def leased(backend=None, count=1, **options):
    """Leases of fresh sandboxes."""
    options.setdefault("images", {"host": count})
    async with SandboxClient(backend or LocalBackend(), spares=0, **options) as client:
        leases = [await client.acquire("host") for _ in range(count)]
        yield leases[0] if count == 1 else leases
        for lease in leases:
            await lease.release()


async def tree(lease):
    """The working directory as a tar archive."""
    return (await lease.exec(["tar", "-cf", "-", "."], check=True)).stdout


def unpacked(archive, top):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(top, filter="fully_trusted")
    return top


def listing(top):
    """Names, types, permissions as far as git knows them, targets and contents."""
    found = {}
    for place, directories, files in os.walk(os.fsencode(top)):
        for name in files + [d for d in directories if os.path.islink(os.path.join(place, d))]:
            path = os.path.join(place, name)
            key = os.path.relpath(path, os.fsencode(top))
            if key.split(b"/")[0].decode("utf-8", "replace") in PATCHED:
                continue
            if os.path.islink(path):
                found[key] = os.readlink(path)
            else:
                with open(path, "rb") as file:
                    found[key] = (os.stat(path).st_mode & 0o777, file.read())
    return found


LOOK = """
cd / && for d in workspace home/sandbox tmp var/tmp; do
find $d -mindepth 1 -printf '%p %y %m %U %G %n %l %T@\\n' | sort; find $d -type f -exec sha256sum {} + | sort -k2; done
find tmp -maxdepth 0 -printf '%m %U %G\\n'
"""


async def look(lease):
    """Everything that a checkpoint holds."""
    return (await lease.exec(LOOK, check=True)).text


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("way", WAYS)
async def test_git_makes_of_the_sandbox_as_it_was_what_it_is(tmp_path, way):
    """The patch of a diff, applied to a copy of the tree before the episode, gives the tree after it, byte for byte."""
    async with leased(Hydrated(), **WAYS[way]) as lease:
        before = unpacked(await tree(lease), tmp_path / "before")
        await lease.exec(EPISODE, check=True)
        diff = await lease.diff()
        after = unpacked(await tree(lease), tmp_path / "after")

    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    done = await anyio.run_process(command, input=diff.patch, cwd=before, check=False, env=env)

    assert (0, b"") == (done.returncode, done.stderr)
    assert listing(after) == listing(before)
    assert "/workspace" == diff.root
    assert {
        "/tmp/t",
        "/workspace/.git/index",
        "/workspace/emptydir",
        "/workspace/pipe",
        "/workspace/src/deep",
    } == {change.path for change in diff.unpatched}
    kinds = {change.path.removeprefix("/workspace/"): str(change.kind) for change in diff.changes}
    assert ("modified", "deleted", "added") == (kinds["tool"], kinds["gone/with/it/f"], kinds["n\nl"])
    assert "modified" == kinds["caf\udce9"]
    assert "same" not in kinds, "when it was written to last is no change"


async def test_a_sandbox_that_nothing_was_changed_in_has_no_diff():
    """Also in the second episode of the same sandbox, and with a process at work."""
    async with leased(Hydrated(), reset=ResetPolicy(rungs=("files", "replace"))) as lease:
        await lease.exec(EPISODE + "setsid sleep 60 &", check=True)
        assert await lease.diff()
        report = await lease.reset()
        await lease.exec("setsid sleep 60 & cat src/a.py; touch same", check=True)
        diff = await lease.diff()

    assert ("files", True) == (report.rung, report.verified)
    assert (b"", ()) == (diff.patch, diff.changes)


async def test_hard_links_and_owners_are_in_the_list():
    """What a patch cannot say is told all the same."""
    async with leased(Hydrated(), baseline=True) as lease:
        await lease.exec("rm links/two; cp links/one links/two; ln src/b.txt links/three", check=True)
        await lease.exec(["chown", "1:2", "/workspace/same"], user="root", check=True)
        found = {change.path.removeprefix("/workspace/"): change for change in (await lease.diff()).changes}

    assert {"links/one", "links/two", "links/three", "src/b.txt", "same"} == set(found)
    assert ("/workspace/src/b.txt",) == found["links/three"].links
    assert ((1000, 1000), (1, 2)) == (found["same"].old_owner, found["same"].owner)
    assert not any(change.patched for change in found.values())


async def test_a_diff_without_a_baseline_is_an_error_and_never_empty():
    """On the local backend none is taken unless it is asked for."""
    async with leased() as lease:
        with pytest.raises(UsageError, match=r"no baseline to compare with; SandboxPool\(..., baseline=True\) has one"):
            await lease.diff()
        assert (await lease.exec("echo alive")).text == "alive\n"


async def test_a_diff_is_about_the_directory_that_is_asked_for():
    """Its patch is relative to that; the list is about everything."""
    async with leased(baseline=True) as lease:
        await lease.exec("echo a > a; echo b > ~/b; echo c > /tmp/c", check=True)
        home = await lease.diff(root="/home/sandbox/")
        everything = await lease.diff(root="/")
        with pytest.raises(ConfigurationError, match="root is an absolute path"):
            await lease.diff(root="a")

    assert b"+++ b/b\n" in home.patch
    assert 1 == home.patch.count(b"diff --git")
    assert ["/home/sandbox/b", "/tmp/c", "/workspace/a"] == [change.path for change in home.changes]
    assert b"+++ b/workspace/a\n" in everything.patch
    assert 3 == everything.patch.count(b"diff --git")


async def test_what_is_too_large_for_a_diff_is_named():
    """A huge file, many small ones, and a file of which the baseline has no copy; the sandbox is still good."""
    async with leased(baseline=True) as lease:
        await lease.exec("truncate -s 200M huge; echo x > small", check=True)
        with pytest.raises(ContentTooLarge, match=r"^'/workspace/huge' with 209715200 bytes: all changes together"):
            await lease.diff()
        await lease.exec("rm huge; seq 1 100 | while read n; do echo $n > f$n; done", check=True)
        with pytest.raises(ContentTooLarge, match="are over the limit") as raised:
            await lease.diff(limit=5000)
        assert raised.value.path.startswith("/workspace/f")
        assert 101 == len((await lease.diff()).changes)
        with pytest.raises(ConfigurationError, match="limit must be a whole number of at least 1, not 0"):
            await lease.diff(limit=0)
    async with leased(Hydrated(), reset=ResetPolicy(copies_limit=4), baseline=True) as lease:
        await lease.exec("echo more >> src/a.py", check=True)
        with pytest.raises(
            ContentTooLarge, match=r"^'/workspace/src/a.py' with 14 bytes: the baseline has no copy of it$"
        ):
            await lease.diff()


async def test_another_sandbox_goes_on_where_a_checkpoint_was_made(tmp_path):
    """Names, types, modes, owners, links, times and contents are the same; what was there is gone, processes too."""
    async with leased(Hydrated(), 2) as (first, second):
        await first.exec(EPISODE + "chmod 000 tool; ln links/one /tmp/three; truncate -s 3M holes", check=True)
        await first.exec(["chown", "5:6", "/workspace/same"], user="root", check=True)
        await first.exec("python3 -c \"import os; os.setxattr('empty', 'user.note', b'kept')\"", check=True)
        made = await first.checkpoint(tmp_path)
        expected = await look(first)
        await second.exec(
            "setsid sleep 60 & mkdir -p src/a.py.d same.d; rm src/a.py; echo junk > /tmp/junk", check=True
        )
        done = await second.restore(made, tmp_path)

        assert expected == await look(second)
        assert "kept" in (await second.exec("python3 -c \"import os; print(os.getxattr('empty', 'user.note'))\"")).text
        assert "" == (await second.exec("pgrep sleep")).text
        assert made.id == done.id == second.restored == (await second.checkpoint(tmp_path)).id
        assert (first.checkpoints, first.restored) == ((made.id,), None)
        assert ("/home/sandbox", "/tmp", "/var/tmp", "/workspace") == made.scope


async def test_equal_contents_have_one_id_and_are_kept_once(tmp_path):
    """Nothing is moved that the store has; whatever changes is another checkpoint."""
    async with leased() as lease:
        await lease.exec(
            "seq 1 20000 > numbers; cp -p numbers copy; python3 -c \"import socket as s; s.socket(1).bind('sock')\"",
            check=True,
        )
        first = await lease.checkpoint(tmp_path)
        again = await lease.checkpoint(tmp_path)
        await lease.exec("echo more >> copy", check=True)
        other = await lease.checkpoint(tmp_path)

    size = len("".join(f"{n}\n" for n in range(1, 20001)))
    assert (2 * size, size, ("/workspace/sock",)) == (first.size, first.stored, first.skipped)
    assert (first.id, 0) == (again.id, again.stored)
    assert first.id != other.id
    assert size + 5 == other.stored
    assert 2 == sum(len(files) for _, _, files in os.walk(tmp_path / "contents"))


async def test_nothing_outside_of_the_scope_is_touched(tmp_path):
    """Neither other directories nor, in them, what is there by now; a scope of one's own is taken at its word."""
    async with leased(None, 2) as (first, second):
        await first.exec("mkdir sub; echo a > sub/a; echo b > b; echo h > ~/h", check=True)
        made = await first.checkpoint(tmp_path, scope=["/workspace/sub", "/workspace/sub", "/nowhere"])
        await second.exec(
            "mkdir sub; echo own > b; echo own > ~/h; echo own > /dev/shm/s; echo old > sub/old", check=True
        )
        await second.restore(made, tmp_path)

        assert ("/workspace/sub",) == made.scope
        assert "a\n" == (await second.exec("ls sub", check=True)).text
        assert "own\nown\nown\n" == (await second.exec("cat b ~/h /dev/shm/s", check=True)).text


@pytest.mark.parametrize("damage", ["missing", "other", "short"])
async def test_a_checkpoint_that_is_not_whole_is_refused_before_anything_is_changed(tmp_path, damage):
    """By the name of the contents and their path; what runs runs on, and the lease is good."""
    async with leased(None, 2) as (first, second):
        await first.exec("mkdir d; echo precious > d/file", check=True)
        made = await first.checkpoint(tmp_path)
        (path,) = [p for p in (tmp_path / "contents").rglob("*") if p.is_file()]
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(b"another.\n" if damage == "other" else b"")
        await second.exec("setsid sleep 60 & echo own > own", check=True)
        with pytest.raises(CheckpointError, match=f"the contents {path.name} of '/workspace/d/file' are "):
            await second.restore(made.id, tmp_path)

        assert "own\nown\n" == (await second.exec("ls; cat own; pgrep sleep >&2", check=True)).text
        assert second.restored is None


async def test_a_checkpoint_of_another_place_is_refused(tmp_path):
    """A directory that this sandbox does not have."""
    async with leased(None, 2) as (first, second):
        await first.exec("mkdir mine", check=True)
        made = await first.checkpoint(tmp_path, scope=["/workspace/mine"])
        with pytest.raises(CheckpointError, match=f"checkpoint {made.id} does not fit this sandbox: /workspace/mine"):
            await second.restore(made, tmp_path)
        assert second.lost is None


async def test_a_checkpoint_that_the_sandbox_has_no_room_for_changes_nothing(tmp_path):
    """It says so, and the sandbox is as it was."""
    async with leased(LocalBackend(disk_limit=64 * 1024**2)) as large:
        await large.exec("head -c 12M /dev/urandom > big", check=True)
        made = await large.checkpoint(tmp_path)
    async with leased(LocalBackend(disk_limit=8 * 1024**2)) as small:
        await small.exec("echo own > own", check=True)
        with pytest.raises(CheckpointError, match=r"cannot be restored here: .*No space left on device"):
            await small.restore(made, tmp_path)
        assert "own\n" == (await small.exec("ls", check=True)).text


async def test_a_file_that_is_too_large_for_a_checkpoint_is_named(tmp_path):
    """Before anything of it is moved."""
    async with leased() as lease:
        await lease.exec("truncate -s 5000 large; echo x > small", check=True)
        with pytest.raises(
            ContentTooLarge, match="'/workspace/large' with 5000 bytes: a file of a checkpoint may have 4999"
        ):
            await lease.checkpoint(tmp_path, limit=4999)
        assert not (tmp_path / "contents").exists()
        assert 5002 == (await lease.checkpoint(tmp_path, limit=5000)).size


async def test_a_file_that_never_holds_still_is_named(tmp_path):
    """What is kept is what was there at one moment, or nothing."""
    async with leased() as lease:
        await lease.exec(
            "head -c 20M /dev/urandom > busy; setsid sh -c 'while :; do date +%N > busy.1; mv busy.1 busy; done' &",
            check=True,
        )
        with pytest.raises(CheckpointError, match="is written to while it is kept; stop what writes to it"):
            for _ in range(20):
                await lease.checkpoint(tmp_path)


async def test_a_reset_goes_back_to_the_sandbox_as_it_was_first(tmp_path):
    """And not to the checkpoint that was restored meanwhile."""
    async with leased(Hydrated(), reset=ResetPolicy(rungs=("files", "replace"))) as lease:
        before, name = await look(lease), lease.sandbox
        await lease.exec(EPISODE, check=True)
        made, changed = await lease.checkpoint(tmp_path), await look(lease)
        for _ in range(2):
            assert "files" == (await lease.reset()).rung
            assert before == await look(lease)
            await lease.restore(made, tmp_path)
            assert changed == await look(lease)
            assert "/workspace/src/a.py" in [change.path for change in (await lease.diff()).changes]
        report = await lease.reset()

        assert ("files", True, name) == (report.rung, report.verified, lease.sandbox)
        assert before == await look(lease)


class Cut(CheckpointStore):
    """Cancels whoever reads contents, the n-th time."""

    def __init__(self, location, scope, number):
        super().__init__(location)
        self.scope, self.left = scope, number

    def read(self, *arguments):
        self.left -= 1
        if self.left == 0:
            anyio.from_thread.run_sync(self.scope.cancel)
        super().read(*arguments)


@pytest.mark.parametrize(
    ("number", "begun"), [(1, False), (2, True)], ids=["while it is checked", "while it is written"]
)
async def test_a_restore_that_is_interrupted_half_way_ends_the_lease(tmp_path, number, begun):
    """Nobody knows what the sandbox holds; as long as nothing was changed, it is as good as before."""
    async with leased(None, 2) as (first, second):
        await first.exec("head -c 5M /dev/urandom > big", check=True)
        made = await first.checkpoint(tmp_path)
        await second.exec("echo own > own", check=True)
        with anyio.CancelScope() as scope:
            await second.restore(made, Cut(tmp_path, scope, number))

        assert scope.cancelled_caught
        if begun:
            with pytest.raises(SandboxLost, match="restore_failed: it was interrupted"):
                await second.exec("true")
        else:
            assert "own\n" == (await second.exec("ls")).text


async def test_without_isolation_nothing_is_kept_or_replaced(tmp_path):
    """The directories of such a sandbox are this machine's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Unconfined)
        backend = LocalBackend(isolation="none")
    async with leased(backend) as lease:
        with pytest.raises(CheckpointError, match="the runner is not the first process of a namespace"):
            await lease.checkpoint(tmp_path)
        with pytest.raises(UsageError, match="no baseline to compare with"):
            await lease.diff()


async def test_a_store_has_to_be_named(tmp_path):
    """Once for the pool, or each time."""
    async with leased() as lease:
        with pytest.raises(ConfigurationError, match="where are checkpoints kept"):
            await lease.checkpoint()
        with pytest.raises(ConfigurationError, match=r"scope is a list of directories; use \['/tmp'\]"):
            await lease.checkpoint(tmp_path, scope="/tmp")
    async with leased(checkpoints=tmp_path) as lease:
        made = await lease.checkpoint()
        assert made.id == (await lease.restore(made.id)).id


async def test_an_episode_goes_on_after_its_sandbox_was_lost(tmp_path):
    """The record says which checkpoints were made, and from which one the next attempt went on."""
    events = []

    async def solve(sandbox, episode):
        done = int((await sandbox.exec("cat done 2>/dev/null || echo 0")).text)
        for step in range(done + 1, 4):
            await sandbox.exec(f"echo {step} > done; echo {step} >> steps", check=True)
            await sandbox.checkpoint()
            if step == 2 and episode.inputs["lost"]:
                await sandbox._tenure.sandbox.session.aclose()
        return float((await sandbox.exec("cat steps")).text == "1\n2\n3\n")

    options = {"images": {"host": 2}, "spares": 0, "rollout": solve, "max_attempts": 1, "checkpoints": tmp_path / "cp"}
    async with SandboxPool("local", sink=events.append, journal=tmp_path / "run.journal", **options) as pool:
        batch = [
            Episode(id="a", image="host", inputs={"lost": True}),
            Episode(id="b", image="host", inputs={"lost": False}),
        ]
        first = await pool.rollout(batch, batch_id="one")
        (lost,) = [record for record in first.records if record.status is Status.RETRYABLE]
        assert 2 == len(lost.last.checkpoints)
        assert lost.last.restored is None
        episodes = [Episode(id="a", image="host", inputs={"lost": False})]
        second = await pool.rollout(episodes, batch_id="two", restore={"a": lost.last.checkpoints[-1]})
        (record,) = second.records

        assert (1.0, lost.last.checkpoints[-1]) == (record.reward, record.last.restored)
        assert 1 == len(record.last.checkpoints), "only the step that was missing"
        told = [(event.episode, event.data["checkpoint"]) for event in events if event.name == "lease.restored"]
        assert [("a", record.last.restored)] == told
        assert 6 == len([event for event in events if event.name == "lease.checkpoint"])

        before = len(events)
        with pytest.raises(ConfigurationError, match="restore names episode 'x', which is not in the batch"):
            await pool.rollout(episodes, restore={"x": "0" * 64})
        with pytest.raises(ConfigurationError, match="restore is a mapping of episode ids to checkpoints"):
            await pool.rollout(episodes, restore=["a"])
        with pytest.raises(CheckpointError, match=f"there is no checkpoint {'0' * 64}"):
            await pool.rollout(episodes, restore={"a": "0" * 64})
        assert not [event for event in events[before:] if event.name == "attempt.started"]
    async with SandboxPool("local", journal=tmp_path / "run.journal", resume=True, **options) as pool:
        resumed = await pool.rollout(episodes, batch_id="two", restore={"a": record.last.restored})

    assert record == resumed.records[0]
    assert 1 == resumed.resumed


async def test_an_episode_whose_checkpoint_is_damaged_meanwhile_fails_for_good(tmp_path):
    """It is the caller's store, and another sandbox would not help."""

    async def solve(sandbox, episode):
        return 1.0

    async with SandboxPool("local", images=["host"], spares=0, rollout=solve, checkpoints=tmp_path) as pool:
        async with await pool.acquire("host") as lease:
            await lease.exec("echo x > x", check=True)
            made = await lease.checkpoint()
        for path in (tmp_path / "contents").rglob("*"):
            if path.is_file():
                path.unlink()
        (record,) = (await pool.rollout([Episode(id="a", image="host")], restore={"a": made})).records

    assert (Status.FAILED, 1, "checkpoint") == (record.status, record.attempts, record.failure.kind)
    assert "are missing in" in record.reason


def test_a_trainer_that_is_not_async_has_all_of_it(tmp_path):
    """The same calls, with methods that wait."""
    with BlockingPool("local", images={"host": 2}, spares=0, baseline=True, checkpoints=tmp_path) as pool:
        with pool.acquire("host") as first, pool.acquire("host") as second:
            first.use_secrets({"TOKEN": "hunter22"})
            path = first.place_secret("hunter23")
            first.exec(f"echo one > f; cp {path} copy; printf %s $TOKEN > token", check=True)
            diff = first.diff()
            made = first.checkpoint(scope=["/workspace"])
            restored = second.restore(made.id)
            found = second.exec("cat f copy token", check=True)

    assert ["copy", "f", "token"] == [change.path.removeprefix("/workspace/") for change in diff.changes]
    assert made.id == restored.id
    assert "one\nhunter23hunter22" == found.text
