"""Models and data sets of a HuggingFace hub, downloaded into the cache of huggingface_hub.

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
# File of a run's folder that holds the commits which the run uses.
PINS_FILE = "hub.json"
TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4")
DATA_SUFFIXES = (
    ".parquet",
    ".arrow",
    ".feather",
    ".orc",
    ".zip",
    *TEXT_SUFFIXES,
    *(text + packed for text in TEXT_SUFFIXES for packed in PACKED_SUFFIXES),
)
# Patterns of a policy's files. They leave out weights of other frameworks, which many repositories hold too.
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATASET_ADDRESS = re.compile(rf"{DATASETS}([^/]+/[^/@]+)(?:@([^/]*))?(?:/(.*))?")

_OFFLINE = "no folder here, not in the cache, and the hub cannot be reached; correct the path, or go online"
_NO_REVISION = "no revision {revision!r}; correct policy.revision or what follows @"
# Error of huggingface_hub -> what the message says after the repository's name; narrower types come first.
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
    # The HTTP client lacks the package for the proxy that the environment names.
    ImportError: "cannot be asked: {text}",
    HFValidationError: "no name of a repository ({text})",
}


@dataclass(frozen=True)
class Pin:
    """A commit of a repository.

    Attributes:
        repository: OWNER/NAME.
        revision: Branch, tag or commit that was requested.
        commit: The commit's hash.
    """

    repository: str
    revision: str
    commit: str


def read_pins(folder: Path) -> list[Pin]:
    """Return the commits that a run started with.

    Args:
        folder: Folder of the run.

    Raises:
        UserError: The file of the commits is damaged.
    """
    path = folder / PINS_FILE
    if not path.is_file():
        return []
    try:
        return TypeAdapter(list[Pin]).validate_json(path.read_bytes())
    except ValueError as error:
        raise UserError(
            f"{path}: damaged, so that the run's commits are lost; "
            "remove it, and the run takes the commits that policy.revision names now"
        ) from error


def write_pins(folder: Path, pins: Iterable[Pin]) -> None:
    """Add pins to those of a run; they replace earlier pins of the same repository and revision.

    Args:
        folder: Folder of the run.
        pins: Pins to add.

    Raises:
        UserError: The file of the commits is damaged.
    """
    merged = {}
    for pin in (*read_pins(folder), *pins):
        merged[pin.repository, pin.revision] = pin
    if merged:
        write_json(folder / PINS_FILE, [asdict(pin) for pin in merged.values()])


def is_repository(name: str) -> bool:
    """Return whether a name is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, and neither it nor OWNER a path."""
    owner = name.split("/")[0]
    is_path = Path(name).exists() or Path(owner).exists()
    return _REPOSITORY.fullmatch(name) is not None and not is_path


def resolve(repository: str, revision: str) -> Pin:
    """Return the commit that a branch or tag names now, or the cached commit if the hub cannot be reached.

    Args:
        repository: OWNER/NAME of a model.
        revision: Branch, tag or commit; empty: main.

    Raises:
        UserError: There is no such repository or revision, or neither the hub nor the cache has it.
        EnvironmentFailure: The hub fails for now.
    """
    revision = revision or "main"
    if _COMMIT.fullmatch(revision):
        return Pin(repository, revision, revision)
    with _errors(repository, "model", revision):
        folder = snapshot_download(repository, revision=revision, allow_patterns=["config.json"])
    return Pin(repository, revision, Path(folder).name)


def fetch_model(pin: Pin, with_weights: bool) -> Path:
    """Return the folder in the cache with the config and the tokenizer of a model.

    Args:
        pin: Commit of the model.
        with_weights: Whether to download the weights too.

    Raises:
        UserError: There is no such commit, or neither the hub nor the cache has it.
        EnvironmentFailure: The hub fails for now.
    """
    patterns = ["config.json", *TOKENIZER_FILES]
    if with_weights:
        patterns += WEIGHT_FILES
    with _errors(pin.repository, "model", pin.commit):
        return Path(snapshot_download(pin.repository, revision=pin.commit, allow_patterns=patterns))


def fetch_data(address: str) -> list[Path]:
    """Return files of a dataset repository, downloaded into the cache.

    Args:
        address: ``hf://datasets/OWNER/NAME[@REVISION][/FILE]``. FILE may be a pattern; without it the
            repository must hold exactly one data file.

    Raises:
        UserError: The address is malformed, or there is no such repository, revision or file.
        EnvironmentFailure: The hub fails for now.
    """
    match = _DATASET_ADDRESS.fullmatch(address)
    if not match:
        raise UserError(f"{address}: expected {DATASETS}OWNER/NAME/FILE")
    repository, revision, pattern = match.groups(default="")
    # A branch such as refs/convert/parquet is written with %2F.
    revision = revision.replace("%2F", "/") or "main"
    with _errors(repository, "dataset", revision):
        if pattern:
            files = _download_matches(repository, revision, pattern)
            if files:
                return files
        info = HfApi().dataset_info(repository, revision=revision)
        names = [file.rfilename for file in info.siblings or ()]
        data_files = sorted(name for name in names if name.endswith(DATA_SUFFIXES))
        if pattern or len(data_files) != 1:
            place = f"{DATASETS}{repository}"
            fault = f"no file {pattern!r}" if pattern else f"{len(data_files)} data files"
            content = ", ".join(data_files) or "no data file"
            raise UserError(f"{place}: {fault}; give {place}/FILE; it holds {content}")
        path = hf_hub_download(repository, data_files[0], repo_type="dataset", revision=info.sha)
        return [Path(path)]


def _download_matches(repository: str, revision: str, pattern: str) -> list[Path]:
    """Return the files of a dataset repository that match a pattern, sorted."""
    snapshot = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=[pattern])
    folder = Path(snapshot)
    matches = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and fnmatch.fnmatchcase(name, pattern):
            matches.append(path)
    return matches


@contextmanager
def _errors(repository: str, kind: str, revision: str) -> Iterator[None]:
    """Raise huggingface_hub's errors as one line that names the repository and the way out."""
    hub = constants.ENDPOINT
    try:
        yield
    except tuple(_ADVICE) as error:
        error_type, template = _advice_for(error)
        page = f"{hub}/datasets/{repository}" if kind == "dataset" else f"{hub}/{repository}"
        advice = template.format(revision=revision, page=page, text=one_line(error))
        # The hub may answer again later; the other errors need another input.
        failure = EnvironmentFailure if error_type is HfHubHTTPError else UserError
        raise failure(f"{repository} ({kind} on {hub}): {advice}") from error
    except ValueError as error:
        if "proxy" not in str(error):
            raise
        raise UserError(
            f"{repository} ({kind} on {hub}): cannot be asked: {one_line(error)}; correct the variable of the"
            " environment that names it (ALL_PROXY, HTTPS_PROXY), such as socks5://HOST:PORT"
        ) from error


def _advice_for(error: Exception) -> tuple[type[Exception], str]:
    """Return the first type of `_ADVICE` that an error has, and its advice."""
    for error_type, template in _ADVICE.items():
        if isinstance(error, error_type):
            return error_type, template
    raise AssertionError(f"no advice for {type(error).__name__}")
