"""Eight simulated CPU devices, fixed seeds, and the fixtures every stage's tests share."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
import pytest
from disk_rig import small_disk  # noqa: F401
from object_store import s3  # noqa: F401

# Set here and not in the environment, so that programs which a test starts see the machine as it is.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # tests compile far longer than they compute
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")


if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # Timings vary on a shared machine, and a failure must come back at the next run.
    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.load_profile("repeatable")

# Tracing and compiling make many objects that stay: look for garbage less often than Python does by itself.
gc.set_threshold(20_000, 20, 20)

ROOT = Path(__file__).resolve().parent.parent


SLOW_TIMEOUT = 1800  # seconds: vLLM alone needs minutes to start where other work holds the machine
# Those that take longest, the longest first: a worker takes whole files, and none shall wait at the end.
LONGEST = (
    *("vllm", "train_hosts", "kill", "train", "real_policy", "real_weights"),
    *("paper_run", "documented_commands", "dense", "paper_layouts", "page_browser", "cuda", "tpu"),
    "page_trained_run",
)


def pytest_make_parametrize_id(val):
    """Name long bytes by their place: compressed ones hold a time, and workers must agree on names."""
    return "bytes" if isinstance(val, bytes) and len(val) > 40 else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="fuzz tests try all their cases (minutes more)")


def use_older_emitters() -> None:
    """Let XLA compile programs for CPUs in a third of the time; JAX 0.12 refuses the flag.

    XLA reads the variable once, when it starts. Programs that a test starts do not get it, and so must not
    find in the cache what was compiled with it: its keys do not tell the two apart.
    """
    cache = jax.config.jax_compilation_cache_dir
    if cache:
        jax.config.update("jax_compilation_cache_dir", f"{cache}_older_emitters")
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} --xla_cpu_use_fusion_emitters=false"
    try:
        jax.devices()
    finally:
        del os.environ["XLA_FLAGS"]
        if before is not None:
            os.environ["XLA_FLAGS"] = before


def pytest_configure(config: pytest.Config) -> None:
    """Choose the compiler of the quick part, and refuse two modules of one name.

    Tests are imported by their names, so that one would hide the other. Slow tests, and those that are run
    by themselves, have the compiler that users have.
    """
    is_quick = "not slow" in config.option.markexpr
    if is_quick and jax.config.jax_platforms == "cpu" and jax.__version_info__ < (0, 11):
        use_older_emitters()
    refuse_equal_names()


def refuse_equal_names() -> None:
    """Refuse two modules of one name."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        places.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    del places["conftest.py"]
    twice = [" and ".join(where) for where in places.values() if len(where) > 1]
    if twice:
        raise pytest.UsageError(f"files of one name: {'; '.join(twice)}: rename one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector, which needs a second for all of it, leaves it out."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries complain at the end of what is still there


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def all_cases(request: pytest.FixtureRequest) -> bool:
    """True with --all-cases: a fuzz test tries all its cases. Otherwise it tries a part of them."""
    return bool(request.config.getoption("--all-cases"))


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """Mixing dtypes is an error. Not for every test: optax and others mix integers and floats inside."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of reference values and real data that is not part of the project; skips where it is absent."""
    folder = Path(os.environ.get("CALIBADV_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder} (set CALIBADV_SHARED)")
    return folder


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ON_THIS_MACHINE = {"127.0.0.1", "localhost", "::1"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; skips where there is none. Only for tests marked slow.

    Playwright's event loop runs until the module's tests have ended: no asyncio.run() meanwhile.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if program is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)}); Debian: apt-get install chromium")
    with playwright.sync_playwright() as running:
        # Chromium refuses root with its sandbox, and /dev/shm is small in containers.
        chromium = running.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of 1280 × 800. The test fails where the page logs an error or asks another machine."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    troubles: list[str] = []

    def stay_here(route: Any) -> None:
        address = urlsplit(route.request.url)
        if address.scheme in ("file", "data", "blob") or address.hostname in ON_THIS_MACHINE:
            route.continue_()
        else:
            troubles.append(f"request to {route.request.url}")
            route.abort()

    context.route("**/*", stay_here)
    opened = context.new_page()
    opened.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    opened.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    yield opened
    context.close()
    assert not troubles
