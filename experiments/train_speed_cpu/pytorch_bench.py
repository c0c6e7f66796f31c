#!/usr/bin/env python3
"""The peer of step_bench: the same model, written plainly in PyTorch, training on random tokens on the CPU.

  pytorch_bench.py [--threads 1] [--steps 10]      one process
  pytorch_bench.py --ranks 8                       DistributedDataParallel over gloo, one thread a process
  pytorch_bench.py --ranks 8 --fsdp                FSDP2 (fully_shard of each block and of the whole) over gloo
Model: 4 blocks of RMSNorm, RoPE, causal SDPA, SwiGLU; fp32; AdamW (fused), gradients clipped to norm 1.
Three steps warm up; the median of --steps counts (with ranks: of the slowest rank). --cpu_time counts the process's
CPU time instead of the wall's, for a busy machine. Needs torch alone.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

L, C, H, FFN, V, T = 4, 256, 8, 704, 256, 256
D = C // H


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.o = nn.Linear(C, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, C, bias=False)

    def forward(self, x, cos, sin):
        B = x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.RMSNorm(C, eps=1e-5)
        self.head = nn.Linear(C, V, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        angle = torch.outer(torch.arange(T).float(), 10000.0 ** (-torch.arange(0, D, 2).float() / D))
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, V), targets.reshape(-1))


def train(rank, ranks, args, results):
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method="file://" + args.store)
    model = Model()
    if ranks > 1 and args.fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        net = fully_shard(model, mesh=mesh)
    else:
        net = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    torch.manual_seed(1 + rank)
    ids = torch.randint(V, (args.batch, T + 1))
    clock = time.process_time if args.cpu_time else time.perf_counter
    times, losses = [], []
    for step in range(3 + args.steps):
        begin = clock()
        loss = net(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(clock() - begin)
    assert abs(losses[0] - 5.545) < 0.5 and losses[-1] < losses[0], losses
    result = statistics.median(times[3:])
    if ranks == 1:
        return result
    worst = torch.tensor([result])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        results.put(worst.item())
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--cpu_time", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.ranks == 1:
        seconds = train(0, 1, args, None)
    else:
        import tempfile
        import torch.multiprocessing as mp
        with tempfile.TemporaryDirectory() as folder:
            args.store = os.path.join(folder, "store")
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(train, args=(args.ranks, args, results), nprocs=args.ranks)
            seconds = results.get()
    tokens = args.batch * T * args.ranks
    out = {"torch": torch.__version__, "fsdp": args.fsdp, "ranks": args.ranks, "threads": args.threads, "step_ms": seconds * 1e3,
           "tokens_per_second": tokens / seconds}
    print(f"PyTorch {torch.__version__}, {args.ranks} rank(s), {args.threads} thread(s): step {seconds * 1e3:.1f} ms, "
          f"{tokens / seconds:.0f} tokens/s")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(out, f, indent=1)


if __name__ == "__main__":
    main()
