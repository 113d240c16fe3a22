"""The files of the trajectory page, by their address: the same for the server and for a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

from calibadv_jax.contrib.pages.index import RunIndex
from calibadv_jax.contrib.pages.run_files import RunFiles
from calibadv_jax.contrib.pages.tokens import Pieces
from calibadv_jax.contrib.pages.transcript import transcript
from calibadv_jax.record.reader import opening_and_actions
from calibadv_jax.record.schema import short_name

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
INDEX = "data/index.json"

_GROUP = re.compile(r"data/group_(\d{1,9})_(\d{1,9})\.json")


class Site:
    """What the page consists of.

    Args:
        files: of the run, which may still be running.

    Raises:
        UserError: the run's tokenizer is missing, or a step cannot be read.
    """

    def __init__(self, files: RunFiles):
        self.files, self.index = files, RunIndex(files)
        metadata = files.metadata()
        self.settings: dict[str, Any] = json.loads(metadata["advantage"])  # that section of the run's config
        self._protocol = opening_and_actions(metadata)
        self._pieces = Pieces(files.folder / metadata["tokenizer"])

    def static(self) -> dict[str, bytes]:
        """Address -> content of the files that do not depend on the run."""
        folder = resources.files("calibadv_jax.contrib.pages") / "static"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def get(self, address: str) -> bytes | None:
        """Content of an address such as "index.html", "data/index.json"; None where there is nothing.

        Raises:
            UserError: a step's file cannot be read.
        """
        if address == INDEX:
            return self._index()
        group = _GROUP.fullmatch(address)
        if group:
            rows = self.files.group(int(group[1]), int(group[2]))
            return _json(transcript(rows, self._pieces, self.settings, *self._protocol)) if rows else None
        return self.static().get(address)

    def everything(self) -> Iterator[tuple[str, bytes]]:
        """Address and content of every file."""
        yield from self.static().items()
        yield INDEX, self._index()
        for step in self.index.steps():
            for group in step["groups"]["group"]:
                address = f"data/group_{step['step']}_{group}.json"
                content = self.get(address)
                assert content is not None, address
                yield address, content

    def _index(self) -> bytes:
        name = short_name(self.files.folder)
        steps = self.index.steps()
        # Of a part of the steps (--steps) the newest one is not the run's.
        planned = self.files.planned_steps() if self.files.last is None else steps[-1]["step"]
        return _json({"name": name, "advantage": self.settings, "planned": planned, "steps": steps})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
