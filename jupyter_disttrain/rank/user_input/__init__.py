"""Ask the user at the notebook: ``input()``, ``getpass()`` and debuggers on a rank."""
