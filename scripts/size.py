"""Print the size of the project: ``python -m scripts.size``. tests/test_size.py holds the limits.

Lines are lines of Python files, docstrings and blank lines included. Words are those of README.md and docs/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = (ROOT / "calibadv_jax/contrib", ROOT / "retriever/contrib")
LOADED = """
import sys
from pathlib import Path
import calibadv_jax.commands.train
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "calibadv_jax"]
print(len(files), sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files))
"""


def lines(folder: Path) -> int:
    """Return the number of lines of the folder's Python files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def sizes() -> dict[str, int]:
    """Return every figure that has a limit, by name."""
    optional = {path: lines(path) for path in OPTIONAL}
    command = [sys.executable, "-c", LOADED]
    loaded = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    modules, module_lines = map(int, loaded.stdout.split())
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {
        "core lines": lines(ROOT / "calibadv_jax") - optional[OPTIONAL[0]],
        "retriever lines": lines(ROOT / "retriever") - optional[OPTIONAL[1]],
        "optional lines": sum(optional.values()),
        "test lines": lines(ROOT / "tests"),
        "modules loaded by train": modules,
        "lines loaded by train": module_lines,
        "words in README and docs": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def main() -> None:
    for name, size in sizes().items():
        sys.stdout.write(f"{size:7,}  {name}\n")


if __name__ == "__main__":
    main()
