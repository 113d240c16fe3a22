"""scripts/kubernetes: every manifest by the published schemas, and the names that they use of each other.

Kubernetes' own kinds: the schemas of the package kubernetes-validate, with no unknown field. JobSet: the
models of the package kubeflow-trainer-api, made from JobSet's own OpenAPI description; its jobs as a Job.
"""

import re
from pathlib import Path

import pytest
import yaml

from calibadv_jax.config import load_config
from calibadv_jax.contrib.cli.plan import memory_of
from calibadv_jax.contrib.planning.hardware import find_target, placed_on
from calibadv_jax.contrib.planning.memory import peak_memory
from calibadv_jax.core.errors import INPUT_STATUS
from calibadv_jax.policy.architecture import architecture_from_hf

validator = pytest.importorskip("kubernetes_validate")
jobsets = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts/kubernetes"
VERSIONS = ("1.31", "1.37")  # the oldest that is tried, and the newest that is published
DOCUMENTS = [
    (file.name, item)
    for file in sorted(FOLDER.glob("*.yaml"))
    for item in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]
IDS = [f"{file}: {item['kind']}" for file, item in DOCUMENTS]


def paths(value, path=""):
    """The paths of all fields of a mapping."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path}.union(*(paths(child, f"{path}/{name}") for name, child in items))


def check(document, version):
    """Check a manifest by the schemas of a version of Kubernetes."""
    if document["kind"] != "JobSet":
        validator.validate(document, version, strict=True)
        return
    parsed = jobsets.JobsetV1alpha2JobSet.from_dict(document).to_dict()
    assert not paths(document) - paths(parsed)
    for item in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": item["name"]}}
        validator.validate(job | {"spec": item["template"]["spec"]}, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", [item for _, item in DOCUMENTS], ids=IDS)
def test_manifest_is_valid(document, version):
    check(document, version)


BY_KIND = {item["kind"]: item for _, item in DOCUMENTS}


def test_unknown_field_of_kubernetes_is_found():
    policy = BY_KIND["NetworkPolicy"]
    with pytest.raises(validator.ValidationError):
        check(policy | {"spec": policy["spec"] | {"ingres": []}}, VERSIONS[-1])


def test_unknown_field_of_a_jobset_is_found():
    jobset = BY_KIND["JobSet"]
    with pytest.raises(AssertionError):
        check(jobset | {"spec": jobset["spec"] | {"failurePolicies": {}}}, VERSIONS[-1])


def test_wrong_value_in_a_job_of_a_jobset_is_found():
    jobset = BY_KIND["JobSet"]
    (trainer,) = jobset["spec"]["replicatedJobs"]
    job = trainer["template"]["spec"] | {"completions": "two"}
    wrong = {"replicatedJobs": [trainer | {"template": {"spec": job}}]}
    with pytest.raises((validator.ValidationError, ValueError)):
        check(jobset | {"spec": jobset["spec"] | wrong}, VERSIONS[-1])


def find(kind, name):
    """The manifest; of two in whose place one may stand, the first."""
    return next(item for _, item in DOCUMENTS if item["kind"] == kind and item["metadata"]["name"] == name)


def pods():
    """Component -> specification of its pods, their labels and their names."""
    (job,) = find("JobSet", "calibadv")["spec"]["replicatedJobs"]
    templates = [job["template"]["spec"]["template"]]
    templates += [
        item["spec"]["template"] for _, item in DOCUMENTS if item["kind"] in ("Deployment", "StatefulSet")
    ]
    return {item["metadata"]["labels"]["app.kubernetes.io/component"]: item for item in templates}


def test_names_ports_and_labels_fit_together():
    rules = [item["spec"] for _, item in DOCUMENTS if item["kind"] == "NetworkPolicy"]
    assert set(pods()) == {"trainer", "retriever", "worker"}
    for component, pod in pods().items():
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                find("PersistentVolumeClaim", claim["claimName"])
            if config := volume.get("configMap"):
                find("ConfigMap", config["name"])
        assert {item["name"] for item in container["volumeMounts"]} == set(volumes)
        for variable in container.get("env", []):
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert secret["key"] in find("Secret", secret["name"])["stringData"]
        labels = pod["metadata"]["labels"].items()
        mine = [rule for rule in rules if rule["podSelector"]["matchLabels"].items() <= labels]
        assert len(mine) == 2, component  # nobody, and who may
        allowed = [ingress for rule in mine for ingress in rule["ingress"]]
        sources = [source["podSelector"]["matchLabels"] for ingress in allowed for source in ingress["from"]]
        assert {source["app.kubernetes.io/component"] for source in sources} <= {"trainer"}
        if component != "trainer":
            service = find("Service", f"calibadv-{component}")["spec"]
            assert service["selector"].items() <= labels
            (port,) = [item["containerPort"] for item in container["ports"]]
            assert [item["port"] for item in service["ports"]] == [port] == [allowed[0]["ports"][0]["port"]]
            assert f"--port={port}" in container["args"]


def test_processes_of_the_job_share_a_coordinator():
    jobset = find("JobSet", "calibadv")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, (container,) = job["template"]["spec"], pods()["trainer"]["spec"]["containers"]
    values = {item["name"]: item.get("value") for item in container["env"]}
    head = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert values["JAX_COORDINATOR_ADDRESS"].partition(":")[0] == head
    assert int(values["JAX_NUM_PROCESSES"]) == spec["completions"] == spec["parallelism"]
    ending = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert (ending["containerName"], ending["values"]) == (container["name"], [INPUT_STATUS])
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    restarted = set(re.search("--restart-on-exit-codes ([0-9,]+)", page)[1].split(","))
    assert restarted == {"1"} | set(re.findall("status ([0-9]+)", page)) - {str(INPUT_STATUS)}


@pytest.fixture(params=["run.yaml", "run_workers.yaml"])
def run(request, tmp_path):
    """The config that a ConfigMap carries."""
    ((_, document),) = [item for item in DOCUMENTS if item[0] == request.param]
    assert document["metadata"]["name"] == "calibadv-run"
    (tmp_path / "run.yaml").write_text(document["data"]["run.yaml"].replace("/app/", f"{ROOT}/"))
    return load_config(tmp_path / "run.yaml")


def test_config_of_the_run_fits_the_cluster(run):
    assert run.retriever.url == "http://calibadv-retriever:8000"
    (trainer,) = pods()["trainer"]["spec"]["containers"]
    (job,) = find("JobSet", "calibadv")["spec"]["replicatedJobs"]
    nodes = job["template"]["spec"]["completions"]
    if run.sampler.name == "vllm":
        count = find("StatefulSet", "calibadv-worker")["spec"]["replicas"]
        assert count >= nodes
        assert run.sampler.urls == [f"http://calibadv-worker-{n}.calibadv-worker:8100" for n in range(count)]
        (worker,) = pods()["worker"]["spec"]["containers"]
        assert f"--model={run.policy.path}" in worker["args"]
        assert f"--max_model_len={run.rollout.max_length}" in worker["args"]
    gpus = int(trainer["resources"]["limits"]["nvidia.com/gpu"])
    target = find_target(gpu="h100", topology=f"1x{nodes}x{gpus}")
    config = placed_on(run, target)  # refuses another number of devices, and rows that they cannot share
    architecture = architecture_from_hf(config.policy.init)
    assert peak_memory(memory_of(config, architecture, target)) < target.limit
