"""What counts as a checkpoint of a run that was stopped while it saved."""

from calibadv_jax.snapshots.checkpoint import has_checkpoint


def test_only_a_complete_step_is_a_checkpoint(tmp_path):
    assert not has_checkpoint(tmp_path / "absent")
    assert not has_checkpoint(tmp_path)
    (tmp_path / "3.orbax-checkpoint-tmp-0").mkdir()
    assert not has_checkpoint(tmp_path)
    (tmp_path / "3").mkdir()
    assert has_checkpoint(tmp_path)
