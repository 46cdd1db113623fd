# SPDX-License-Identifier: Apache-2.0
"""One list and one watch for everybody, and how nothing stays missed. In virtual time."""

from __future__ import annotations

import copy

import anyio
import pytest
from trio.testing import MockClock

from agentsandbox.backends.kubernetes.watch import Reflector, backoff
from agentsandbox.errors import ApiUnavailable, Conflict, NotFound, PermissionDenied, Throttled

pytestmark = pytest.mark.anyio
PATH = "/api/v1/namespaces/rl/pods"
EXPIRED = {
    "type": "ERROR",
    "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 5 (900)"},
}


@pytest.fixture
def anyio_backend():
    """A clock that jumps to the next timer as soon as nothing else can run."""
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


def pod(uid, version, **status):
    """An object as far as a cache looks at it."""
    return {"metadata": {"uid": uid, "name": f"pod-{uid}", "resourceVersion": str(version)}, "status": status}


def told(changes):
    """Changes in short."""
    return [(change.type.value, change.object["metadata"]["uid"]) for change in changes]


def test_p40_backoff_grows_is_spread_and_honours_the_server():
    """Twice as long each time, up to a limit, never in step, and never sooner than the server asked for."""
    assert [backoff(n, 1.0) for n in (1, 2, 3, 4, 7, 100)] == [0.25, 0.5, 1.0, 2.0, 15.0, 15.0]
    assert backoff(3, 0.0) == 0.5
    assert backoff(1, 0.0, at_least=30.0) == 30.0
    assert 30.0 < backoff(1, 0.7, at_least=30.0) < 31.0


class Cluster:
    """A collection behind an API: lists answer with it, watches replay its history and then wait for more."""

    def __init__(self):
        self.pods = {}
        self.version = 900
        self.history = []
        self.news = anyio.Event()
        self.calls = []
        self.list_errors = []
        self.watch_scripts = []
        self.page = None
        self.cut = anyio.Event()

    def put(self, uid, **status):
        self.version += 1
        kind = "MODIFIED" if uid in self.pods else "ADDED"
        self.pods[uid] = pod(uid, self.version, **status)
        self._tell(kind, self.pods[uid])
        return copy.deepcopy(self.pods[uid])

    def drop(self, uid, *, silently=False):
        self.version += 1
        gone = self.pods.pop(uid)
        gone["metadata"]["resourceVersion"] = str(self.version)
        if not silently:
            self._tell("DELETED", gone)

    def _tell(self, kind, obj):
        self.history.append((self.version, {"type": kind, "object": copy.deepcopy(obj)}))
        self.news.set()
        self.news = anyio.Event()

    async def request(self, method, path, *, params=None):
        await anyio.sleep(0.01)
        self.calls.append(("list", params.get("continue")))
        if self.list_errors:
            raise self.list_errors.pop(0)
        items = [copy.deepcopy(p) for p in self.pods.values()]
        meta = {"resourceVersion": str(self.version)}
        if self.page:
            start = int(params.get("continue") or 0)
            if start + self.page < len(items):
                meta["continue"] = str(start + self.page)
            items = items[start : start + self.page]
        return {"items": items, "metadata": meta}

    async def watch(self, path, *, params):
        self.calls.append(("watch", params["resourceVersion"]))
        assert params["allowWatchBookmarks"] == "true"
        if self.watch_scripts:
            for step in self.watch_scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    return
                if isinstance(step, float):
                    await anyio.sleep(step)
                else:
                    yield copy.deepcopy(step)
        told_until = int(params["resourceVersion"])
        with anyio.move_on_after(float(params["timeoutSeconds"])):
            while True:
                news = self.news
                for version, event in list(self.history):
                    if version > told_until:
                        told_until = version
                        yield copy.deepcopy(event)
                await news.wait()


async def running(tasks, cluster, **options):
    """Start a reflector."""
    reflector = Reflector(cluster, PATH, selector="run=1", **options)
    await tasks.start(reflector.run)
    return reflector


async def test_many_waiters_share_one_watch():
    """However many wait, there is one list and one watch, and each gets its own object."""
    cluster = Cluster()
    got = {}
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)

        async def wait(uid):
            got[uid] = await reflector.wait_for(uid, lambda p: p is not None and p["status"].get("phase") == "Running")

        for i in range(200):
            tasks.start_soon(wait, f"u{i}")
        await anyio.sleep(1)
        assert repr(reflector) == f"<Reflector {PATH} live objects=0 waiting=200 lists=1 watches=1>"
        for i in range(200):
            cluster.put(f"u{i}", phase="Pending")
            cluster.put(f"u{i}", phase="Running")
        await anyio.sleep(1)
        assert repr(reflector) == f"<Reflector {PATH} live objects=200 waiting=0 lists=1 watches=1>"
        tasks.cancel_scope.cancel()

    assert {uid: p["metadata"]["uid"] for uid, p in got.items()} == {f"u{i}": f"u{i}" for i in range(200)}
    assert cluster.calls == [("list", None), ("watch", "900")]


async def test_wait_for_asks_about_what_is_known_first():
    """What is true already needs no news; names work where the UID is not known yet."""
    cluster = Cluster()
    cluster.put("a", phase="Running")
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)

        by_uid = await reflector.wait_for("a", lambda p: True)
        by_name = await reflector.wait_for("pod-a", lambda p: True)
        tasks.cancel_scope.cancel()

    assert by_uid is by_name is reflector.get("a")


async def test_wait_for_tells_of_deletion():
    """A predicate is asked about ``None`` when the object goes, and at once when it went before."""
    cluster = Cluster()
    cluster.put("a")
    cluster.put("b")
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)
        tasks.start_soon(reflector.wait_for, "a", lambda p: p is None)
        await anyio.sleep(1)
        cluster.drop("a")
        await anyio.sleep(1)

        assert await reflector.wait_for("a", lambda p: p is None) is None
        assert reflector.gone("a")["metadata"]["uid"] == "a"
        assert reflector.get("a") is None
        tasks.cancel_scope.cancel()


async def test_wait_for_times_out_and_leaves_nothing():
    """A waiter that gives up or is cancelled is forgotten."""
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, Cluster())
        with pytest.raises(TimeoutError):
            await reflector.wait_for("a", lambda p: True, timeout=5)
        with anyio.move_on_after(5) as scope:
            await reflector.wait_for("a", lambda p: True)

        assert scope.cancelled_caught
        assert "waiting=0" in repr(reflector)
        tasks.cancel_scope.cancel()


async def test_waiters_do_not_outlive_the_watch():
    """When the reflector is stopped, those who wait hear of it, and so do those who come later."""
    failed = []
    async with anyio.create_task_group() as outer:
        async with anyio.create_task_group() as tasks:
            reflector = await running(tasks, Cluster())

            async def wait():
                try:
                    await reflector.wait_for("a", lambda p: True)
                except ApiUnavailable as error:
                    failed.append(str(error))

            outer.start_soon(wait)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        await wait()

    assert failed == ["nobody watches any more"] * 2
    assert "ended" in repr(reflector)


async def test_subscribers_hear_every_change_of_theirs():
    """One object's or everybody's, until they unsubscribe."""
    cluster = Cluster()
    one, every = [], []
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)
        stop = reflector.subscribe(one.append, uid="a")
        reflector.subscribe(every.append)
        cluster.put("a")
        cluster.put("b")
        cluster.put("a", phase="Running")
        await anyio.sleep(1)
        stop()
        stop()
        cluster.drop("a")
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()

    assert told(one) == [("added", "a"), ("modified", "a")]
    assert told(every) == [("added", "a"), ("added", "b"), ("modified", "a"), ("deleted", "a")]


async def test_p51_expired_event_leads_to_a_list_that_notices_the_deleted():
    """After a 410 in the stream the next watch begins at the list's version, and what went in the gap is told."""
    cluster = Cluster()
    cluster.put("a")
    heard = []
    cluster.watch_scripts = [[1.0, EXPIRED]]
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)
        reflector.subscribe(heard.append)
        cluster.drop("a", silently=True)
        await anyio.sleep(1.1)
        tasks.cancel_scope.cancel()

    assert cluster.calls == [("list", None), ("watch", "901"), ("list", None), ("watch", "902")]
    assert told(heard) == [("deleted", "a")]
    assert reflector.stale_since is None


async def test_p51_expired_status_leads_to_a_list():
    """The same as an HTTP status."""
    cluster = Cluster()
    cluster.watch_scripts = [[Conflict("too old", status=410, reason="Expired")]]
    async with anyio.create_task_group() as tasks:
        await running(tasks, cluster)
        await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()

    assert cluster.calls == [("list", None), ("watch", "900"), ("list", None), ("watch", "900")]


async def test_p51_server_that_always_expires_is_not_hammered():
    """A second 410 in a row is backed off like any failure."""
    cluster = Cluster()
    cluster.watch_scripts = [[copy.deepcopy(EXPIRED)] for _ in range(1000)]
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)
        await anyio.sleep(120)

        assert 5 < reflector.lists < 30
        tasks.cancel_scope.cancel()


async def test_watch_that_ends_in_order_goes_on_without_a_list():
    """The server ends each watch after a while; nothing was missed, so nothing is listed."""
    cluster = Cluster()
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "950"}}}
    cluster.watch_scripts = [[5.0, bookmark, None]]
    async with anyio.create_task_group() as tasks:
        await running(tasks, cluster)
        await anyio.sleep(6)
        tasks.cancel_scope.cancel()

    assert cluster.calls == [("list", None), ("watch", "900"), ("watch", "950")]


async def test_watch_that_ends_at_once_is_a_failure():
    """Something on the path that closes every watch does not make a loop without pause."""
    cluster = Cluster()
    cluster.watch_scripts = [[None] for _ in range(1000)]
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)
        await anyio.sleep(120)

        assert reflector.watches < 30
        assert "as soon as it began" in str(reflector.failure)
        tasks.cancel_scope.cancel()


async def test_silent_watch_is_noticed():
    """A stream that died without a word is replaced after the idle limit, and what it kept to itself is found."""
    cluster = Cluster()
    cluster.watch_scripts = [[1e9]]
    cluster.put("a")
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster, idle=90.0)
        cluster.drop("a", silently=True)
        await anyio.sleep(89)
        assert (reflector.get("a") is None, reflector.lists) == (False, 1)
        await anyio.sleep(2)

        assert (reflector.get("a"), reflector.lists, reflector.watches) == (None, 2, 2)
        assert reflector.stale_since is None
        tasks.cancel_scope.cancel()


async def test_p51_waiters_make_silence_suspicious_sooner():
    """While somebody waits there is a poll as a safety net."""
    cluster = Cluster()
    cluster.watch_scripts = [[1e9]]
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster, idle=1000.0, poll=20.0)
        cluster.put("a", phase="Running")
        started = anyio.current_time()
        await reflector.wait_for("a", lambda p: p is not None)

        assert anyio.current_time() - started <= 41
        tasks.cancel_scope.cancel()


async def test_api_server_that_is_away_only_makes_it_stale():
    """The cache stays, says since when it may be behind, and catches up when the server is back."""
    cluster = Cluster()
    cluster.put("a")
    cluster.watch_scripts = [[5.0, ApiUnavailable("connection broke")]]
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)
        well = anyio.current_time()
        cluster.list_errors = [ApiUnavailable("cannot connect"), PermissionDenied("forbidden"), ApiUnavailable("503")]
        cluster.drop("a", silently=True)
        cluster.put("b")
        await anyio.sleep(5.1)

        assert (reflector.stale_since, str(reflector.failure)) == (well, "connection broke")
        assert reflector.get("a") is not None
        await anyio.sleep(30)
        assert (reflector.stale_since, reflector.failure) == (None, None)
        assert (reflector.get("a"), reflector.get("b")["metadata"]["name"]) == (None, "pod-b")
        tasks.cancel_scope.cancel()


async def test_p40_retry_after_is_a_minimum():
    """The next try comes no sooner than the server asked for."""
    cluster = Cluster()
    cluster.list_errors = [Throttled("slow down", retry_after=60.0)]
    async with anyio.create_task_group() as tasks:
        started = anyio.current_time()
        await running(tasks, cluster)

        assert 60 <= anyio.current_time() - started < 61
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("error", [PermissionDenied("forbidden"), NotFound("no such namespace")])
async def test_first_list_that_is_refused_for_good_is_raised(error):
    """A missing permission is told to whoever starts the watch, not retried for ever."""
    cluster = Cluster()
    cluster.list_errors = [error]

    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            await running(tasks, cluster)
    assert caught.value.exceptions[0] is error


async def test_list_is_taken_in_pages():
    """Large collections come in pieces, and count as one list."""
    cluster = Cluster()
    cluster.page = 2
    for i in range(5):
        cluster.put(str(i))
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)

        assert (len(reflector.objects), reflector.lists) == (5, 1)
        tasks.cancel_scope.cancel()
    assert cluster.calls[:3] == [("list", None), ("list", "2"), ("list", "4")]


async def test_observed_object_is_watched_from_then_on():
    """The answer to a create is news; its deletion is noticed even if the watch never told of either."""
    cluster = Cluster()
    cluster.watch_scripts = [[1e9]]
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster, poll=10.0)
        created = cluster.put("a")
        reflector.observe(created)
        assert reflector.get("a") is created
        cluster.drop("a", silently=True)

        assert await reflector.wait_for("a", lambda p: p is None) is None
        tasks.cancel_scope.cancel()


async def test_version_is_never_the_word_none():
    """A server without versions gets no version in the next watch."""
    cluster = Cluster()
    seen = []

    async def nothing(method, path, *, params=None):
        return {"items": [], "metadata": {"resourceVersion": None}}

    async def watch(path, *, params):
        seen.append(params["resourceVersion"])
        await anyio.sleep_forever()
        yield {}

    cluster.request, cluster.watch = nothing, watch
    async with anyio.create_task_group() as tasks:
        await running(tasks, cluster)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()

    assert seen == [None]


async def test_subscriber_that_raises_is_a_bug_that_shows():
    """Nothing is swallowed: the owner's task group ends with it."""
    cluster = Cluster()

    def wrong(_):
        raise RuntimeError("bug")

    with pytest.raises(ExceptionGroup) as caught:
        await watch_with(wrong, cluster)
    assert caught.value.subgroup(RuntimeError) is not None


async def watch_with(callback, cluster):
    """Let a subscriber hear of one change."""
    async with anyio.create_task_group() as tasks:
        reflector = await running(tasks, cluster)
        reflector.subscribe(callback)
        cluster.put("a")
        await anyio.sleep(1)
