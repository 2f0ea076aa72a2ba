"""Settings that not every optimizer reads, and which optimizers do."""

READERS = {
    "momentum": ("muon", "rmsprop", "sgd"),
    "rotation": ("orthoadam",),
    "rotation_sides": ("orthoadam",),
    "rotation_share": ("orthoadam",),
    "adamw_patterns": ("muon", "orthoadam", "soap"),
}
"""Optimizers that read a setting, by setting; a setting not listed is read by all."""
