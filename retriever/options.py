"""Options of the commands, on the command line or in a YAML file of the same names.

Imports nothing heavy: the commands read them before numpy is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any

import yaml

from retriever.backends import (
    KINDS,
    VECTOR_KINDS,
    WEB_NAMES,
    BuildOptions,
    IndexOptions,
    Option,
    Remote,
    find_remote,
)
from retriever.errors import RetrieverError

# How to install the packages that both commands need.
INSTALL = "pip install 'calibadv-jax[retriever]'"
# Help text of --corpus_path.
CORPUS = "corpus: JSONL file of {id, contents}, or a csv, tsv or parquet file of id, title and text; also .gz"
# Values of --retriever_name that index a corpus.
BUILT = "hashed, e5, bge, dense, bm25"
# Fields of BuildOptions that the service has too, or that hold a kind's own options.
NOT_ONLY_BUILD = ("retriever_name", "retriever_model", "settings")
# Options that only a build takes.
BUILD = tuple(field.name for field in dataclasses.fields(BuildOptions) if field.name not in NOT_ONLY_BUILD)
# Options of the builder and of the service that belong to a kind of index, by name.
BUILD_OPTIONS = {name: option for kind in KINDS.values() for name, option in kind.build_options.items()}
SERVE_OPTIONS = {name: option for kind in KINDS.values() for name, option in kind.serve_options.items()}
# Options of search services that have no index folder.
REMOTE_OPTIONS = [name for kind in KINDS.values() if not kind.backend for name in kind.serve_options]
# Options that are numbers of at least 1: their defaults and help texts.
COUNTS = {
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
    """Return the parser of the service's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m retriever.serve", description="Starts the retrieval service.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--config", type=Path, help="YAML file of options; options of the command line win")
    add_source(parser, f"{BUILT}, or {', '.join(WEB_NAMES)}", name="", is_required=False)
    add("--build_if_missing", action="store_true", help="build the index by the options of the builder")
    add_build(parser)
    for name, (default, meaning) in COUNTS.items():
        add(f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)")
    _add_search(parser)
    _add_server(parser)
    return parser


def add_source(parser: argparse.ArgumentParser, names: str, name: str, is_required: bool) -> None:
    """Add the options that both commands have: corpus, index and encoder.

    Args:
        parser: The parser of a command.
        names: Values of --retriever_name, for its help text.
        name: Default of --retriever_name; empty for the encoder of the index.
        is_required: Whether corpus and index must be given on the command line.
    """
    add = parser.add_argument
    add("--corpus_path", type=Path, required=is_required, help=CORPUS)
    folder = "folder of the index; the service also takes a FAISS file"
    add("--index_path", type=Path, required=is_required, help=folder)
    add("--retriever_name", default=name, help=f"encoder: {names} (default: {name or 'that of the index'})")
    add("--retriever_model", default="", help="model of the encoder: a folder or a hub name")


def add_build(parser: argparse.ArgumentParser) -> None:
    """Add the options of the builder; the value of one that is not given is None."""
    group = parser.add_argument_group("building an index")
    add = group.add_argument
    add("--kind", help=f"kind of the index: {VECTOR_KINDS} or package.module:Class (default: faiss)")
    add("--factory", help="FAISS factory string (default: Flat)")
    add("--search", help="search parameters kept in the index: nprobe=32 (FAISS), hnsw_ef=128 (Qdrant)")
    add("--embeddings", type=Path, help="folder to keep the vectors in, for further indexes")
    add("--embedding_dtype", help="precision of the kept vectors: float32 or float16 (default: float32)")
    add("--shard_rows", type=int, help="number of passages in a file of vectors (default: 262144)")
    add("--devices", help="devices that encode, a process each, such as cuda:0,cuda:1 (default: one process)")
    for name, option in BUILD_OPTIONS.items():
        _add_option(add, name, option, None)


def _add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of the service that say how an index is searched."""
    add = parser.add_argument
    add("--faiss_gpu", action="store_true", help="spread the index over all GPUs, Flat in fp16")
    add("--mmap", action="store_true", help="read the parts of the index from disk when they are needed")
    add("--skip_checksum", action="store_true", help="do not read the index's files first to compare them")
    add("--engine", default="", choices=["", "faiss", "jax"], help="library that searches a flat index")
    for name, option in SERVE_OPTIONS.items():
        _add_option(add, name, option, option.default)
    add("--reranker_model", default="", help="cross-encoder: a folder or a hub name")
    add("--pages_path", type=Path, help="JSONL file of rows with url, for POST /access")
    add("--cache_path", type=Path, help="file of the result store (SQLite: for the services of one host)")
    modes = "use: the store first, then the search; replay: the store only"
    add("--cache_mode", choices=["use", "replay"], default="use", help=modes)


def _add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options of the service that concern its socket and its process."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port (default: %(default)s)")
    add("--token_file", type=Path, help="file with the token that clients must send; or set RETRIEVER_TOKEN")
    hosts = (
        "comma-separated names, besides --host and loopback, for which requests without a token are answered"
    )
    add("--allowed_hosts", default="", help=f"{hosts}; * stands for any characters")
    add("--port_file", type=Path, help="file to write the port to when the service is ready")
    add("--parent_pid", type=int, help="stop when this process has ended")
    add("--threads", type=int, default=0, help="number of cores to use; 0: all (default: %(default)s)")
    seconds = "seconds for a client to send a request or to take its reply (default: %(default)g)"
    add("--request_seconds", type=float, default=30.0, help=seconds)


def _add_option(add: Any, name: str, option: Option, default: Any) -> None:
    if option.default is False:
        add(f"--{name}", action="store_true", default=default, help=option.help)
        return
    help_text = option.help
    if option.default:
        help_text += f" (default: {option.default})"
    add(f"--{name}", type=type(option.default), default=default, help=help_text)


def build_options(arguments: argparse.Namespace) -> BuildOptions:
    """Return the options of the builder, with defaults for those that were not given."""
    values = _build_values(arguments)
    settings = {name: values.pop(name) for name in BUILD_OPTIONS if name in values}
    retriever_name = arguments.retriever_name or BuildOptions.retriever_name
    return BuildOptions(retriever_name, arguments.retriever_model, settings=settings, **values)


def index_options(arguments: argparse.Namespace) -> IndexOptions:
    """Return the options of opening an index; of a kind's own options only those that were given."""
    settings = {}
    for name, option in SERVE_OPTIONS.items():
        value = getattr(arguments, name)
        if value != option.default:
            settings[name] = value
    return IndexOptions(
        retriever_name=arguments.retriever_name,
        retriever_model=arguments.retriever_model,
        engine=arguments.engine,
        faiss_gpu=arguments.faiss_gpu,
        mmap=arguments.mmap,
        threads=arguments.threads,
        skip_checksum=arguments.skip_checksum,
        settings=settings,
    )


def _build_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that only a build takes and that were given, by name."""
    values = {}
    for name in (*BUILD, *BUILD_OPTIONS):
        value = getattr(arguments, name)
        if value is not None:
            values[name] = value
    return values


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the options of the service; those of the command line win over those of the file.

    Args:
        argv: Arguments of the command line; None for those of the process.

    Returns:
        The options by name. Options of the builder that were not given are None.

    Raises:
        RetrieverError: Unknown key, bad value, or an option that is missing or has no meaning.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.config is not None:
        parser.set_defaults(**_read_options(options.config, parser))
        options = parser.parse_args(argv)
    remote = find_remote(options)
    _check_source(options, remote)
    _check_build(options, remote)
    _check_numbers(options)
    return options


def _check_source(options: argparse.Namespace, remote: Remote | None) -> None:
    """Refuse options that are missing, or have no meaning for what is searched."""
    if remote:
        required = remote.required_options
        excluded = remote.excluded_options
    else:
        required = ("corpus_path", "index_path")
        excluded = tuple(REMOTE_OPTIONS)
    for name in required:
        if not getattr(options, name):
            raise RetrieverError(f"--{name} is missing; give it, or set {name} in the file of --config")
    for name in excluded:
        default = SERVE_OPTIONS[name].default if name in SERVE_OPTIONS else ""
        if getattr(options, name) and getattr(options, name) != default:
            purpose = f"--retriever_name {options.retriever_name}" if options.retriever_name else "an index"
            raise RetrieverError(f"--{name}: has no meaning for {purpose}; leave it out")


def _check_build(options: argparse.Namespace, remote: Remote | None) -> None:
    """Refuse options of the builder if nothing is built."""
    shared = remote.builder_options if remote else ()
    build_only = [name for name in _build_values(options) if name not in shared]
    if not build_only:
        return
    if remote:
        raise RetrieverError(f"--{build_only[0]}: only a build takes it; leave it out")
    if not options.build_if_missing:
        raise RetrieverError(
            f"--{build_only[0]}: only a build takes it; add --build_if_missing, or leave it out"
        )


def _check_numbers(options: argparse.Namespace) -> None:
    """Refuse numbers that are too small."""
    minima = dict.fromkeys(COUNTS, 1)
    minima["web_budget"] = 0
    minima["threads"] = 0
    for name, minimum in minima.items():
        value = getattr(options, name)
        if value < minimum:
            raise RetrieverError(f"--{name} is {value}, but must be at least {minimum}")
    if not options.request_seconds > 0:  # NaN is refused too
        raise RetrieverError(f"--request_seconds is {options.request_seconds}, but must be above 0")


def read_token(arguments: argparse.Namespace) -> str:
    """Return the token that clients must send: that of --token_file, or of RETRIEVER_TOKEN.

    Args:
        arguments: Options of the service.

    Returns:
        The token without white space around it; empty if clients need none.

    Raises:
        RetrieverError: The file is missing or empty.
    """
    path = arguments.token_file
    if path is None:
        return os.environ.get("RETRIEVER_TOKEN", "").strip()
    if not path.is_file():
        raise RetrieverError(f"{path}: no such file; correct --token_file")
    token: str = path.read_text(encoding="utf-8").strip()
    if not token:
        raise RetrieverError(f"{path}: is empty; write a token into it")
    return token


def _read_options(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options of a YAML file, converted to the types of the command line."""
    if not path.is_file():
        raise RetrieverError(f"{path}: no such config file; configs/retriever.yaml is an example")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        one_line = " ".join(str(error).split())
        raise RetrieverError(f"{path}: not valid YAML: {one_line}") from error
    if not isinstance(values, dict):
        raise RetrieverError(f"{path}: expected keys and values, got {type(values).__name__}")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    options = {}
    for name, value in values.items():
        if name not in actions:
            matches = difflib.get_close_matches(str(name), actions, n=1)
            advice = f"; did you mean {matches[0]!r}?" if matches else ""
            raise RetrieverError(f"{path}: unknown key {name!r}{advice}")
        options[name] = _convert(path, name, value, actions[name])
    return options


def _convert(path: Path, name: str, value: Any, action: argparse.Action) -> Any:
    """Return the value of a key of the file, converted and checked as by the command line."""
    is_switch = action.nargs == 0
    if is_switch:
        if not isinstance(value, bool):
            raise RetrieverError(f"{path}: {name} must be true or false, got {value!r}")
        return value
    kind: Any = action.type or str
    try:
        converted = kind(value)
    except (TypeError, ValueError) as error:
        raise RetrieverError(f"{path}: {name} must be of type {kind.__name__}, got {value!r}") from error
    if action.choices is not None and converted not in action.choices:
        choices = ", ".join(str(choice) for choice in action.choices)
        raise RetrieverError(f"{path}: {name} is {value!r}; known are {choices}")
    return converted
