# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from agentsandbox.client import Lease, SandboxClient
from agentsandbox.errors import (
    AcquireTimeout,
    CommandFailed,
    CommandNotFound,
    CommandTimeout,
    ConfigurationError,
    PoolClosed,
    ProtocolError,
    ResetFailed,
    SandboxLost,
    StreamBroken,
    UsageError,
)
from agentsandbox.models.timing import StartKind
from agentsandbox.testing.virtualtime import virtual_time

from .warmpool.fake_backend import FakeBackend

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time: nothing here uses sockets, threads or processes."""
    return virtual_time(request.param)


@asynccontextmanager
async def opened(backend=None, **options):
    """A client whose sandboxes are ready; afterwards nothing is left."""
    backend = backend or FakeBackend()
    options.setdefault("images", {"host": 1})
    async with SandboxClient(backend, **options) as client:
        await anyio.wait_all_tasks_blocked()
        yield client
    assert set() == backend.alive


@asynccontextmanager
async def leased(backend=None, **options):
    """A lease of such a client."""
    async with opened(backend, **options) as client:
        lease = await client.acquire("host", episode="ep-1", attempt=2)
        yield lease, client.backend.sandboxes[lease.sandbox]
        await lease.release()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": {}}, r"^images is empty; name at least one, such as images=\{'host': 8\}, or give max_sandboxes="),
        ({"images": "host"}, r"^images is a mapping or a collection of names, not one string; use \['host'\]$"),
        ({"images": {"host": 0}}, "^the size of image 'host' must be a whole number of at least 1, not 0$"),
        ({"images": {"host": 1.5}}, "^the size of image 'host' must be a whole number of at least 1, not 1.5$"),
        ({"images": {"host": True}}, "not True$"),
        ({"images": {"host": None}}, "not None$"),
        ({"images": {"": 1}}, "^an image is a name such as 'host', not ''$"),
        ({"images": [7]}, "^an image is a name such as 'host', not 7$"),
        ({"spares": -1}, "^spares must be a whole number of at least 0, not -1$"),
        ({"spares": "2"}, "^spares must be a whole number of at least 0, not '2'$"),
        ({"max_sandboxes": 0}, "^max_sandboxes must be a whole number of at least 1, not 0$"),
        ({"acquire_timeout": 0}, "^acquire_timeout must be a number above 0 seconds, not 0$"),
        ({"create_timeout": 0}, "^create_timeout must be a number above 0 seconds, not 0$"),
        ({"acquire_timeout": "1"}, "^acquire_timeout must be a number above 0 seconds, not '1'$"),
        ({"create_rate": -2.0}, "^create_rate must be a number above 0 a second, not -2.0$"),
        ({"backend_options": {"x": 1}}, "^backend_options are for a backend given by its name"),
        ({"backend": "docker"}, "^unknown backend 'docker'; there are local, kubernetes, agent-sandbox, simulated$"),
    ],
    ids=str,
)
def test_bad_configuration_is_refused_before_anything_is_created(options, message):
    """The error names the value, and what would be right."""
    arguments = {"backend": FakeBackend(), "images": {"host": 1}, **options}
    with pytest.raises(ConfigurationError, match=message):
        SandboxClient(arguments.pop("backend"), **arguments)


async def test_an_unknown_image_is_refused_by_the_backend_before_anything_is_created():
    """Entering the client validates first."""
    backend = FakeBackend()
    backend.unknown = {"nope"}
    with pytest.raises(ConfigurationError, match="no image 'nope'"):
        async with SandboxClient(backend, images=["host", "nope"]):
            pass

    assert [] == backend.attempts


async def test_names_alone_mean_one_of_each():
    """An iterable of images: one lease of each at once."""
    async with opened(images=iter(["a", "b"])) as client:
        assert {"a": 1, "b": 1} == client.images
        assert "<SandboxClient [fake | 0 leased, 2 ready, 0 creating | 0 waiting]>" == repr(client)


async def test_spares_default_to_what_the_backend_says():
    """Eight places and the backend's eight spares: sixteen ready; an explicit number wins."""
    async with opened(FakeBackend(spares=8), images={"host": 8}) as client:
        assert "<SandboxClient [fake | 0 leased, 16 ready, 0 creating | 0 waiting]>" == repr(client)
    async with opened(FakeBackend(spares=8), images={"host": 8}, spares=1) as client:
        assert 9 == client.statistics().ready


async def test_max_sandboxes_caps_everything_alive():
    """Six are wanted, four allowed."""
    async with opened(images={"host": 6}, max_sandboxes=4) as client:
        assert 4 == client.statistics().ready == client.statistics().alive


async def test_what_is_asked_for_reaches_the_backend():
    """User, working directory and environment are part of every sandbox's spec."""
    async with opened(user="agent", workdir="/src", env={"A": "1"}, create_rate=1000.0) as client:
        (sandbox,) = client.backend.sandboxes.values()

        assert ("host", "agent", "/src", {"A": "1"}) == (
            sandbox.spec.image,
            sandbox.spec.user,
            sandbox.spec.workdir,
            sandbox.spec.env,
        )
        assert sandbox.name.startswith(f"sb-{client.run_id}-")


async def test_a_client_is_entered_once_and_used_while_it_is_open():
    """Before, after and twice are usage errors."""
    client = SandboxClient(FakeBackend(), images=["host"])
    assert "<SandboxClient [fake | 0 leased, 0 ready, 0 creating | 0 waiting]>" == repr(client)
    with pytest.raises(UsageError, match="not open"):
        await client.acquire("host")
    async with client:
        pass
    with pytest.raises(PoolClosed):
        await client.acquire("host")
    with pytest.raises(UsageError, match="once"):
        async with client:
            pass


async def test_an_image_that_was_not_declared_is_refused():
    """The error names those that were, and how to add others."""
    message = r"^image 'c' was not declared; this client has 'a', 'b'; announce\(\) adds others$"
    async with opened(images=["a", "b"]) as client:
        with pytest.raises(ConfigurationError, match=message):
            await client.acquire("c")
        with pytest.raises(ConfigurationError, match="timeout must be a number above 0"):
            await client.acquire("a", timeout=-1)


async def test_many_declared_images_are_not_all_named():
    """Ten names and a number."""
    async with opened(images=[f"i{n}" for n in range(12)], max_sandboxes=1) as client:
        with pytest.raises(ConfigurationError, match="'i8', 'i9' and 2 more; "):
            await client.acquire("c")


async def test_acquire_timeout_is_the_clients_or_the_calls():
    """The client's default applies when nothing is said."""
    async with opened(acquire_timeout=7.0) as client:
        lease = await client.acquire("host")
        for options, seconds in (({}, 7.0), ({"timeout": 2.0}, 2.0)):
            began = anyio.current_time()
            with pytest.raises(AcquireTimeout, match=rf"^no sandbox of image 'host' within {seconds:g} s: 1 leased"):
                await client.acquire("host", **options)
            assert seconds == pytest.approx(anyio.current_time() - began)
        await lease.release()


async def test_a_lease_says_what_it_is():
    """Image, sandbox, identity, capabilities, node and how it was come by."""
    async with leased() as (lease, sandbox):
        assert "host" == lease.image
        assert sandbox.name == lease.sandbox
        assert f"{sandbox.name}.1" == lease.id
        assert sandbox.identity == lease.identity
        assert sandbox.capabilities == lease.capabilities
        assert "node-1" == lease.node
        assert 1 == lease.generation
        assert StartKind.WARM is lease.start
        assert ("ep-1", 2) == (lease.episode, lease.attempt)
        assert f"<Lease '{sandbox.name}.1' of 'host' [leased, 0 commands]>" == repr(lease)


async def test_exec_returns_the_result_and_logs_it():
    """The options reach the runner; the log has command, exit code, times and sizes."""
    async with leased() as (lease, sandbox):
        await anyio.sleep(2)
        result = await lease.exec(["echo", "a b"], cwd="x", env={"K": "v"}, user="u", timeout=5, merge=True)

        (request,) = sandbox.session.requests
        assert (("echo", "a b"), "x", {"K": "v"}, "u", 5, True) == (
            request.command,
            request.cwd,
            request.env,
            request.user,
            request.timeout,
            request.merge,
        )
        assert sandbox.name == result.text
        (entry,) = lease.commands
        assert {
            "command": "echo 'a b'",
            "exit_code": 0,
            "started": pytest.approx(2.0),
            "wall": 0.25,
            "truncated": False,
            "sizes": {"stdout": 0, "stderr": 0},
        } == entry


async def test_long_commands_are_shortened_in_the_log_only():
    """500 characters are kept; the sandbox gets all of it."""
    async with leased() as (lease, sandbox):
        await lease.exec("x" * 10_000)

        assert "x" * 499 + "…" == lease.commands[0]["command"]
        assert 10_000 == len(sandbox.session.requests[0].command)


async def test_p56_ttfc_counts_from_the_call_of_acquire_to_the_first_command():
    """Queue and start are its stages; later commands do not change it."""
    backend = FakeBackend()
    backend.create_delay = 4.0
    async with SandboxClient(backend, images=["host"]) as client:
        lease = await client.acquire("host", episode="ep-1")
        await anyio.sleep(3)
        assert (True, pytest.approx(7.0)) == (lease.ttfc.censored, lease.ttfc.seconds)
        assert {"queue": pytest.approx(4.0)} == lease.ttfc.stages

        await lease.exec("true")
        await anyio.sleep(5)
        await lease.exec("true")
        sample = lease.ttfc

    assert not sample.censored
    assert 7.0 == pytest.approx(sample.seconds)
    assert {"queue": pytest.approx(4.0), "start": pytest.approx(3.0)} == sample.stages
    assert (StartKind.COLD, "ep-1", "host", lease.sandbox) == (
        sample.start,
        sample.episode,
        sample.image,
        sample.sandbox,
    )


async def test_p56_a_lease_without_a_command_is_censored_at_its_release():
    """Its sample is the time that was waited in vain, and grows no more."""
    async with leased() as (lease, _):
        await anyio.sleep(3)
        await lease.release()
        await anyio.sleep(9)

        assert (True, pytest.approx(3.0)) == (lease.ttfc.censored, lease.ttfc.seconds)


async def test_check_turns_an_exit_code_into_an_error():
    """With ``check`` the result comes as an exception, and is logged as a result."""
    async with leased() as (lease, sandbox):
        sandbox.exit_code = 3
        assert 3 == (await lease.exec("false")).exit_code
        with pytest.raises(CommandFailed) as caught:
            await lease.exec("false", check=True)

        assert 3 == caught.value.result.exit_code
        assert [3, 3] == [entry["exit_code"] for entry in lease.commands]


@pytest.mark.parametrize("command", [5, None, {"a": 1}], ids=str)
async def test_a_command_is_a_string_or_a_list(command):
    """Anything else is refused before it reaches the sandbox."""
    async with leased() as (lease, sandbox):
        with pytest.raises(ConfigurationError, match="a command is a string or a list of strings"):
            await lease.exec(command)
        assert [] == sandbox.session.requests
        assert () == lease.commands


@pytest.mark.parametrize(
    "error",
    [CommandTimeout("total", 1.0, 1.1), CommandNotFound("no such file", subject="x")],
    ids=lambda e: type(e).__name__,
)
async def test_an_error_of_the_command_leaves_the_sandbox_good(error):
    """It is logged, and the next command runs in the same sandbox."""
    async with leased() as (lease, sandbox):
        sandbox.errors.append(error)
        with pytest.raises(type(error)):
            await lease.exec("x")
        await lease.exec("true")

        assert [f"{type(error).__name__}: {error}", 0] == [e.get("error", e.get("exit_code")) for e in lease.commands]
        assert lease.lost is None


async def test_p55_a_sandbox_that_was_replaced_before_the_command_runs_nothing():
    """The fence is checked first."""
    async with leased() as (lease, sandbox):
        sandbox.dead = SandboxLost("replaced", "uid changed")
        with pytest.raises(SandboxLost, match=r"^replaced: uid changed$"):
            await lease.exec("true")

        assert [] == sandbox.session.requests
        assert lease.ttfc.censored
        assert "SandboxLost: replaced: uid changed" == lease.commands[0]["error"]


@pytest.mark.parametrize("own_error", [None, CommandTimeout("total", 1.0, 1.1)], ids=["result", "timeout"])
async def test_p55_a_result_from_the_wrong_side_of_the_fence_is_no_result(own_error):
    """The sandbox was replaced while the command ran: neither its exit code nor its error is believed."""
    async with leased() as (lease, sandbox):

        class DyingDeque(list):
            def __bool__(self):
                sandbox.dead = SandboxLost("restarted", "1 → 2")
                return own_error is not None

            def popleft(self):
                return own_error

        sandbox.errors = DyingDeque()
        with pytest.raises(SandboxLost, match=r"^restarted: 1 → 2$"):
            await lease.exec("true")

        assert ["SandboxLost: restarted: 1 → 2"] == [entry["error"] for entry in lease.commands]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StreamBroken("stream", "1006"), "stream"),
        (SandboxLost("oom_killed"), "oom_killed"),
        (ProtocolError("bad frame"), "broken"),
    ],
    ids=["stream", "lost", "protocol"],
)
async def test_p60_a_lost_sandbox_is_never_used_again(error, reason):
    """The lease is dead: every later call fails alike, and the release has it destroyed."""
    async with opened() as client:
        lease = await client.acquire("host")
        sandbox = client.backend.sandboxes[lease.sandbox]
        sandbox.errors.append(error)
        with pytest.raises(type(error)):
            await lease.exec("true")
        for call in (lease.exec("true"), lease.read_file("x"), lease.write_file("x", ""), lease.reset()):
            with pytest.raises(SandboxLost, match=rf"^{reason}"):
                await call
        assert not await lease.alive()
        assert reason == lease.lost.reason
        assert "<SandboxClient [fake | 0 leased, 0 ready, 0 creating, 1 lost | 0 waiting]>" == repr(client)
        assert repr(lease).endswith("[lost, 1 commands]>")
        assert [] == client.backend.destroy_calls

        await lease.release()
        await anyio.wait_all_tasks_blocked()
        assert [lease.sandbox] == client.backend.destroy_calls
        assert reason == lease.lost.reason
        fresh = await client.acquire("host")
        assert fresh.sandbox != lease.sandbox


async def test_release_is_idempotent_and_ends_everything():
    """A second release does nothing; every other use is a usage error."""
    async with opened() as client:
        async with await client.acquire("host") as lease:
            await client.exec(lease, "true")
        await lease.release()
        await client.release(lease)
        for call in (lease.exec("true"), lease.open_process("cat"), lease.read_file("x"), lease.reset()):
            with pytest.raises(UsageError, match=rf"^lease {lease.id} was released; acquire another one$"):
                await call
        assert lease.released
        assert not await lease.alive()
        assert repr(lease).endswith("[released, 1 commands]>")
        await anyio.wait_all_tasks_blocked()
        assert [lease.sandbox] == client.backend.destroy_calls


async def test_a_command_that_ends_after_the_release_is_no_result():
    """Released by one task while another executes: the command's outcome is not returned."""
    async with leased() as (lease, sandbox), anyio.create_task_group() as group:
        sandbox.block = anyio.Event()

        async def execute():
            with pytest.raises(UsageError, match="released or reset while it was in use"):
                await lease.exec("true")

        group.start_soon(execute)
        await anyio.wait_all_tasks_blocked()
        await lease.release()
        sandbox.block.set()


async def test_a_cancelled_command_is_logged():
    """The log tells that it was running when it was cancelled."""
    async with leased() as (lease, sandbox):
        sandbox.block = anyio.Event()
        with anyio.move_on_after(5):
            await lease.exec("sleep 60")

        assert lease.commands[0]["error"].startswith("Cancelled")
        assert 5.0 == pytest.approx(lease.commands[0]["wall"])


async def test_reset_gives_a_fresh_sandbox_under_the_same_lease():
    """Generation, sandbox and identity change; id, place, log and first command stay."""
    async with leased() as (lease, old):
        await lease.exec("true")
        ttfc, name = lease.ttfc, lease.id
        report = await lease.reset()

        assert ("replace", True, (), ()) == (report.rung, report.verified, report.changed, report.killed)
        assert "jail is not offered; files is not offered; restart is not offered" == report.reason
        assert 0 <= report.seconds < 1
        assert 2 == lease.generation
        assert lease.sandbox != old.name
        assert lease.identity != old.identity
        assert (name, ttfc) == (lease.id, lease.ttfc)
        assert lease.sandbox == (await lease.exec("true")).text
        assert 2 == len(lease.commands)


async def test_reset_keeps_the_place_in_the_queue():
    """Somebody waits for the only place, and goes on waiting."""
    async with leased() as (lease, _), anyio.create_task_group() as group:
        client_lease = lease
        engine = client_lease._engine
        got = []

        async def wait():
            got.append(await engine.acquire("host", timeout=None))

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await lease.reset()
        assert [] == got
        await lease.release()


async def test_nothing_can_be_done_while_it_is_reset():
    """Neither a command nor a second reset; the release wins over the reset."""
    async with leased() as (lease, _), anyio.create_task_group() as group:
        backend = lease._engine.backend
        backend.create_delay = 5.0

        async def reset():
            with pytest.raises(UsageError, match="released while it was reset"):
                await lease.reset()

        group.start_soon(reset)
        await anyio.sleep(1)
        assert repr(lease).endswith("[resetting, 0 commands]>")
        assert not await lease.alive()
        for call in (lease.exec("true"), lease.reset()):
            with pytest.raises(UsageError, match="is being reset"):
                await call
        await lease.release()


async def test_a_reset_that_fails_kills_the_lease():
    """No fresh sandbox in time: ResetFailed, and the lease is dead, not half alive."""
    async with opened() as client:
        lease = await client.acquire("host", timeout=3.0)
        client.backend.create_delay = 100.0
        with pytest.raises(ResetFailed, match=r"^no fresh sandbox of 'host' could be had: no sandbox of image"):
            await lease.reset()
        with pytest.raises(SandboxLost, match="reset did not come to its end"):
            await lease.exec("true")
        await lease.release()
        assert 0 == client.statistics().leased


async def test_a_cancelled_reset_leaks_nothing():
    """The old sandbox is removed, the place is free, the lease is dead."""
    async with opened() as client:
        lease = await client.acquire("host")
        client.backend.create_delay = 100.0
        with anyio.move_on_after(1):
            await client.reset(lease)
        await lease.release()
        client.backend.create_delay = 0.0
        await anyio.sleep(200)

        assert "<SandboxClient [fake | 0 leased, 1 ready, 0 creating | 0 waiting]>" == repr(client)


async def test_closing_the_client_ends_a_reset_with_pool_closed():
    """Not ResetFailed: nothing is wrong with the sandbox."""
    errors = []
    async with anyio.create_task_group() as group:
        async with SandboxClient(FakeBackend(), images=["host"]) as client:
            lease = await client.acquire("host")
            client.backend.create_block = anyio.Event()

            async def reset():
                try:
                    await lease.reset()
                except PoolClosed as error:
                    errors.append(error)

            group.start_soon(reset)
            await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
    assert 1 == len(errors)


async def test_a_lease_outlives_its_client_harmlessly():
    """Afterwards it can be released, and nothing else."""
    async with opened() as client:
        lease = await client.acquire("host")
    with pytest.raises(UsageError, match="of a client that was closed"):
        await lease.exec("true")
    await lease.release()


async def test_a_lease_that_is_dropped_is_given_back_with_a_warning():
    """Garbage collection hands the sandbox to who waits for it, and says whose fault it was."""
    async with opened() as client:
        lease = await client.acquire("host")
        name, holders = lease.sandbox, [lease]
        del lease
        with pytest.warns(ResourceWarning, match=rf"^the lease of sandbox {name} was never released"):
            holders.clear()
        fresh = await client.acquire("host", timeout=5.0)

        assert fresh.sandbox != name
        await fresh.release()


async def test_a_lease_dropped_after_its_client_was_closed_is_dropped_silently():
    """Its sandbox was removed with the client: there is nothing to give back."""
    async with opened() as client:
        lease = await client.acquire("host")
    del lease
    gc.collect()


async def test_a_released_lease_is_dropped_silently():
    """Nothing is said about what was released, reset or not."""
    async with opened() as client:
        lease = await client.acquire("host")
        await lease.reset()
        await lease.release()
        del lease
        gc.collect()


async def test_files_go_through_the_fence_too():
    """Text is written as UTF-8, bytes as they are; Python's own errors leave the sandbox good."""
    async with leased() as (lease, sandbox):
        await lease.write_file("a", "ü")
        await lease.write_file("b", b"\xff", mode=0o600)
        assert (b"\xc3\xbc", b"\xff") == (await lease.read_file("a"), await lease.read_file("b", limit=10))
        with pytest.raises(FileNotFoundError, match="nope"):
            await lease.read_file("nope")
        await lease.upload_dir("/src", "t")
        await lease.download_dir("/out", "d")
        assert {"t": b"/src", "d": b"/out"} == {key: sandbox.session.files[key] for key in "td"}
        assert await lease.alive()
        assert () == lease.commands
        assert lease.ttfc.censored

        sandbox.dead = SandboxLost("died")
        with pytest.raises(SandboxLost):
            await lease.read_file("nope")


async def test_alive_asks_the_sandbox():
    """One that does not answer is not alive now; one that is another one is not used again."""
    async with leased() as (lease, sandbox):
        assert await lease.alive()
        sandbox.silent = True
        assert not await lease.alive()
        sandbox.silent = False
        assert await lease.alive()
        await lease.exec("true")
        sandbox.dead = SandboxLost("evicted")
        assert not await lease.alive()
        with pytest.raises(SandboxLost, match="evicted"):
            await lease.exec("true")


async def test_open_process_talks_to_a_live_command():
    """It counts as the first command, goes through the fence at its end, and is logged once."""
    async with leased() as (lease, sandbox):
        await anyio.sleep(1)
        async with await lease.open_process(["cat"], cwd="x") as process:
            assert not lease.ttfc.censored
            assert ("in", "out", "err") == (process.stdin, process.stdout, process.stderr)
            assert "<LeasedProcess [running]>" == repr(process)
            assert 0 == (await process.wait()).exit_code
            assert 0 == (await process.wait()).exit_code
            await process.kill()
            assert "<LeasedProcess [exit code 0]>" == repr(process)
        assert [("cat", 0)] == [(entry["command"], entry["exit_code"]) for entry in lease.commands]

        async with await lease.open_process("cat") as process:
            sandbox.dead = SandboxLost("replaced")
            with pytest.raises(SandboxLost, match="replaced"):
                await process.wait()
        assert "SandboxLost: replaced" == lease.commands[1]["error"]
        assert 2 == len(lease.commands)


async def test_a_process_that_nobody_waits_for_is_logged_when_it_is_left():
    """Neither an exit code nor an error is known: only that it ran, and how long."""
    async with leased() as (lease, _):
        async with await lease.open_process("sleep 60"):
            await anyio.sleep(3)

        (entry,) = lease.commands
        assert ("sleep 60", pytest.approx(3.0)) == (entry["command"], entry["wall"])
        assert {"command", "started", "wall"} == set(entry)


async def test_sinks_hear_the_whole_story():
    """Events of one episode in their order, with sandbox, episode and attempt."""
    events = []
    async with leased(sink=events.append) as (lease, _):
        await lease.exec("true")
        await lease.reset()
        await lease.release()

    mine = [event for event in events if event.episode == "ep-1"]
    assert ["lease.granted", "command.started", "command.ended", "lease.reset", "lease.released"] == [
        e.name for e in mine
    ]
    assert {2} == {event.attempt for event in mine}
    assert "warm" == mine[0].data["start"]
    assert 0 == mine[2].data["exit_code"]


async def test_several_sinks_and_a_refused_acquire():
    """Every sink hears it; a failed acquire is told with its reason and the time waited in vain."""
    one, two = [], []
    async with opened(sink=[one.append, two.append]) as client, await client.acquire("host"):
        with pytest.raises(AcquireTimeout):
            await client.acquire("host", timeout=4.0, episode="ep-9", attempt=1)

    assert one == two
    (refused,) = [event for event in one if event.name == "lease.refused"]
    assert ("ep-9", 1, "host", pytest.approx(4.0)) == (
        refused.episode,
        refused.attempt,
        refused.data["image"],
        refused.data["waited"],
    )
    assert refused.data["error"].startswith("AcquireTimeout: no sandbox of image 'host' within 4 s")


async def test_a_thousand_episodes_share_eight_places():
    """Every sandbox is used once, nobody is passed over, and the limits hold throughout."""
    backend = FakeBackend(spares=8)
    used = []
    async with opened(backend, images={"host": 8}) as client:
        left = iter(range(1000))

        async def work():
            for _ in left:
                async with await client.acquire("host") as lease:
                    used.append((await lease.exec("true")).text)

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(work)
        statistics = client.statistics()

    assert 1000 == len(used) == len(set(used)) == statistics.granted_total
    assert backend.most_alive <= 32
    assert backend.most_in_flight <= 4
    assert isinstance(client, SandboxClient)
    assert Lease.__module__ == "agentsandbox.client.lease"
