#!/usr/bin/env python3
"""The peer of `train` on several GPUs: the same model by PyTorch's DistributedDataParallel or FSDP2, compiled.

  torchrun --standalone --nproc-per-node N pytorch_peer.py CONFIG --mode ddp|fsdp2 [--batch 1] [--steps 20] [--warm-up 5] [--json out.json]

Shape, batch a rank, recomputation and optimizer are those of the configuration file; the model is
experiments/train_speed/pytorch_model.py. ddp: the whole model compiled, gradients in fp32, buckets of PyTorch's choice.
fsdp2: each block sharded and compiled by itself, the head with the loss too; fp32 shards, bf16 gathers, fp32 reductions; where
the file recomputes anything, a block's activations are checkpointed. AdamW is fused and keeps fp32 moments, whatever the file says:
PyTorch's knows no other. Weights are made on the GPU, shard by shard. A step is the time between two events on the stream,
nothing waits for the device in between, and the slowest rank's median counts.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "train_speed"))
from pytorch_model import Model, check_losses, read_config, rotation  # noqa: E402


def sharded(shape, recompute):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = Model(shape, torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(torch.compile(checkpoint_wrapper(block) if recompute else block), mp_policy=policy)
    model.loss = torch.compile(model.loss)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    with torch.device("cuda"):  # the tables of the rotation are no parameters
        model.cos, model.sin = (table.to(torch.bfloat16) for table in rotation(shape))
    residual = 0.02 / math.sqrt(2 * shape.L)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            torch.nn.init.constant_(p, 1.0 if name.endswith("weight") else 0.0)
        else:
            torch.nn.init.normal_(p, std=residual if ".o." in name or ".down." in name else 0.02)
    return model


def replicated(shape, device):
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Model(shape, torch.bfloat16)
    net = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True) if dist.get_world_size() > 1 else model
    return torch.compile(net)


def train(net, config, shape, steps, warm_up):
    training, optimizer = config["training"], config["optimizer"]
    B, T = training["global_batch_size"], training["seq_len"]
    adam = torch.optim.AdamW(net.parameters(), lr=optimizer["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=optimizer["weight_decay"],
                             fused=True)
    torch.manual_seed(2 + dist.get_rank())
    ids = torch.randint(shape.V, (8, B, T + 1), device="cuda")
    events, losses = [torch.cuda.Event(enable_timing=True)], []
    events[0].record()
    for step in range(warm_up + steps):
        batch = ids[step % 8]
        loss = net(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), optimizer["clip_norm"])
        adam.step()
        adam.zero_grad(set_to_none=True)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        losses.append(loss.detach())
        if step < warm_up:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    losses = [x.item() for x in losses]
    check_losses(shape, losses)
    return statistics.median(times[warm_up:]), losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--mode", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--batch", type=int, help="sequences a rank, instead of the configuration's")
    parser.add_argument("--json")
    args = parser.parse_args()
    config, shape = read_config(args.config, args.batch)
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    recompute = config["training"].get("recompute", "none") != "none"
    net = sharded(shape, recompute) if args.mode == "fsdp2" else replicated(shape, device)
    median, losses = train(net, config, shape, args.steps, args.warm_up)
    figures = torch.tensor([median, torch.cuda.max_memory_allocated() / 2**30], device="cuda")
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    step_ms, peak = figures.tolist()
    ranks, batch = dist.get_world_size(), config["training"]["global_batch_size"]
    tokens = ranks * batch * config["training"]["seq_len"]
    out = {"program": f"PyTorch {torch.__version__.split('+')[0]} {args.mode}, compiled", "ranks": ranks, "batch": ranks * batch, "step_ms": step_ms,
           "tokens_per_second": tokens / step_ms * 1e3, "peak_allocated_gib": peak, "losses": [losses[0], losses[-1]]}
    if dist.get_rank() == 0:
        print(json.dumps(out), flush=True)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(out) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
