"""Chooses a ptxas that compiles the kernels correctly. Version 12.8, which Triton uses on a Hopper GPU, does not.

With Triton 3.6 on an H100, products of matrices (WGMMA) go wrong although their PTX is right: gradients were off by
1e-2 to 1e37, and stores went to addresses outside of our tensors. Versions 12.9 and 13.5 compile the same PTX
correctly, and so does 12.8 without optimization. Published reports of wrong gradients on Hopper (flash-linear-attention
640, 984, 988) may have this cause.
"""

from triton import knobs

OLDEST = (12, 9)
"""The oldest ptxas whose code was seen to be right. docs/kernels.md lists the versions that Triton brings."""


def choose() -> str | None:
    """Makes Triton use a ptxas that is new enough, in this process and in processes that it starts.

    Takes the ptxas of TRITON_PTXAS_PATH, or Triton's default. If that ptxas is too old, takes the ptxas that Triton
    brings for Blackwell GPUs, which compiles for older GPUs too.

    Returns:
        What the user must provide if both are too old, else None.
    """
    if _version(knobs.nvidia.ptxas) >= OLDEST:
        return None
    newer = getattr(knobs.nvidia, "ptxas_blackwell", None)
    if newer is None or _version(newer) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return f"ptxas {needed} or later, not {knobs.nvidia.ptxas.version}, in TRITON_PTXAS_PATH"
    knobs.nvidia.ptxas = newer.path
    return None


def _version(tool: knobs.NvidiaTool) -> tuple[int, ...]:
    """The version as numbers."""
    return tuple(map(int, tool.version.split(".")))
