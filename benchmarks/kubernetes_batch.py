# SPDX-License-Identifier: Apache-2.0
"""
A batch of episodes on a cluster, from no Pod to all rewards, beside a bare loop that does the same commands.

Both use as many Pods as the concurrency says, half of them of each image, and take turns, so that a busy machine
disturbs both alike. The bare loop keeps one Pod and one exec stream a worker, with a small Python loop behind it that
runs what it is told: no reset, no check, no record. Ours is a pool with its defaults: every episode finds a sandbox
that is verified to be as it was.

    python benchmarks/kubernetes_batch.py --context kind --image python:3.12 --image python:3.13 --root

Prints one JSON object. The images must be on the nodes and have a shell and Python. Neither pays for imports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.backend import KubernetesBackend
from agentsandbox.backends.kubernetes.manifests import CONTAINER, exec_params, exec_path, pods_path
from agentsandbox.cli.bench import environment
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.transport.websocket import MAX_MESSAGE, PROTOCOLS, ExecSocket, ExecStream

SHIPPING = "def shipping(total):\n    return 0 if total > 99 else 10\n"
TEST = """\
import unittest
from shipping import shipping
class ShippingTest(unittest.TestCase):
    def test_below(self):
        self.assertEqual(shipping(98), 10)
    def test_boundary(self):
        self.assertEqual(shipping(99), 0)
if __name__ == "__main__":
    unittest.main()
"""
WRITE = f"cat > shipping.py <<'E'\n{SHIPPING}E\ncat > test_shipping.py <<'E'\n{TEST}E\n"
PATCH = "sed -i 's/total > 99/total >= 99/' shipping.py"
RUN = ["python3", "-B", "test_shipping.py"]

SETTLE = 5.0
"""Seconds for the node to clear away what a run left, which is no part of the next one."""

LOOP = """\
import json,subprocess,sys
for line in sys.stdin:
 r=subprocess.run(json.loads(line),stdin=subprocess.DEVNULL,capture_output=True)
 print(json.dumps([r.returncode,r.stdout.decode(),r.stderr.decode()]),flush=True)
"""


class Options(argparse.Namespace):
    """What was asked for."""

    context: str | None
    namespace: str
    image: list[str]
    episodes: int
    concurrency: int
    rounds: int
    sleep: float
    root: bool
    bare: bool

    def backend(self) -> dict[str, Any]:
        """Return the options of the backend, and of its Pods."""
        return {
            "context": self.context,
            "namespace": self.namespace,
            "run_as_root": self.root,
            "requests": {"cpu": "10m", "memory": "32Mi"},
            "limits": {"cpu": "2", "memory": "512Mi"},
            "lifetime": 600,
        }

    def sizes(self) -> dict[str, int]:
        """Return how many Pods there are of each image."""
        share, more = divmod(self.concurrency, len(self.image))
        return {image: share + (number < more) for number, image in enumerate(self.image)}

    def commands(self) -> list[list[str]]:
        """Return the commands of an episode."""
        patch = PATCH if not self.sleep else f"sleep {self.sleep:g}; {PATCH}"
        return [["sh", "-c", WRITE], RUN, ["sh", "-c", patch], RUN]


EXITS = [0, 1, 0, 0]
"""What the commands of an episode end with."""


async def bare(options: Options) -> dict[str, Any]:
    """Run the batch by a loop that knows nothing."""
    began = time.monotonic()
    marks: dict[str, list[float]] = {"up": [], "episode": []}
    api = await KubernetesApi.connect(
        context=options.context, namespace=options.namespace, max_connections=2 * options.concurrency
    )
    mark = secrets.token_hex(6)
    ready: dict[str, anyio.Event] = {}
    queues = {
        image: iter(range(number, options.episodes, len(options.image))) for number, image in enumerate(options.image)
    }
    rewards: list[float] = []

    async def watch() -> None:
        params = {"labelSelector": f"batch={mark}"}
        async with aclosing(api.watch(pods_path(api.namespace), params=params)) as events:
            async for event in events:
                pod = event["object"]
                if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())):
                    ready[pod["metadata"]["name"]].set()

    async def work(image: str) -> None:
        name = f"bare-{mark}-{secrets.token_hex(3)}"
        ready[name] = anyio.Event()
        await api.request("POST", pods_path(api.namespace), body=_pod(name, mark, image, options))
        await ready[name].wait()
        socket = await api.websocket(
            exec_path(api.namespace, name),
            params=exec_params(["python3", "-uc", LOOP], container=CONTAINER, stdin=True),
            protocols=PROTOCOLS,
            heartbeat=None,
            max_size=MAX_MESSAGE,
        )
        stream = ExecStream(ExecSocket(socket))
        marks["up"].append(time.monotonic() - began)
        rest = b""
        for _ in queues[image]:
            start, codes = time.monotonic(), []
            for command in options.commands():
                await stream.send([json.dumps(command).encode() + b"\n"])
                while b"\n" not in rest:
                    rest += await stream.receive()
                line, _, rest = rest.partition(b"\n")
                codes.append(json.loads(line)[0])
            rewards.append(float(codes == EXITS))
            marks["episode"].append(time.monotonic() - start)
        await stream.aclose()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            async with anyio.create_task_group() as workers:
                for image, count in options.sizes().items():
                    for _ in range(count):
                        workers.start_soon(work, image)
            seconds = time.monotonic() - began
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _remove(api, f"batch={mark}")
            await api.aclose()
    assert rewards == [1.0] * options.episodes, rewards
    return {"seconds": seconds, "streams_up": _spread(marks["up"]), "episode": _spread(marks["episode"])}


def _pod(name: str, mark: str, image: str, options: Options) -> dict[str, Any]:
    pod = options.backend()
    return {
        "metadata": {"name": name, "labels": {"batch": mark}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "activeDeadlineSeconds": pod["lifetime"],
            "containers": [
                {
                    "name": CONTAINER,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "600"],
                    "resources": {"requests": pod["requests"], "limits": pod["limits"]},
                }
            ],
        },
    }


async def _remove(api: KubernetesApi, selector: str) -> None:
    path = pods_path(api.namespace)
    params = {"labelSelector": selector}
    await api.request("DELETE", path, params=params)
    while (await api.request("GET", path, params=params))["items"]:  # noqa: ASYNC110 - not measured
        await anyio.sleep(0.1)


async def ours(options: Options) -> dict[str, Any]:
    """Run the batch by a pool."""
    events: list[Any] = []

    async def solve(sandbox: Any, _episode: Episode) -> float:
        codes = [(await sandbox.exec(command)).exit_code for command in options.commands()]
        return float(codes == EXITS)

    began, processor = time.monotonic(), time.process_time()
    async with SandboxPool(
        KubernetesBackend(**options.backend()),
        images=options.sizes(),
        rollout=solve,
        spares=0,
        max_sandboxes=options.concurrency,
        sink=events.append,
    ) as pool:
        images = options.image
        batch = [Episode(id=f"e{number}", image=images[number % len(images)]) for number in range(options.episodes)]
        result = await pool.rollout(batch)
        seconds = time.monotonic() - began
        processor = time.process_time() - processor
        statistics = pool.statistics()
    assert result.rewards == (1.0,) * options.episodes, sorted({record.reason or "" for record in result.records})
    resets = [event for event in events if event.name == "sandbox.reset"]
    return {
        "seconds": seconds,
        "driver_cpu_seconds": processor,
        "pods_created": statistics.created_total,
        "opened": _since(events, "sandbox.opened", began),
        "ready": _since([e for e in events if "recycled" not in e.data], "sandbox.ready", began),
        "prepared": _between(events),
        "first_command": _spread([r.ttfc.seconds for r in result.records if r.ttfc is not None]),
        "resets": {
            "rungs": {rung: sum(e.data["rung"] == rung for e in resets) for rung in {e.data["rung"] for e in resets}},
            "verified": sum(bool(e.data["verified"]) for e in resets),
            "seconds": _spread([e.data["seconds"] for e in resets]),
        },
    }


def _since(events: list[Any], name: str, began: float) -> dict[str, float]:
    return _spread([event.at - began for event in events if event.name == name])


def _between(events: list[Any]) -> dict[str, float]:
    opened = {event.sandbox: event.at for event in events if event.name == "sandbox.opened"}
    ready: dict[str, float] = {}
    for event in events:
        if event.name == "sandbox.ready":
            ready.setdefault(event.sandbox, event.at)
    return _spread([ready[name] - at for name, at in opened.items() if name in ready])


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    figures = {"min": min(values), "p50": quantile(values, 0.5), "max": max(values)}
    return {"n": len(values), **{name: round(value, 4) for name, value in figures.items()}}


async def compare(options: Options) -> dict[str, Any]:
    """Run both in turn."""
    api = await KubernetesApi.connect(context=options.context, namespace=options.namespace, max_connections=8)
    version = (await api.request("GET", "/version"))["gitVersion"]  # and the client library is imported
    await api.aclose()
    runs: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        pair: dict[str, Any] = {}
        for name, run in (("bare", bare), ("ours", ours)):
            if name == "ours" or options.bare:
                pair[name] = await run(options)
                await anyio.sleep(SETTLE)
        runs.append(pair)
    mine = quantile([run["ours"]["seconds"] for run in runs], 0.5)
    answer: dict[str, Any] = {
        "bench": "kubernetes_batch",
        "environment": {**environment(), "kubernetes": version},
        "episodes": options.episodes,
        "concurrency": options.concurrency,
        "images": options.image,
        "sleep": options.sleep,
        "ours_p50_s": mine,
    }
    if options.bare:
        theirs = quantile([run["bare"]["seconds"] for run in runs], 0.5)
        answer |= {
            "bare_p50_s": theirs,
            "ratio": mine / theirs,
            "ratios": [run["ours"]["seconds"] / run["bare"]["seconds"] for run in runs],
        }
    return {**answer, "runs": runs}


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--context", default=os.environ.get("AGENTSANDBOX_E2E_CONTEXT"), help="kubeconfig context")
    parser.add_argument("--namespace", default=os.environ.get("AGENTSANDBOX_E2E_NAMESPACE", "default"))
    parser.add_argument("--image", action="append", required=True, help="may be repeated")
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds added to each episode")
    parser.add_argument("--root", action="store_true", help="let Pods run as root")
    parser.add_argument("--no-bare", dest="bare", action="store_false", help="leave the bare loop out")
    parser.add_argument("--output", type=Path, help="file for the JSON object; standard output if not given")
    options = parser.parse_args(namespace=Options())
    report = json.dumps(asyncio.run(compare(options)), indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(report)
    else:
        options.output.write_text(report)


if __name__ == "__main__":
    main()
