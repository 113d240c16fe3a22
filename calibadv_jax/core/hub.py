"""Models and data sets of a HuggingFace hub, in huggingface_hub's cache.

`HF_ENDPOINT` names another hub, `HF_HOME` another cache, `HF_TOKEN` gives access to gated repositories.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is the HTTP client's
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from pydantic import TypeAdapter

from calibadv_jax.core.errors import EnvironmentFailure, UserError, one_line
from calibadv_jax.core.files import write_json

DATASETS = "hf://datasets/"
PINS = "hub.json"  # in a run's folder
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz", ".json.gz", ".tsv.gz", ".csv.gz")
# Patterns of a policy's files; many repositories hold weights of other frameworks too.
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template*", "generation_config.json"),
)
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Pin:
    """A commit of a repository."""

    repository: str
    revision: str  # as requested
    commit: str


def read_pins(folder: Path) -> list[Pin]:
    """Return the commits that a run started with; a damaged file is a UserError."""
    path = folder / PINS
    try:
        return TypeAdapter(list[Pin]).validate_json(path.read_bytes()) if path.is_file() else []
    except ValueError as error:
        advice = "remove it, and the run takes the commits that policy.revision names now"
        raise UserError(f"{path}: damaged, so that the run's commits are lost; {advice}") from error


def write_pins(folder: Path, pins: Iterable[Pin]) -> None:
    """Add pins to the run's; they replace earlier pins of the same repository and revision."""
    merged = {(pin.repository, pin.revision): pin for pin in (*read_pins(folder), *pins)}
    if merged:
        write_json(folder / PINS, [asdict(pin) for pin in merged.values()])


def is_repository(name: str) -> bool:
    """Whether a name is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, and neither it nor OWNER a path."""
    is_path = Path(name).exists() or Path(name.split("/")[0]).exists()
    return _REPOSITORY.fullmatch(name) is not None and not is_path


def resolve(repository: str, revision: str) -> Pin:
    """Return the commit that a branch or tag names now, or the cached commit if the hub cannot be reached."""
    revision = revision or "main"
    if _COMMIT.fullmatch(revision):
        return Pin(repository, revision, revision)
    with _errors(repository, "model", revision):
        folder = snapshot_download(repository, revision=revision, allow_patterns=["config.json"])
    return Pin(repository, revision, Path(folder).name)


def fetch_model(pin: Pin, with_weights: bool) -> Path:
    """Return the folder with the repository's config and tokenizer, and its weights."""
    patterns = ["config.json", *TOKENIZER_FILES, *(WEIGHT_FILES if with_weights else ())]
    with _errors(pin.repository, "model", pin.commit):
        return Path(snapshot_download(pin.repository, revision=pin.commit, allow_patterns=patterns))


def fetch_data(address: str) -> list[Path]:
    """Return the files of a dataset repository: ``hf://datasets/OWNER/NAME[@REVISION][/FILE]``.

    FILE may be a pattern. Without it the repository must hold exactly one data file.
    """
    parts = re.fullmatch(rf"{DATASETS}([^/]+/[^/@]+)(?:@([^/]*))?(?:/(.*))?", address)
    if not parts:
        raise UserError(f"{address}: expected {DATASETS}OWNER/NAME/FILE")
    repository, revision, pattern = parts.groups(default="")
    # A branch such as refs/convert/parquet is written with %2F.
    revision = revision.replace("%2F", "/") or "main"
    with _errors(repository, "dataset", revision):
        if pattern:
            folder = Path(
                snapshot_download(
                    repository, repo_type="dataset", revision=revision, allow_patterns=[pattern]
                )
            )
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            matches = [p for p in files if fnmatch.fnmatchcase(p.relative_to(folder).as_posix(), pattern)]
            if matches:
                return matches
        info = HfApi().dataset_info(repository, revision=revision)
        data = sorted(f.rfilename for f in info.siblings or () if f.rfilename.endswith(DATA_SUFFIXES))
        if pattern or len(data) != 1:
            fault = f"no file {pattern!r}" if pattern else f"{len(data)} data files"
            place, content = f"{DATASETS}{repository}", ", ".join(data) or "no data file"
            raise UserError(f"{place}: {fault}; give {place}/FILE; it holds {content}")
        return [Path(hf_hub_download(repository, data[0], repo_type="dataset", revision=info.sha))]


# The hub's errors, narrower types first, and the advice that follows the repository's name.
_OFFLINE = "no folder here, not in the cache, and the hub cannot be reached; correct the path, or go online"
_NO_REVISION = "no revision {revision!r}; correct policy.revision or what follows @"
_ADVICE: dict[type[Exception], str] = {
    GatedRepoError: "access is granted on request; ask for it on {page}, then set HF_TOKEN",
    RepositoryNotFoundError: "no folder here and no repository there; correct the name, or set HF_TOKEN",
    RevisionNotFoundError: _NO_REVISION,
    RevisionResolutionError: _NO_REVISION,
    LocalEntryNotFoundError: _OFFLINE,
    OfflineModeIsEnabled: _OFFLINE,
    EntryNotFoundError: "a file is missing there: {text}; choose another revision",
    HfHubHTTPError: "cannot be downloaded: {text}; try again later",
    HTTPError: _OFFLINE,
    ImportError: "cannot be asked: {text}",  # httpx lacks the package for this proxy
    HFValidationError: "no name of a repository ({text})",
}


@contextmanager
def _errors(repository: str, kind: str, revision: str) -> Iterator[None]:
    """Raise huggingface_hub's errors as one line that names the repository and the way out."""
    hub = constants.ENDPOINT
    try:
        yield
    except tuple(_ADVICE) as error:
        failure, advice = next(item for item in _ADVICE.items() if isinstance(error, item[0]))
        page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{repository}"
        advice = advice.format(revision=revision, page=page, text=one_line(error))
        error_type = EnvironmentFailure if failure is HfHubHTTPError else UserError
        raise error_type(f"{repository} ({kind} on {hub}): {advice}") from error
