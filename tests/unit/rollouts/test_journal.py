# SPDX-License-Identifier: Apache-2.0
"""The journal: what is in the file, what a second driver makes of it, and what it refuses."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from agentsandbox.errors import ConfigurationError, FailureKind, JournalError, Phase, SandboxLost, UsageError, classify
from agentsandbox.models.episode import Attempt, Counts, Episode, EpisodeRecord, Graded, RolloutResult, Status
from agentsandbox.models.sandbox import Identity
from agentsandbox.models.timing import StartKind, Timings, TTFCSample
from agentsandbox.rollouts.gather import gather_rollouts
from agentsandbox.rollouts.journal import Journal
from agentsandbox.rollouts.journal.batches import Shelf
from agentsandbox.rollouts.journal.encoding import (
    decode,
    digest,
    dump,
    encode,
    load_attempt,
    load_record,
    store_attempt,
    store_record,
)
from agentsandbox.rollouts.journal.reading import Known

from .fakes import FakeLease, FakeSource

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run in real time: a journal writes in a thread."""
    return str(request.param)


def make(count: int, **options: Any) -> list[Episode]:
    """Return *count* episodes."""
    return [Episode(id=f"ep-{index}", image="host", **options) for index in range(count)]


async def good(sandbox: FakeLease, episode: Episode) -> Graded:
    """Run a command and give a reward."""
    await sandbox.exec("true")
    return Graded(reward=0.1, patch="+x", info={"episode": episode.id, "pair": (1, 2)})


async def run(path: Path, batch: list[Episode], rollout: Any = good, **options: Any) -> RolloutResult:
    """Run one batch under a journal, as one driver."""
    source = options.pop("source", None) or FakeSource()
    retry = options.pop("retry", False)
    async with Journal(path, resume=True, retry=retry).writing() as journal:
        return await gather_rollouts(source, batch, rollout, journal=journal, **options)


async def killed(path: Path, batch: list[Episode], rollout: Any, *, copy: Path, when: str) -> None:
    """Leave at *copy* what a driver leaves that is killed during episode *when*."""

    async def snap(sandbox: FakeLease, episode: Episode) -> Any:
        if episode.id == when:
            for file in path.parent.glob(f"{path.name}*"):
                shutil.copy(file, copy.with_name(file.name.replace(path.name, copy.name)))
        return await rollout(sandbox, episode)

    await run(path, batch, snap, parallelism=1)


VALUES = [
    None, True, 3, -1.5, 0.1 + 0.2, 1e308, "text", "\ud800 lone", "\u2028\0", [1, [2.0]], (1, (2,), []),
    {"a": {"b": 1}},
    {1: "one", None: 2, (1, 2): 3}, {"~": "tag", "v": 1}, b"\0\xff", {1, 2}, frozenset({"a"}), math.inf, -math.inf,
    2**70, -(2**9000), Path("/a/b"), {"nested": [{"deep": (b"x", math.inf)}]}, {},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_equal(value: object) -> None:
    """What goes into JSON comes out equal and of the same type."""
    import json

    back = decode(json.loads(dump(encode(value))))

    assert back == value
    assert type(back) is type(value) or isinstance(value, Path)


def test_not_a_number_comes_back_as_such() -> None:
    """NaN equals nothing, and survives all the same."""
    assert math.isnan(decode(encode(math.nan)))


class Scalar:
    """What a number of an array library looks like."""

    def item(self) -> float:
        """Return it as Python's own."""
        return 2.5


class Rude:
    """What does not even have a repr."""

    def __repr__(self) -> str:
        raise RuntimeError


def test_strange_values_never_cost_a_record() -> None:
    """A number of an array library becomes a number; anything else becomes its repr."""
    assert decode(encode(Scalar())) == 2.5
    assert decode(encode(Rude())) == "<Rude>"
    assert decode(encode(range(3))) == "range(0, 3)"


def test_a_record_comes_back_exactly() -> None:
    """Failures, timings, samples, identities, commands, info and artifacts equal what was stored."""
    import json

    lost = attrs.evolve(classify(SandboxLost("evicted", "disk\udc80"), Phase.EXEC), cause=None)
    attempt = Attempt(
        number=2,
        sandbox="box",
        node="n",
        identity=Identity(uid="u", instance="i", restarts=3),
        failure=lost,
        ttfc=TTFCSample(seconds=0.25, start=StartKind.REUSED, stages={"queue": 0.1}, episode="e", image="host"),
        timings=Timings(queued=0.0, acquire=1 / 3, total=2.5),
        commands=({"command": "x\ud83d", "exit_code": 0, "sizes": {"stdout": 2**40}, "odd": (1,)},),
    )
    record = EpisodeRecord(
        episode=Episode(id="e", image="host", group=(1, "a"), inputs={"x": b"1"}),
        status=Status.RETRYABLE,
        failure=lost,
        attempts=2,
        history=(attempt,),
        patch="a\r\n\ud800",
        info={"k": {1: (2, None)}, "inf": math.inf},
        artifacts={"a": Path("/x/y")},
    )

    again = load_attempt(json.loads(dump(store_attempt(attempt))))

    assert again == attempt
    assert type(again.ttfc.start) is StartKind
    assert type(again.failure.kind) is FailureKind
    assert load_record(json.loads(dump(store_record(record))), record.episode, (again,)) == record


def test_an_episode_is_known_by_its_content() -> None:
    """Equal content has an equal digest in another process; any difference another one."""
    base = Episode(id="a", image="host", inputs={"s": {"b", "a", "c"}, "n": 1}, group=3)
    others = [
        attrs.evolve(base, id="b"),
        attrs.evolve(base, image="x"),
        attrs.evolve(base, group="3"),
        attrs.evolve(base, timeout=1.0),
        attrs.evolve(base, artifacts=("x",)),
        attrs.evolve(base, inputs={"s": {"b", "a", "c"}, "n": True}),
    ]
    code = (
        "from agentsandbox.models.episode import Episode; from agentsandbox.rollouts.journal.encoding import digest;"
        "print(digest(Episode(id='a', image='host', inputs={'n': 1, 's': {'c', 'a', 'b'}}, group=3)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True
    )

    assert elsewhere.stdout.strip() == digest(base)
    assert len({digest(base), *map(digest, others)}) == 7


def test_inputs_that_cannot_be_recognised_are_refused() -> None:
    """Something without content that could be compared is named before anything runs."""
    with pytest.raises(ConfigurationError, match="inputs of episode 'a' hold a function, which a journal"):
        digest(Episode(id="a", image="host", inputs={"f": lambda: 1}))


async def test_each_step_is_in_the_file_before_it_is_taken(tmp_path: Path) -> None:
    """When the rollout function runs, the submission, the attempt and its sandbox can be read by others."""
    path, seen = tmp_path / "run.journal", []

    async def look(sandbox: FakeLease, episode: Episode) -> float:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as reader:
            seen.extend(reader.execute("SELECT name, episode, attempt, data FROM events ORDER BY seq").fetchall())
        seen.append(Journal(path).counts())
        return 1.0

    result = await run(path, make(1), look)

    assert [row[:3] for row in seen[:-1]] == [
        ("run.started", None, None),
        ("batch.submitted", None, None),
        ("episode.submitted", "ep-0", None),
        ("attempt.started", "ep-0", 1),
        ("attempt.granted", "ep-0", 1),
    ]
    assert '"sandbox":"box-0"' in seen[4][3]
    assert '"uid":"box-0"' in seen[4][3]
    assert seen[-1] == Counts(submitted=1)
    assert result.counts == Journal(path).counts() == Counts(submitted=1, rewarded=1)


async def test_the_end_of_an_episode_is_in_the_file_before_it_is_told(tmp_path: Path) -> None:
    """Whoever hears that an episode has ended finds its record in the journal."""
    path, told = tmp_path / "run.journal", []

    def sink(event: Any) -> None:
        if event.name == "episode.ended":
            told.append((event.episode, {r.episode.id: r.reward for r in Journal(path).records()}[event.episode]))

    await run(path, make(5), sink=sink)

    assert sorted(told) == [(f"ep-{index}", 0.1) for index in range(5)]


async def test_the_records_read_are_those_returned(tmp_path: Path) -> None:
    """A reader gets every record as the driver returned it, but for the inputs."""
    path = tmp_path / "run.journal"
    source = FakeSource(failures={"ep-1": [SandboxLost("evicted")]})
    batch = make(3, group=(1, 2), artifacts=("a",), timeout=50.0)
    result = await run(path, [attrs.evolve(e, inputs={"n": e.id}) for e in batch], source=source)

    read = Journal(path).records()

    assert read == tuple(
        attrs.evolve(record, episode=attrs.evolve(record.episode, inputs={})) for record in result.records
    )
    assert [record.attempts for record in read] == [1, 2, 1]
    assert Journal(path).records(2) == ()


async def test_finished_records_are_returned_and_the_rest_runs(tmp_path: Path) -> None:
    """A driver killed in its third episode: two records come back as they were, the others run, numbers go on."""
    path, copy, ran = tmp_path / "first.journal", tmp_path / "second.journal", []
    await killed(path, make(4), good, copy=copy, when="ep-2")
    before = Journal(copy).counts()

    async def again(sandbox: FakeLease, episode: Episode) -> float:
        ran.append((episode.id, sandbox.attempt))
        return 7.0

    told: list[tuple[str, str]] = []
    result = await run(copy, make(4), again, sink=lambda event: told.append((event.name, event.episode)))

    assert before == Counts(submitted=4, rewarded=2)
    assert sorted(ran) == [("ep-2", 2), ("ep-3", 1)]
    assert result.rewards == (0.1, 0.1, 7.0, 7.0)
    assert result.resumed == 2
    assert result.records[0].info == {"episode": "ep-0", "pair": (1, 2)}
    assert [name for name, episode in told if episode == "ep-0"] == ["episode.restored"]
    cut = result.records[2]
    assert (cut.attempts, [a.number for a in cut.history]) == (2, [1, 2])
    assert cut.history[0].failure.kind is FailureKind.INTERRUPTED
    assert cut.history[0].sandbox == "box-2"
    assert Journal(copy).counts() == Counts(submitted=4, rewarded=4)


async def test_an_interrupted_attempt_costs_nothing(tmp_path: Path) -> None:
    """An episode whose driver was killed has as many attempts left as before."""
    path, copy = tmp_path / "first.journal", tmp_path / "second.journal"
    await killed(path, make(1), good, copy=copy, when="ep-0")
    source = FakeSource(failures={"ep-0": [SandboxLost("evicted")]})

    record = (await run(copy, make(1), source=source, max_attempts=2)).records[0]

    assert (record.status, record.attempts) == (Status.REWARDED, 3)
    assert [a.failure.kind if a.failure else None for a in record.history] == [
        FailureKind.INTERRUPTED,
        FailureKind.SANDBOX_LOST,
        None,
    ]


async def test_what_the_driver_held_is_reported(tmp_path: Path) -> None:
    """A journal that is opened again names the sandboxes that the dead driver had granted, and its receipt, once."""
    path, copy = tmp_path / "first.journal", tmp_path / "second.journal"
    await killed(path, make(2), good, copy=copy, when="ep-1")

    async with Journal(copy, resume=True).writing({"run_id": "b"}) as journal:
        orphans, leftovers = journal.orphans, journal.leftovers
        await journal.reaped(leftovers[0], ["gone"])
    async with Journal(copy, resume=True).writing() as journal:
        later = (journal.orphans, journal.leftovers)

    assert [(o.sandbox, o.episode, o.attempt, o.identity.uid) for o in orphans] == [("box-1", "ep-1", 1, "box-1")]
    assert [(receipt["created"], receipt["ended"]) for receipt in leftovers] == [([], False)]
    assert later == ((), ())


async def test_a_cancelled_batch_runs_again_and_a_failed_episode_does_not(tmp_path: Path) -> None:
    """Stopping a trainer ends nothing for good; what failed for good stays so."""
    path = tmp_path / "run.journal"

    async def half(sandbox: FakeLease, episode: Episode) -> float:
        if episode.id == "ep-0":
            raise ValueError("wrong")
        if episode.id == "ep-2":
            scope.cancel()
        await anyio.sleep(0)
        return 1.0

    with anyio.CancelScope() as scope:
        await run(path, make(4), half, parallelism=1)
    stopped = Journal(path).counts()
    result = await run(path, make(4))

    assert stopped == Counts(submitted=4, rewarded=1, failed=1, cancelled=2)
    assert [record.status.value for record in result.records] == ["failed", "rewarded", "rewarded", "rewarded"]
    assert result.records[0].failure.message == "ValueError: wrong"
    assert result.resumed == 2
    assert Journal(path).counts() == Counts(submitted=4, rewarded=3, failed=1)


async def test_retryable_episodes_stay_unless_told_otherwise(tmp_path: Path) -> None:
    """A retryable record is a result; with retry it is tried again, with attempts as from the start."""
    path = tmp_path / "run.journal"
    failures = [SandboxLost("evicted")] * 2
    first = await run(path, make(1), source=FakeSource(failures={"ep-0": list(failures)}))
    same = await run(path, make(1))
    again = await run(path, make(1), retry=True, source=FakeSource(failures={"ep-0": failures[:1]}))

    assert [result.records[0].status.value for result in (first, same, again)] == ["retryable", "retryable", "rewarded"]
    assert again.records[0].attempts == 4
    assert Journal(path).records() == again.records


async def test_changed_content_runs_anew(tmp_path: Path) -> None:
    """In a named batch, an episode with the same id and other inputs gets no record of the old one."""
    path = tmp_path / "run.journal"
    await run(path, [Episode(id="a", image="host", inputs={"n": 1}), Episode(id="b", image="host")], batch_id="x")

    async def two(sandbox: FakeLease, episode: Episode) -> float:
        return 2.0

    batch = [Episode(id="a", image="host", inputs={"n": 2}), Episode(id="b", image="host")]
    result = await run(path, batch, two, batch_id="x")

    assert result.rewards == (2.0, 0.1)
    assert Journal(path).counts() == Counts(submitted=3, rewarded=3)


async def test_the_same_batch_twice_is_two_batches(tmp_path: Path) -> None:
    """Within one driver nothing is answered from the journal."""
    path = tmp_path / "run.journal"
    async with Journal(path).writing() as journal:
        first = await gather_rollouts(FakeSource(), make(2), good, journal=journal)
        second = await gather_rollouts(FakeSource(), make(2), good, journal=journal)

    assert (first.resumed, second.resumed) == (0, 0)
    assert Journal(path).counts() == Counts(submitted=4, rewarded=4)
    assert Journal(path).counts(2) == Counts(submitted=2, rewarded=2)


def shelf(*batches: str) -> Shelf:
    """Make a shelf; an exclamation mark is a batch that had not ended."""
    return Shelf(
        [
            Known(number=number, batch_id=None, fingerprint=name.strip("!"), ended="!" not in name)
            for number, name in enumerate(batches, 1)
        ]
    )


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        pytest.param("a b c!", "a b c d", [1, 2, 3, None], id="from the start"),
        pytest.param("a b c!", "b c d", [2, 3, None], id="from a checkpoint"),
        pytest.param("a b a!", "a b", [3, None], id="second round, killed in its first batch"),
        pytest.param("a b c a b!", "a b c", [4, 5, None], id="second round, from its beginning"),
        pytest.param("a b c a b!", "b c", [5, None], id="second round, from its middle"),
        pytest.param("a b c", "a b c a", [1, 2, 3, None], id="one round that had ended"),
        pytest.param("a! b!", "b a", [2, 1], id="two at once in another order"),
        pytest.param("", "a a", [None, None], id="nothing known"),
    ],
)
def test_which_batch_is_continued(before: str, now: str, found: list[int | None]) -> None:
    """Batches are found in the order of their submission, and an old one is never taken for a new one."""
    known = shelf(*before.split())

    taken = [known.take(name, None) for name in now.split()]

    assert [batch.number if batch else None for batch in taken] == found


async def test_an_existing_journal_is_not_overwritten(tmp_path: Path) -> None:
    """Without resume a file that is there is refused, and stays as it is."""
    path = tmp_path / "run.journal"
    await run(path, make(1))
    content = path.read_bytes()

    with pytest.raises(ConfigurationError, match="exists; give resume=True to go on with it"):
        async with Journal(path).writing():
            pass

    assert path.read_bytes() == content


async def test_a_second_writer_in_this_process_is_refused(tmp_path: Path) -> None:
    """One journal, one writer; afterwards it is free again."""
    path = tmp_path / "run.journal"
    async with Journal(path).writing() as journal:
        with pytest.raises(JournalError, match="is open for writing in this process already"):
            async with Journal(path, resume=True).writing():
                pass
        with pytest.raises(UsageError, match="is open already"):
            async with journal.writing():
                pass
    async with Journal(path, resume=True).writing():
        pass


async def test_a_second_writer_in_another_process_is_refused(tmp_path: Path) -> None:
    """It is told who writes; a forked child that outlives the writer keeps nobody out."""
    path = tmp_path / "run.journal"
    code = (
        "import anyio, os, sys, time\n"
        "from agentsandbox.rollouts.journal import Journal\n"
        "async def main():\n"
        "    async with Journal(sys.argv[1]).writing():\n"
        "        if os.fork() == 0:\n"
        "            sys.stdin.read(); os._exit(0)\n"
        "        print('open', flush=True); time.sleep(60)\n"
        "anyio.run(main)\n"
    )
    with subprocess.Popen(  # noqa: ASYNC220 - it says when it is ready
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(JournalError, match=f"is being written by process {other.pid}$"):
            async with Journal(path, resume=True).writing():
                pass
        other.kill()
        other.wait()
        async with Journal(path, resume=True).writing() as journal:
            assert len(journal.leftovers) == 1


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        pytest.param("PRAGMA user_version = 99", "has schema 99, written by a newer agentsandbox", id="newer"),
        pytest.param("PRAGMA user_version = -1", "has schema -1, and this agentsandbox needs 1", id="older"),
        pytest.param("PRAGMA application_id = 5", "is not a journal; it is left as it is", id="another's"),
    ],
)
async def test_other_files_are_refused(tmp_path: Path, statement: str, words: str) -> None:
    """A schema that is not known, or another program's database, is neither read nor changed."""
    path = tmp_path / "run.journal"
    await run(path, make(1))
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    content = path.read_bytes()

    with pytest.raises(JournalError, match=words):
        await run(path, make(1))
    with pytest.raises(JournalError, match=words):
        Journal(path).counts()
    assert path.read_bytes() == content


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """Somebody's notes are not overwritten; a journal that is not there is said not to be."""
    path = tmp_path / "notes.txt"
    path.write_text("not a journal " * 100)

    with pytest.raises(JournalError, match=r"cannot be used: file is not a database"):
        await run(path, make(1))
    with pytest.raises(JournalError, match="there is no journal"):
        Journal(tmp_path / "none").counts()
    assert path.read_text() == "not a journal " * 100


async def test_a_journal_only_grows(tmp_path: Path) -> None:
    """The file itself refuses to change or remove an event, and to end an episode twice for good."""
    path = tmp_path / "run.journal"
    await run(path, make(1))

    with sqlite3.connect(path) as connection:
        for statement in ("DELETE FROM events", "UPDATE events SET name = 'x'"):
            with pytest.raises(sqlite3.IntegrityError, match="only grows"):
                connection.execute(statement)
        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            connection.execute(
                "INSERT INTO events (at, run, batch, name, digest, status, final, data) "
                "SELECT at, run, batch, name, digest, status, final, data FROM events WHERE name = 'episode.ended'"
            )
    connection.close()


async def test_a_torn_log_keeps_what_was_written_before(tmp_path: Path) -> None:
    """Wherever the log is cut off, the journal opens, the law holds, and what it has is a beginning of the truth."""
    path, copy = tmp_path / "first.journal", tmp_path / "second.journal"
    await killed(path, make(6), good, copy=copy, when="ep-5")
    log = copy.with_name(f"{copy.name}-wal").read_bytes()
    found = []
    for size in range(0, len(log), max(1, len(log) // 60)):
        torn = tmp_path / f"torn-{size}.journal"
        shutil.copy(copy, torn)
        torn.with_name(f"{torn.name}-wal").write_bytes(log[:size])
        async with Journal(torn, resume=True).writing():
            pass
        counts = Journal(torn).counts()
        assert counts.submitted in (0, 6)
        assert counts.pending >= 0
        found.append(counts.rewarded)
        torn.unlink()

    assert found == sorted(found)
    assert found[0] == 0
    assert set(found) >= {1, 2, 3, 4}


async def test_a_torn_file_is_rescued_up_to_the_tear(tmp_path: Path) -> None:
    """A file that lost its end is put aside; the events before go on in a new one, and what was lost runs again."""
    path = tmp_path / "run.journal"
    batch = make(40, inputs={"n": 1})
    await run(path, batch)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])

    with pytest.raises(JournalError, match="cannot be used: database disk image is malformed"):
        Journal(path).records()
    async with Journal(path, resume=True).writing() as journal:
        said = journal.rescued
        kept = Journal(path).counts()
        result = await gather_rollouts(FakeSource(), batch, good, journal=journal)

    assert "was damaged" in said
    assert path.with_name(f"{path.name}-damaged-1").read_bytes() == whole[: len(whole) * 2 // 3]
    assert kept.submitted == 40
    assert 0 < kept.rewarded < 40
    assert result.resumed == kept.rewarded
    assert Journal(path).counts() == Counts(submitted=40, rewarded=40)


FULL = """
import resource, sys, anyio
from agentsandbox.errors import JournalError
from agentsandbox.models.episode import Episode, Graded
from agentsandbox.rollouts.gather import gather_rollouts
from agentsandbox.rollouts.journal import Journal
from tests.unit.rollouts.fakes import FakeSource

async def solve(sandbox, episode):
    return Graded(reward=float(episode.inputs["n"]), info={"log": "x" * 20000})

def sink(event):
    if event.name == "episode.ended" and event.data["status"] == "rewarded":
        print("ended", event.episode, flush=True)

async def main():
    batch = [Episode(id=f"ep-{n}", image="host", inputs={"n": n}) for n in range(200)]
    async with Journal(sys.argv[1], resume=True).writing() as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
        try:
            await gather_rollouts(FakeSource(), batch, solve, journal=journal, parallelism=4, sink=sink)
        except JournalError as error:
            print("stopped", len(error.records), sum(r.reward is not None for r in error.records), error, flush=True)

anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_full_disk_is_an_error_that_loses_no_record(tmp_path: Path, backend: str) -> None:
    """The batch stops with a clear error and all records; those announced are in the file; with room it goes on."""
    path = tmp_path / "run.journal"
    done = subprocess.run(
        [sys.executable, "-c", FULL, path, backend], capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    lines = done.stdout.splitlines()
    announced = [line.split()[1] for line in lines if line.startswith("ended")]
    stopped = next(line for line in lines if line.startswith("stopped"))
    read = {record.episode.id: record.reward for record in Journal(path).records() if record.reward is not None}

    assert len(announced) >= 5
    assert set(announced) <= set(read)
    assert all(read[name] == float(name.removeprefix("ep-")) for name in announced)
    assert stopped.split()[1] == "200"
    assert int(stopped.split()[2]) >= len(announced)
    assert "could not be written" in stopped
    assert "make room and resume" in stopped
    counts = Journal(path).counts()
    assert counts.submitted == 200

    async def finish() -> RolloutResult:
        async def solve(sandbox: FakeLease, episode: Episode) -> float:
            return float(episode.inputs["n"])

        batch = [Episode(id=f"ep-{n}", image="host", inputs={"n": n}) for n in range(200)]
        return await run(path, batch, solve)

    result = anyio.run(finish)
    assert result.rewards == tuple(float(n) for n in range(200))
    assert result.resumed >= len(announced)


async def test_many_events_share_a_transaction(tmp_path: Path) -> None:
    """Waiting for the disk is shared: a wide batch needs far fewer transactions than it has events."""
    path = tmp_path / "run.journal"
    async with Journal(path).writing() as journal:
        await gather_rollouts(FakeSource(), make(200), good, journal=journal)
        writer = journal._writer
        events, commits = writer._written, writer._commits
        assert repr(journal) == f"<Journal {str(path)!r} [1 batches | {writer!r}]>"

    assert events == 1 + 201 + 200 * 4 + 1
    assert commits < 200


async def test_late_results_are_written(tmp_path: Path) -> None:
    """A result that comes after its attempt was given up is in the journal, and changes no record."""
    path = tmp_path / "run.journal"

    async def slow(sandbox: FakeLease, episode: Episode) -> float:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            return 1.0
        raise AssertionError

    result = await run(path, make(1), slow, episode_timeout=0.01)

    assert (result.late_results, result.rewards) == (1, (None,))
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT episode, attempt, data FROM events WHERE name = 'attempt.late'").fetchall()
    connection.close()
    assert rows == [("ep-0", 1, '{"reward":1.0}')]
    assert Journal(path).counts() == Counts(submitted=1, retryable=1)


async def test_p58_a_partial_batch_is_in_the_journal_as_it_was_returned(tmp_path: Path) -> None:
    """What the deadline cut off is retryable, there and here; the next driver returns it, or with retry runs it."""
    path = tmp_path / "run.journal"

    async def slow(sandbox: FakeLease, episode: Episode) -> float:
        await sandbox.exec("true")
        if episode.id in ("ep-1", "ep-2"):
            await anyio.sleep_forever()
        return 1.0

    first = await run(path, make(5), slow, deadline=0.3, parallelism=2)
    read = Journal(path).records()
    second = await run(path, make(5))
    third = await run(path, make(5), retry=True)

    assert first.rewards == (1.0, None, None, None, None)
    assert [record.failure.kind if record.failure else None for record in read] == [None, *["timed_out"] * 4]
    assert read == first.records == second.records
    assert (second.resumed, third.resumed) == (5, 1)
    assert (third.rewards[0], third.rewards[1:]) == (1.0, (0.1,) * 4)
    assert [record.attempts for record in third.records] == [1, 2, 2, 1, 1]
