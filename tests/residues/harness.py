# SPDX-License-Identifier: Apache-2.0
"""Leave one residue of the corpus in one episode, and look for it in the next one: the same for every backend."""

from __future__ import annotations

import re
import tomllib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from agentsandbox import SandboxClient
from agentsandbox.models.command import Command
from agentsandbox.models.reset import ResetPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping

    from agentsandbox.client import Lease

CORPUS = Path(__file__).parent
SETUP = (CORPUS / "setup.sh").read_text()
RUNGS = {"jail": ("jail",), "files": ("files", "replace"), "restart": ("restart", "replace"), "replace": ("replace",)}
"""What a policy allows so that a rung is the one to be tried."""

PROGRAMS = ("git", "chattr", "renice", "prlimit")


@attrs.frozen
class Plant:
    """One residue of the corpus."""

    kind: str
    id: str
    plant: str
    probe: str
    outcome: str
    user: str | None = None
    probe_user: str | None = None
    pain: str = ""
    needs: str = ""

    @property
    def programs(self) -> list[str]:
        """Programs that it takes and that not every image has."""
        scripts = f"{self.kind} \n{self.plant}\n{self.probe}"  # git's own kind needs a repository
        return [program for program in PROGRAMS if re.search(rf"(?<![\w./-]){program} ", scripts)]


def corpus() -> list[Plant]:
    """Read every plant there is."""
    found = []
    for path in sorted(CORPUS.glob("*.toml")):
        content = tomllib.loads(path.read_text())
        found += [Plant(kind=content["kind"], **plant) for plant in content["plant"]]
    return found


PLANTS = corpus()
ORDINARY = [plant for plant in PLANTS if plant.user is None]
"""Those that the sandbox's own user can leave, whoever that is."""
FIRST_OF_KIND = list({plant.kind: plant for plant in reversed(ORDINARY)}.values())


def each(plants: list[Plant]) -> Any:
    """Run a test once a plant."""
    return pytest.mark.parametrize("plant", plants, ids=[plant.id for plant in plants])


def chosen(pain: str) -> Any:
    """Run a test once for each plant of a pain."""
    return each([plant for plant in PLANTS if plant.pain == pain])


class Hydrated:
    """A backend whose sandboxes have the fixture's tree before anybody may use them. To be mixed into a real one."""

    async def create(self, spec: Any, name: str) -> Any:
        """Make a sandbox, and the tree in it."""
        return await self._hydrate(await super().create(spec, name))  # type: ignore[misc]

    async def recycle(self, sandbox: Any, spec: Any, name: str) -> Any:
        """Make a sandbox anew in its place, and the tree in it."""
        return await self._hydrate(await super().recycle(sandbox, spec, name))  # type: ignore[misc]

    async def _hydrate(self, sandbox: Any) -> Any:
        result = await sandbox.session.exec(Command(command=SETUP))
        assert result.exit_code == 0, result.stderr
        return sandbox


@attrs.define
class Place:
    """A pool of one sandbox, another one that nobody uses, and what the pool said about its resets."""

    rung: str
    image: str
    used: SandboxClient
    reference: Lease
    events: list[Any]
    root: bool = False
    """Whether commands are root's there anyway."""
    outcomes: Mapping[str, str] = attrs.field(factory=dict)
    """What becomes of plants there, where that is not what becomes of them elsewhere."""
    programs: Collection[str] = ()
    """What its image has of the programs that plants may lack."""

    def who(self, user: str | None) -> str | None:
        """Return as whom to run a script there."""
        return None if self.root and user == "root" else user


@asynccontextmanager
async def opened(rung: str, image: str, backend: Any, other: Any, **facts: Any) -> AsyncGenerator[Place, None]:
    """Open a place for one rung, over two backends that are alike."""
    events: list[Any] = []

    def sink(event: Any) -> None:
        if event.name.startswith("sandbox."):
            events.append(event)

    policy = ResetPolicy(rungs=RUNGS[rung], budget_seconds=60.0)
    async with (
        SandboxClient(backend, images={image: 1}, spares=0, reset=policy, sink=sink) as used,
        SandboxClient(other, images={image: 1}, spares=0) as fresh,
        await fresh.acquire(image) as reference,
    ):
        looked = await reference.exec(f"for name in {' '.join(PROGRAMS)}; do command -v $name; done")
        programs = {Path(line).name for line in looked.stdout.decode().splitlines()}
        yield Place(rung, image, used, reference, events, programs=programs, **facts)


async def leave(place: Place, plant: Plant) -> None:
    """Plant in one episode, look in the next one."""

    async def look(lease: Lease) -> bytes:
        return (await lease.exec(plant.probe, user=place.who(plant.probe_user), timeout=30)).stdout

    outcome = place.outcomes.get(plant.id, plant.outcome)
    lacking = [program for program in plant.programs if program not in place.programs]
    if lacking:
        pytest.skip(f"the image has no {', '.join(lacking)}")
    expected = await look(place.reference)
    async with await place.used.acquire(place.image) as lease:
        assert expected == await look(lease)
        planted = await lease.exec(plant.plant, user=place.who(plant.user), timeout=60)
        if plant.needs and planted.exit_code != 0:
            pytest.skip(f"this machine has no {plant.needs}")
        if outcome != "prevented":
            assert planted.exit_code == 0, planted.stderr.decode()
            assert expected != await look(lease), "nothing was planted"
        used = (lease.sandbox, lease.identity)
        del place.events[:]
    async with await place.used.acquire(place.image) as after:
        assert expected == await look(after)
        now = (after.sandbox, after.identity)
    told = [(event.name, event.data.get("rung") or event.data.get("error")) for event in place.events]
    again = [(name, why) for name, why in told if name in ("sandbox.reset", "sandbox.not_recycled")]
    if place.rung == "files" and outcome == "replaced":
        assert used[0] != now[0], told
        assert ["sandbox.not_recycled"] == [name for name, _ in again]
    elif place.rung == "files" and outcome == "restored":
        assert used == now, told
        assert [("sandbox.reset", "files")] == again
    elif place.rung == "restart" and outcome != "replaced":
        assert used[0] == now[0], told
        assert used[1].uid == now[1].uid
        assert used[1].instance != now[1].instance
        assert [("sandbox.reset", "restart")] == again
    elif place.rung != "files":
        assert used[1] != now[1], told
