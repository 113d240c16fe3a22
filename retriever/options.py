"""The service's options, on the command line or in a YAML file of the same names; what both commands ask for.

Imports nothing heavy: the commands read them before numpy is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from retriever.errors import RetrieverError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

INSTALL = "pip install 'calibadv-jax[retriever]'"  # what both commands need
CORPUS = "corpus: JSONL file of {id, contents}, or a csv, tsv or parquet file of id, title and text; also .gz"
BUILT = "hashed, e5, bge, dense, bm25"  # what a corpus is indexed by
WEB_SEARCHES = ("google", "serpapi")  # what needs no corpus
BUILD = (
    *("kind", "factory", "search", "embeddings", "embedding_dtype", "shard_rows", "devices"),
    *("qdrant_url", "qdrant_collection", "qdrant_shards", "qdrant_replicas", "qdrant_on_disk"),
    *("qdrant_quantization", "qdrant_parallel"),
)
COUNTS = {  # option -> default and help; at least 1
    "retrieval_topk": (3, "number of documents if the request names no number"),
    "reranking_topk": (3, "number of documents that the reranker keeps"),
    "reranker_batch_size": (32, "number of pairs that the reranker scores at once"),
    "max_batch": (256, "largest number of queries of one search"),
    "max_queue": (8192, "largest number of queries that wait"),
    "max_queries": (8192, "largest number of queries of one request"),
    "max_results": (65536, "largest product of a request's queries and its documents for each query"),
    "max_connections": (4096, "largest number of open connections"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m retriever.serve", description="Starts the retrieval service.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--config", type=Path, help="YAML file of options; options of the command line win")
    add_source(parser, f"{BUILT}, or {', '.join(WEB_SEARCHES)}", name="", is_required=False)
    add(
        "--build_if_missing", action="store_true", help="build the index first, by the options of the builder"
    )
    add_build(parser)
    for name, (default, meaning) in COUNTS.items():
        add(f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)")
    add("--faiss_gpu", action="store_true", help="spread the index over all GPUs, Flat in fp16")
    add("--mmap", action="store_true", help="read the parts of the index from disk when they are needed")
    add("--skip_checksum", action="store_true", help="do not read the index's files first to compare them")
    add("--engine", default="", choices=["", "faiss", "jax"], help="library that searches a flat index")
    add(
        "--qdrant_search",
        default="",
        help="search parameters, such as hnsw_ef=128,oversampling=2; or exact=true",
    )
    add("--qdrant_text", default="contents", help="field of a collection's payload that holds the text")
    add("--reranker_model", default="", help="cross-encoder: a folder or a hub name")
    add("--pages_path", type=Path, help="JSONL file of rows with url, for POST /access")
    add("--cache_path", type=Path, help="file of the result store (SQLite: for the services of one host)")
    add(
        "--cache_mode",
        choices=["use", "replay"],
        default="use",
        help="use: the store first, then the search; replay: the store only",
    )
    add("--web_budget", type=int, default=0, help="web search: largest number of requests to send in all")
    add("--web_endpoint", default="", help="web search: another address of the same API")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port (default: %(default)s)")
    add("--token_file", type=Path, help="file with the token that clients must send; or set RETRIEVER_TOKEN")
    add("--port_file", type=Path, help="file to write the port to when the service is ready")
    add("--parent_pid", type=int, help="stop when this process has ended")
    add("--threads", type=int, default=0, help="number of cores to use; 0: all (default: %(default)s)")
    add(
        "--request_seconds",
        type=float,
        default=30.0,
        help="seconds that a client may take to send a request or to take its reply (default: %(default)g)",
    )
    return parser


def add_source(parser: argparse.ArgumentParser, names: str, name: str, is_required: bool) -> None:
    """What both commands ask for: a corpus, its index, and the encoder between them."""
    add = parser.add_argument
    add("--corpus_path", type=Path, required=is_required, help=CORPUS)
    add(
        "--index_path",
        type=Path,
        required=is_required,
        help="folder of the index; the service also takes a FAISS file",
    )
    add("--retriever_name", default=name, help=f"encoder: {names} (default: {name or 'that of the index'})")
    add("--retriever_model", default="", help="model of the encoder: a folder or a hub name")


def add_build(parser: argparse.ArgumentParser) -> None:
    """What the builder can be told: the fields of `indexing.options.BuildOptions`, which has the defaults."""
    group = parser.add_argument_group("building an index")
    add = group.add_argument
    add("--kind", help="kind of the index: faiss, jax or qdrant (default: faiss)")
    add("--factory", help="FAISS factory string (default: Flat)")
    add(
        "--search",
        help="search parameters kept in the index, such as nprobe=32 (FAISS) or hnsw_ef=128 (Qdrant)",
    )
    add("--embeddings", type=Path, help="folder to keep the vectors in, for further indexes")
    add("--embedding_dtype", help="precision of the kept vectors: float32 or float16 (default: float32)")
    add("--shard_rows", type=int, help="number of passages in a file of vectors (default: 262144)")
    add("--devices", help="devices that encode, a process each, such as cuda:0,cuda:1 (default: one process)")
    add("--qdrant_url", help="address of the Qdrant server (default: embedded in the index's folder)")
    add("--qdrant_collection", help="name of the collection to make (default: passages)")
    add("--qdrant_shards", type=int, help="number of shards of the collection (default: 1)")
    add("--qdrant_replicas", type=int, help="number of copies of each shard (default: 1)")
    add("--qdrant_on_disk", action="store_true", help="leave the full vectors on disk")
    add("--qdrant_quantization", help="codes in memory: int8 or binary (default: none)")
    add("--qdrant_parallel", type=int, help="number of requests of the upload at once (default: 4)")
    group.set_defaults(**dict.fromkeys(BUILD))


def given_build(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those options of the builder that were given."""
    return {name: value for name in BUILD if (value := getattr(arguments, name)) is not None}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options of the file, if one is given, under those of the command line.

    Raises:
        RetrieverError: unknown key, bad value, an option that is missing or has no meaning.
    """
    parser = make_parser()
    given = parser.parse_args(argv)
    if given.config is not None:
        parser.set_defaults(**_read_options(given.config, parser))
        given = parser.parse_args(argv)
    if is_collection(given):
        needed = ["qdrant_collection", "retriever_name"]
        unused = ["corpus_path", "web_budget", "web_endpoint"]
    elif given.retriever_name in WEB_SEARCHES:
        needed = ["cache_path", "web_budget"]
        unused = ["corpus_path", "index_path", "retriever_model"]
    else:
        needed = ["corpus_path", "index_path"]
        unused = ["web_budget", "web_endpoint"]
    for name in needed:
        if not getattr(given, name):
            raise RetrieverError(f"--{name} is missing; give it, or set {name} in the file of --config")
    for name in unused:
        if getattr(given, name):
            what = f"--retriever_name {given.retriever_name}" if given.retriever_name else "an index"
            raise RetrieverError(f"--{name}: has no meaning for {what}; leave it out")
    if (
        not given.build_if_missing
        and not is_collection(given)
        and (extra := next(iter(given_build(given)), None))
    ):
        raise RetrieverError(f"--{extra}: only a build takes it; add --build_if_missing, or leave it out")
    if given.web_budget < 0:
        raise RetrieverError(f"--web_budget is {given.web_budget}, but must be at least 1")
    if given.threads < 0:
        raise RetrieverError(f"--threads is {given.threads}, but must be at least 1, or 0 for all cores")
    if not given.request_seconds > 0:
        raise RetrieverError(f"--request_seconds is {given.request_seconds}, but must be above 0")
    for name in COUNTS:
        if getattr(given, name) < 1:
            raise RetrieverError(f"--{name} is {getattr(given, name)}, but must be at least 1")
    return given


def is_collection(arguments: argparse.Namespace) -> bool:
    """Whether a Qdrant collection is to be served as it is, without an index's folder."""
    return bool(arguments.qdrant_url) and not arguments.index_path


def select(kind: type[Options], arguments: argparse.Namespace) -> Options:
    """The dataclass whose fields are named as options of the command."""
    return kind(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)})


def read_token(arguments: argparse.Namespace) -> str:
    """The token clients must send; empty: none.

    Raises:
        RetrieverError: the file is missing or empty.
    """
    if arguments.token_file is None:
        return os.environ.get("RETRIEVER_TOKEN", "").strip()
    if not arguments.token_file.is_file():
        raise RetrieverError(f"{arguments.token_file}: no such file; correct --token_file")
    token: str = arguments.token_file.read_text(encoding="utf-8").strip()
    if not token:
        raise RetrieverError(f"{arguments.token_file}: is empty; write a token into it")
    return token


def _read_options(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    if not path.is_file():
        raise RetrieverError(f"{path}: no such config file; configs/retriever.yaml is an example")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RetrieverError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RetrieverError(f"{path}: expected keys and values, got {type(values).__name__}")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    options = {}
    for name, value in values.items():
        if name not in actions:
            near = difflib.get_close_matches(str(name), actions, n=1)
            raise RetrieverError(
                f"{path}: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        options[name] = _convert(path, name, value, actions[name])
    return options


def _convert(path: Path, name: str, value: Any, action: argparse.Action) -> Any:
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise RetrieverError(f"{path}: {name} must be true or false, got {value!r}")
        return value
    kind: Any = action.type or str
    try:
        converted = kind(value)
    except (TypeError, ValueError) as error:
        raise RetrieverError(f"{path}: {name} must be of type {kind.__name__}, got {value!r}") from error
    if action.choices is not None and converted not in action.choices:
        raise RetrieverError(f"{path}: {name} is {value!r}; known are {', '.join(map(str, action.choices))}")
    return converted
