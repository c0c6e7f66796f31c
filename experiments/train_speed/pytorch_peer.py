#!/usr/bin/env python3
"""The peer of `train` in the speed table: the same model by PyTorch, on random tokens, with fused AdamW and clipping.

  pytorch_peer.py configs/124m.toml --mode compile [--steps 20] [--json out.json]

Shape, batch and optimizer are those of the configuration file. Five steps warm up; the median of --steps counts. A step
is the time between two events on the stream, one at the end of each step; nothing waits for the device in between.
Where the batch does not fit into memory, it is halved and gradients are accumulated, and the output says so.
Also told: peak memory, and the seconds from the start of the process to the end of the first step at full speed
(within 10 % of the median).
"""

import argparse
import json
import os
import statistics
import time

import torch

from pytorch_model import Model, check_losses, read_config

WARM_UP = 5


def process_start():
    """Seconds of CLOCK_BOOTTIME at which this process was started."""
    with open("/proc/self/stat") as f:
        return int(f.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")


def train(config, shape, mode, micro, steps, attention):
    training, optimizer = config["training"], config["optimizer"]
    B, T = training["global_batch_size"], training["seq_len"]
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Model(shape, torch.bfloat16)
    net = torch.compile(model) if mode == "compile" else model
    adam = torch.optim.AdamW(model.parameters(), lr=optimizer["lr"], betas=(0.9, 0.95), eps=1e-8,
                             weight_decay=optimizer["weight_decay"], fused=True)
    ids = torch.randint(shape.V, (8, B, T + 1), device="cuda")
    events, losses = [torch.cuda.Event(enable_timing=True)], []
    ended = []
    events[0].record()
    with torch.nn.attention.sdpa_kernel(attention) if attention else torch.enable_grad():
        for step in range(WARM_UP + steps):
            batch, total = ids[step % 8], 0
            for i in range(0, B, micro):
                loss = net(batch[i:i + micro, :-1], batch[i:i + micro, 1:]) * (micro / B)
                loss.backward()
                total = total + loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer["clip_norm"])
            adam.step()
            adam.zero_grad(set_to_none=True)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            losses.append(total)
            if step < WARM_UP:
                torch.cuda.synchronize()
                ended.append(time.clock_gettime(time.CLOCK_BOOTTIME))
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    losses = [x.item() for x in losses]
    check_losses(shape, losses)
    median = statistics.median(times[WARM_UP:])
    return times, median, model.flops_per_token(T), ended


def first_full_speed(times, median, ended):
    """Seconds from the process's start to the end of the first step within 10 % of the median."""
    first = next(i for i, t in enumerate(times) if t < 1.1 * median)
    after = sum(times[WARM_UP:first + 1]) * 1e-3 if first >= WARM_UP else 0
    return ended[min(first, WARM_UP - 1)] + after - process_start()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--mode", choices=["eager", "compile"], default="compile")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="sequences, instead of the configuration's")
    parser.add_argument("--attention", choices=["flash", "cudnn"], help="kernels of the attention; PyTorch's choice if not given")
    parser.add_argument("--json")
    args = parser.parse_args()
    config, shape = read_config(args.config, args.batch)
    B, T = config["training"]["global_batch_size"], config["training"]["seq_len"]
    backends = {"flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION, "cudnn": torch.nn.attention.SDPBackend.CUDNN_ATTENTION}
    micro, result = B, None
    while result is None:
        try:
            result = train(config, shape, args.mode, micro, args.steps, backends.get(args.attention))
        except torch.cuda.OutOfMemoryError:
            if micro == 1:
                raise
            micro //= 2
        if result is None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            if args.mode == "compile":
                torch._dynamo.reset()
    times, median, flops_per_token, ended = result
    tokens_per_second = B * T / median * 1e3
    peak = config["metrics"]["peak_tflops"]
    out = {"program": f"PyTorch {torch.__version__.split('+')[0]}", "mode": args.mode, "attention": args.attention or "auto",
           "device": torch.cuda.get_device_name(), "batch": B, "micro_batch": micro, "step_ms": median,
           "fastest_ms": min(times[WARM_UP:]), "tokens_per_second": tokens_per_second,
           "mfu_percent": 100 * tokens_per_second * flops_per_token * 1e-12 / peak,
           "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
           "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
           "device_memory_gib": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 2**30,
           "first_full_speed_s": first_full_speed(times, median, ended)}
    print(f"{os.path.basename(args.config)} {out['program']} {args.mode} (attention {out['attention']}), B {B} (micro-batch {micro}) T {T}: "
          f"{median:.2f} ms (fastest {out['fastest_ms']:.2f}), {tokens_per_second:,.0f} tok/s, MFU {out['mfu_percent']:.1f} %, "
          f"peak {out['peak_allocated_gib']:.1f} GiB allocated, {out['peak_reserved_gib']:.1f} reserved, "
          f"first full-speed step after {out['first_full_speed_s']:.1f} s", flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(out, f, indent=1)


if __name__ == "__main__":
    main()
