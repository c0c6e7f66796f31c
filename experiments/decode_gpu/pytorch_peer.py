"""The peer of decode_bench_gpu: the same model written plainly in PyTorch, bf16, static cache, greedy.

python3 pytorch_peer.py --shape llama-1b|llama-8b|qwen3-0.6b [--batch 1 32] [--context 1024] [--prefill 2048]
                        [--whole] [--no-compile] [--json FILE]

A block of the model is compiled once (fullgraph) and called for every layer; it begins with the residual sum and the
norm, so that nothing is left to fuse across its border; --whole compiles all layers as one instead. The whole step is
captured as one CUDA graph and replayed. It feeds its own token; the cache is `context` long and full. Median of 64
replays by events after 16. Prefill: compiled, cuDNN attention; the median of 7 after 2.
"""
import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

COPY = 4.28e12
SHAPES = {  # layers, width, heads, kv heads, head size, feed-forward, vocabulary, tied, QK-norm
    "llama-1b": (16, 2048, 32, 8, 64, 8192, 128256, True, False),
    "llama-8b": (32, 4096, 32, 8, 128, 14336, 128256, False, False),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, True, True),
}


class Model:
    def __init__(self, shape, batch, length):
        self.L, self.C, self.H, self.K, self.D, self.F, self.V, self.tied, self.qk_norm = SHAPES[shape]
        r = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16) * 0.02
        one = lambda n: torch.ones(n, device="cuda", dtype=torch.bfloat16)
        self.table, qkv = r(self.V, self.C), (self.H + 2 * self.K) * self.D
        self.head = self.table if self.tied else r(self.V, self.C)
        self.blocks = [
            (one(self.C), r(qkv, self.C), one(self.D), one(self.D), r(self.C, self.H * self.D), one(self.C),
             r(2 * self.F, self.C), r(self.C, self.F)) for _ in range(self.L)]
        self.norm = one(self.C)
        angles = torch.arange(8192)[:, None] * 500000.0 ** (-torch.arange(0, self.D, 2) / self.D)
        self.cos, self.sin = angles.cos().cuda(), angles.sin().cuda()
        cache = lambda: torch.randn(batch, self.K, length, self.D, device="cuda", dtype=torch.bfloat16)
        self.cache = [(cache(), cache()) for _ in range(self.L)] if length else None
        self.at = torch.tensor([length - 1], device="cuda")

    def rotate(self, x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def block(self, x, branch, weights, cache, cos, sin):  # x (B, T, C); T = 1 with a cache, else a prompt
        n1, wqkv, qn, kn, wo, n2, wup, wdown = weights
        B, T, _ = x.shape
        if branch is not None:
            x = x + branch
        h = F.linear(F.rms_norm(x, (self.C,), n1, 1e-5), wqkv).view(B, T, -1, self.D).transpose(1, 2)
        q, k, v = h.split([self.H, self.K, self.K], 1)
        if self.qk_norm:
            q, k = F.rms_norm(q, (self.D,), qn, 1e-5), F.rms_norm(k, (self.D,), kn, 1e-5)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if cache is not None:
            keys, values = cache
            keys.index_copy_(2, self.at, k)
            values.index_copy_(2, self.at, v)
            o = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(o.transpose(1, 2).reshape(B, T, -1), wo)
        gate, up = F.linear(F.rms_norm(x, (self.C,), n2, 1e-5), wup).chunk(2, -1)
        return x, F.linear(F.silu(gate) * up, wdown)

    def last(self, x, branch):
        x = (x + branch)[:, -1]
        return F.linear(F.rms_norm(x, (self.C,), self.norm, 1e-5), self.head).argmax(-1, keepdim=True)

    def compile(self, whole):
        if whole:
            self.forward = torch.compile(self.forward, fullgraph=True)
            return
        self.block, self.last = torch.compile(self.block, fullgraph=True), torch.compile(self.last, fullgraph=True)

    def forward(self, ids):  # (B, T)
        x, branch = self.table[ids], None
        T = ids.shape[1]
        cos, sin = (self.cos[self.at], self.sin[self.at]) if self.cache is not None else (self.cos[:T], self.sin[:T])
        for layer, weights in enumerate(self.blocks):
            x, branch = self.block(x, branch, weights, self.cache[layer] if self.cache is not None else None, cos, sin)
        return self.last(x, branch)


def times_ms(run, warm_up, count):
    out = []
    for i in range(warm_up + count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= warm_up:
            out.append(begin.elapsed_time(end))
    return sorted(out)[count // 2]


def decode(a, batch):
    torch._dynamo.reset()
    m = Model(a.shape, batch, a.context)
    if not a.no_compile:
        m.compile(a.whole)
    step = m.forward
    ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    begin = time.time()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            ids.copy_(step(ids))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids.copy_(step(ids))
    first = time.time() - begin
    ms = times_ms(graph.replay, 16, 64)
    matrices = sum(w.numel() for b in m.blocks for w in b if w.dim() == 2) + m.head.numel()
    kv = batch * a.context * 2 * m.L * m.K * m.D
    floor = 2 * (matrices + kv) / COPY * 1e3
    print(f"PyTorch {a.shape} batch {batch} context {a.context}: {ms:.3f} ms a step, floor {floor:.3f} ms, "
          f"{100 * floor / ms:.1f} % of floor; {first:.0f} s to the first graph")
    return {"batch": batch, "context": a.context, "ms": ms, "floor_ms": floor, "percent_of_floor": 100 * floor / ms}


def prefill(a):
    torch._dynamo.reset()
    m = Model(a.shape, 1, 0)
    if not a.no_compile:
        m.compile(a.whole)
    run = m.forward
    ids = torch.randint(0, m.V, (1, a.prefill), device="cuda")
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        ms = times_ms(lambda: run(ids), 2, 7)
    print(f"PyTorch {a.shape} prefill 1 x {a.prefill}: {ms:.3f} ms, {a.prefill / ms * 1e3:.0f} tok/s")
    return {"tokens": a.prefill, "ms": ms, "tokens_per_second": a.prefill / ms * 1e3}


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--shape", choices=SHAPES, default="llama-1b")
    p.add_argument("--batch", type=int, nargs="*", default=[1, 32], help="none: no decode")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--prefill", type=int, default=2048, help="0: none")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--whole", action="store_true", help="compile all layers as one: 20 to 100 s a shape and batch")
    p.add_argument("--json")
    a = p.parse_args()
    what = {"shape": a.shape, "what": "PyTorch " + torch.__version__ + ("" if a.no_compile else " compiled")}
    with torch.no_grad():
        lines = [{**what, "decode": decode(a, batch)} for batch in a.batch]
        if a.prefill:
            lines.append({**what, "prefill": prefill(a)})
    if a.json:
        open(a.json, "a").writelines(json.dumps(line) + "\n" for line in lines)
