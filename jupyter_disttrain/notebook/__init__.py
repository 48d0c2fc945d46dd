"""Define the notebook's side: magics, output, views.

Imports ``client`` and IPython; only the package itself imports it, when the extension is loaded.
"""
