"""The ptxas that Triton assembles our kernels with: 12.8, which it takes for a Hopper GPU, makes wrong code of them.

Seen with Triton 3.6, on an H100, in products of matrices (WGMMA) whose PTX is right: gradients off by 1e-2 to 1e37, and
stores to addresses that are not ours. 12.9 and 13.5 made right code of the same PTX, 12.8 without optimizing it too.
Published reports of wrong gradients on Hopper (flash-linear-attention 640, 984, 988) may be of this.
"""

from triton import knobs

OLDEST = (12, 9)


def choose() -> str | None:
    """Has Triton, in this process and what it starts, take a ptxas that is new enough; what to do if there is none.

    That of TRITON_PTXAS_PATH or, where it is too old, what Triton brings for a Blackwell GPU, which knows older ones.
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
    return tuple(map(int, tool.version.split(".")))
