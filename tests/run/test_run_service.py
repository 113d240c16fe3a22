"""A run that is continued over another index is refused, unless that is what its config says."""

import errno
import os
from dataclasses import replace

import pytest

from calibadv_jax.config import CheckpointConfig, Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.folder import SERVICE_FILE, check_service

FIRST = {"status": "ready", "corpus_sha256": "c1", "encoder": "hashed", "documents": 7, "identity": "aa"}
ACCEPTING = replace(Config(), checkpoint=CheckpointConfig(allow_change=["retriever.content"]))


@pytest.fixture
def run(tmp_path):
    """A folder with a checkpoint that was trained over FIRST."""
    check_service(Config(), tmp_path, FIRST)
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    return tmp_path


def test_same_index_is_accepted_at_another_address(run):
    check_service(Config(), run, FIRST | {"documents": 7, "stage": "x"})


@pytest.mark.parametrize("changed", [{"corpus_sha256": "c2"}, {"encoder": "e5"}, {"identity": "bb"}])
def test_another_index_is_refused_until_it_is_accepted(run, changed):
    kept = (run / SERVICE_FILE).read_text()
    for _ in range(2):  # a start that was refused leaves no trace
        with pytest.raises(
            UserError, match="has another index than at the last start .*instead of.*allow_ch"
        ):
            check_service(Config(), run, FIRST | changed)
        assert (run / SERVICE_FILE).read_text() == kept
    check_service(ACCEPTING, run, FIRST | changed)
    check_service(Config(), run, FIRST | changed)  # accepted once and for all
    with pytest.raises(UserError, match="another index"):
        check_service(Config(), run, FIRST)


def test_service_without_description_is_refused(run):
    with pytest.raises(UserError, match="corpus_sha256 None instead of 'c1'"):
        check_service(Config(), run, {})


def test_index_may_change_before_first_step(tmp_path):
    check_service(Config(), tmp_path, FIRST)
    check_service(Config(), tmp_path, FIRST | {"corpus_sha256": "c2"})


def test_run_without_description_accepts_the_index(run):
    (run / SERVICE_FILE).unlink()
    check_service(Config(), run, FIRST)
    assert (run / SERVICE_FILE).is_file()


def test_damaged_description_is_refused(run):
    (run / SERVICE_FILE).write_text("{")
    with pytest.raises(UserError, match=f"{SERVICE_FILE}: damaged"):
        check_service(Config(), run, FIRST)


def test_its_section_accepts_it_too(run):
    section = replace(Config(), checkpoint=CheckpointConfig(allow_change=["retriever"]))
    check_service(section, run, FIRST | {"corpus_sha256": "c2"})


@pytest.mark.parametrize("left", ["metrics.jsonl", "rollouts/step_000001.parquet"])
def test_trained_steps_count_without_a_checkpoint(tmp_path, left):
    check_service(Config(), tmp_path, FIRST)
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="another index than at the last start"):
        check_service(Config(), tmp_path, FIRST | {"corpus_sha256": "c2"})


def test_full_disk_keeps_the_description(run, monkeypatch):
    before = (run / SERVICE_FILE).read_text()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=rf"{SERVICE_FILE} cannot be written \(No space left on device\)"):
        check_service(ACCEPTING, run, FIRST | {"corpus_sha256": "c2"})
    assert (run / SERVICE_FILE).read_text() == before
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", SERVICE_FILE]
