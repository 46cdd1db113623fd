# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox job``: a batch as one Job, for clusters where exec is not allowed."""

from __future__ import annotations

import json
import os
import random
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.backends.kubernetes import jobs, owned
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.evidence import events_text, shown
from agentsandbox.backends.kubernetes.manifests import DOMAIN, pods_path, selector
from agentsandbox.backends.kubernetes.preflight import check_runtime_class
from agentsandbox.backends.kubernetes.watch import backoff
from agentsandbox.backends.local.leftovers import started
from agentsandbox.cli.output import OutputDirectory
from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    ControlPlaneError,
    InfrastructureError,
    SandboxError,
    Throttled,
)
from agentsandbox.report.summary import describe_environment

if TYPE_CHECKING:
    from rich.console import Console

    from agentsandbox.backends.kubernetes.api import Json
    from agentsandbox.cli.cluster_options import ClusterOptions

__all__ = ["run_job"]

POLL = 0.5
"""Seconds between looks at the Job."""

LOOKS = 4
"""Looks at the Job for one at its Pods."""

PATIENCE = 30.0
"""Seconds beyond the Job's own deadline until we stop waiting for the cluster to say that it is over."""

LOGS_AT_ONCE = 8


@attrs.define
class _Batch:
    """One Job on its way."""

    api: KubernetesApi
    output: OutputDirectory
    run_id: str
    namespace: str
    options: jobs.JobOptions
    started_at: float = 0.0
    job: Json = attrs.Factory(dict)
    pods: list[Json] = attrs.Factory(list)
    logs: dict[str, str] = attrs.Factory(dict)
    trouble: str = ""


async def run_job(
    output: Path, options: jobs.JobOptions, cluster: ClusterOptions, console: Console, *, script: Path | None = None
) -> bool:
    """
    Run a batch as one Job, save everything about it, and verify it.

    Args:
        output: The directory to write.
        options: What the Job is to be.
        cluster: Where.
        console: Where to tell of it.
        script: The episode; ``None`` is the built-in one.

    Returns:
        Whether every episode is verified; only then there is a ``results.json``.

    Raises:
        ConfigurationError: If something cannot work; nothing has been created then.
        ControlPlaneError: If the API server refuses or does not answer.

    """
    text = jobs.built_in_script() if script is None else _read(script)
    api = await KubernetesApi.connect(**cluster.where(), max_connections=8)
    try:
        run_id, nonce = secrets.token_hex(6), secrets.token_hex(8)
        own = cluster.namespace is None
        namespace = owned.own_namespace(run_id) if own else api.namespace
        config_map, job = jobs.config_map(run_id, nonce, text), jobs.job(run_id, nonce, options)
        await check_runtime_class(api, options.runtime_class)
        if own:
            await owned.check_namespace(api, run_id)
        else:
            await api.request("POST", owned.config_maps_path(namespace), params={"dryRun": "All"}, body=config_map)
            await api.request("POST", owned.jobs_path(namespace), params={"dryRun": "All"}, body=job)
        receipt = {
            "run_id": run_id,
            "backend": "kubernetes",
            "kind": "job",
            "context": api.context,
            "namespace": namespace,
            "own_namespace": own,
            "nonce": nonce,
            "image": options.image,
            "driver": {"pid": os.getpid(), "started": started(os.getpid())},
        }
        directory = OutputDirectory(output, receipt)
        batch = _Batch(api, directory, run_id, namespace, options)
        try:
            return await _run(batch, config_map, job, console, own_script=script is not None)
        except SandboxError:
            console.print(_hint(output), markup=False, highlight=False)
            raise
        finally:
            directory.end()
    finally:
        await api.aclose()


async def _run(batch: _Batch, config_map: Json, job: Json, console: Console, *, own_script: bool) -> bool:
    api, namespace, output = batch.api, batch.namespace, batch.output
    if batch.namespace == owned.own_namespace(batch.run_id):
        nonce = job["metadata"]["annotations"][f"{DOMAIN}/nonce"]
        made = await owned.create(api, owned.namespace_path(), owned.namespace_manifest(batch.run_id, nonce))
        output.note(namespace_uid=made["metadata"]["uid"])
    console.print(f"run {batch.run_id}, namespace {namespace}", markup=False, highlight=False)
    made = await owned.create(api, owned.config_maps_path(namespace), config_map)
    output.created("ConfigMap", made)
    output.write("job-submitted.json", job)
    batch.started_at = anyio.current_time()
    batch.job = await owned.create(api, owned.jobs_path(namespace), job)
    output.note(job_uid=batch.job["metadata"]["uid"])
    output.created("Job", batch.job)
    failure: SandboxError | None = None
    try:
        await _wait(batch)
    except SandboxError as error:
        failure = error
    observed = anyio.current_time() - batch.started_at
    await _save(batch)
    if failure is None and jobs.finished(batch.job) != "Complete":
        seen = f"; last seen: {batch.trouble}" if batch.trouble else ""
        failure = InfrastructureError(f"the Job has failed: {_why(batch.job)}{seen}")
    try:
        if failure is not None:
            raise failure
        report = jobs.collect(batch.pods, batch.logs, batch.job, own_script=own_script)
    except SandboxError as error:
        console.print(f"not verified: {error}", style="red", markup=False, highlight=False)
        console.print(f"see job.json, pods.json, events.txt and the logs in {output.path}", highlight=False)
        console.print(_hint(output.path), markup=False, highlight=False)
        return False
    options = batch.options
    report.update(
        run_id=batch.run_id,
        context=api.context,
        namespace=namespace,
        image=options.image,
        runtime=options.runtime_class,
        parallelism=options.at_once,
        cache_state="uncontrolled",
        client_job_complete_seconds=observed,
        environment=describe_environment(),
    )
    output.write_results(report)
    console.print_json(json.dumps({key: value for key, value in report.items() if key not in ("pods", "environment")}))
    return True


async def _wait(batch: _Batch) -> None:
    """Look at the Job until it is over, or cannot succeed."""
    path = owned.jobs_path(batch.namespace, batch.job["metadata"]["name"])
    over = batch.started_at + batch.options.deadline + PATIENCE
    looks = failures = 0
    while anyio.current_time() < over:
        try:
            batch.job = await batch.api.request("GET", path)
            if jobs.finished(batch.job):
                return
            looks += 1
            if looks % LOOKS == 0:
                batch.pods = await _pods(batch)
                words, never = jobs.trouble(batch.pods) or ("", False)
                batch.trouble = words
                if never:
                    raise InfrastructureError(words)
            failures = 0
        except (ApiUnavailable, Throttled) as error:
            failures += 1
            await anyio.sleep(backoff(failures, random.random(), at_least=error.retry_after))  # noqa: S311 - jitter
        await anyio.sleep(POLL)
    raise InfrastructureError(f"the Job is not over {batch.options.deadline + PATIENCE:g} s after its creation")


async def _pods(batch: _Batch) -> list[Json]:
    found = await owned.list_all(batch.api, pods_path(batch.namespace), selector=selector(batch.run_id))
    uid = batch.job["metadata"]["uid"]
    return [pod for pod in found if any(one.get("uid") == uid for one in pod["metadata"].get("ownerReferences") or ())]


async def _save(batch: _Batch) -> None:
    """Save everything that the cluster can show; what it does not show must not keep the rest from being saved."""
    output = batch.output
    output.write("job.json", batch.job)
    try:
        # A Job that is out of time takes its Pods along: what was seen of them last is better than nothing.
        batch.pods = await _pods(batch) or batch.pods
    except ControlPlaneError as error:
        output.write("pods.json", {"error": str(error)})
        return
    output.write("pods.json", [shown(pod) for pod in batch.pods])
    output.write_text("events.txt", await events_text(batch.api, batch.namespace))
    slots = anyio.Semaphore(LOGS_AT_ONCE)

    async def save(pod: Json) -> None:
        name = pod["metadata"]["name"]
        async with slots:
            try:
                path = f"{pods_path(batch.namespace, name)}/log"
                log = await batch.api.text("GET", path, params={"container": jobs.CONTAINER})
            except ControlPlaneError as error:
                output.write_text(f"{name}.log", f"# no log: {error}\n")
                return
        batch.logs[name] = log
        output.write_text(f"{name}.log", log)

    async with anyio.create_task_group() as group:
        for pod in batch.pods:
            group.start_soon(save, pod)


def _hint(output: Path) -> str:
    return f"to remove what is left on the cluster: agentsandbox job cleanup --output {output}"


def _why(job: Json) -> str:
    conditions = (job.get("status") or {}).get("conditions") or ()
    words = [f"{one.get('reason')}: {one.get('message')}" for one in conditions if one.get("type") == "Failed"]
    return "; ".join(words) or "it says nothing of it"


def _read(script: Path) -> str:
    try:
        text = script.read_text(encoding="utf-8")
        compile(text, str(script), "exec")
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigurationError(f"cannot use the script {script}: {error}") from error
    return text
