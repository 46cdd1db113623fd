# SPDX-License-Identifier: Apache-2.0
"""Several backends as one."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.opening import open_backend
from agentsandbox.backends.several import REST, Balance, SeveralBackends
from agentsandbox.errors import ApiUnavailable, ConfigurationError, ImagePullFailed, ProvisionError, UsageError
from agentsandbox.models.sandbox import SandboxSpec
from tests.unit.warmpool.fake_backend import FakeBackend, FakeSandbox

HOST = SandboxSpec(image="host")


class Failing(FakeBackend):
    """A member that fails as often as it is told to."""

    def __init__(self, *errors):
        super().__init__()
        self.errors = list(errors)
        self.asked = 0

    async def create(self, spec, name):
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return await super().create(spec, name)


def filled(balance, image, count, now=0.0):
    """Take sandboxes one after another, and return who makes how many."""
    found = Counter()
    for _ in range(count):
        name = balance.order(image, now)[0]
        balance.taken(name, image)
        balance.made(name)
        found[name] += 1
    return dict(found)


def test_sandboxes_are_shared_by_weight():
    """One of weight three takes three times as many, also when images have their home."""
    assert {"a": 30, "b": 10} == filled(Balance({"a": 3.0, "b": 1.0}, {}), "x", 40)


def test_an_image_stays_where_it_is_as_long_as_loads_are_fair():
    """The second of an image goes where the first is, another image to the other member."""
    balance = Balance({"a": 1.0, "b": 1.0}, {})
    for image in ("x", "y"):
        filled(balance, image, 1)
    assert ["a", "b"] == balance.order("x", 0.0)
    assert ["b", "a"] == balance.order("y", 0.0)


def test_an_image_goes_only_to_members_that_take_it():
    """By pattern; one that is named for nothing takes all."""
    balance = Balance({"a": 1.0, "b": 1.0}, {"a": ["swe/*"]})
    assert ["b"] == balance.takers("other")
    assert ["a", "b"] == balance.takers("swe/x")


def test_a_member_that_failed_is_asked_last_for_a_while():
    """Twice as long after the second failure in a row; after a success all is forgotten."""
    balance = Balance({"a": 1.0, "b": 1.0}, {})
    for rest in (REST, 2 * REST):
        balance.taken("a", "x")
        balance.failed("a", "x", 100.0)
        assert ["b", "a"] == balance.order("x", 100.0 + rest - 1)
        assert ["a", "b"] == balance.order("x", 100.0 + rest)
    balance.taken("a", "x")
    balance.made("a")
    balance.taken("a", "x")
    balance.failed("a", "x", 500.0)
    assert ["b", "a"] == balance.order("x", 500.0 + REST - 1)


def test_what_is_gone_counts_no_more():
    """The member that lost one is asked next."""
    balance = Balance({"a": 1.0, "b": 1.0}, {})
    for image in "wxyz":
        filled(balance, image, 1)
    balance.freed("b", "x")
    assert ("b", "<Balance [a 2, b 1]>") == (balance.order("v", 0.0)[0], repr(balance))


@pytest.mark.anyio
async def test_a_pool_over_two_members_runs_a_batch():
    """Each takes its part, the sandboxes say where they are, and everything ends with the pool."""
    places = []

    async def rollout(sandbox, episode):
        places.append(sandbox.capabilities.facts["member"])
        await anyio.sleep(0)
        return float((await sandbox.exec(["true"])).exit_code == 0)

    members = {"east": FakeBackend(), "west": FakeBackend()}
    backend = SeveralBackends(members, weights={"west": 1.0})
    async with SandboxPool(backend, images={"host": 4}, rollout=rollout) as pool:
        result = await pool.rollout([Episode(id=f"e{n}", image="host") for n in range(8)])
    assert (1.0,) * 8 == result.rewards
    assert {"east", "west"} == set(places)
    assert [set(), set()] == [member.alive for member in members.values()]
    assert "<SeveralBackends <Balance [east 0, west 0]>>" == repr(backend)


@pytest.mark.anyio
async def test_real_members_work_side_by_side():
    """Two local backends, one for the images of a name; the lease is usable and knows its member."""
    backend = SeveralBackends({"one": open_backend("local"), "two": open_backend("local")}, images={"one": ["h*"]})
    async with backend.running():
        sandbox = await backend.create(HOST, "s1")
        await sandbox.check()
        assert sandbox.capabilities.facts["member"] in ("one", "two")
        await backend.destroy(sandbox)
        await backend.destroy(sandbox)


@pytest.mark.anyio
async def test_where_one_cannot_the_next_is_asked():
    """And the first is left alone."""
    east, west = Failing(ApiUnavailable("no answer")), Failing()
    backend = SeveralBackends({"east": east, "west": west})
    async with backend.running():
        for number in range(3):
            sandbox = await backend.create(HOST, f"s{number}")
            assert "west" == sandbox.capabilities.facts["member"]
    assert (1, 3) == (east.asked, west.asked)


@pytest.mark.anyio
async def test_if_none_can_the_error_has_the_words_of_each():
    """Of one member alone it is that member's own error."""
    words = r"east: registry is gone; west: no answer"
    backend = SeveralBackends(
        {"east": Failing(ImagePullFailed("registry is gone")), "west": Failing(ApiUnavailable("no answer"))}
    )
    async with backend.running():
        with pytest.raises(ProvisionError, match=words):
            await backend.create(HOST, "s")
    backend = SeveralBackends({"east": Failing(ImagePullFailed("registry is gone"))})
    async with backend.running():
        with pytest.raises(ImagePullFailed):
            await backend.create(HOST, "s")
    assert "<SeveralBackends <Balance [east 0]>>" == repr(backend)


@pytest.mark.anyio
async def test_a_cancelled_create_is_nobodys_failure():
    """Nothing is counted, and nobody rests."""
    member = FakeBackend()
    member.create_block = anyio.Event()
    backend = SeveralBackends({"a": member, "b": FakeBackend()})
    async with backend.running(), anyio.create_task_group() as group:
        group.start_soon(backend.create, HOST, "s")
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert ("a", "<Balance [a 0, b 0]>") == (backend.balance.order("host", 0.0)[0], repr(backend.balance))


@pytest.mark.anyio
async def test_strangers_are_refused():
    """A sandbox of nobody cannot be recycled, suspended or resumed, and its removal is nothing."""
    backend = SeveralBackends({"a": FakeBackend()})
    stranger = FakeSandbox("x", HOST)
    assert backend.can_recycle(stranger) is False
    await backend.destroy(stranger)
    for act in (backend.recycle(stranger, HOST, "y"), backend.suspend(stranger), backend.resume(stranger)):
        with pytest.raises(UsageError, match="is not of this backend"):
            await act


@pytest.mark.anyio
async def test_a_used_sandbox_is_recycled_where_it_is():
    """Its member does it, and counts the new image; one that the member does not take is refused."""
    member = FakeBackend()
    member.recycling = True
    backend = SeveralBackends({"a": member, "b": FakeBackend()}, images={"a": ["host", "next"], "b": ["other"]})
    async with backend.running():
        sandbox = await backend.create(HOST, "s")
        assert backend.can_recycle(sandbox)
        fresh = await backend.recycle(sandbox, SandboxSpec(image="next"), "s")
        assert ("a", "next") == (fresh.capabilities.facts["member"], fresh.spec.image)
        with pytest.raises(ProvisionError, match="member 'a' does not take image 'other'"):
            await backend.recycle(fresh, SandboxSpec(image="other"), "s")
        with pytest.raises(UsageError, match="cannot suspend"):
            await backend.suspend(fresh)
        with pytest.raises(UsageError, match="cannot resume"):
            await backend.resume(fresh)


@pytest.mark.anyio
async def test_an_image_that_nobody_takes_is_refused_before_anything_is_made():
    """So is one that its only taker cannot use; the error names the member."""
    backend = SeveralBackends({"a": open_backend("local")}, images={"a": ["swe/*"]})
    with pytest.raises(ConfigurationError, match="no member takes image 'host'; there are a"):
        await backend.validate([HOST])
    with pytest.raises(ConfigurationError, match=r"member 'a': .*swe/none"):
        await backend.validate([SandboxSpec(image="swe/none")])


@pytest.mark.anyio
async def test_receipts_and_checks_are_those_of_the_members():
    """Each with its name before it; and what is left is removed by each kind."""
    backend = SeveralBackends({"a": open_backend("local")})
    assert {"a"} == {check.name.partition(":")[0] for check in await backend.examine()}
    receipt = backend.receipt()["members"]["a"]
    assert ("local", backend.members["a"].run_id) == (receipt["backend"], receipt["run_id"])
    ended = {"run_id": "x", "members": {}, "created": [], "ended": True}
    assert [] == await SeveralBackends.remove_leftovers(ended)


def test_what_it_promises_is_what_every_member_can_keep():
    """The least life, the longest time to make one, all creates together; each is told how many to expect."""
    a, b = FakeBackend(), FakeBackend()
    b.default_create_timeout = 500.0
    backend = SeveralBackends({"a": a, "b": b})
    told = []
    a.expect = b.expect = told.append
    backend.expect(7)
    assert [7, 7] == told
    assert (500.0, 8, None) == (
        backend.default_create_timeout,
        backend.default_creates_in_flight,
        backend.guaranteed_life,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"members": {}}, "at least one member"),
        ({"weights": {"b": 1.0}}, "no member 'b'"),
        ({"weights": {"a": 0.0}}, "weight of 'a'"),
        ({"images": {"a": "swe/*"}}, "should be a list"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, words):
    """Before anything is made."""
    with pytest.raises(ConfigurationError, match=words):
        SeveralBackends(**{"members": {"a": FakeBackend()}, **arguments})


def test_one_backend_is_one_member():
    """It could not be run twice."""
    one = FakeBackend()
    with pytest.raises(ConfigurationError, match="cannot be two members"):
        SeveralBackends({"a": one, "b": one})
