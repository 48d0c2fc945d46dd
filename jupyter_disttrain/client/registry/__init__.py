"""Record this user's clusters on disk, and find them again."""
