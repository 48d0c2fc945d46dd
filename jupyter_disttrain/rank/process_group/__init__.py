"""Form, release and rebuild process groups."""
