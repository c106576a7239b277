"""rise_kernels in trainers that people already have, one file each: `transformers`, `trl`, `verl`.

None is imported here, and each needs its own trainer and `rise_kernels` only. See docs/integrations.md.
"""
