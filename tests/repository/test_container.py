"""The files for containers and Kubernetes fit the package: what they copy is there, and versions and folders agree."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.folders import ROOT

from deltalab import __version__

LINES = [line.partition(" ")[::2] for line in (ROOT / "Dockerfile").read_text().splitlines()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))


def test_the_image_is_made_of_what_the_wheel_is_made_of() -> None:
    kept = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert all((ROOT / entry).exists() for entry in kept)
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {package.partition("/")[0] for package in wheel["packages"]}
    files = {PROJECT["project"]["readme"], "LICENSE", "constraints.txt", "pyproject.toml"}
    assert {*packages, *wheel["force-include"], *files} == kept


def test_each_line_of_the_dockerfile_is_an_instruction_and_uses_what_is_there() -> None:
    words = {"FROM", "ARG", "COPY", "RUN", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "#", ""}
    assert {word for word, _ in LINES} == words
    arguments = dict(rest.split("=", 1) for word, rest in LINES if word == "ARG")
    used = {name for word, rest in LINES if word == "RUN" for name in re.findall(r"\$(\w+)", rest)}
    assert set(arguments) == used
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    (base,) = [rest for word, rest in LINES if word == "FROM"]
    python = re.fullmatch(r"python:(3\.\d+)-slim", base)
    assert python is not None
    assert PROJECT["project"]["requires-python"] == f">={python[1]}"
    assert "torch" in PINS, "a line reads its version"


KUBERNETES = list(yaml.safe_load_all((ROOT / "docs" / "kubernetes" / "ray-cluster.yaml").read_text()))


def named(kind: str) -> list[dict[str, Any]]:
    return [part for part in KUBERNETES if part["kind"] == kind]


@pytest.fixture
def pods() -> dict[str, dict[str, Any]]:
    """What runs on the head and on the workers."""
    (cluster,) = named("RayCluster")
    groups = {"head": cluster["spec"]["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def test_the_ray_cluster_has_the_versions_of_the_image(pods: dict[str, dict[str, Any]]) -> None:
    (cluster,) = named("RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["spec"]["rayVersion"] == PINS["ray"]
    images = {container["image"] for pod in pods.values() for container in pod["containers"]}
    assert images == {f"registry.example.org/deltalab:{__version__}"}
    names = [part["metadata"]["name"] for part in KUBERNETES]
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) for name in names)
    params = [
        group["rayStartParams"] for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"])
    ]
    assert all(isinstance(value, str) for given in params for value in given.values()), "KubeRay takes texts"


def test_every_machine_sees_the_weights_and_only_the_head_the_ledger(pods: dict[str, dict[str, Any]]) -> None:
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in named("PersistentVolumeClaim")}
    places: dict[str, dict[str, str]] = {}
    for name, pod in pods.items():
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == set(volumes)
        claimed = {name: volume["persistentVolumeClaim"]["claimName"] for name, volume in volumes.items()
                   if "persistentVolumeClaim" in volume}  # fmt: skip
        assert set(claimed.values()) <= set(claims)
        places[name] = {claimed[volume]: mounts[volume] for volume in claimed}
    head = places.pop("head")
    assert head == {"deltalab-runs": "/runs", "deltalab-ledger": "/ledger"}
    assert all(worker == {"deltalab-runs": "/runs"} for worker in places.values())
    assert claims["deltalab-runs"]["accessModes"] == ["ReadWriteMany"]
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    assert "--storage /runs --db /ledger/deltalab.db" in page


def test_only_the_cluster_and_its_operator_reach_rays_ports() -> None:
    (policy,) = named("NetworkPolicy")
    (cluster,) = named("RayCluster")
    own = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert policy["spec"]["podSelector"]["matchLabels"] == own
    (rule,) = policy["spec"]["ingress"]
    labels = [source["podSelector"]["matchLabels"] for source in rule["from"]]
    assert labels == [own, {"app.kubernetes.io/name": "kuberay-operator"}]


def test_the_pages_name_the_files() -> None:
    for page, file in (("container", "Dockerfile"), ("kubernetes", "../kubernetes/ray-cluster.yaml")):
        text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
        assert file in text
        assert Path(ROOT / "docs" / "how-to" / file).exists() or (ROOT / file).exists()
