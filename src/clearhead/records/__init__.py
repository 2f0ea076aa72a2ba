"""Records of runs: JSON lines, atomic writing, checksums, locks and provenance."""
