# SPDX-License-Identifier: Apache-2.0
"""What an attempt leaves behind."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agentsandbox.errors import SandboxLost
from agentsandbox.models.episode import Episode, Graded, Status
from agentsandbox.rollouts import artifacts
from agentsandbox.rollouts.artifacts import ArtifactStore, path_component
from agentsandbox.rollouts.gather import gather_rollouts

from .fakes import FakeLease, FakeSource

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run in real time: files are written in threads."""
    return request.param


async def save(
    store: ArtifactStore, content: Mapping[str, bytes], *, names: tuple[str, ...], **options: Any
) -> artifacts.Saved:
    """Save artifacts of a lease whose sandbox has *content*."""
    lease = FakeLease(
        source=FakeSource(),
        sandbox="box-0",
        image="host",
        episode="ep",
        attempt=1,
        requested_at=0.0,
        granted_at=0.0,
        files=dict(content),
    )
    episode = Episode(id="ep", image="host", artifacts=names)
    return await store.save(lease, episode, 1, **{"patch": None, **options})


async def test_files_are_saved_under_episode_and_attempt(tmp_path: Path) -> None:
    """Bytes arrive as they are, absolute and relative names alike, each once."""
    store = ArtifactStore(tmp_path / "out")
    saved = await save(
        store, {"/work/a.bin": b"\x00\xff", "b.txt": b"text"}, names=("/work/a.bin", "b.txt", "b.txt"), patch="diff"
    )
    base = tmp_path / "out" / "ep" / "attempt-1"

    assert saved.missing == {}
    assert dict(saved.paths) == {
        "patch.diff": base / "patch.diff",
        "/work/a.bin": base / "files" / "work" / "a.bin",
        "b.txt": base / "files" / "b.txt",
    }
    assert saved.paths["/work/a.bin"].read_bytes() == b"\x00\xff"
    assert saved.paths["patch.diff"].read_text() == "diff"
    assert repr(store) == f"<ArtifactStore {str(tmp_path / 'out')!r} [3 saved]>"


async def test_a_hostile_name_stays_inside(tmp_path: Path) -> None:
    """``..`` in a name leads nowhere else."""
    name = "../../../../evil/../x"
    saved = await save(ArtifactStore(tmp_path), {name: b"x"}, names=(name,))

    assert saved.paths[name].read_bytes() == b"x"
    assert saved.paths[name].resolve().is_relative_to(tmp_path.resolve() / "ep" / "attempt-1" / "files")


async def test_what_cannot_be_saved_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, too large, and a directory in the way: each has its reason, and the others are saved."""
    monkeypatch.setattr(artifacts, "ARTIFACT_LIMIT", 3)
    (tmp_path / "ep" / "attempt-1" / "files" / "taken").mkdir(parents=True)
    files = {"large": b"1234", "taken": b"x", "fine": b"123"}
    saved = await save(ArtifactStore(tmp_path), files, names=("absent", "large", "taken", "fine"))

    assert list(saved.paths) == ["fine"]
    assert saved.missing["absent"] == "FileNotFoundError: no such file: absent"
    assert saved.missing["large"] == "larger than 3 bytes"
    assert saved.missing["taken"].startswith("IsADirectoryError")


async def test_a_sandbox_that_is_gone_is_not_asked(tmp_path: Path) -> None:
    """Without a sandbox the files are noted as missing; the patch is kept."""
    saved = await save(ArtifactStore(tmp_path), {"a": b"x"}, names=("a",), files=False, patch="p")

    assert saved.missing == {"a": "the sandbox was gone"}
    assert list(saved.paths) == ["patch.diff"]


async def test_a_sandbox_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving has a limit of time."""
    import anyio

    async def never(self: FakeLease, path: str, *, limit: int | None = None) -> bytes:
        await anyio.sleep_forever()
        return b""

    monkeypatch.setattr(FakeLease, "read_file", never)
    monkeypatch.setattr(artifacts, "SAVE_TIMEOUT", 0.05)
    saved = await save(ArtifactStore(tmp_path), {}, names=("a",))

    assert saved.missing == {"a": "not saved within 0.05 s"}


async def test_missing_artifacts_change_no_reward(tmp_path: Path) -> None:
    """The reward stands, the gap is in the record's info beside what the rollout function kept."""

    async def solve(lease: FakeLease, episode: Episode) -> Graded:
        lease.files["there"] = b"x"
        await lease.exec("make")
        return Graded(reward=1.0, info={"turns": 2})

    batch = [Episode(id="a/b", image="host", artifacts=("there", "absent"))]
    record = (await gather_rollouts(FakeSource(), batch, solve, output=str(tmp_path))).records[0]

    assert record.reward == 1.0
    assert record.info["turns"] == 2
    assert record.info["artifacts_missing"] == {"absent": "FileNotFoundError: no such file: absent"}
    assert set(record.artifacts) == {"there", "commands.jsonl"}
    assert json.loads(record.artifacts["commands.jsonl"].read_text()) == {"command": "make"}
    assert record.artifacts["there"].is_relative_to(tmp_path / "a%2Fb" / "attempt-1")
    assert stat.S_ISREG(record.artifacts["there"].stat().st_mode)


async def test_a_full_disk_changes_no_reward(tmp_path: Path) -> None:
    """When nothing can be written, the reward stands all the same."""
    (tmp_path / "ep").write_text("in the way")

    async def solve(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("true")
        return 1.0

    record = (await gather_rollouts(FakeSource(), [Episode(id="ep", image="host")], solve, output=tmp_path)).records[0]

    assert record.status is Status.REWARDED
    assert "commands.jsonl" in record.info["artifacts_missing"]


async def test_failed_attempts_leave_their_artifacts_too(tmp_path: Path) -> None:
    """The files of an episode that raised are saved; those of a lost sandbox are noted; attempts do not mix."""

    async def solve(lease: FakeLease, episode: Episode) -> float:
        lease.files["log"] = str(lease.attempt).encode()
        await lease.exec("true")
        if lease.attempt == 1:
            lease.lose()
            raise SandboxLost("evicted")
        raise ValueError("bug")

    batch = [Episode(id="ep", image="host", artifacts=("log",))]
    record = (await gather_rollouts(FakeSource(), batch, solve, output=tmp_path)).records[0]

    assert record.status is Status.FAILED
    assert record.artifacts["log"].read_text() == "2"
    assert (tmp_path / "ep" / "attempt-1" / "commands.jsonl").exists()
    assert not (tmp_path / "ep" / "attempt-1" / "files").exists()


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        pytest.param("ep-0", "ep-0", id="plain"),
        pytest.param("a/b", "a%2Fb", id="slash"),
        pytest.param("..", "%2E.", id="parent"),
        pytest.param(".hidden", "%2Ehidden", id="hidden"),
        pytest.param("a%2Fb", "a%252Fb", id="already quoted"),
        pytest.param("a\0b\n", "a%00b%0A", id="control characters"),
    ],
)
def test_directory_names(name: str, directory: str) -> None:
    """An id becomes one harmless path component."""
    assert path_component(name) == directory


@given(st.lists(st.text(min_size=1, max_size=300), min_size=2, max_size=5, unique=True))
def test_directory_names_are_safe_and_different(names: list[str]) -> None:
    """Whatever the ids: one short component each, none that leads out, no two alike."""
    directories = [path_component(name) for name in names]

    assert len(set(directories)) == len(names)
    for directory in directories:
        assert 0 < len(directory.encode()) <= 120
        assert Path(directory).parts == (directory,)
        assert directory not in {".", ".."}
