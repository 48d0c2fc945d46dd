"""The fixtures of JupyterLab and the browser."""

from ..support.browser import browser, lab_server, open_notebook, page

__all__ = ["browser", "lab_server", "open_notebook", "page"]
