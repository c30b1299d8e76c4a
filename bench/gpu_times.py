# SPDX-License-Identifier: Apache-2.0
"""GPU times of collective calls, for benchmarks whose ranks are processes of torch.distributed, one per GPU."""
import statistics

#: Cycles of the kernel that keeps a GPU busy before a timed call: about a millisecond.
BUSY_CYCLES = 2_000_000


class GpuTimes:
    """Creation is collective. device: this rank's GPU. repetitions: number of measurements per time.

    Times are measured between CUDA events; each is the median over repetitions of the slowest rank's time. Each repetition first
    overwrites the L2 cache, runs an all-reduce so that the ranks begin together, and keeps the GPU busy while the host enqueues
    the call.
    """

    def __init__(self, device, repetitions):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.repetitions = torch, dist, repetitions
        self.nccl = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
        self.flushed = torch.empty(64 << 20, dtype=torch.int32, device=device)
        self.token = torch.zeros(1, device=device)

    def align(self, calls):
        self.flushed.zero_()
        self.dist.all_reduce(self.token, group=self.nccl)
        self.torch.cuda._sleep(BUSY_CYCLES * calls)

    def slowest(self, taken):
        """Returns the median over repetitions of the maximum over ranks of `taken`, which has one value per repetition."""
        everybody = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(everybody, taken)
        return statistics.median(map(max, zip(*everybody)))

    def of(self, call, calls=1):
        """Returns the time of `call`, which makes `calls` calls, in microseconds."""
        torch, taken = self.torch, []
        for repetition in range(self.repetitions + 5):
            self.align(calls)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if repetition >= 5:
                taken.append(begin.elapsed_time(end) * 1e3)
        return self.slowest(taken)
