"""The same measurement as comm_bench's, with PyTorch's all_reduce over gloo.

Usage: gloo_all_reduce.py RANKS OUT.json SIZE_BYTES...
"""
import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def iterations_for(size):
    return max(10, min((64 << 20) // size, 30))


def run(rank, ranks, store, out, sizes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    rows = []
    for size in sizes:
        count = size // 4
        i = torch.arange(count)
        x = ((i + 3 * rank) % 29 - 14).float()
        dist.all_reduce(x)
        want = sum(((i + 3 * r) % 29 - 14).float() for r in range(ranks))
        assert torch.equal(x, want), "wrong sums"
        x.zero_()
        iterations = iterations_for(size)
        times = torch.zeros(iterations, dtype=torch.float64)
        for it in range(-max(3, iterations // 10), iterations):
            dist.barrier()
            began = time.perf_counter_ns()
            dist.all_reduce(x)
            if it >= 0:
                times[it] = (time.perf_counter_ns() - began) / 1000
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        worst = times.sort().values
        rows.append({"size_bytes": size, "time_us": worst[iterations // 2].item(), "best_us": worst[0].item()})
    if rank == 0:
        with open(out, "w") as f:
            json.dump({"ranks": ranks, "torch": torch.__version__, "rows": rows}, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    num_ranks, path, *sizes_bytes = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(int(num_ranks), os.path.join(folder, "store"), path, [int(s) for s in sizes_bytes]),
                 nprocs=int(num_ranks))
