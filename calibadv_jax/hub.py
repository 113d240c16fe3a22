"""Models and data sets of a HuggingFace hub: downloaded once, kept in huggingface_hub's cache.

`HF_ENDPOINT` names another hub, `HF_HOME` another cache, `HF_TOKEN` gives access to gated repositories.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from calibadv_jax.errors import UserError

DATASETS = "hf://datasets/"
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz", ".json.gz", ".tsv.gz", ".csv.gz")
# What a policy needs; not other frameworks' weights, which many repositories carry beside.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Pin:
    """A repository at one commit."""

    repository: str
    revision: str  # as it was asked for
    commit: str


def is_repository(name: str) -> bool:
    """Whether a name that is no path here can be a repository: ``OWNER/NAME`` or ``OWNER/NAME@REVISION``.

    A name whose first part is a folder here is a path of a file that is missing.
    """
    return (
        _REPOSITORY.fullmatch(name) is not None
        and not Path(name).exists()
        and not Path(name.split("/")[0]).exists()
    )


def resolve(repository: str, revision: str) -> Pin:
    """The commit that a branch or tag names now; what is in the cache where the hub cannot be reached.

    Raises:
        UserError: no such repository or revision, no permission, or no network and nothing in the cache.
    """
    revision = revision or "main"
    if _COMMIT.fullmatch(revision):
        return Pin(repository, revision, revision)
    with _errors(repository, "model", revision):
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=["config.json"]
        )
    return Pin(repository, revision, Path(folder).name)


def fetch_model(pin: Pin, with_weights: bool) -> Path:
    """The folder with the repository's config and tokenizer, and its safetensors where they are asked for.

    Raises:
        UserError: as `resolve`.
    """
    patterns = [*SMALL_FILES, *(WEIGHT_FILES if with_weights else ())]
    with _errors(pin.repository, "model", pin.commit):
        return Path(
            huggingface_hub.snapshot_download(pin.repository, revision=pin.commit, allow_patterns=patterns)
        )


def fetch_data(address: str) -> list[Path]:
    """Files of a dataset repository: ``hf://datasets/OWNER/NAME[@REVISION][/FILE]``.

    FILE may be a pattern. Without it the repository must hold exactly one data file.

    Raises:
        UserError: as `resolve`; no such file; or several, and none was named.
    """
    parts = address.removeprefix(DATASETS).split("/", 2)
    if len(parts) < 2:
        raise UserError(f"{address}: expected {DATASETS}OWNER/NAME/FILE")
    name, _, revision = parts[1].partition("@")
    repository, wanted = f"{parts[0]}/{name}", parts[2] if len(parts) > 2 else ""
    # A branch such as refs/convert/parquet is written with %2F.
    revision = revision.replace("%2F", "/") or "main"
    with _errors(repository, "dataset", revision):
        info = huggingface_hub.HfApi().dataset_info(repository, revision=revision)
        files = sorted(one.rfilename for one in info.siblings or ())
        chosen = _choose(files, wanted, f"{DATASETS}{repository}")
        return [
            Path(
                huggingface_hub.hf_hub_download(
                    repository, file, repo_type="dataset", revision=info.sha or revision
                )
            )
            for file in chosen
        ]


def _choose(files: Sequence[str], wanted: str, address: str) -> list[str]:
    data = [file for file in files if file.endswith(DATA_SUFFIXES)]
    if wanted:
        found = [file for file in files if file == wanted] or fnmatch.filter(data, wanted)
        if found:
            return found
        raise UserError(f"{address}: no file {wanted!r}; its data files: {', '.join(data) or 'none'}")
    if len(data) != 1:
        raise UserError(
            f"{address}: {len(data)} data files; name those that you mean, such as"
            f" {address}/{data[0] if data else 'train.jsonl'} (there are: {', '.join(data) or 'none'})"
        )
    return data


@contextmanager
def _errors(repository: str, kind: str, revision: str) -> Iterator[None]:
    """What huggingface_hub raises, as one line that names the repository and the way out."""
    hub = huggingface_hub.constants.ENDPOINT
    place = f"{repository} ({kind} on {hub})"
    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{place}: access is granted on request; ask for it on {hub}/{_page(repository, kind)}, then set"
            " HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{place}: neither a folder here nor a repository there; correct the name, or set HF_TOKEN if it"
            " is private"
        ) from error
    except (RevisionNotFoundError, RevisionResolutionError) as error:
        raise UserError(
            f"{place}: no revision {revision!r}; correct policy.revision or what follows @"
        ) from error
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise _offline(place) from error
        raise UserError(
            f"{place}: a file is missing there: {_short(error)}; choose another revision"
        ) from error
    except (OfflineModeIsEnabled, httpx.TransportError) as error:
        raise _offline(place) from error
    except HFValidationError as error:
        raise UserError(f"{repository}: no name of a repository ({_short(error)})") from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{place}: cannot be downloaded: {_short(error)}; try again later") from error


def _offline(place: str) -> UserError:
    return UserError(
        f"{place}: not a folder here, not in the cache, and the hub cannot be reached; correct the path,"
        " connect to the network, or download it elsewhere and give the folder"
    )


def _page(repository: str, kind: str) -> str:
    return f"datasets/{repository}" if kind == "dataset" else repository


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
