# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox plan --ahead``: the batches that follow."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from agentsandbox.cli.app import app
from agentsandbox.testing.cluster import Image


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def batches(tmp_path):
    """Three files: a and b, then a and c, then b."""
    paths = []
    for number, images in enumerate(["ab", "ac", "b"]):
        paths.append(tmp_path / f"step-{number}.csv")
        paths[-1].write_text("image,size,rollouts,seconds\n" + "".join(f"{name},100000000,4,30\n" for name in images))
    return paths


def test_what_several_batches_come_to_is_printed(batches):
    """Each batch with what it fetches, and all of them with their bound; the JSON has the same, and every step."""
    words = ("plan", "--csv", batches[0], "--ahead", batches[1], "--ahead", batches[2], "--nodes", 2)

    text, made = invoke(*words), json.loads(invoke(*words, "--json").stdout)

    assert 0 == text.exit_code, text.output
    assert "3 batches, one after another: predicted 90 s, and no plan could be faster than 90 s; 0.3 GB" in text.output
    assert "batch 2: 30 s for 2 images, 1 of them to fetch (0.1 GB) and 0 others to remove" in text.output
    assert [2, 1] == [len(batch["placement"]) for batch in made["ahead"]]
    assert made["total_seconds"] == pytest.approx(
        sum(batch["complete_seconds"] for batch in (made, *made["ahead"])), abs=1e-9
    )
    steps = [step for node in made["ahead"][0]["nodes"] for step in node["steps"]]
    assert [{"pull": "c", "evict": None}] == steps
    assert 0.0 == made["ahead"][1]["stall_seconds"]


def test_what_does_not_fit_in_a_later_batch_is_named(batches, tmp_path):
    """The exit code is 1, as for the first one; and files of different kinds are refused."""
    huge = tmp_path / "huge.csv"
    huge.write_text("image,size\nhuge,99000000000\n")

    result = invoke("plan", "--csv", batches[0], "--ahead", huge, "--nodes", 2, "--disk", 100)

    assert 1 == result.exit_code
    assert "does not fit: huge" in result.output
    assert "no OCI layout" in invoke("plan", "--oci-layout", tmp_path, "--ahead", batches[0]).output


def test_the_first_window_is_fetched(start_cluster, tmp_path):
    """Images of later batches, too, as long as nothing has to make room for them."""
    names = [f"registry.example/i{n}:1" for n in range(3)]
    cluster = start_cluster(
        nodes=1, images={name: Image(present=False) for name in names}, process="echo-runner", namespace="default"
    )
    paths = []
    for number, chosen in enumerate((names[:2], names[1:])):
        paths.append(tmp_path / f"{number}.csv")
        paths[-1].write_text("image,size\n" + "".join(f"{name},1000000\n" for name in chosen))

    result = invoke("plan", "--csv", paths[0], "--ahead", paths[1], "--backend", "kubernetes", "--fetch", "--json")

    assert 0 == result.exit_code, result.output
    assert {} == json.loads(result.stdout)["failed"]
    assert 3 == len(cluster.asked("POST", "/pods")) + len(cluster.asked("PATCH", "/pods"))
    assert [] == cluster.pods()
