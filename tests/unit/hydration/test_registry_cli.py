# SPDX-License-Identifier: Apache-2.0
"""``plan`` and ``simulate`` with images that a registry knows."""

from __future__ import annotations

import json

import pytest
from anyio.from_thread import start_blocking_portal
from typer.testing import CliRunner

from agentsandbox.cli.app import app


@pytest.fixture
def served(registry, tmp_path, monkeypatch):
    """A registry with three images of one base, in a thread of its own: a command has an event loop of its own."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for name in "abc":
        registry.image(name, "1", layers={"base": 900_000_000, name: 1_000_000})
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(registry.serving()):
        yield registry


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def listed(tmp_path, registry, *names, header=""):
    path = tmp_path / "images.txt"
    path.write_text(header + "".join(f"{registry.host}/{name}\n" for name in names))
    return path


def test_a_plan_is_made_of_what_a_registry_says(served, tmp_path):
    """The base counts once a node; how an image is used is in the list."""
    images = listed(tmp_path, served, "a:1,2,7", "b:1,,", "c:1,,", header="image,rollouts,seconds\n")

    result = invoke("plan", "--registry-images", images, "--nodes", 1, "--json")

    assert 0 == result.exit_code, result.output
    made = json.loads(result.stdout)
    assert {f"{served.host}/{name}:1": "node-00" for name in "abc"} == made["placement"]
    assert (903_000_000, {}) == (made["pulled"], made["unread"])


def test_all_images_that_are_missing_are_named_and_the_rest_is_planned(served, tmp_path):
    """With exit code 1, on standard error and in the file."""
    images, output = listed(tmp_path, served, "a:1", "gone", "b:1", "lost:2"), tmp_path / "plan.json"

    result = invoke("plan", "--registry-images", images, "--output", output)

    assert 1 == result.exit_code, result.output
    assert "2 images on 10 nodes" in result.stdout
    missing = [f"{served.host}/gone", f"{served.host}/lost:2"]
    said = [line for line in result.stderr.splitlines() if line.startswith("left out: ")]
    assert [f"left out: {name}: NotFound: no manifest of {name}" for name in missing] == [
        line.partition(":latest:" if "gone" in line else ": 127.0.0.1 answers")[0] for line in said
    ]
    assert missing == list(json.loads(output.read_text())["unread"])


def test_a_plan_of_nothing_is_refused_with_every_reason(served, tmp_path):
    """Exit code 2: there is nothing to plan for."""
    result = invoke("plan", "--registry-images", listed(tmp_path, served, "gone", "lost"))

    assert 2 == result.exit_code
    assert "none of the images can be read" in result.output
    assert 2 == result.output.count("MANIFEST_UNKNOWN")


def test_a_simulation_takes_its_images_from_a_registry(served, tmp_path):
    """What is missing is said there, too, with exit code 1."""
    words = ("simulate", "--strategy", "ours", "--shape", "cold-nodes", "--nodes", 1, "--json", "--registry-images")

    good = invoke(*words, listed(tmp_path, served, "a:1", "b:1"))
    partly = invoke(*words, listed(tmp_path, served, "a:1", "gone"))

    assert (0, 1) == (good.exit_code, partly.exit_code), good.output
    assert {} == json.loads(good.stdout)["unread"]
    assert 8 == json.loads(good.stdout)["rows"][0]["rewarded"]
    assert [f"{served.host}/gone"] == list(json.loads(partly.stdout)["unread"])


def test_options_of_registries_are_checked(served, tmp_path):
    """Before anything is asked; and one place has the images."""
    images = listed(tmp_path, served, "a:1")
    for words, reason in (
        (("--platform", "linux"), "'linux' is no platform such as linux/amd64"),
        (("--plain-http", "http://r.example"), "leave out http://"),
        (("--ca-file", tmp_path / "no.pem"), "cannot read certificates from"),
        (("--oci-layout", tmp_path), "give either --csv or --oci-layout or --registry-images"),
    ):
        result = invoke("plan", "--registry-images", images, *words)
        assert (2, True) == (result.exit_code, reason in " ".join(result.output.split())), result.output
    assert [] == served.requests
