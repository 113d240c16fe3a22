"""The trajectory page inside a notebook: Jupyter on this machine, or Google Colab."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from calibadv_jax.contrib.pages.site import Site, make_server

# Whose pages may show it in a frame: this machine's, or those that hold a notebook's outputs in Colab.
JUPYTER = "http://localhost:* http://127.0.0.1:*"
COLAB = "https://colab.research.google.com https://*.googleusercontent.com https://*.colab.dev"


def show(run: str | Path, height: int = 700) -> None:
    """Serve the page of a run until the kernel ends, and show it below the cell; UserError as `Site`."""
    from IPython.display import IFrame, display

    colab = sys.modules.get("google.colab.output")  # every kernel there has imported it
    server = make_server(Site(Path(run)), 0)

    class Framed(server.RequestHandlerClass):  # type: ignore[misc, name-defined]
        def send_header(self, name: str, value: str) -> None:
            ancestors = f"frame-ancestors {COLAB if colab else JUPYTER}"
            super().send_header(name, value.replace("frame-ancestors 'none'", ancestors))

        def do_GET(self) -> None:
            if colab:  # only Colab's proxy reaches this machine, for its user alone, under names of its own
                self.headers.replace_header("Host", "localhost")
            super().do_GET()

    server.RequestHandlerClass = Framed
    threading.Thread(target=server.serve_forever, name="inspect", daemon=True).start()
    if colab:
        colab.serve_kernel_port_as_iframe(server.server_port, height=height)
    else:
        display(IFrame(f"http://localhost:{server.server_port}/", "100%", height))
