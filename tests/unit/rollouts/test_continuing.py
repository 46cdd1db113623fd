# SPDX-License-Identifier: Apache-2.0
"""Episodes that go on from checkpoints, and records without credentials, on doubles."""

from __future__ import annotations

import json

import attrs
import pytest

from agentsandbox.errors import CheckpointError, ConfigurationError, FailureKind, SandboxLost
from agentsandbox.models.episode import Attempt, Episode, Graded, Status
from agentsandbox.rollouts.artifacts import ArtifactStore
from agentsandbox.rollouts.gather import gather_rollouts
from agentsandbox.rollouts.journal.encoding import dump, load_attempt, store_attempt

from .fakes import FakeLease, FakeSource

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Run in real time: artifacts are written in a thread."""
    return request.param


@attrs.define(eq=False)
class Lease(FakeLease):
    """One that restores, and knows a credential."""

    restored: str | None = None
    checkpoints: tuple[str, ...] = ()
    refusals: list = attrs.field(factory=list)

    async def restore(self, checkpoint, store):
        await self.exec(f"restore {checkpoint} from {store}")
        if self.refusals:
            raise self.refusals.pop(0)
        self.restored = checkpoint

    def redact(self, value):
        if isinstance(value, str):
            return value.replace("hunter22", "[redacted]")
        if isinstance(value, bytes):
            return value.replace(b"hunter22", b"[redacted]")
        return {key: self.redact(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@attrs.define(eq=False)
class Source(FakeSource):
    """Grants such leases."""

    refusals: list = attrs.field(factory=list)

    async def acquire(self, image, *, episode=None, attempt=None):
        lease = await super().acquire(image, episode=episode, attempt=attempt)
        fields = {field.name: getattr(lease, field.name) for field in attrs.fields(FakeLease) if field.init}
        return Lease(**fields, refusals=self.refusals)


@pytest.fixture
def source():
    return Source()


def batch(*ids):
    return [Episode(id=one, image="host") for one in ids]


async def good(sandbox, episode):
    sandbox.checkpoints = (f"{episode.id}-1", f"{episode.id}-2")
    return 1.0


async def test_every_attempt_of_an_episode_goes_on_from_its_checkpoint(source):
    """Also the second one, after the first has lost its sandbox; other episodes begin at the beginning."""
    source.refusals = [SandboxLost("evicted")]
    options = {"restore": {"a": "c-1"}, "checkpoints": "store", "parallelism": 1}
    first, second = (await gather_rollouts(source, batch("a", "b"), good, **options)).records

    assert (Status.REWARDED, 2) == (first.status, first.attempts)
    assert [(None, ()), ("c-1", ("a-1", "a-2"))] == [(one.restored, one.checkpoints) for one in first.history]
    assert [(None, ("b-1", "b-2"))] == [(one.restored, one.checkpoints) for one in second.history]


async def test_a_checkpoint_that_cannot_be_used_is_final(source):
    """Another sandbox would not make it better; the rollout function is never called."""
    source.refusals = [CheckpointError("there is no checkpoint c-1 in store")]

    async def never(sandbox, episode):
        raise AssertionError

    (record,) = (await gather_rollouts(source, batch("a"), never, restore={"a": "c-1"})).records

    assert (Status.FAILED, 1, FailureKind.CHECKPOINT) == (record.status, record.attempts, record.failure.kind)
    assert "CheckpointError: there is no checkpoint c-1 in store" == record.reason


@pytest.mark.parametrize(
    ("restore", "message"),
    [
        ({"x": "c"}, "restore names episode 'x', which is not in the batch"),
        ("a", "restore is a mapping of episode ids"),
    ],
    ids=["unknown", "no mapping"],
)
async def test_what_cannot_be_meant_is_refused_before_anything_starts(source, restore, message):
    """No sandbox is asked for."""
    with pytest.raises(ConfigurationError, match=message):
        await gather_rollouts(source, batch("a"), good, restore=restore)


async def test_records_and_artifacts_are_without_credentials(source, tmp_path):
    """Reasons, patches and what is kept beside a reward."""

    async def leak(sandbox, episode):
        if episode.id == "bad":
            raise ValueError("denied: hunter22")
        return Graded(reward=1.0, patch="+hunter22\n", info={"token": "hunter22", "n": 3})

    good_one, bad_one = (await gather_rollouts(source, batch("good", "bad"), leak, output=tmp_path)).records

    assert (None, None) == (good_one.reason, good_one.failure)
    assert ("+[redacted]\n", {"token": "[redacted]", "n": 3}) == (good_one.patch, good_one.info)
    assert "ValueError: denied: [redacted]" == bad_one.reason == bad_one.last.failure.message
    assert "+[redacted]\n" == (tmp_path / "good/attempt-1/patch.diff").read_text()


async def test_a_patch_of_bytes_that_are_no_text_is_saved_as_those_bytes(tmp_path):
    """As a diff has them; any other text is saved, too."""
    lease, store = await FakeSource().acquire("host"), ArtifactStore(tmp_path)
    for number, (patch, expected) in enumerate([("+caf\udce9\n", b"+caf\xe9\n"), ("\ud800", b"\xed\xa0\x80")], 1):
        await store.save(lease, batch("a")[0], number, patch=patch)

        assert expected == (tmp_path / f"a/attempt-{number}/patch.diff").read_bytes()


def test_checkpoints_are_in_the_journal_and_older_journals_are_read():
    """The fields are written only where there is something to say."""
    plain = Attempt(number=1)
    told = Attempt(number=2, restored="c-1", checkpoints=("c-2", "c-3"))

    assert {"restored", "checkpoints"} == store_attempt(told).keys() - store_attempt(plain).keys()
    for attempt in (plain, told):
        assert attempt == load_attempt(json.loads(dump(store_attempt(attempt))))
