"""scripts/kubernetes: every manifest by the published schemas, and the names that they use of each other.

Kubernetes' own kinds: the schemas of the package kubernetes-validate, with no unknown field. JobSet: the
models of the package kubeflow-trainer-api, made from JobSet's own OpenAPI description; its jobs as a Job.
"""

from pathlib import Path

import pytest
import yaml

from calibadv_jax.config import load_config
from calibadv_jax.contrib.commands.plan import memory_of
from calibadv_jax.contrib.planning.hardware import find_target, placed_on
from calibadv_jax.contrib.planning.memory import peak_memory
from calibadv_jax.policy.architecture import architecture_from_hf

validator = pytest.importorskip("kubernetes_validate")
jobsets = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts/kubernetes"
VERSIONS = ("1.31", "1.37")  # the oldest that is tried, and the newest that is published
DOCUMENTS = [
    (file.name, one)
    for file in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]
IDS = [f"{file}: {one['kind']}" for file, one in DOCUMENTS]


def lost(given, kept):
    """Fields of a mapping that its model does not know."""
    if isinstance(given, dict):
        return [name for name in given if name not in kept] + [
            found for name in given if name in kept for found in lost(given[name], kept[name])
        ]
    if isinstance(given, list):
        return [found for one, other in zip(given, kept, strict=True) for found in lost(one, other)]
    return []


def check(document, version):
    if document["kind"] != "JobSet":
        validator.validate(document, version, strict=True)
        return
    kept = jobsets.JobsetV1alpha2JobSet.from_dict(document).to_dict()
    assert lost(document, kept) == []
    for one in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}}
        validator.validate(job | {"spec": one["template"]["spec"]}, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", [one for _, one in DOCUMENTS], ids=IDS)
def test_a_manifest_is_valid(document, version):
    check(document, version)


def test_a_mistake_is_found():
    """In a field of Kubernetes', of JobSet's, and of a job within a JobSet."""
    by_kind = {one["kind"]: one for _, one in DOCUMENTS}
    policy, jobset = by_kind["NetworkPolicy"], by_kind["JobSet"]
    with pytest.raises(validator.ValidationError):
        check(policy | {"spec": policy["spec"] | {"ingres": []}}, VERSIONS[-1])
    with pytest.raises(AssertionError):
        check(jobset | {"spec": jobset["spec"] | {"failurePolicies": {}}}, VERSIONS[-1])
    (trainer,) = jobset["spec"]["replicatedJobs"]
    job = trainer["template"]["spec"] | {"completions": "two"}
    wrong = {"replicatedJobs": [trainer | {"template": {"spec": job}}]}
    with pytest.raises((validator.ValidationError, ValueError)):
        check(jobset | {"spec": jobset["spec"] | wrong}, VERSIONS[-1])


def find(kind, name):
    """The manifest; of two in whose place one may stand, the first."""
    return next(one for _, one in DOCUMENTS if one["kind"] == kind and one["metadata"]["name"] == name)


def pods():
    """Component -> specification of its pods, their labels and their names."""
    (job,) = find("JobSet", "calibadv")["spec"]["replicatedJobs"]
    templates = [job["template"]["spec"]["template"]]
    templates += [
        one["spec"]["template"] for _, one in DOCUMENTS if one["kind"] in ("Deployment", "StatefulSet")
    ]
    return {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in templates}


def test_names_ports_and_labels_fit_together():
    found = pods()
    assert set(found) == {"trainer", "retriever", "worker"}
    for component, pod in found.items():
        (container,) = pod["spec"]["containers"]
        for volume in pod["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                find("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
            if "configMap" in volume:
                find("ConfigMap", volume["configMap"]["name"])
        assert {one["name"] for one in container["volumeMounts"]} == {
            one["name"] for one in pod["spec"]["volumes"]
        }
        for variable in container.get("env", []):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                secret = variable["valueFrom"]["secretKeyRef"]
                assert secret["key"] in find("Secret", secret["name"])["stringData"]
        labels = pod["metadata"]["labels"].items()
        rules = [one["spec"] for _, one in DOCUMENTS if one["kind"] == "NetworkPolicy"]
        mine = [one for one in rules if one["podSelector"]["matchLabels"].items() <= labels]
        assert len(mine) == 2, component  # nobody, and who may
        allowed = [rule for one in mine for rule in one["ingress"]]
        assert all(
            source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "trainer"
            for rule in allowed
            for source in rule["from"]
        )
        if component != "trainer":
            service = find("Service", f"calibadv-{component}")["spec"]
            assert service["selector"].items() <= labels
            (port,) = [one["containerPort"] for one in container["ports"]]
            assert [one["port"] for one in service["ports"]] == [port] == [allowed[0]["ports"][0]["port"]]
            assert f"--port={port}" in container["args"]


def test_the_jobs_processes_find_each_other():
    jobset = find("JobSet", "calibadv")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, (container,) = job["template"]["spec"], pods()["trainer"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    head = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert values["JAX_COORDINATOR_ADDRESS"].partition(":")[0] == head
    assert int(values["JAX_NUM_PROCESSES"]) == spec["completions"] == spec["parallelism"]
    assert container["name"] == spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]


@pytest.fixture(params=["run.yaml", "run_workers.yaml"])
def run(request, tmp_path):
    """The config that a ConfigMap carries."""
    ((_, document),) = [one for one in DOCUMENTS if one[0] == request.param]
    assert document["metadata"]["name"] == "calibadv-run"
    (tmp_path / "run.yaml").write_text(document["data"]["run.yaml"].replace("/app/", f"{ROOT}/"))
    return load_config(tmp_path / "run.yaml")


def test_the_runs_config_names_the_services_and_fits_the_devices(run):
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
