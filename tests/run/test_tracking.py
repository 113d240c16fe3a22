"""How services name a run."""

from calibadv_jax.config import load_config
from calibadv_jax.run.tracking import COLD_START_KIND, describe_run


def test_runs_of_several_seeds_have_different_names_and_one_group(tmp_path):
    descriptions = []
    for seed in (0, 1):
        folder = tmp_path / f"quickstart-grpo/seed-{seed}"
        config = load_config("configs/quickstart_grpo.yaml", [f"run.dir={folder}", f"run.seed={seed}"])
        descriptions.append(describe_run(config, folder, "train"))
    assert [each.name for each in descriptions] == ["quickstart-grpo/seed-0", "quickstart-grpo/seed-1"]
    assert {each.group for each in descriptions} == {"quickstart-grpo"}
    parameters = descriptions[1].flat_parameters()
    assert (parameters["run.seed"], parameters["advantage.name"]) == ("1", "grpo")
    assert parameters["sft.phases"].startswith('[{"')


def test_cold_start_has_its_runs_name(tmp_path):
    config = load_config("configs/quickstart.yaml", [f"run.dir={tmp_path}/a/seed-0"])
    description = describe_run(config, tmp_path / "a/seed-0", COLD_START_KIND)
    assert (description.name, description.kind) == ("a/seed-0 cold start", "cold start")


def test_secrets_are_not_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_FOLDER", "/secret/place")
    config = load_config("configs/quickstart.yaml", ["run.dir=${oc.env:SECRET_FOLDER}/seed-0"])
    assert "/secret/place" not in str(describe_run(config, tmp_path / "seed-0", "train").parameters)
