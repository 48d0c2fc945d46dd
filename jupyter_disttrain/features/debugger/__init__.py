"""Debug the cells of ranks by the Debug Adapter Protocol, as JupyterLab's debugger does."""
