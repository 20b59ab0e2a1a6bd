"""Memory of one call, on a GPU and on a CPU."""

import torch
from torch.distributed._tools.mem_tracker import MemTracker


def peak_bytes(step, device):
    """Bytes of tensors that one call of `step` holds at its highest, beyond what was held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    tracker = MemTracker()  # of tensors: the process keeps freed memory, so its size says little
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[device]["Total"]
