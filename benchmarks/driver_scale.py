# SPDX-License-Identifier: Apache-2.0
"""
What one driver process costs that holds thousands of sandboxes, against the API server double in another process.

``python benchmarks/driver_scale.py --sandboxes 4000`` holds so many sandboxes and runs a command in each every
``--every`` seconds. ``--acquires 2000`` then asks a new client for so many sandboxes at once. Prints one JSON object.
What was created is counted by the server, from its own log of requests. Exit code 1 if a limit was exceeded.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs

from agentsandbox import Event, Lease, SandboxClient

IMAGE = "host"
TICK = 0.01
"""Seconds between two looks at how late the event loop is."""

RSS_LIMIT = 300 * 1024
"""Bytes of the driver a sandbox."""

LAG_LIMIT = 0.1
"""Seconds of event-loop lag, 99th percentile."""


@attrs.define
class Double:
    """The API server double in a process of its own."""

    kubeconfig: Path
    log: Path
    process: subprocess.Popen[str]

    def requests(self) -> list[tuple[float, str, str]]:
        """End it and return what it was asked: when, method, path."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=300)
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]


@contextmanager
def double(*, tls: bool) -> Iterator[Double]:
    """Have an API server whose Pods are echo runners."""
    with tempfile.TemporaryDirectory(prefix="driver-scale-") as directory:
        kubeconfig, log = Path(directory, "kubeconfig"), Path(directory, "requests")
        command = [sys.executable, "-m", "agentsandbox.testing.cluster", str(kubeconfig), "--process", "echo-runner"]
        process = subprocess.Popen(
            [*command, "--no-events", "--nodes", "40", "--log", str(log), *(["--tls"] if tls else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("the double did not start")
            yield Double(kubeconfig, log, process)
        finally:
            process.kill()
            process.wait()


@attrs.define
class Asked:
    """When sandboxes were asked for, as the driver has it."""

    times: list[float] = attrs.field(factory=list)

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        if event.name == "sandbox.created":
            self.times.append(event.at)


@attrs.define
class Lag:
    """How late the event loop calls who asked to be called, and what this process itself did meanwhile."""

    busy: list[float] = attrs.field(factory=list)
    samples: list[float] = attrs.field(factory=list)
    pauses: list[float] = attrs.field(factory=list)

    def collecting(self, phase: str, _info: dict[str, int]) -> None:
        """Take in that a collection begins or ends: a callback of the collector."""
        if phase == "start":
            self.pauses.append(-time.thread_time())
        elif self.pauses and self.pauses[-1] < 0:
            self.pauses[-1] += time.thread_time()

    async def watch(self) -> None:
        """Look until cancelled."""
        gc.callbacks.append(self.collecting)
        try:
            while True:
                due, used = time.perf_counter() + TICK, time.thread_time()
                await anyio.sleep(TICK)
                self.samples.append(max(0.0, time.perf_counter() - due))
                self.busy.append(time.thread_time() - used)
        finally:
            gc.callbacks.remove(self.collecting)

    def take(self) -> dict[str, float]:
        """Return what was seen since the last call, in milliseconds."""
        samples, self.samples = sorted(self.samples), []
        pauses, self.pauses = sorted(pause for pause in self.pauses if pause > 0), []
        if not samples:
            return {}
        # A long stop is one late call here, and many for whoever wanted to be called meanwhile.
        wanted = sorted(late - step * TICK for late in samples for step in range(1 + int(late / TICK)))
        # On a machine with a core to spare nobody is called later than by what was computed meanwhile.
        busy, self.busy = sorted(self.busy), []
        return {
            "p50_ms": quantile(samples, 0.5),
            "p99_ms": quantile(samples, 0.99),
            "p99_at_any_time_ms": quantile(wanted, 0.99),
            "max_ms": quantile(samples, 1.0),
            "own_work_p50_ms": quantile(busy, 0.5),
            "own_work_p99_ms": quantile(busy, 0.99),
            "own_work_max_ms": quantile(busy, 1.0),
            "gc_share": round(sum(pauses) / max(1e-9, sum(busy)), 3),
            "gc_max_ms": quantile(pauses or [0.0], 1.0),
        }


def quantile(samples: Sequence[float], share: float) -> float:
    """Return a quantile of sorted seconds, in milliseconds."""
    return round(1000 * samples[max(0, math.ceil(share * len(samples)) - 1)], 2)


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def client(cluster: Double, count: int, options: argparse.Namespace, *, asked: Asked | None = None) -> SandboxClient:
    """Return a client for so many sandboxes and not one more."""
    return SandboxClient(
        "kubernetes",
        images={IMAGE: count},
        spares=0,
        max_sandboxes=count,
        create_rate=options.rate,
        acquire_timeout=None,
        sink=asked or (),
        backend_options={
            "kubeconfig": str(cluster.kubeconfig),
            "max_connections": count + 16,
            "streams": options.streams,
            "requests": {"cpu": "1m", "memory": "1Mi"},
        },
    )


async def hold(cluster: Double, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Hold sandboxes, and run commands in them at a steady pace."""
    count: int = options.sandboxes
    asked, lag, done, failures = Asked(), Lag(), Counter[str](), Counter[str]()
    async with client(cluster, 1, options) as first, await first.acquire(IMAGE) as lease:
        await lease.exec("true")
    base = resident()
    began = time.perf_counter()
    async with client(cluster, count, options, asked=asked) as sandboxes, anyio.create_task_group() as group:
        group.start_soon(lag.watch)
        leases: list[Lease] = []

        async def take() -> None:
            leases.append(await sandboxes.acquire(IMAGE))

        async with anyio.create_task_group() as taking:
            for _ in range(count):
                taking.start_soon(take)
        report["warm_seconds"] = round(time.perf_counter() - began, 1)
        report["lag_warming"] = lag.take()
        if options.gc == "freeze":
            gc.freeze()
        report["resident_idle_kib"] = round((resident() - base) / count / 1024, 1)
        lag.take()

        async def work(lease: Lease, offset: float) -> None:
            await anyio.sleep(offset)
            while True:
                due = anyio.current_time() + options.every
                try:
                    done[f"exit {(await lease.exec('true')).exit_code}"] += 1
                except Exception as error:  # noqa: BLE001 - counted
                    failures[f"{type(error).__name__}: {error}"[:200]] += 1
                await anyio.sleep(max(0.0, due - anyio.current_time()))

        used, began = time.process_time(), time.perf_counter()
        with anyio.move_on_after(options.seconds):
            async with anyio.create_task_group() as working:
                for number, lease in enumerate(leases):
                    working.start_soon(work, lease, options.every * number / count)
        wall = time.perf_counter() - began
        report["lag"] = lag.take()
        report["commands"] = done.total()
        report["outcomes"] = dict(done)
        report["commands_a_second"] = round(done.total() / wall, 1)
        report["driver_cpu_share"] = round((time.process_time() - used) / wall, 3)
        report["resident_kib"] = round((resident() - base) / count / 1024, 1)
        report["failures"] = dict(failures)
        report["statistics"] = str(sandboxes.statistics())
        report["base_mib"] = round(base / 2**20, 1)
        began = time.perf_counter()
        for lease in leases:
            await lease.release(discard=True)
        group.cancel_scope.cancel()
    report["creates"] = pace(asked.times, options.rate)
    report["removal_seconds"] = round(time.perf_counter() - began, 1)


async def storm(cluster: Double, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Ask for sandboxes all at once, and give them back when all are there."""
    count: int = options.acquires
    asked, lag, failures, waits = Asked(), Lag(), Counter[str](), []
    async with client(cluster, count, options, asked=asked) as sandboxes, anyio.create_task_group() as group:
        group.start_soon(lag.watch)
        leases: list[Lease] = []

        async def take() -> None:
            try:
                lease = await sandboxes.acquire(IMAGE)
            except Exception as error:  # noqa: BLE001 - counted
                failures[f"{type(error).__name__}: {error}"[:200]] += 1
            else:
                waits.append(lease.granted_at - lease.requested_at)
                leases.append(lease)

        async with anyio.create_task_group() as taking:
            for _ in range(count):
                taking.start_soon(take)
        report["lag"] = lag.take()
        report["statistics"] = str(sandboxes.statistics())
        report["answered"] = len(leases)
        report["failures"] = dict(failures)
        report["wait_max_seconds"] = round(max(waits), 1)
        for lease in leases:
            await lease.release(discard=True)
        group.cancel_scope.cancel()
    report["creates"] = pace(asked.times, options.rate)


def creates(log: Sequence[tuple[float, str, str]]) -> list[float]:
    """Return when Pods were asked for; dry runs are not in the log's paths."""
    return sorted(at for at, method, path in log if method == "POST" and path.endswith("/pods"))


def pace(times: Sequence[float], rate: float) -> dict[str, Any]:
    """
    Count the most creates in any second, and by how many they were ever ahead of what was configured.

    Each is noted a moment after it was decided on, later by whatever the event loop was late: some may seem to come
    together. That can make none of them seem too early by the count since the first, so that is what is judged.
    """
    burst, most, first, ahead = max(1.0, rate), 0, 0, 0.0
    for number, at in enumerate(times):
        while times[first] < at - 1:
            first += 1
        most = max(most, number - first + 1)
        ahead = max(ahead, number + 1 - burst - rate * (at - times[0]))
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    mean = round(len(times) / span, 1) if span else None
    return {"configured": rate, "mean": mean, "most_in_a_second": most, "ahead_since_the_first": round(ahead, 2)}


def judge(report: dict[str, Any]) -> list[str]:
    """Say what is not as it should be."""
    wrong = []
    if (held := report.get("hold")) is not None:
        if held["failures"]:
            wrong.append(f"commands failed: {held['failures']}")
        if held["resident_kib"] * 1024 > RSS_LIMIT:
            wrong.append(f"{held['resident_kib']} KiB a sandbox")
        if held["lag"]["p99_ms"] > 1000 * LAG_LIMIT:
            wrong.append(f"event-loop lag p99 {held['lag']['p99_ms']} ms")
        if held["pods_created"] != report["sandboxes"]:
            wrong.append(f"{held['pods_created']} Pods for {report['sandboxes']} sandboxes")
    if (asked := report.get("storm")) is not None:
        if asked["failures"]:
            wrong.append(f"acquires failed: {asked['failures']}")
        if asked["pods_created"] != report["acquires"]:
            wrong.append(f"{asked['pods_created']} Pods for {report['acquires']} acquires")
    paces = [part["creates"] for part in (report.get("hold"), report.get("storm")) if part is not None]
    return [*wrong, *(f"creates too fast: {one}" for one in paces if one["ahead_since_the_first"] > 1)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", type=int, default=200, help="how many to hold; 0 is not to")
    parser.add_argument("--acquires", type=int, default=0, help="how many to ask for at once; 0 is not to")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to hold them")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between the commands of one sandbox")
    parser.add_argument("--rate", type=float, default=100.0, help="most creates a second")
    parser.add_argument("--gc", choices=("default", "freeze"), default="default", help="freeze: gc.freeze() once warm")
    parser.add_argument("--tls", action="store_true", help="speak TLS with the double")
    parser.add_argument("--streams", choices=("warm", "lazy"), default="warm")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "sandboxes": options.sandboxes,
        "acquires": options.acquires,
        "streams": options.streams,
        "gc": options.gc,
    }
    report["tls"] = options.tls
    report |= {"every": options.every, "python": platform.python_version(), "cores": os.cpu_count()}
    report["load_before"] = round(os.getloadavg()[0], 1)
    for name, phase, count in (("hold", hold, options.sandboxes), ("storm", storm, options.acquires)):
        if count:
            with double(tls=options.tls) as cluster:
                part = report[name] = {}
                anyio.run(phase, cluster, options, part)
                made = creates(cluster.requests())
                made = made[1:] if name == "hold" else made  # the first was there to measure the base
                part["pods_created"] = len(made)
                # Later than they were sent, by whatever the server's own loop was late: they may come in bunches.
                part["creates_as_arrived"] = pace(made, options.rate)
    report["load_after"] = round(os.getloadavg()[0], 1)
    report["wrong"] = judge(report)
    print(json.dumps(report, indent=2))
    sys.exit(1 if report["wrong"] else 0)


if __name__ == "__main__":
    main()
