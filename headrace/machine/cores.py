"""How many cores this process may use."""

import os


def available_cores() -> int:
    """Cores in the process's affinity, shared evenly with the other ranks of a launcher on this node.

    ``OMP_NUM_THREADS``, which launchers set to 1, does not count: it speaks of torch's own threads.
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, len(affinity) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
