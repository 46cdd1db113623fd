# SPDX-License-Identifier: Apache-2.0
"""How a kubelet gets an image for a Pod, or says why it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.testing.cluster import images, statuses

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.replies import Json
    from agentsandbox.testing.cluster.worker import Worker

__all__ = ["needs_root", "pull"]


async def pull(worker: Worker) -> bool:
    """Have the Pod's image on its node, however long that takes; ``False`` if the Pod has to end first."""
    kubelet, timing, failures = worker.kubelet, worker.cluster.timing, 0
    while not worker.interrupted:
        spec = worker.pod["spec"]["containers"][0]
        name, policy = spec["image"], spec.get("imagePullPolicy", "IfNotPresent")
        present, image = kubelet.has_image(worker.node, name), kubelet.image(name)
        if bad := images.malformed(name):
            reason, words = "InvalidImageName", bad
        elif policy == "Never" and not present:
            reason, words = "ErrImageNeverPull", f'Container image "{name}" is not present with pull policy of Never'
        elif needs_root(worker.pod, image):
            reason, words = "CreateContainerConfigError", "container has runAsNonRoot and image will run as root"
            words += f' (pod: "{worker.name}_{worker.namespace}({worker.uid})", container: {spec["name"]})'
        elif present and (policy != "Always" or (image is not None and not image.error)):
            kubelet.pulled(worker.node, name)
            words = f'Container image "{name}" already present on machine and can be accessed by the pod'
            worker.cluster.event(worker.pod, "Normal", "Pulled", words)
            return True
        else:
            kubelet.fetched[worker.node, name] += 1
            worker.cluster.event(worker.pod, "Normal", "Pulling", f'Pulling image "{name}"')
            began = anyio.current_time()
            if image is not None and image.pull and await worker.pause(image.pull):
                return False
            error = "not_found" if image is None else image.error
            if not error:
                kubelet.pulled(worker.node, name)
                took = f"{(anyio.current_time() - began) * 1000:.0f}ms"
                words = f'Successfully pulled image "{name}" in {took} ({took} including waiting). Image size: '
                worker.cluster.event(worker.pod, "Normal", "Pulled", f"{words}{image.size if image else 0} bytes.")
                return True
            brief = images.pull_error(name, error)
            _wait_state(worker, "ErrImagePull", brief)
            worker.cluster.event(worker.pod, "Warning", "Failed", f'Failed to pull image "{name}": {brief}')
            worker.cluster.event(worker.pod, "Warning", "Failed", "Error: ErrImagePull")
            worker.cluster.event(worker.pod, "Normal", "BackOff", f'Back-off pulling image "{name}"')
            worker.cluster.event(worker.pod, "Warning", "Failed", "Error: ImagePullBackOff")
            reason, words = "ImagePullBackOff", f'Back-off pulling image "{name}": ErrImagePull: {brief}'
        _wait_state(worker, reason, words)
        failures += 1
        wait = min(timing.pull_back_off * 2 ** (failures - 1), timing.back_off_max)
        with anyio.move_on_after(wait * timing.second):
            while not worker.interrupted and worker.pod["spec"]["containers"][0]["image"] == name:
                await worker.changed()
    return False


def needs_root(pod: Json, image: images.Image | None) -> bool:
    """Return whether a container would run as root although its Pod forbids it."""
    spec = pod["spec"]["containers"][0]
    contexts = (spec.get("securityContext") or {}, pod["spec"].get("securityContext") or {})
    if image is None or not next((one["runAsNonRoot"] for one in contexts if "runAsNonRoot" in one), False):
        return False
    user: Any = next((one["runAsUser"] for one in contexts if "runAsUser" in one), None)
    if user is None:
        user = image.user or ("sandbox" if image.root == "host" else "0")
    return str(user) in ("0", "root")


def _wait_state(worker: Worker, reason: str, words: str) -> None:
    view = worker.view.container
    if "terminated" in view.state:
        view.last = view.state
    view.state = statuses.waiting(reason, words)
    view.image = worker.pod["spec"]["containers"][0]["image"]
    worker.tell()
