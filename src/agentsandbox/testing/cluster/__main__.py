# SPDX-License-Identifier: Apache-2.0
"""
The cluster double in a process of its own, so that what a driver costs can be told from what the double costs.

``python -m agentsandbox.testing.cluster KUBECONFIG`` writes that file, prints the server's URL, and serves until its
standard input ends.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from agentsandbox.testing.cluster import FakeCluster


async def serve(options: argparse.Namespace) -> None:
    """Serve until standard input ends."""
    images = dict.fromkeys(options.image, "host")
    async with FakeCluster(
        nodes=options.nodes, images=images, process=options.process, tls=options.tls, events=not options.no_events
    ) as cluster:
        cluster.kubeconfig(options.kubeconfig)
        print(cluster.url, flush=True)  # noqa: T201 - whoever started it waits for it
        await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        print(cluster, flush=True)  # noqa: T201
        if options.log is not None:
            asked = (one for one in cluster.requests if one.get("dryRun") is None)
            lines = [json.dumps([one.at, one.method, one.path]) + "\n" for one in asked]
            options.log.write_text("".join(lines))


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m agentsandbox.testing.cluster", description=FakeCluster.__doc__)
    parser.add_argument("kubeconfig", help="the file to write")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--image", action="append", default=["host"], help="a further name of the image 'host'")
    parser.add_argument("--process", choices=("real", "echo-runner"), default="real")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--no-events", action="store_true")
    parser.add_argument("--log", type=Path, help="a file to write at the end: when, method and path of every request")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    anyio.run(serve, options)


if __name__ == "__main__":
    main()
