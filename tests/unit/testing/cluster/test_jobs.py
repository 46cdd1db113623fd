# SPDX-License-Identifier: Apache-2.0
"""Jobs in the double."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.errors import InvalidObject

pytestmark = pytest.mark.anyio
JOBS = "/apis/batch/v1/namespaces/rl/jobs"


def job(command, **spec):
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "host", "command": command}]}}
    template["spec"]["terminationGracePeriodSeconds"] = 0
    return {"metadata": {"name": "j"}, "spec": {"template": template, **spec}}


async def finished(client, kind):
    """Wait until the Job has that condition."""
    with anyio.fail_after(30):
        while True:
            found = await client.api.request("GET", f"{JOBS}/j")
            if kind in [one["type"] for one in found["status"].get("conditions") or ()]:
                return found
            await anyio.sleep(0.02)


async def test_indexed_job_runs_to_its_end(started) -> None:
    """As many Pods as allowed at once, one for each index, each told its own; then the Job is complete."""
    async with started(process="real") as client:
        seen = set()
        pods = client.cluster.store.resource("pods")

        def hear(event):
            alive = [one for one in client.cluster.pods() if one["status"]["phase"] in ("Pending", "Running")]
            seen.add(len(alive))

        client.cluster.store.subscribe(pods, hear)
        body = job(
            ["sh", "-c", 'echo "I am $JOB_COMPLETION_INDEX"'], completions=5, parallelism=2, completionMode="Indexed"
        )
        await client.api.request("POST", JOBS, body=body)
        found = await finished(client, "Complete")

        assert (found["status"]["succeeded"], found["status"].get("failed")) == (5, None)
        assert max(seen) == 2
        texts = [
            await client.api.text("GET", f"{client.pods}/{pod['metadata']['name']}/log")
            for pod in client.cluster.pods()
        ]
        assert sorted(texts) == [f"I am {number}\n" for number in range(5)]
        await client.api.request("DELETE", f"{JOBS}/j", body={"propagationPolicy": "Background"})
        await client.eventually(lambda: not client.cluster.pods())


async def test_failures_and_deadlines(started) -> None:
    """A Job fails when its Pods have failed too often, or when its time is up."""
    async with started(process="real") as client:
        await client.api.request("POST", JOBS, body=job(["false"], backoffLimit=2))
        failed = await finished(client, "Failed")
        assert (failed["status"]["failed"], failed["status"]["conditions"][-1]["reason"]) == (3, "BackoffLimitExceeded")
        await client.api.request("DELETE", f"{JOBS}/j")
        await client.api.request("POST", JOBS, body=job(["sleep", "infinity"], activeDeadlineSeconds=1))
        late = await finished(client, "Failed")
        assert late["status"]["conditions"][-1]["reason"] == "DeadlineExceeded"


async def test_bad_jobs(started) -> None:
    """A Job whose Pods would be restarted for ever is refused."""
    async with started() as client:
        body = job(["true"])
        body["spec"]["template"]["spec"]["restartPolicy"] = "Always"
        with pytest.raises(InvalidObject, match="restartPolicy"):
            await client.api.request("POST", JOBS, body=body)
