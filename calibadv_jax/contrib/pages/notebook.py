"""The trajectory page inside a notebook: Jupyter on this machine, or Google Colab."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from calibadv_jax.contrib.pages.page_server import make_server
from calibadv_jax.contrib.pages.site import Site

# Sources whose pages may show it in a frame: those of this machine, or those that hold a notebook's outputs
# in Colab.
JUPYTER = "http://localhost:* http://127.0.0.1:*"
COLAB = "https://colab.research.google.com https://*.googleusercontent.com https://*.colab.dev"


def show(run: str | Path, height: int = 700) -> None:
    """Serve the page of a run until the kernel ends, and show it below the cell.

    Args:
        run: folder of the run.
        height: height of the frame in pixels.

    Raises:
        UserError: the folder keeps no steps, or the run's tokenizer is missing.
    """
    from IPython.display import IFrame, display

    colab = sys.modules.get("google.colab.output")  # every kernel in Colab has imported it
    site = Site(Path(run))
    if colab is not None:
        # Colab's proxy alone reaches the machine, for its user only, under host names of its own.
        server = make_server(site, 0, COLAB, any_host=True)
    else:
        server = make_server(site, 0, JUPYTER)
    threading.Thread(target=server.serve_forever, name="inspect", daemon=True).start()
    if colab:
        colab.serve_kernel_port_as_iframe(server.server_port, height=height)
    else:
        display(IFrame(f"http://localhost:{server.server_port}/", "100%", height))
