"""The trajectory page inside a notebook: Jupyter on this machine, or Google Colab."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from calibadv_jax.contrib.pages.server import make_server
from calibadv_jax.contrib.pages.site import Site

# Whose pages may show it in a frame: this machine's, or those that hold a notebook's outputs in Colab.
JUPYTER = "http://localhost:* http://127.0.0.1:*"
COLAB = "https://colab.research.google.com https://*.googleusercontent.com https://*.colab.dev"


def show(run: str | Path, height: int = 700) -> None:
    """Serve the page of a run until the kernel ends, and show it below the cell; UserError as `Site`."""
    from IPython.display import IFrame, display

    colab = sys.modules.get("google.colab.output")  # every kernel there has imported it
    # Only Colab's proxy reaches its machines, for their user alone, under names of its own.
    server = make_server(Site(Path(run)), 0, COLAB if colab else JUPYTER, any_host=colab is not None)
    threading.Thread(target=server.serve_forever, name="inspect", daemon=True).start()
    if colab:
        colab.serve_kernel_port_as_iframe(server.server_port, height=height)
    else:
        display(IFrame(f"http://localhost:{server.server_port}/", "100%", height))
