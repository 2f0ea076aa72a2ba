"""Files that runs leave: JSON lines, whole-file writing, checksums, locks and provenance."""
