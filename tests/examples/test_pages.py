# SPDX-License-Identifier: Apache-2.0
"""The Python of the documentation's pages runs as it stands; what is marked ``testcode`` is run by Sphinx."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import attrs
import pytest

import agentsandbox
from agentsandbox import Attempt, Episode, SandboxLost, SandboxPool
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.local import LocalBackend
from agentsandbox.backends.local.ids import choose
from agentsandbox.hydration import plan
from agentsandbox.hydration.cluster import read_nodes
from agentsandbox.hydration.cluster_lanes import ClusterPuller
from agentsandbox.hydration.inputs import from_csv
from agentsandbox.hydration.prepull import Hydration
from agentsandbox.testing.cluster import FakeCluster, Image, Timing

pytestmark = pytest.mark.timeout(120)

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DJANGO = "registry.example.com/swe/django:4.2"
AGENT_SANDBOX = "howto/agent-sandbox"
TESTING = "howto/testing"
ECHO = {"process": "echo-runner"}
"""Pods without processes, whose runner says that every command went well."""


def blocks(page):
    """Return the blocks of a page, each with the reason why it is not run, if there is one."""
    return BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))


PAGES = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts)
RUN = {(page, number) for page in PAGES for number, (why, _) in enumerate(blocks(page)) if not why}
TRIED = set()


def case(page, number, **marks):
    """Mark a test as that of one block."""
    TRIED.add((page, number))
    return pytest.mark.parametrize("code", [pytest.param(blocks(page)[number][1], id=f"{page}-{number}")], **marks)


async def run(code, **names):
    """Run a block with the names that its page takes for granted; return all names that it leaves behind."""
    running = compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    known = {name: getattr(agentsandbox, name) for name in agentsandbox.__all__}
    known.update(solve=solve, **names)
    if inspect.iscoroutine(waiting := eval(running, known)):
        await waiting
    return known


async def solve(sandbox, episode):
    """Run one command and pay for it."""
    return float((await sandbox.exec(["true"])).ok)


def batch_of(image, count=4, step=0):
    """Return some episodes of an image."""
    return [Episode(id=f"{step}-{n}", image=image, group=n // 2) for n in range(count)]


@pytest.fixture
def anyio_backend():
    """Top-level ``await`` is asyncio's, and so are Kubernetes backends."""
    return "asyncio"


@pytest.fixture
def cluster(anyio_backend, tmp_path, monkeypatch):
    """Start a cluster with the namespace ``rollouts`` that the current kubeconfig leads to; no Pod may be left."""

    @asynccontextmanager
    async def start(images, *, clean=True, **options):
        timing = Timing(second=0.1)
        async with FakeCluster(images=images, namespace="rollouts", timing=timing, **options) as found:
            monkeypatch.setenv("KUBECONFIG", found.kubeconfig(tmp_path))
            yield found
            if clean:
                assert found.pods() == []

    return start


@pytest.fixture
def many_ids():
    """Only where containers have more than one id can they be root and somebody else."""
    ids = choose()
    ids.release()
    if ids.kind != "range":
        pytest.skip("this machine gives its containers one id only")


@pytest.mark.anyio
@case(AGENT_SANDBOX, 0)
async def test_first_pool_of_claims(code, cluster):
    """The batch has all its rewards."""
    async with cluster({"python:3.12": "host"}, agent_sandbox=True, **ECHO):
        left = await run(code, batch=batch_of("python:3.12"))

    assert left["result"].rewards == (1.0,) * 4


@pytest.mark.anyio
@case(AGENT_SANDBOX, 1)
async def test_warm_claims(code, anyio_backend):
    """The pool takes the options."""
    await run(code)


def make_their_pool(cluster):
    """Make a template and a pool as somebody else would."""
    first = {"name": "runtime", "image": "swe", "command": ["sleep", "infinity"]}
    template = {
        "metadata": {"name": "their-template", "namespace": "rollouts"},
        "spec": {"podTemplate": {"spec": {"containers": [first]}}},
    }
    cluster.create("sandboxtemplates", template)
    spec = {"replicas": 1, "sandboxTemplateRef": {"name": "their-template"}}
    cluster.create("sandboxwarmpools", {"metadata": {"name": "their-pool", "namespace": "rollouts"}, "spec": spec})


@pytest.mark.anyio
@case(AGENT_SANDBOX, 2)
async def test_their_pool(code, cluster):
    """The episode runs in a sandbox of the pool that is there."""
    async with cluster({"swe": "host"}, agent_sandbox=True, clean=False) as found:
        make_their_pool(found)
        left = await run(code)

    assert left["result"].rewards == (1.0,)


@pytest.mark.anyio
@case(AGENT_SANDBOX, 3)
async def test_look_at_their_pool(code, cluster, capsys):
    """Each check is printed."""
    async with cluster({"swe": "host"}, agent_sandbox=True, clean=False) as found:
        make_their_pool(found)
        await run(code)

    assert any(line.startswith("True") and "their-pool" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.anyio
@case("howto/report", 0)
async def test_report(code, tmp_path, monkeypatch, anyio_backend):
    """The page is written."""
    monkeypatch.chdir(tmp_path)
    await run(code, batch=batch_of("host", 2))

    assert "Step 49" in (tmp_path / "step-49.html").read_text(encoding="utf-8")


@pytest.mark.anyio
@case("howto/plan-capacity", 0)
async def test_placement(code, cluster, tmp_path, monkeypatch):
    """The batch has all its rewards on the node that the plan names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"sandboxes": 2, "placement": {"host": "node2"}}))
    async with cluster({"host": "host"}, nodes=2, **ECHO):
        left = await run(code, json=json, Path=Path, batch=batch_of("host"))

    assert left["result"].rewards == (1.0,) * 4
    assert {record.last.node for record in left["result"].records} == {"node2"}


@pytest.mark.anyio
@case("howto/plan-capacity", 1)
async def test_several_batches(code, cluster, tmp_path, monkeypatch):
    """Every image is fetched, and the last batch has all its rewards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images.csv").write_text("image,size\na,1000\nb,2000\nc,3000\n")
    images = {name: Image(present=False, pull=0.1) for name in "abc"}
    async with cluster(images, nodes=2, **ECHO):
        api = await KubernetesApi.connect(namespace="rollouts", max_connections=8)
        puller = ClusterPuller(api)
        names = {"plan": plan, "from_csv": from_csv, "Hydration": Hydration, "nodes": await read_nodes(api)}
        names |= {"Counter": Counter, "attrs": attrs, "anyio": anyio, "Path": Path, "puller": puller}
        left = await run(code, batches=[batch_of("a"), batch_of("b"), batch_of("c")], **names)
        await api.aclose()

    assert left["result"].rewards == (1.0,) * 4
    assert left["hydration"].failed == {}


@pytest.mark.anyio
@case("howto/announce", 0)
async def test_announce(code, cluster):
    """Every batch is announced before it runs, and has all its rewards."""
    batches = [batch_of("host", 2, step) for step in range(3)]
    async with cluster({"host": "host"}, **ECHO):
        left = await run(code, batches=batches)

    assert left["result"].rewards == (1.0, 1.0)


@pytest.mark.anyio
@case("howto/checkpoints", 0)
async def test_checkpoints_in_a_rollout(code, tmp_path, anyio_backend):
    """What could not be finished goes on from its last checkpoint."""

    async def long(sandbox, episode):
        if (await sandbox.exec("cat progress")).text == "step 1\n":
            return 1.0
        await sandbox.exec("echo 'step 1' > progress", check=True)
        await sandbox.checkpoint()
        raise SandboxLost("evicted", "for want of room")

    images = {"host": 2}
    async with SandboxPool("local", images=images, rollout=long, checkpoints=tmp_path, max_attempts=1) as pool:
        left = await run(code, pool=pool, batch=batch_of("host", 2))

    assert len(left["again"]) == 2
    assert left["result"].rewards == (1.0, 1.0)


@pytest.mark.anyio
@case("howto/images", 0)
async def test_limits(code, anyio_backend):
    """The pool takes the limits."""
    left = await run(code)

    assert set(left["limits"]) == {"disk_limit", "max_processes"}


@pytest.mark.anyio
@case("howto/kubernetes", 0)
async def test_first_pool_on_kubernetes(code, cluster):
    """The batch has all its rewards."""
    async with cluster({DJANGO: Image(user="0")}, **ECHO):
        left = await run(code, batch=batch_of(DJANGO))

    assert left["result"].rewards == (1.0,) * 4


async def full(pool):
    """Hold all sandboxes at once, and return the pool's figures meanwhile."""
    leases = [await pool.acquire(DJANGO) for _ in range(32)]
    found = pool.statistics()
    for lease in leases:
        await lease.release()
    return found


@pytest.mark.anyio
@case("howto/kubernetes", 1)
async def test_jails_and_slots(code, cluster, many_ids):
    """Thirty-two sandboxes are in four Pods."""
    async with cluster({DJANGO: Image(user="0")}) as found:
        left = await run(code.replace("    ...\n", "    seen = await full(pool)\n"), full=full)

        assert len(found.asked("POST", "/pods$")) >= 4
    assert (left["seen"].leased, left["seen"].hosts) == (32, 4)


@case("howto/kubernetes", 2)
def test_episode_of_a_job(code, tmp_path):
    """The program prints what a verified episode prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"EPISODE_ID": "7"}, cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert re.sub(r"[\d.]{9,}", "T", done.stdout).splitlines() == [
        '{"event": "ready", "at": T, "episode_id": "7"}',
        '{"event": "reward", "at": T, "episode_id": "7", "reward": 0.5}',
    ]


@pytest.mark.anyio
@case("howto/secrets-and-network", 0)
async def test_secret_of_a_command(code, anyio_backend):
    """The command has the credential."""
    async with SandboxPool("local", images={"host": 1}, env={"PATH": "/workspace/bin:/usr/bin:/bin"}) as pool:
        async with await pool.acquire("host") as sandbox:
            await sandbox.write_file("bin/pip", '#!/bin/sh\necho "$*" "$PIP_INDEX_URL" > got\n', mode=0o755)
            await run(code, sandbox=sandbox, url="https://key@example.com")
            assert await sandbox.read_file("got") == b"download private-package https://key@example.com\n"


@pytest.mark.anyio
@case("howto/secrets-and-network", 1)
async def test_network_of_pods(code, anyio_backend):
    """The backend takes the rules."""
    assert (await run(code, KubernetesBackend=KubernetesBackend))["backend"].name == "kubernetes"


def pytest_of(tmp_path, *files):
    """Run pytest on files, and return what it says last."""
    for name, content in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()[-1].partition(" in ")[0]


@case(TESTING, 0)
def test_fixture(code, tmp_path):
    """The test passes as printed."""
    wheel = ("dist/x.whl", "PK\x05\x06" + "\0" * 18)
    assert pytest_of(tmp_path, wheel, ("test_it.py", code)) == "1 passed"


@case(TESTING, 1)
def test_rollout_function(code, tmp_path):
    """The test passes with the tutorial's rollout function, given what the page says before."""
    episode = (DOCS / "tutorial.md").read_text().split("## An episode and its reward")[1]
    source = re.search(r"```\{testcode\}\n(.*?)```", episode, re.DOTALL)[1]
    given = blocks(TESTING)[0][1].split("async def test")[0]

    assert pytest_of(tmp_path, ("my_module.py", source), ("test_it.py", given + code)) == "1 passed"


@pytest.mark.anyio
@case("topics/failures", 0)
async def test_bias(code, capsys, anyio_backend):
    """The lines are those in the comment, for a batch whose longest quarter has no rewards."""
    from agentsandbox.models.episode import EpisodeRecord, RolloutResult, Status
    from agentsandbox.models.timing import Timings

    records = [
        EpisodeRecord(
            episode=episode,
            status=Status.RETRYABLE if n >= 48 else Status.REWARDED,
            reward=None if n >= 48 else 1.0,
            history=(Attempt(number=1, timings=Timings(run=float(n))),),
        )
        for n, episode in enumerate(batch_of("host", 64))
    ]
    await run(code, result=RolloutResult(records=tuple(records)))

    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", code, re.MULTILINE)


@pytest.mark.anyio
@case("topics/failures", 1)
async def test_hedge(code, anyio_backend):
    """The pool takes the policy."""
    left = await run(code, images={"host": 1})

    assert left["HedgePolicy"] is agentsandbox.HedgePolicy


@pytest.mark.anyio
@case("topics/journal", 0)
async def test_reading_a_journal(code, tmp_path, monkeypatch, anyio_backend):
    """A journal can be read."""
    monkeypatch.chdir(tmp_path)
    async with SandboxPool("local", images={"host": 2}, rollout=solve, journal=tmp_path / "run.journal") as pool:
        await pool.rollout(batch_of("host", 2))
    left = await run(code)

    assert left["journal"].counts().rewarded == 2


@pytest.mark.anyio
@case("topics/metrics", 0)
async def test_idle(code, capsys, cluster):
    """The idle time is told after each step."""
    batches = [batch_of("host", 8, step) for step in range(2)]
    async with cluster({"host": "host"}, **ECHO):
        await run(code, images={"host": 8}, batches=batches, train=lambda result: None)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(re.match(r"idle \d+% of [\d.]+ s on 64 devices: ", line) for line in lines)


@pytest.mark.anyio
@case("topics/metrics", 1)
async def test_prometheus(code, cluster):
    """The sink goes with the pool."""
    served = "start_http_server(9464)"
    assert served in code
    async with cluster({"host": "host"}, **ECHO):
        left = await run(code.replace(served, 'server, _ = start_http_server(0, "127.0.0.1")'), images={"host": 1})
    left["server"].shutdown()
    left["server"].server_close()


@pytest.mark.anyio
@case("topics/metrics", 2)
async def test_open_telemetry(code, cluster):
    """The batch has its rewards, and its spans."""
    from opentelemetry import trace

    async with cluster({"host": "host"}, **ECHO):
        left = await run(code, images={"host": 2}, batch=batch_of("host", 2), tracer=trace.get_tracer("t"))

    assert left["result"].rewards == (1.0, 1.0)


@pytest.mark.anyio
@case("topics/reset", 0)
async def test_policy(code, anyio_backend):
    """The pool takes the policy."""
    assert isinstance((await run(code))["pool"], SandboxPool)


@pytest.mark.anyio
@case("topics/reset", 1)
async def test_determinism(code, anyio_backend):
    """The same sandbox gives the same results again."""

    async def another(sandbox):
        await sandbox.exec("echo left > behind")

    left = await run(code, backend=LocalBackend(), image="host", another_episode=another)

    assert left["result"].ok


def test_no_block_is_left_out():
    """Each block has its test here, or says above itself why it is not run."""
    for page in PAGES:
        assert (DOCS / f"{page}.md").read_text(encoding="utf-8").count("```python") == len(blocks(page)), page
    assert TRIED == RUN
