# SPDX-License-Identifier: Apache-2.0
"""
How many Pods batches take on a real cluster, and what is made of them again.

Counts are asserted; times are printed, for ``pytest -s``.
"""

from __future__ import annotations

import json
import statistics
import sys

import anyio
import pytest

from agentsandbox import Episode, ResetPolicy, SandboxPool
from agentsandbox.errors import ProvisionError
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.reset import baseline

from .conftest import CONTEXT, NAMESPACE, options, sh

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

PLANT = "test ! -e /tmp/used && test ! -e used && touch /tmp/used used"
"""Succeeds where nobody was before."""

ROLLOUT = f"""
async def solve(sandbox, episode):
    return float((await sandbox.exec({PLANT!r})).exit_code == 0)
"""


def say(text):
    """Show a figure to who asked for it."""
    sys.stdout.write(f"{text}\n")


async def solve(sandbox, _episode):
    """Leave something behind, and be right only if nobody else did."""
    return float((await sandbox.exec(PLANT)).exit_code == 0)


class Seen:
    """What a pool told."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    def of(self, name):
        """Return the events of a name."""
        return [event for event in self.events if event.name == name]

    def resets(self):
        """Count verified resets by rung."""
        rungs = [event.data["rung"] for event in self.of("sandbox.reset") if event.data["verified"]]
        return {rung: rungs.count(rung) for rung in sorted(set(rungs))}


async def batch(images, *, rollouts, concurrency, sizes, **more):
    """Run so many rollouts of each image; return the result, what the pool says, what it told, and seconds."""
    seen = Seen()
    episodes = [Episode(id=f"{image}-{n}", image=image) for image in images for n in range(rollouts)]
    start = anyio.current_time()
    async with SandboxPool(
        "kubernetes",
        images=dict.fromkeys(images, sizes),
        rollout=solve,
        parallelism=concurrency,
        max_sandboxes=concurrency,
        spares=0,
        sink=seen,
        backend_options=options(**more.pop("backend", {})),
        **more,
    ) as pool:
        result = await pool.rollout(episodes)
        seconds = anyio.current_time() - start
        say(f"{len(episodes)} episodes, {len(images)} images: {seconds:.2f} s, {seen.resets()}, {pool.statistics()}")
        for event in (*seen.of("sandbox.not_recycled"), *seen.of("sandbox.failed"), *seen.of("sandbox.lost")):
            say(f"{event.name} {dict(event.data)}")
        return result, pool.statistics(), seen


async def test_forty_episodes_take_eight_pods(image, second_image):
    """40 episodes over 2 images, 8 at once, are done by 8 Pods, and each finds a sandbox that nobody used."""
    result, counts, seen = await batch([image, second_image], rollouts=20, concurrency=8, sizes=4)

    assert (1.0,) * 40 == result.rewards
    assert 8 == counts.created_total == len(seen.of("sandbox.created"))
    assert sum(seen.resets().values()) >= 32
    assert [] == seen.of("sandbox.not_recycled")


async def test_sixteen_images_take_eight_pods(images):
    """64 episodes over 16 images, 8 at once and one of each image, are done by 8 Pods whose image changes in place."""
    assert 16 == len(set(images))
    result, counts, seen = await batch(images, rollouts=4, concurrency=8, sizes=1)

    assert (1.0,) * 64 == result.rewards
    if not counts.recycled_total - seen.resets().get("files", 0):
        pytest.skip("the server does not know the rule RestartAllContainers")
    assert 8 == counts.created_total - len(backed_off(seen))
    assert len(backed_off(seen)) <= 2


def backed_off(seen):
    """
    Return what was made anew because the kubelet backed off.

    One that has no time may hear of the new image and of the container's end apart, and does so then.
    """
    return [event for event in seen.of("sandbox.not_recycled") if "CrashLoopBackOff" in event.data["error"]]


async def test_without_a_change_in_place_sixteen_images_take_sixteen_pods(images):
    """Where containers cannot be made anew, there is one Pod for each image, and never more than 8 at once."""
    result, counts, seen = await batch(images, rollouts=4, concurrency=8, sizes=1, backend={"reuse": False})

    assert (1.0,) * 64 == result.rewards
    assert {"files"} == set(seen.resets())
    assert 16 >= counts.created_total


async def test_a_run_over_twelve_images_takes_four_pods(images, tmp_path):
    """The command line runs 48 tasks over 12 images, 4 at once, with 4 Pods."""
    (tmp_path / "mine.py").write_text(ROLLOUT)
    tasks = [{"id": f"{image}-{n}", "image": image} for image in images[:12] for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    command = [sys.executable, "-m", "agentsandbox.cli", "run", "--backend", "kubernetes", "--context", CONTEXT]
    command += ["--namespace", NAMESPACE, "--run-as-root", "--output", "out", "--tasks", "tasks.jsonl"]
    command += ["--rollout", "mine:solve", "--parallelism", "4"]
    start = anyio.current_time()
    done = await anyio.run_process(command, cwd=tmp_path, check=False)
    say(f"48 tasks over 12 images: {anyio.current_time() - start:.2f} s")

    assert 0 == done.returncode, done.stdout.decode() + done.stderr.decode()
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert (48, 48.0) == (results["successful_episodes"], results["reward_sum"])
    pods = json.loads((tmp_path / "out/pods.json").read_text())
    pods = pods if isinstance(pods, list) else pods.get("items", pods)
    assert 4 == len(pods)


async def test_thirty_restarts_in_a_row(image):
    """One Pod serves 31 leases, each in a container of its own."""
    seen, seconds, places = Seen(), [], set()
    async with SandboxPool(
        "kubernetes",
        images={image: 1},
        spares=0,
        max_sandboxes=1,
        reset=ResetPolicy(rungs=("restart", "replace")),
        sink=seen,
        backend_options=options(),
    ) as pool:
        lease = await pool.acquire(image)
        for _ in range(30):
            assert 0 == (await lease.exec(PLANT)).exit_code
            places.add((lease.identity.uid, lease.identity.instance))
            start = anyio.current_time()
            await lease.release()
            lease = await pool.acquire(image)
            seconds.append(anyio.current_time() - start)
        counts = pool.statistics()
        await lease.release()
    say(f"restart: median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s")
    if "restart" not in seen.resets():
        pytest.skip("the server does not know the rule RestartAllContainers")
    assert (1, 30) == (counts.created_total, counts.recycled_total)
    assert 30 == len(places)
    assert 1 == len({uid for uid, _ in places})


async def test_sixty_changes_of_the_image(running, image, second_image):
    """One Pod serves two images in turn, 60 times; a kubelet without time may back off, and is given another Pod."""
    seconds, failures = [], 0
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        if not backend.can_recycle(sandbox):
            pytest.skip("the server does not know the rule RestartAllContainers")
        for number in range(60):
            spec, uid = SandboxSpec(image=(second_image, image)[number % 2]), sandbox.uid
            start = anyio.current_time()
            try:
                sandbox = await backend.change_image(sandbox, spec)
            except ProvisionError as error:
                assert "CrashLoopBackOff" in str(error)  # noqa: PT017 - what it must not be is anything else
                failures += 1
                await backend.destroy(sandbox)
                sandbox = await backend.create(spec, f"sb-{number + 2}")
            else:
                seconds.append(anyio.current_time() - start)
                assert (uid, spec) == (sandbox.uid, sandbox.spec)
            assert 0 == (await sh(sandbox, PLANT)).exit_code
    say(f"image change: median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s, {failures} backed off")
    assert failures <= 6


CHANGES = {
    "a new file": "d=$(find /usr -xdev -mindepth 3 -type d | tail -1); touch $d/planted",
    "contents": "f=$(find /usr -xdev -mindepth 3 -type f -size +0 | tail -1); printf X | dd of=$f conv=notrunc",
    "contents, with the old time": (
        "f=$(find /usr -xdev -mindepth 3 -type f -size +0 | tail -1); cp -p $f /tmp/f; echo >> $f; touch -r /tmp/f $f"
    ),
    "a removed file": "rm $(find /usr -xdev -mindepth 3 -type f | tail -1)",
    "a mode": "chmod 4755 $(find /usr -xdev -mindepth 3 -type f | tail -1)",
    "a hard link": "f=$(find /usr -xdev -mindepth 3 -type f | tail -1); ln $f $f.planted",
    "a copy of a directory": "d=$(find /usr -xdev -mindepth 3 -type d | tail -1); cp -a $d $d.planted",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_change_deep_in_the_image_is_found(running, image, change):
    """Directories of the image that nobody touched are not looked into, and whatever is changed below one shows."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        taken, why = await baseline.take(sandbox.session, ResetPolicy())
        assert taken is not None, why
        result = await sh(sandbox, change)
        assert 0 == result.exit_code, result.stderr

        _, report = await baseline.restore(sandbox.session, taken, timeout=60)

        assert not report.verified
        assert report.reason.startswith("changed outside of the scope: /usr/")


async def test_what_is_not_looked_into_is_as_it_was(running, image):
    """Nothing is found where nothing was changed, time after time, and the scope is restored."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        taken, why = await baseline.take(sandbox.session, ResetPolicy())
        assert taken is not None, why
        for _ in range(5):
            await sandbox.session.exec(Command(command="echo x > left; find / -xdev -type f -exec cat {} + >/dev/null"))
            taken, report = await baseline.restore(sandbox.session, taken, timeout=60)
            assert (True, "") == (report.verified, report.reason)
            assert ["left"] == [path.rpartition("/")[2] for path in report.changed]
